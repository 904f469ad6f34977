"""Header: a small record of fixed size that travels before data of unknown size.

It also carries a refusal: when the root's argument is wrong, the others wait for
nothing but the header, and raise with the root's reason.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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


def pack(headers: list[Header]) -> Buffer:
    """Headers as a buffer of NBYTES each."""
    block = np.zeros((len(headers), NBYTES), np.uint8)
    last: Header | None = None
    text = b""
    for row, header in zip(block, headers, strict=True):
        if header is not last:  # even blocks have one header for all
            last, text = header, _encoded(header)
        row[: len(text)] = np.frombuffer(text, np.uint8)
    return as_buffer(block)


def _encoded(header: Header) -> bytes:
    text = json.dumps(vars(header)).encode()
    if len(text) > NBYTES:
        return json.dumps(vars(Header(refusal=_shortened(header.refusal)))).encode()
    return text


def _shortened(text: str) -> str:
    """As much of it as a header holds, whatever its characters take in JSON."""
    empty = len(json.dumps(vars(Header())))
    while len(json.dumps(text)) + empty > NBYTES:
        text = text[: len(text) * 7 // 8 - 4] + " ..."
    return text


def room(number: int) -> Buffer:
    """Room for so many headers."""
    return as_buffer(np.zeros((number, NBYTES), np.uint8))


def unpack(buffer: Buffer) -> list[Header]:
    """The headers in a buffer."""
    rows: Any = buffer.array().reshape(-1, NBYTES)
    return [Header(**json.loads(row.tobytes().rstrip(b"\0") or b"{}")) for row in rows]
