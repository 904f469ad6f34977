"""Wire format of a point-to-point message: what its MPI tag says, and how a large one is cut.

The MPI tag carries the user's tag and a code: the element type, or that the
bytes are a pickle, or that pieces follow. So a receiver knows type and size
before it touches its buffer, and no header costs a copy.

    wire tag = tag << 9 | code          tag < 2**20, so MPICH's limit of 2**29 holds
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

CODE_BITS = 9
CODE_MASK = (1 << CODE_BITS) - 1
MAX_TAG = 2**20 - 1

# Codes 1-31: elements of that type, the whole array in one message.
ARRAY_IN_PIECES = 32  # + element code: the message holds the array's nbytes, the data follow as PIECEs
OBJECT = 64  # a pickle, then its out-of-band buffers, in one message
OBJECT_IN_PIECES = 65  # the message is the table of sizes and the pickle, the buffers follow as PIECEs, see `bodies`;
# a pickle that is too large for one message follows as the first of them, an empty one in its place
PIECE = 66  # a part of the last message with pieces of the same source and tag
LAST = 67  # empty: its sender closes the communicator, and nothing follows
FASTBOX = 68  # the message says where its sender puts small arrays from now on, see `fastbox`
NOTHING = 69  # of an entry there that could not be filled
ARRAY_SHOWN = 96  # + element code: the message says where its receiver finds the data, on a device of its node

# Open MPI refuses messages of 2**31 bytes and more.
PIECE_BYTES = 2**30

# Where arrays may start inside an object's message.
ALIGNMENT = 64

# Out-of-band buffers of an object in pieces are packed up to this size, and stay where they are above it.
SMALL_FRAME_BYTES = 64 * 1024

# So much is packed together: whoever keeps one array of an object keeps no more than these bytes.
PACK_BYTES = 1024**2

_SIZE = struct.Struct("<Q")
_SHOWN = struct.Struct("<QQqQQ64s")


def wire_tag(tag: int, code: int) -> int:
    """The MPI tag of a message."""
    return tag << CODE_BITS | code


def max_tag(limit: int) -> int:
    """The largest user tag where MPI's tags end at `limit`."""
    return min(MAX_TAG, ((limit + 1) >> CODE_BITS) - 1)


def piece_sizes(nbytes: int) -> list[int]:
    """Sizes of the pieces in which `nbytes` travel."""
    whole, rest = divmod(nbytes, PIECE_BYTES)
    return [PIECE_BYTES] * whole + [rest] * (rest > 0)


def pack_size(nbytes: int) -> bytes:
    """First message of an array in pieces."""
    return _SIZE.pack(nbytes)


def unpack_size(head: bytes | bytearray | memoryview) -> int:
    """Inverse of pack_size."""
    return int(_SIZE.unpack(head)[0])


@dataclass(slots=True)
class Place:
    """Where the receiver of an array finds its data; all of a message with ARRAY_SHOWN.

    Attributes:
        nbytes: of the array.
        ticket: offset of its Ticket in the sender's shared memory.
        offset: of the array in a block or segment of the sender; negative if it is in none that others may open.
        number: of the segment; 0 for a block, which stays for ever.
        word: offset of the word that tells whether the segment is still there, see memory/segments.py.
        handle: what they open it by.
    """

    nbytes: int
    ticket: int
    offset: int
    number: int
    word: int
    handle: bytes

    def pack(self) -> bytes:
        return _SHOWN.pack(self.nbytes, self.ticket, self.offset, self.number, self.word, self.handle)

    @classmethod
    def unpack(cls, head: bytes | bytearray) -> Place:
        """Inverse of pack."""
        return cls(*_SHOWN.unpack(head))


def bodies(sizes: Sequence[int]) -> list[list[int]]:
    """Which out-of-band frames of these sizes travel together: a large one alone, small ones packed.

    Small ones would cost more as messages of their own than their copies do.
    """
    groups: list[list[int]] = []
    room = -1
    for index, size in enumerate(sizes[1:], 1):
        if size > SMALL_FRAME_BYTES:
            groups.append([index])
            continue
        if room < size:
            pack: list[int] = []
            groups.append(pack)
            room = PACK_BYTES
        pack.append(index)
        room -= size + ALIGNMENT
    return groups


def body_bytes(sizes: Sequence[int]) -> int:
    """Bytes that frames of these sizes take as one body."""
    return _layout(sizes, 0)[-1] + sizes[-1]


def pack_body(frames: Sequence[memoryview]) -> bytearray:
    """Small frames as one body."""
    return _lay(bytearray(), frames, _layout([frame.nbytes for frame in frames], 0))


def unpack_body(body: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """Inverse of pack_body, without copy."""
    return [body[start : start + size] for start, size in zip(_layout(sizes, 0), sizes, strict=True)]


def pack_frames(frames: Sequence[memoryview], *, inline: bool) -> bytearray:
    """The table of sizes and frame 0, the pickle; with `inline` all the others too."""
    sizes = [frame.nbytes for frame in frames]
    message = bytearray(struct.pack(f"<{len(sizes) + 1}Q", len(sizes), *sizes))
    return _lay(message, frames if inline else frames[:1], _layout(sizes, len(message)))


def unpack_table(message: memoryview) -> list[int]:
    """Sizes of all frames, the pickle's first."""
    number = int(_SIZE.unpack_from(message)[0])
    return list(struct.unpack_from(f"<{number}Q", message, _SIZE.size))


def unpack_frames(message: memoryview, sizes: Sequence[int], *, inline: bool) -> list[memoryview]:
    """The frames that lie in the message, without copy."""
    starts = _layout(sizes if inline else sizes[:1], _SIZE.size * (len(sizes) + 1))
    return [message[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _layout(sizes: Sequence[int], offset: int) -> list[int]:
    """Where frames of these sizes start behind so many bytes, each aligned for any element type."""
    starts = []
    for size in sizes:
        offset += -offset % ALIGNMENT
        starts.append(offset)
        offset += size
    return starts


def _lay(message: bytearray, frames: Sequence[memoryview], starts: Sequence[int]) -> bytearray:
    """Append the frames where they are to start."""
    for frame, start in zip(frames, starts, strict=False):
        message += bytes(start - len(message))
        message += frame
    return message
