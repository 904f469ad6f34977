"""Why an array is refused, in words: what was got, what was needed, what to do.

Each function makes the error and leaves raising it to the caller. The texts
name no operation and no communicator: who made the call puts that in front.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpdist.errors import UnsupportedBuffer
from mpdist.memory.buffer import TORCH_DEVICES
from mpdist.memory.elements import BY_NAME, ELEMENT_NAMES, Element, element_of

_OBJECT_HINT = "Python objects travel by the object operations (send_object, broadcast_object, ...)"


def not_an_array(x: object) -> UnsupportedBuffer:
    """An object with no memory to be sent: None, a number, a list, an unknown type."""
    got = f"got {named(x)}; needed an array. "
    if x is None:
        return UnsupportedBuffer(got + "Give a NumPy array, torch tensor or other buffer")
    if isinstance(x, int | float | complex):
        return UnsupportedBuffer(got + "v = np.array(v) makes one, also to receive into")
    if isinstance(x, list | tuple):
        return UnsupportedBuffer(got + f"np.array(x) makes one of numbers; {_OBJECT_HINT}")
    if isinstance(x, np.ma.MaskedArray):
        return UnsupportedBuffer(got + "A mask is not communicated: x.filled(value) makes a plain array")
    if torch_base(type(x)) is not None:
        if getattr(x, "is_nested", False):
            return _nested()
        return UnsupportedBuffer(got + "It has no memory of its own; unwrap it first (DTensor: x.to_local())")
    if hasattr(x, "__await__"):
        return UnsupportedBuffer(got + "Give its result: `await x`, or x.wait() of a Work where no event loop runs")
    if hasattr(x, "__array__"):
        return UnsupportedBuffer(got + "np.asarray(x) makes one")
    return UnsupportedBuffer(got + _OBJECT_HINT)


def named(x: object) -> str:
    """What x is, by its type."""
    if x is None:
        return "None"
    kind = type(x)
    if isinstance(x, int | float | complex):
        is_long = isinstance(x, int) and x.bit_length() > 64  # Python refuses to print the very long ones
        return f"the Python {kind.__name__}" + ("" if is_long else f" {x!r}")
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return f"an {name}" if name[0] in "aeiouAEIO" else f"a {name}"


def read_only(x: object) -> UnsupportedBuffer:
    """Memory that must not be written, where the call writes."""
    what = describe(x)
    if isinstance(x, bytes):
        return UnsupportedBuffer(f"got {what}, which cannot be written; needed writable memory. Use bytearray(x)")
    if isinstance(x, np.ndarray):
        return UnsupportedBuffer(f"got {what}, which is read-only; needed writable memory. Use x.copy()")
    return UnsupportedBuffer(
        f"got {what}, which is read-only; needed writable memory. Give a NumPy array (np.array(x)) or a torch tensor"
    )


def numpy_array(x: np.ndarray[Any, Any]) -> UnsupportedBuffer:
    """A NumPy array of a dtype or layout that cannot be sent."""
    if element_of(x.dtype) is None:
        return _numpy_dtype(x.dtype)
    return strided("a NumPy array", x.shape, "np.ascontiguousarray(x)", fortran=x.flags.f_contiguous)


def _numpy_dtype(dtype: np.dtype[Any]) -> UnsupportedBuffer:
    native = dtype if dtype.isnative else dtype.newbyteorder("=")
    if native is not dtype and element_of(native) is not None:
        return UnsupportedBuffer(
            f"got a NumPy array of dtype {dtype.str!r}, which is not in this machine's byte order; "
            "needed the native one. Use x.astype(x.dtype.newbyteorder('='))"
        )
    if dtype.kind == "V" and dtype.names is None:
        return element_type("a NumPy array", str(dtype))
    return element_type("a NumPy array", str(dtype), _NUMPY_REMEDIES.get(dtype.kind, ""))


_NUMPY_REMEDIES = {
    "O": _OBJECT_HINT,
    "M": "Use x.view(np.int64), and send the unit beside it",
    "m": "Use x.view(np.int64), and send the unit beside it",
    "V": "Use x.view(np.uint8), if all ranks agree on the fields, or send each field",
    "U": _OBJECT_HINT,
    "S": "Use x.view(np.uint8)",
    "T": _OBJECT_HINT,
    "f": "Use x.astype(np.float64)",
    "c": "Use x.astype(np.complex128)",
}


def element_type(what: str, got: str, remedy: str = "") -> UnsupportedBuffer:
    """An element type that cannot be communicated."""
    return UnsupportedBuffer(f"got {what} of dtype {got}; needed {ELEMENT_NAMES}. {remedy or 'Convert it first'}")


def strided(what: str, shape: tuple[int, ...], remedy: str, *, fortran: bool = False) -> UnsupportedBuffer:
    """Elements that do not lie one behind the other in C order."""
    layout = "in Fortran order" if fortran else "not contiguous"
    return UnsupportedBuffer(
        f"got {what} of shape {tuple(shape)} that is {layout}; needed contiguous memory in C order. "
        f"Use {remedy}, and copy back what it receives"
    )


def torch_tensor(x: Any) -> UnsupportedBuffer:
    """A torch tensor that has no plain memory of a known type on a known device."""
    if x.is_nested:
        return _nested()
    if str(x.layout) != "torch.strided":
        return UnsupportedBuffer(f"got a torch tensor of layout {x.layout}; needed a dense one. Use x.to_dense()")
    if not x.is_cpu and x.device.type not in TORCH_DEVICES:
        return UnsupportedBuffer(
            f"got a torch tensor on device {x.device}; needed one on cpu or cuda. Use x.cpu(), and copy results back"
        )
    if str(x.dtype).removeprefix("torch.") not in BY_NAME:
        return element_type("a torch tensor", str(x.dtype), "Use x.to(torch.float32)" if x.is_floating_point() else "")
    if x.is_conj() or x.is_neg():
        return UnsupportedBuffer(
            "got a torch tensor that is a lazily conjugated or negated view; needed real memory. "
            "Use x.resolve_conj().resolve_neg()"
        )
    if not x.is_contiguous():
        return strided("a torch tensor", tuple(x.shape), "x.contiguous()")
    return UnsupportedBuffer(
        f"got a torch tensor of shape {tuple(x.shape)} without memory (freed, fake or wrapped); needed an ordinary one"
    )


def _nested() -> UnsupportedBuffer:
    return UnsupportedBuffer(
        "got a nested torch tensor, whose parts have no shape in common; needed a dense one. "
        "Use each of x.unbind(), or x.to_padded_tensor(0)"
    )


def tensor_that_raised(x: Any, error: Exception) -> UnsupportedBuffer:
    """A torch tensor that raised this when it was asked where its elements are."""
    return lazy() if isinstance(error, ValueError) else torch_tensor(x)


def lazy() -> UnsupportedBuffer:
    """A parameter of a lazy module that has not seen a batch."""
    return UnsupportedBuffer(
        "got a lazy torch parameter, which has no shape yet; needed one with memory. Call the module on a batch first"
    )


def buffer_format(x: object, text: str) -> UnsupportedBuffer:
    """A buffer whose elements have no known type."""
    return element_type(named(x), f"{text!r} (buffer format)", "Use memoryview(x).cast('B') for its bytes")


def memory_view(x: memoryview, element: Element | None) -> UnsupportedBuffer:
    """A memoryview of an unknown format, or strided."""
    if element is None:
        return buffer_format(x, x.format)
    return strided("a memoryview", x.shape or (), "np.ascontiguousarray(x)", fortran=x.f_contiguous)


def describe(x: object) -> str:
    """What x is, in a few words."""
    if isinstance(x, np.ndarray):
        return f"a NumPy array of {x.dtype} x {x.size}"
    return named(x)


def torch_base(kind: type) -> type | None:
    """torch.Tensor, if `kind` is it or derives from it; torch itself is not imported."""
    for base in kind.__mro__:
        if base.__name__ == "Tensor" and base.__module__ == "torch":
            return base
    return None


def is_plain_tensor(kind: type, base: type) -> bool:
    """Whether a tensor class has memory of its own, unlike DTensor, FakeTensor and other wrappers."""
    return getattr(kind, "__torch_dispatch__", None) is getattr(base, "__torch_dispatch__", None)
