"""Memory: what an array is to MPI (Buffer), what it holds (Element), how two are combined (ReduceOp)."""

from mpdist.memory.allocate import allocate, allocate_like
from mpdist.memory.buffer import HOST, Buffer, Device, address_of, is_same, overlap
from mpdist.memory.comparing import from_integers, to_integers
from mpdist.memory.elements import BY_CODE, BY_DTYPE, BY_NAME, ELEMENTS, Element, element_of
from mpdist.memory.folding import Folder
from mpdist.memory.half import narrow_into, widen
from mpdist.memory.ops import (
    OP_NAMES,
    ReduceOp,
    ReduceOpLike,
    as_op,
    check_op,
    finish,
    fold,
    function_name,
    premul_sum,
    premultiply,
)
from mpdist.memory.sources import as_buffer

__all__ = [
    "BY_CODE",
    "BY_DTYPE",
    "BY_NAME",
    "ELEMENTS",
    "HOST",
    "OP_NAMES",
    "Buffer",
    "Device",
    "Element",
    "Folder",
    "ReduceOp",
    "ReduceOpLike",
    "address_of",
    "allocate",
    "allocate_like",
    "as_buffer",
    "as_op",
    "check_op",
    "element_of",
    "finish",
    "fold",
    "from_integers",
    "function_name",
    "is_same",
    "narrow_into",
    "overlap",
    "premul_sum",
    "premultiply",
    "to_integers",
    "widen",
]
