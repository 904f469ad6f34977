"""Gradient accumulation and mixed precision: four micro-batches a step, of which only the last one communicates.

`model.no_sync()` lets gradients add up on each rank; the forward belongs inside
it too. autocast computes in bfloat16; parameters and gradients stay float32.

$ mpirun -n 2 python examples/train_accumulate.py
step  20: loss 2...
step  40: loss 1...
40 steps of 4 micro-batches, ranks: 2, gradients were averaged 40 times
"""

from contextlib import nullcontext

import torch
from torch import nn

import mpdist
from mpdist.torch import DistributedDataParallel, Metrics

STEPS, PARTS = 40, 4


def main() -> None:
    torch.set_num_threads(1)
    world = mpdist.init()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)  # float16 needs it; bfloat16 runs with it, too
    losses = Metrics(world, "loss")
    data = torch.Generator().manual_seed(world.rank)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        for part in range(PARTS):
            x = torch.randn(32, 16, generator=data)
            y = x.sin().sum(1, keepdim=True)
            with model.no_sync() if part < PARTS - 1 else nullcontext():
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = nn.functional.mse_loss(model(x).float(), y) / PARTS
                scaler.scale(loss).backward()
            losses.add(loss=loss * PARTS)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the same gradients on all ranks: torch's own will do
        scaler.step(optimizer)
        scaler.update()
        if step % 20 == 0:
            mean = losses.means()["loss"]
            if world.rank == 0:
                print(f"step {step:3}: loss {mean:.4f}", flush=True)
    if world.rank == 0:
        times = model.reducer.step
        print(f"{STEPS} steps of {PARTS} micro-batches, ranks: {world.size}, gradients were averaged {times} times")


if __name__ == "__main__":
    main()
