"""Uneven inputs: rank r has 5 + 3 r batches, and `model.join()` lets those that are done help the others along.

Without it the first rank that has no batch left would end, and the others wait for its gradients.

$ mpirun -n 2 python examples/train_uneven.py
rank 0 made 5 steps of its own
rank 1 made 8 steps of its own
all parameters are equal
"""

import numpy as np
import torch
from torch import nn

import mpdist
from mpdist.torch import DistributedDataParallel


def main() -> None:
    torch.set_num_threads(1)
    world = mpdist.init()
    torch.manual_seed(world.rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steps = 0
    with model.join(divide_by_initial_world_size=False):  # the mean of those that still have inputs
        for _ in range(5 + 3 * world.rank):
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
            steps += 1
    counts = world.gather(np.array([steps]), dst=0).wait()
    sums = world.all_gather(torch.stack([p.detach().double().sum() for p in model.parameters()])).wait()
    if world.rank == 0:
        for rank, count in enumerate(counts.reshape(-1)):
            print(f"rank {rank} made {count} steps of its own")
        print("all parameters are equal" if (sums == sums[0]).all() else f"parameters differ: {sums}")


if __name__ == "__main__":
    main()
