"""Data-parallel training by hand: a GradientAverager averages gradients while the others are still being derived.

A line is fitted to points by gradient descent; each rank has its own points. With
--torch the gradients are torch tensors, which autograd has derived. The averager
takes arrays of any library.

$ mpirun -n 2 python examples/08_average_gradients.py
y = 3.00 x + 1.00 after 200 steps, ranks: 2
"""

import sys
from typing import Any

import numpy as np

import mpdist

STEPS, RATE = 200, 0.3


def points(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """This rank's points on the line y = 3 x + 1."""
    x = np.random.default_rng(rank).uniform(-1, 1, 100)
    return x, 3 * x + 1


async def with_numpy(world: mpdist.Communicator) -> list[Any]:
    x, y = points(world.rank)
    slope, offset = parameters = [np.zeros(()), np.zeros(())]
    gradients = [np.zeros(()), np.zeros(())]
    averager = mpdist.GradientAverager(world, gradients)
    for _ in range(STEPS):
        error = slope * x + offset - y
        gradients[1][...] = 2 * error.mean()
        averager.ready(1)  # on its way, while the next one is derived
        gradients[0][...] = 2 * (error * x).mean()
        averager.ready(0)
        await averager
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= RATE * gradient
    return parameters


async def with_torch(world: mpdist.Communicator) -> list[Any]:
    import torch

    x, y = (torch.from_numpy(each) for each in points(world.rank))
    slope, offset = parameters = [torch.zeros((), dtype=x.dtype, requires_grad=True) for _ in range(2)]
    averager = mpdist.GradientAverager(world, [torch.zeros_like(parameter) for parameter in parameters])
    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda p, index=index: averager.ready(index, p.grad))
    for _ in range(STEPS):
        (slope * x + offset - y).square().mean().backward()  # each gradient is said to be ready by its hook
        await averager
        with torch.no_grad():
            for parameter in parameters:
                parameter -= RATE * parameter.grad
                parameter.grad = None
    return [parameter.item() for parameter in parameters]


async def main(world: mpdist.Communicator) -> None:
    slope, offset = await (with_torch(world) if "--torch" in sys.argv else with_numpy(world))
    if world.rank == 0:
        print(f"y = {float(slope):.2f} x + {float(offset):.2f} after {STEPS} steps, ranks: {world.size}")


if __name__ == "__main__":
    mpdist.run(main)
