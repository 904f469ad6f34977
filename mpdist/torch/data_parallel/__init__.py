"""Data-parallel training of a torch module: its gradients are averaged over the ranks while backward computes."""

from mpdist.torch.data_parallel.module import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
