"""Train on handwritten digits with DistributedDataParallel: the loop of one process, and five lines for many.

The lines that make it distributed are marked. The accuracy is that of all ranks together. With --device cuda it trains
on the GPUs, which the ranks of a node share out.

$ mpirun -n 2 python examples/train_digits_ddp.py
epoch  5: loss 0.1..., test accuracy 9... %
epoch 10: loss 0.0..., test accuracy 9... %
test accuracy 9... %, ranks: 2
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

import mpdist
from mpdist.torch import DistributedDataParallel, Metrics

EPOCHS, BATCH = 10, 64


def main(device: str) -> None:
    torch.set_num_threads(1)
    world = mpdist.init()  # 1: who are we
    if device == "cuda":
        torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
    torch.manual_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
    train, test = random_split(data, [0.75, 0.25])
    sampler = DistributedSampler(train, world.size, world.rank, drop_last=True)  # 2: each its part of the data
    loader = DataLoader(train, BATCH // world.size, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    model = DistributedDataParallel(model)  # 3: gradients are averaged in backward
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    losses, tests = Metrics(world, "loss"), Metrics(world, "accuracy")
    for epoch in range(1, EPOCHS + 1):
        sampler.set_epoch(epoch)  # 4: another order in each epoch
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.add(len(x), loss=loss)
        with torch.no_grad():
            for x, y in test:
                if int(x.sum() * 16) % world.size == world.rank:  # each rank tests its share
                    tests.add(accuracy=model.module(x.to(device)).argmax() == y.to(device))
        loss_of_all = losses.means()["loss"]  # 5: means over all ranks
        accuracy = 100 * tests.means()["accuracy"]
        if world.rank == 0 and epoch % 5 == 0:
            print(f"epoch {epoch:2}: loss {loss_of_all:.4f}, test accuracy {accuracy:.1f} %", flush=True)
    if world.rank == 0:
        print(f"test accuracy {accuracy:.1f} %, ranks: {world.size}")


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
    main(chosen_device("train_digits_ddp.py"))
