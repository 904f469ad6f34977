"""The wire format: tags, sizes of pieces, frames of an object."""

from __future__ import annotations

from time import process_time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpdist.memory import ELEMENTS
from mpdist.progress import wire


@given(st.integers(0, wire.MAX_TAG), st.integers(0, wire.CODE_MASK))
def test_a_wire_tag_holds_tag_and_code_within_the_limit_of_mpich(tag: int, code: int) -> None:
    both = wire.wire_tag(tag, code)
    assert (both >> wire.CODE_BITS, both & wire.CODE_MASK) == (tag, code)
    assert both < 2**29


def test_codes_are_distinct() -> None:
    whole = {element.code for element in ELEMENTS}
    pieces = {wire.ARRAY_IN_PIECES + element.code for element in ELEMENTS}
    special = {wire.OBJECT, wire.OBJECT_IN_PIECES, wire.PIECE}
    codes = whole | pieces | special
    assert len(codes) == 2 * len(ELEMENTS) + 3
    assert max(codes) <= wire.CODE_MASK
    assert max(whole) < wire.ARRAY_IN_PIECES <= min(pieces)
    assert max(pieces) < wire.OBJECT


@pytest.mark.parametrize("limit", [32767, 2**23, 2**29 - 1, 2**31 - 1])
def test_the_largest_tag_fits_below_the_limit(limit: int) -> None:
    tag = wire.max_tag(limit)
    assert wire.wire_tag(tag, wire.CODE_MASK) <= limit
    assert tag == wire.MAX_TAG or wire.wire_tag(tag + 1, wire.CODE_MASK) > limit


@given(st.integers(0, 1000), st.integers(1, 50))
def test_pieces_are_whole_but_the_last_and_none_is_empty(nbytes: int, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "PIECE_BYTES", piece)
        sizes = wire.piece_sizes(nbytes)
    assert sum(sizes) == nbytes
    assert all(size == piece for size in sizes[:-1])
    assert all(0 < size <= piece for size in sizes)


@given(st.integers(0, 2**63))
def test_a_size_survives(nbytes: int) -> None:
    assert wire.unpack_size(wire.pack_size(nbytes)) == nbytes


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=6))
def test_inline_frames_survive_and_are_aligned(contents: list[bytes]) -> None:
    message = memoryview(wire.pack_frames([memoryview(each) for each in contents], inline=True))
    sizes = wire.unpack_table(message)
    assert sizes == [len(each) for each in contents]
    frames = wire.unpack_frames(message, sizes, inline=True)
    assert [bytes(frame) for frame in frames] == contents
    assert all(address(frame) % wire.ALIGNMENT == address(message) % wire.ALIGNMENT for frame in frames if frame.nbytes)


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=6))
def test_without_inline_only_the_pickle_follows_the_table(contents: list[bytes]) -> None:
    message = memoryview(wire.pack_frames([memoryview(each) for each in contents], inline=False))
    sizes = wire.unpack_table(message)
    assert sizes == [len(each) for each in contents]
    assert [bytes(frame) for frame in wire.unpack_frames(message, sizes, inline=False)] == contents[:1]
    assert bytes(message).endswith(contents[0])


@given(st.lists(st.integers(0, 300), min_size=1, max_size=60))
def test_large_frames_travel_alone_and_small_ones_packed(sizes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "SMALL_FRAME_BYTES", 200)
        patch.setattr(wire, "PACK_BYTES", 1000)
        bodies = wire.bodies(sizes)
    assert sorted(index for body in bodies for index in body) == list(range(1, len(sizes)))
    for body in bodies:
        assert len(body) == 1 or all(sizes[index] <= 200 for index in body)
        assert len(body) == 1 or wire.body_bytes([sizes[index] for index in body]) <= 1000 + wire.ALIGNMENT
    packs = [body for body in bodies if sizes[body[0]] <= 200]
    assert all(sum(sizes[index] + wire.ALIGNMENT for index in body) > 1000 - 200 for body in packs[:-1])


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=6))
def test_packed_frames_survive_and_are_aligned(contents: list[bytes]) -> None:
    sizes = [len(each) for each in contents]
    body = memoryview(wire.pack_body([memoryview(each) for each in contents]))
    assert body.nbytes == wire.body_bytes(sizes)
    frames = wire.unpack_body(body, sizes)
    assert [bytes(frame) for frame in frames] == contents
    assert all(address(frame) % wire.ALIGNMENT == address(body) % wire.ALIGNMENT for frame in frames if frame.nbytes)


def test_the_time_for_many_frames_grows_with_their_number() -> None:
    """With the square of it this took minutes."""
    contents = [memoryview(b"x")] * 30_000
    start = process_time()
    message = memoryview(wire.pack_frames(contents, inline=True))
    sizes = wire.unpack_table(message)
    assert len(wire.unpack_frames(message, sizes, inline=True)) == len(contents)
    assert sum(len(body) for body in wire.bodies(sizes)) == len(contents) - 1
    assert process_time() - start < 10


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**40),
    st.integers(-1, 2**40),
    st.integers(0, 2**63 - 1),
    st.binary(min_size=64, max_size=64),
)
def test_a_place_survives_its_message(nbytes: int, ticket: int, offset: int, number: int, handle: bytes) -> None:
    place = wire.Place(nbytes, ticket, offset, number, ticket + 8, handle)
    assert wire.Place.unpack(bytearray(place.pack())) == place


def test_codes_of_what_is_shown_are_no_others() -> None:
    codes = [wire.ARRAY_SHOWN + element.code for element in ELEMENTS]
    assert min(codes) > wire.LAST
    assert max(codes) <= wire.CODE_MASK
