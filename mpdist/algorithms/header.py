"""Header: a small record of fixed size that travels before data of unknown size.

It also carries a refusal: when the root's argument is wrong, the others wait for
nothing but the header, and raise with the root's reason.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

from mpdist.errors import UsageError
from mpdist.memory import BY_CODE, Buffer, Element, as_buffer

NBYTES = 1024


@dataclass(frozen=True)
class Header:
    """What a block is, or why there is none.

    Attributes:
        code: element code; 0 for an object.
        shape: of the block.
        nbytes: of the block, or of the object's message.
        refusal: the root's error, empty where there is none.
        is_even: all ranks' blocks are of this size.
    """

    code: int = 0
    shape: list[int] = field(default_factory=list)
    nbytes: int = 0
    refusal: str = ""
    is_even: bool = False

    @classmethod
    def of(cls, buffer: Buffer) -> Header:
        return cls(buffer.element.code, list(buffer.shape), buffer.nbytes)

    @property
    def element(self) -> Element:
        return BY_CODE[self.code]

    def check(self) -> Header:
        """Raise the root's refusal as this rank's error."""
        if self.refusal:
            raise UsageError(self.refusal)
        return self


# Code, whether even, number of axes, bytes of the refusal, bytes of the block; then the shape, then the refusal.
_FIXED = struct.Struct("<BBHIQ")
_AXIS_BYTES = 8
_MORE = " ..."


def pack(headers: list[Header]) -> Buffer:
    """Headers as a buffer of NBYTES each."""
    packed = bytearray(len(headers) * NBYTES)
    last: Header | None = None
    record = b""
    for number, header in enumerate(headers):
        if header is not last:  # even blocks have one header for all
            last, record = header, _encoded(header)
        start = number * NBYTES
        packed[start : start + len(record)] = record
    return as_buffer(packed)


def _encoded(header: Header) -> bytes:
    axes = len(header.shape)
    text = header.refusal.encode(errors="surrogatepass") if header.refusal else b""
    if _FIXED.size + axes * _AXIS_BYTES + len(text) > NBYTES:
        return _encoded(Header(refusal=_shortened(text)))
    fixed = _FIXED.pack(header.code, header.is_even, axes, len(text), header.nbytes)
    return fixed + struct.pack(f"<{axes}Q", *header.shape) + text


def _shortened(text: bytes) -> str:
    """As much of it as a header holds, in whole characters."""
    return text[: NBYTES - _FIXED.size - len(_MORE)].decode(errors="ignore") + _MORE


def room(number: int) -> Buffer:
    """Room for so many headers."""
    return as_buffer(bytearray(number * NBYTES))


def unpack(buffer: Buffer) -> list[Header]:
    """The headers in a buffer."""
    octets: Any = buffer.exporter
    return [_decoded(octets, start) for start in range(0, buffer.nbytes, NBYTES)]


def _decoded(octets: bytearray, start: int) -> Header:
    code, is_even, axes, text_bytes, nbytes = _FIXED.unpack_from(octets, start)
    start += _FIXED.size
    shape = list(struct.unpack_from(f"<{axes}Q", octets, start))
    start += axes * _AXIS_BYTES
    refusal = octets[start : start + text_bytes].decode(errors="surrogatepass") if text_bytes else ""
    return Header(code, shape, nbytes, refusal, bool(is_even))
