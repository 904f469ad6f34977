"""A character-level transformer learns Python's own documentation, data-parallel, and shows what communication costs.

The text ships with Python (`pydoc_data.topics`, half a megabyte). Each rank trains
on its own pieces of it. At the end: where the time of a step went, and, with
--curve, the loss as a picture.

$ mpirun -n 2 python examples/train_text.py --steps 60 --curve loss.png
step  20: loss 2...
step  40: loss 2...
step  60: loss 2...
... steps of ... ms: compute ..., communication ... (... % hidden), exposed ..., ...
loss.png
"""

import argparse
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

import mpdist
from mpdist.torch import DistributedDataParallel, Metrics

CONTEXT, HEADS = 64, 4


class Reader(nn.Module):
    """Guesses each next character from those before it."""

    def __init__(self, symbols: int, width: int, layers: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(symbols, width)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(width, HEADS, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, symbols)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.characters(x) + self.places, mask=self.mask, is_causal=True))


def load_text() -> tuple[Tensor, str]:
    """The text as numbers of characters, and the characters."""
    text = "\n".join(topics[name] for name in sorted(topics))
    symbols = "".join(sorted(set(text)))
    number = {symbol: index for index, symbol in enumerate(symbols)}
    return torch.tensor([number[symbol] for symbol in text]), symbols


def draw(losses: list[float], path: Path) -> None:
    """The loss curve as a PNG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    pyplot.figure(figsize=(6, 3.5), layout="constrained")
    pyplot.plot(range(1, len(losses) + 1), losses)
    pyplot.xlabel("step")
    pyplot.ylabel("loss (nats per character)")
    pyplot.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="pieces of text in a batch, of all ranks together")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--curve", type=Path, help="draw the loss curve there (PNG); needs matplotlib")
    options = parser.parse_args()
    if min(options.steps, options.batch, options.layers, options.width) < 1 or options.width % HEADS:
        parser.error(f"all numbers must be at least 1, and --width a multiple of {HEADS}")
    if options.curve and not options.curve.parent.is_dir():
        parser.error(f"--curve {options.curve}: there is no folder {options.curve.parent}")
    if options.curve and not find_spec("matplotlib"):
        parser.error("--curve needs matplotlib: pip install 'mpdist[examples]'")
    torch.set_num_threads(1)
    world = mpdist.init()
    torch.manual_seed(0)
    text, symbols = load_text()
    model = DistributedDataParallel(Reader(len(symbols), options.width, options.layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    metrics = Metrics(world, "loss")
    curve = []
    where = torch.Generator().manual_seed(1 + world.rank)  # each rank reads other pieces
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(text) - CONTEXT - 1, (max(1, options.batch // world.size),), generator=where)
        pieces = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        optimizer.zero_grad()
        guesses = model(pieces[:, :-1])
        loss = nn.functional.cross_entropy(guesses.flatten(0, 1), pieces[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        metrics.add(loss=loss)
        curve.append(metrics.means()["loss"])
        if world.rank == 0 and step % 20 == 0:
            print(f"step {step:3}: loss {curve[-1]:.4f}", flush=True)
    if world.rank == 0:
        print(model.statistics())
        if options.curve:
            draw(curve, options.curve)
            print(options.curve)


if __name__ == "__main__":
    main()
