"""mpdist for PyTorch: a `torch.distributed` backend over MPI, and what torch lacks on CPU.

`torch.distributed.init_process_group("mpdist")` is all that a script needs; see registration.py. Importing this
package registers the backend, and starts no MPI.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from mpdist.errors import Unavailable
from mpdist.torch.registration import autoload, register

if TYPE_CHECKING:
    from mpdist.torch.checking import check
    from mpdist.torch.checkpoint import load_checkpoint, save_checkpoint
    from mpdist.torch.clip import clip_grad_norm
    from mpdist.torch.data_parallel import DistributedDataParallel
    from mpdist.torch.environment import setup_env
    from mpdist.torch.hooks import bf16_compress
    from mpdist.torch.metrics import Metrics
    from mpdist.torch.mpi_name import as_mpi
    from mpdist.torch.store import MpiStore
    from mpdist.torch.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

_HOMES = {
    "mpdist.torch.checking": ("check",),
    "mpdist.torch.checkpoint": ("load_checkpoint", "save_checkpoint"),
    "mpdist.torch.clip": ("clip_grad_norm",),
    "mpdist.torch.data_parallel": ("DistributedDataParallel",),
    "mpdist.torch.metrics": ("Metrics",),
    "mpdist.torch.mpi_name": ("as_mpi",),
    "mpdist.torch.environment": ("setup_env",),
    "mpdist.torch.hooks": ("bf16_compress",),
    "mpdist.torch.store": ("MpiStore",),
    "mpdist.torch.sync_batch_norm": ("SyncBatchNorm", "convert_sync_batchnorm"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "DistributedDataParallel",
    "Metrics",
    "MpiStore",
    "SyncBatchNorm",
    "as_mpi",
    "bf16_compress",
    "check",
    "clip_grad_norm",
    "convert_sync_batchnorm",
    "load_checkpoint",
    "register",
    "save_checkpoint",
    "setup_env",
]

if find_spec("torch") is None:
    raise Unavailable("mpdist.torch needs torch: pip install 'mpdist[torch]'")
autoload()  # not register(): the entry point in there imports this package, and must not fail


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'mpdist.torch' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
