"""A cupy whose device memory is the host's, so that every MPI takes it; loaded by a trial's ranks.

PRETENDED_FAULTS says what goes wrong: `crash ireduce`, `wrong iscan`, `hang ibroadcast`, `raise igather`, for a method
of Transport; `absent` or `silent` or `garbage` for the whole; several with commas between them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np


class ndarray:
    def __init__(self, values: Any) -> None:
        self._values = values
        self.shape, self.dtype = values.shape, values.dtype
        self.device = SimpleNamespace(id=0)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self._values.__array_interface__["data"][0], False)
        return {"shape": self.shape, "typestr": self.dtype.str, "data": data, "version": 3}


def empty(shape: Any, dtype: Any) -> ndarray:
    return ndarray(np.full(shape, 77, dtype))


class Device:
    def __init__(self, index: int) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class Stream:
    ptr = 1

    def __init__(self, non_blocking: bool) -> None: ...


class Event:
    ptr = 2
    done = True

    def __init__(self, block: bool, disable_timing: bool) -> None: ...
    def record(self, stream: Stream) -> None: ...
    def synchronize(self) -> None: ...


def _copy_rows(
    target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, kind: int, stream: int
) -> None:
    for row in range(height):
        ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)


def _copy(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
    ctypes.memmove(target, source, nbytes)


RawKernel = None  # a trial folds nothing

cuda = SimpleNamespace(
    driver=SimpleNamespace(CUDADriverError=RuntimeError),
    compiler=SimpleNamespace(CompileException=RuntimeError),
    nvrtc=SimpleNamespace(NVRTCError=RuntimeError),
    Device=Device,
    Stream=Stream,
    Event=Event,
    runtime=SimpleNamespace(
        memcpyAsync=_copy,
        memcpy2DAsync=_copy_rows,
        free=lambda address: None,
        CUDARuntimeError=RuntimeError,
        getDeviceProperties=lambda index: {"name": b"Pretended"},
        driverGetVersion=lambda: 13000,
    ),
)


def _misbehave(what: str, name: str) -> None:
    from mpdist.transport.mpi import MPI, Transport

    plain = getattr(Transport, name)

    def method(self: Any, x: Any, *arguments: Any) -> Any:
        if what == "crash" and self.rank == self.size - 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        if what == "hang":
            time.sleep(1000)
        if what == "raise":
            raise MPI.Exception(MPI.ERR_OTHER)
        if what == "wrong" and x is not None:
            ctypes.memset(x.address, 0, 4)
        return plain(self, x, *arguments)

    setattr(Transport, name, method)


for _fault in filter(None, os.environ.get("PRETENDED_FAULTS", "").split(",")):
    if _fault == "absent":
        raise ImportError("no driver\nat all")
    if _fault == "silent":
        os._exit(3)
    if _fault == "garbage":
        for _line in (b"\xff\xfe\nok send\nbegin nothing\nranks 99\nend of it\nranks", b" \n"):
            with open(sys.argv[1], "ab") as _report:
                _report.write(_line)
        continue
    _misbehave(*_fault.split())
