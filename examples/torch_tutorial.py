"""The steps of PyTorch's tutorial "Writing Distributed Applications", over MPI.

Messages, immediate messages, groups, all_reduce, synchronous SGD with averaged gradients, and a ring all-reduce of
one's own, each with `torch.distributed` alone.

$ mpirun -n 2 python examples/torch_tutorial.py
send and recv: rank 1 has 1.0
isend and irecv: rank 1 has 1.0
a group: ranks 0 and 1 have 2.0
all_reduce: 1.0
SGD: loss 0.0..., parameters are equal, ranks: 2
a ring of 2: 2.0 on each
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import mpdist.torch  # noqa: F401  # only where mpdist is not installed: else torch finds the backend by itself


def tell(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def told(x: Tensor, rank: int) -> float:
    """The value that another rank has."""
    value = x.clone()
    dist.broadcast(value, rank)
    return float(value)


def messages() -> None:
    """Point to point: rank 0 to rank 1."""
    x = torch.zeros(1)
    for name, is_immediate in (("send and recv", False), ("isend and irecv", True)):
        x.zero_()
        if dist.get_rank() == 0:
            x += 1
            dist.isend(x, 1).wait() if is_immediate else dist.send(x, 1)
        elif dist.get_rank() == 1:
            dist.irecv(x, 0).wait() if is_immediate else dist.recv(x, 0)
        tell(f"{name}: rank 1 has {told(x, 1)}")


def groups() -> None:
    pair: Any = dist.new_group([0, 1])
    x = torch.ones(1)
    if dist.get_rank() < 2:
        dist.all_reduce(x, dist.ReduceOp.SUM, group=pair)
    tell(f"a group: ranks 0 and 1 have {float(x)}")


def reduction() -> None:
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x, dist.ReduceOp.MAX)
    tell(f"all_reduce: {float(x)}")


def sgd() -> None:
    """Each rank has data of its own; averaged gradients keep the parameters equal."""
    torch.manual_seed(1234)
    model, size = nn.Linear(4, 1), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(data).squeeze(1) - data.sum(1)).pow(2).mean()
        loss.backward()
        for each in model.parameters():
            dist.all_reduce(each.grad)
            each.grad /= size
        optimizer.step()
    everyone = [torch.zeros_like(model.weight) for _ in range(size)]
    dist.all_gather(everyone, model.weight.detach())
    assert all(torch.equal(each, everyone[0]) for each in everyone)
    tell(f"SGD: loss {loss:.4f}, parameters are equal, ranks: {size}")


def ring_all_reduce(x: Tensor) -> Tensor:
    """The sum of all ranks' x: what came from the left goes on to the right."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total, passing, arriving = x.clone(), x.clone(), torch.zeros_like(x)
    for _ in range(size - 1):
        sent = dist.isend(passing, (rank + 1) % size)
        dist.recv(arriving, (rank - 1) % size)
        total += arriving
        sent.wait()
        passing.copy_(arriving)
    return total


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("mpdist")
    if dist.get_world_size() > 1:
        messages()
        groups()
    reduction()
    sgd()
    tell(f"a ring of {dist.get_world_size()}: {float(ring_all_reduce(torch.ones(1)))} on each")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
