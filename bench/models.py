"""Models: networks and batches for the benchmarks of data-parallel training."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Case(NamedTuple):
    """A model, and a function from a seed to a batch."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]


def mlp() -> nn.Module:
    """10.2 million parameters, 2.4 million in each of the four layers from 1536 to 1536."""
    widths = [512, 1536, 1536, 1536, 1536, 1536, 10]
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Block(nn.Module):
    """Two convolutions beside a shortcut, as in ResNet-18."""

    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(),
            nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b),
        )  # fmt: skip
        is_same = stride == 1 and a == b
        self.shortcut = nn.Identity() if is_same else nn.Sequential(nn.Conv2d(a, b, 1, stride), nn.BatchNorm2d(b))

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + self.shortcut(x)).relu()


def resnet() -> nn.Module:
    """Like ResNet-18, for pictures of 32 x 32."""
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [Block(a, b, 1 if a == b else 2) for a, b in pairwise(widths)]
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Transformer(nn.Module):
    """Of characters; heads of width 64. As it is, 3.2 million parameters."""

    def __init__(self, layers: int = 4, width: int = 256, context: int = 128, symbols: int = 96) -> None:
        super().__init__()
        self.words = nn.Embedding(symbols, width)
        self.places = nn.Parameter(torch.zeros(context, width))
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, symbols)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.words(x) + self.places)).flatten(0, 1)


def tiny() -> nn.Module:
    """300 small parameters."""
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(150)))


def vectors(size: int, inputs: int, outputs: int = 10) -> Callable[[int], tuple[Tensor, Tensor]]:
    def batch(seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(size, inputs, generator=generator), torch.randint(outputs, (size,), generator=generator)

    return batch


def pictures(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 3, 32, 32, generator=generator), torch.randint(10, (16,), generator=generator)


def texts(size: int, context: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def batch(seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randint(96, (size, context), generator=generator)
        return x, torch.randint(96, (size * context,), generator=generator)

    return batch


CASES = {
    "MLP, batch 64": Case(mlp, vectors(64, 512)),
    "MLP, batch 8": Case(mlp, vectors(8, 512)),
    "ResNet-18-like, batch 16": Case(resnet, pictures),
    "transformer, batch 8": Case(Transformer, texts(8, 128)),
    "300 tiny parameters": Case(tiny, vectors(8, 16, 16)),
}
