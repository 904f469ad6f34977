"""A pipeline of two stages: ranks hold halves of a network, and micro-batches are under way between them.

Rank 0 has the first half, rank 1 the second. All forwards come first, then all
backwards (GPipe's schedule): while rank 1 computes one micro-batch, rank 0
computes the next. The gradients' norm is that of both halves together.

$ mpirun -n 2 python examples/train_pipeline.py
step 10: loss 0.0...
step 60: loss 0.0...
gradients of the pipeline are those of the whole network
"""

import torch
from torch import Tensor, nn

import mpdist
from mpdist.torch import clip_grad_norm

STEPS, PARTS, WIDTH = 60, 4, 32


def halves() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return first, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))
    return x, x.prod(1, keepdim=True).sin()


async def first_stage(world: mpdist.Communicator, stage: nn.Module, x: Tensor) -> None:
    outputs, sends = [], []
    for part in x.chunk(PARTS):
        outputs.append(stage(part))
        sends.append(world.send(outputs[-1].detach(), dst=1))
    for output in outputs:
        gradient = torch.empty_like(output)
        await world.recv(gradient, src=1)
        output.backward(gradient)
    for send in sends:
        await send


async def last_stage(world: mpdist.Communicator, stage: nn.Module, y: Tensor) -> float:
    inputs, losses, sends = [], [], []
    for part in y.chunk(PARTS):
        inputs.append(torch.empty(len(part), WIDTH))
        await world.recv(inputs[-1], src=0)
        inputs[-1].requires_grad_()
        losses.append(nn.functional.mse_loss(stage(inputs[-1]), part) / PARTS)
    for x, loss in zip(inputs, losses, strict=True):
        loss.backward()
        sends.append(world.send(x.grad, dst=0))
    for send in sends:
        await send
    return sum(loss.item() for loss in losses)


async def main(world: mpdist.Communicator) -> None:
    torch.set_num_threads(1)
    if world.size != 2:
        raise SystemExit("this pipeline has two stages: run it on 2 ranks")
    stage = halves()[world.rank]
    optimizer = torch.optim.Adam(stage.parameters(), lr=0.01)
    for step in range(1, STEPS + 1):
        x, y = batch(step)
        optimizer.zero_grad()
        if world.rank == 0:
            await first_stage(world, stage, x)
        else:
            loss = await last_stage(world, stage, y)
            if step in (10, STEPS):
                print(f"step {step}: loss {loss:.4f}", flush=True)
        if step == 1:
            check(stage, world.rank, x, y)
        clip_grad_norm(stage.parameters(), 1.0, world)
        optimizer.step()
    await world.barrier()
    if world.rank == 1:
        print("gradients of the pipeline are those of the whole network")


def check(stage: nn.Module, rank: int, x: Tensor, y: Tensor) -> None:
    """The first step's gradients are those that one process would have."""
    both = halves()
    nn.functional.mse_loss(both[1](both[0](x)), y).backward()
    for mine, whole in zip(stage.parameters(), both[rank].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, whole.grad)


if __name__ == "__main__":
    mpdist.run(main)
