"""Metrics: means over the samples of all ranks."""

from __future__ import annotations

import json

import numpy as np
from torch import Tensor

from mpdist.comm import Communicator
from mpdist.errors import UsageError
from mpdist.torch.waiting import finish


class Metrics:
    """Weighted means, added up on each rank and joined in one message.

    ```python
    metrics = mpdist.torch.Metrics(comm, "loss", "accuracy")
    for x, y in loader:
        ...
        metrics.add(len(x), loss=loss, accuracy=correct / len(x))
    print(metrics.means())  # {"loss": ..., "accuracy": ...}, the same on all ranks
    ```
    """

    def __init__(self, comm: Communicator, *names: str) -> None:
        if not isinstance(comm, Communicator):
            raise UsageError(f'Metrics takes a communicator first, Metrics(world, "loss"), got {comm!r}')
        self._comm = comm
        self._sums: dict[str, float | Tensor] = dict.fromkeys(sorted(names), 0.0)
        self._order = tuple(dict.fromkeys(names))
        self._weight = 0.0
        self._are_names_alike = False

    def add(self, weight: float = 1.0, /, **values: object) -> None:
        """Add the means of `weight` samples; numbers, or tensors of one element."""
        if values.keys() != self._sums.keys():
            raise UsageError(f"got {sorted(values)}; these metrics are {sorted(self._sums)}")
        if not weight:  # the mean of no samples is not a number
            return
        numbers = {name: _number(name, value) for name, value in values.items()}
        for name, number in numbers.items():
            self._sums[name] = self._sums[name] + weight * number
        self._weight += weight

    def means(self) -> dict[str, float]:
        """Means over all samples of all ranks since the last call; not a number without samples. Collective.

        Raises:
            UsageError: at the first call: the ranks' metrics have other names.
        """
        if not self._are_names_alike:
            self._compare_names()
        numbers = np.array([self._weight, *map(float, self._sums.values())])
        finish(self._comm.all_reduce(numbers))
        weight, sums = numbers[0], numbers[1:]
        self._sums = dict.fromkeys(self._sums, 0.0)
        self._weight = 0.0
        means = {
            name: float(total / weight) if weight else float("nan")
            for name, total in zip(self._sums, sums, strict=True)
        }
        return {name: means[name] for name in self._order}

    def _compare_names(self) -> None:
        """Sums are joined by their places: all ranks must have the same names."""
        mine = list(self._sums)
        texts = finish(self._comm.all_gather([np.frombuffer(json.dumps(mine).encode(), np.uint8)]))
        for rank, names in enumerate(json.loads(text.tobytes()) for text in texts):
            if names != mine:
                raise UsageError(
                    f"Metrics on '{self._comm.name}' (rank {self._comm.rank}) are {mine}, and on rank {rank} {names}: "
                    "give all ranks the same names"
                )
        self._are_names_alike = True


def _number(name: str, value: object) -> float | Tensor:
    """A number; of a device a tensor, so that nobody waits for the device before the numbers are needed."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise UsageError(f"{name} is a tensor of shape {tuple(value.shape)}, one number is needed: {name}.mean()")
    if not isinstance(value, Tensor):
        return float(value)  # type: ignore[arg-type]  # what has __float__
    if value.is_cpu:
        return float(value.detach())
    return value.detach().double().reshape(())
