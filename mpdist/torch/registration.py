"""Registration: torch learns the name "mpdist", and what "mpi" means with it, and nothing else happens yet.

Three ways lead here: `import mpdist.torch`; the entry point `torch.backends`, which torch calls at the end of
`import torch`; and the entry point `torch.distributed.backends`, which newer versions call when the name is first
used. So this module is light: what needs MPI, or costs time, is imported when the first group is made.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpdist.config import Config

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup
    from torch.futures import Future

NAME = "mpdist"
SCHEME = "mpi"
DEVICES = ["cpu"]
"""Types of devices whose tensors are communicated; "cuda" is one of them where this torch is built for it."""


def autoload() -> None:
    """The entry points. An exception here would break `import torch` for the whole environment: it warns."""
    try:
        register()
    except Exception as error:
        warnings.warn(
            f"mpdist: the backend could not be registered with torch.distributed, or not as set: "
            f"{type(error).__name__}: {error}; `import mpdist.torch` tries again",
            RuntimeWarning,
            stacklevel=2,
        )


def register() -> None:
    """Register the backend "mpdist" and the rendezvous mpi://; may be called again."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    if NAME.upper() not in dist.Backend._plugins:
        _register()
    if Config.read().as_mpi:
        from mpdist.torch.mpi_name import as_mpi

        as_mpi()


def _register() -> None:
    import torch
    import torch.distributed as dist

    from mpdist.torch.mpi_name import take_mpi

    if torch.version.cuda is not None and "cuda" not in DEVICES:
        DEVICES.append("cuda")
    dist.Backend.register_backend(NAME, create_group, extended_api=True, devices=list(DEVICES))
    _register_rendezvous()
    _let_groups_end()
    _let_barrier_be_monitored()
    _let_futures_be_collected()
    take_mpi()


def create_group(options: Any, backend_options: object = None) -> ProcessGroup:
    """torch's creator of a group; called on its members."""
    from mpdist.torch.creation import create

    return create(options, backend_options)


def _register_rendezvous() -> None:
    # By its full name: torch.distributed has a function of the same name.
    rendezvous = import_module("torch.distributed.rendezvous")
    handlers = rendezvous._rendezvous_handlers
    if SCHEME not in handlers:
        rendezvous.register_rendezvous_handler(SCHEME, _meet_over_mpi)
    stock = handlers["env"]

    def meet_by_environment(url: str, **options: Any) -> Iterator[tuple[Store, int, int]]:
        from mpdist.torch.rendezvous import by_environment

        return by_environment(url, stock, **options)

    handlers["env"] = meet_by_environment


def _meet_over_mpi(url: str, **options: Any) -> Iterator[tuple[Store, int, int]]:
    from mpdist.torch.rendezvous import over_mpi

    return over_mpi(url, **options)


def _let_groups_end() -> None:
    """Older versions tell only NCCL's groups that they are destroyed; newer ones tell each group themselves."""
    from torch.distributed import distributed_c10d

    stock = getattr(distributed_c10d, "_shutdown_backend", None)
    if stock is None:
        return

    def shut_down(group: ProcessGroup) -> None:
        shutdown = getattr(group, "mpdist_shutdown", None)
        if shutdown is None:
            stock(group)
        else:
            shutdown()

    distributed_c10d._shutdown_backend = shut_down  # type: ignore[attr-defined]  # there


def _let_barrier_be_monitored() -> None:
    """torch allows monitored_barrier for gloo only, by name; ours goes to the group, gloo's to torch's function."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    stock = distributed_c10d.monitored_barrier

    def monitored_barrier(
        group: ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        own = distributed_c10d._get_default_group() if group is None else group
        monitor = getattr(own, "mpdist_monitored_barrier", None)
        if monitor is None:
            stock(group, timeout, wait_all_ranks)
        else:
            monitor(timeout, wait_all_ranks)

    monitored_barrier.__doc__ = stock.__doc__
    distributed_c10d.monitored_barrier = monitored_barrier
    dist.monitored_barrier = monitored_barrier


def _let_futures_be_collected() -> None:
    """torch does it in C++, which neither drives for ours, as a wait in a backward must, nor hears of their errors."""
    from torch import futures as torch_futures

    stock = torch_futures.collect_all

    def collect_all(futures: list[Future[Any]]) -> Future[list[Future[Any]]]:
        own = next((each for each in futures if hasattr(each, "mpdist_collect_all")), None)
        return stock(futures) if own is None else own.mpdist_collect_all(futures)

    def wait_all(futures: list[Future[Any]]) -> list[Any]:
        return [each.wait() for each in collect_all(futures).wait()]

    collect_all.__doc__, wait_all.__doc__ = stock.__doc__, torch_futures.wait_all.__doc__
    torch_futures.collect_all, torch_futures.wait_all = collect_all, wait_all
