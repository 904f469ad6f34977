"""PyTorch over MPI: stock DistributedDataParallel learns handwritten digits; one word differs from any torch script.

The word is the backend's name in `init_process_group`. No address, no port, no rank: MPI knows them. The rest is
PyTorch as it is in the wheel: DistributedSampler deals the pictures, DDP averages the gradients. With --device cuda
they are on the GPUs, which the ranks of a node share out.

$ mpirun -n 2 python examples/torch_backend.py
epoch  1: loss ...
...
test accuracy 9... % after 15 epochs, ranks: 2
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mpdist.torch  # noqa: F401  # only where mpdist is not installed: else torch finds the backend by itself

EPOCHS, BATCH = 15, 32


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Pictures of 8 x 8 and their digits, to train and to test."""
    pictures, labels = load_digits(return_X_y=True)
    parts = train_test_split(pictures.astype("float32") / 16, labels, test_size=0.25, random_state=0)
    train, test, train_labels, test_labels = map(torch.from_numpy, parts)
    return TensorDataset(train, train_labels), TensorDataset(test, test_labels)


def main(device: str) -> None:
    torch.set_num_threads(1)  # ranks share the cores
    dist.init_process_group("mpdist")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, test = digits()
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(train)
    loader = DataLoader(train, BATCH // size, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        losses = []
        for pictures, labels in loader:
            pictures, labels = pictures.to(device), labels.to(device)
            loss = nn.functional.cross_entropy(model(pictures), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if rank == 0:
            print(f"epoch {epoch + 1:2}: loss {mean:.4f}")
    pictures, labels = test[:]
    accuracy = (model(pictures.to(device)).argmax(1) == labels.to(device)).double().mean()
    if rank == 0:
        print(f"test accuracy {100 * accuracy:.1f} % after {EPOCHS} epochs, ranks: {size}")
    dist.destroy_process_group()


def chosen_device(name: str) -> str:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    device: str = parser.parse_args().device
    if device == "cuda":
        try:
            import cupy  # noqa: F401  # mpdist copies with it
        except ModuleNotFoundError as error:
            raise SystemExit(f"{name}: {error}; pip install 'mpdist[cuda13]' (or cuda12)") from error
        if not torch.cuda.is_available():
            raise SystemExit(f"{name}: --device cuda needs an NVIDIA GPU, and a torch that is built for CUDA")
    return device


if __name__ == "__main__":
    main(chosen_device("torch_backend.py"))
