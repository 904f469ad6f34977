"""Halves: what keeps a Work alive of which only C++ knows.

A Work of ours is an object of C++ with a Python half. Where C++ calls a method of ours, older versions of torch keep
the first and drop the second: what C++ meets later is its own Work, which has no Future and whose `wait` never ends.
Newer ones hold both. Which it is we try, once, with a group that does nothing.

Where the Python half is dropped, it comes back: if nobody has waited for a Work when Python gives it up, C++ has it,
or nobody cares. It is kept until C++ has waited for it, once for each output (functional collectives do), or has asked
for its Future. C++ gives `wait` a timeout always, Python seldom.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work as TorchWork

from mpdist.torch.compiling import leave_alone

# C++ may ask for the Future of a Work when Python has given it up, or it has waited for it: the last small are kept.
KEPT_WORKS = 128
KEPT_ELEMENTS = 4096

# Works for which nobody waits are not kept for ever.
FORGOTTEN_WORKS = 4096

Kind = TypeVar("Kind", bound=type)

_kept: dict[int, Any] = {}
_waited: deque[Any] = deque(maxlen=KEPT_WORKS)


def is_small(outputs: Sequence[Tensor]) -> bool:
    """Whether a Work of these outputs may be kept for a while."""
    return sum(tensor.numel() for tensor in outputs) < KEPT_ELEMENTS


def held(kind: Kind) -> Kind:
    """This kind of Work, safe in the hands of C++; `_outputs` are its results."""
    return _held(kind) if _IS_DROPPED else kind


def _held(kind: Any) -> Any:
    class Held(kind):  # type: ignore[misc]  # whichever it is
        _is_known = False
        _waits = 0

        def __del__(self) -> None:
            if not self._is_known:
                self._is_known = True
                _keep(self)

        @leave_alone
        def wait(self, timeout: timedelta | None = None) -> bool:
            self._is_known = True
            if timeout is None:
                return bool(super().wait())
            done = bool(super().wait(timeout))
            self._waits += 1
            if self._waits < len(self._outputs):
                _keep(self)
            else:
                _let_go(self)
            return done

        @leave_alone
        def get_future(self) -> Any:
            self._is_known = True
            future = super().get_future()
            _let_go(self)
            return future

        def is_completed(self) -> bool:
            done: bool = super().is_completed()
            self._is_known |= done
            return done

    Held.__name__ = Held.__qualname__ = kind.__name__
    return Held


def _keep(work: Any) -> None:
    _kept[id(work)] = work
    while len(_kept) > FORGOTTEN_WORKS:
        oldest = next(iter(_kept))
        if not _kept[oldest].is_completed():
            return
        del _kept[oldest]


def _let_go(work: Any) -> None:
    _kept.pop(id(work), None)
    if is_small(work._outputs):
        _waited.append(work)


def _is_python_half_dropped() -> bool:
    class Waited(TorchWork):
        def get_future(self) -> torch.futures.Future[Any]:
            return torch.futures.Future()

    class Idle(dist.ProcessGroup):
        def __init__(self) -> None:
            super().__init__(0, 1)  # type: ignore[call-arg]  # the form for subclasses, unlisted

        def allreduce(self, tensors: object, opts: object = None) -> TorchWork:  # type: ignore[override]
            return Waited()

    work = dist.ProcessGroup.allreduce(cast(Any, Idle()), [torch.empty(0)], dist.AllreduceOptions())
    try:
        work.get_future()
    except RuntimeError:
        return True
    return False


_IS_DROPPED = _is_python_half_dropped()

WORKS_KEPT_BY_GROUP = 0 if _IS_DROPPED else KEPT_WORKS
