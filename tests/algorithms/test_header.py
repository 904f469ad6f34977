"""Headers: what they say arrives, and a refusal is never lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpdist.algorithms.header import NBYTES, Header, pack, room, unpack
from mpdist.errors import UsageError
from mpdist.memory import ELEMENTS, as_buffer


@given(
    st.lists(
        st.builds(
            Header,
            code=st.sampled_from([0, *(element.code for element in ELEMENTS)]),
            shape=st.lists(st.integers(0, 2**62), max_size=20),
            nbytes=st.integers(0, 2**62),
            refusal=st.text(max_size=50),
        ),
        max_size=4,
    )
)
def test_headers_survive(headers: list[Header]) -> None:
    assert unpack(pack(headers)) == headers


def test_a_header_says_what_the_buffer_is() -> None:
    header = Header.of(as_buffer(np.zeros((2, 3), np.complex64)))
    assert (header.element.name, header.shape, header.nbytes) == ("complex64", [2, 3], 48)


def test_an_array_with_the_most_axes_fits() -> None:
    header = Header.of(as_buffer(np.zeros((1,) * 32)))
    assert unpack(pack([header])) == [header]


@given(st.text(min_size=1, max_size=3000))
def test_a_long_refusal_is_shortened_and_still_refuses(text: str) -> None:
    (header,) = unpack(pack([Header(refusal=text)]))
    with pytest.raises(UsageError):
        header.check()
    assert header.refusal == text or header.refusal.endswith(" ...")
    assert text.startswith(header.refusal.removesuffix(" ..."))


def test_a_refusal_keeps_most_of_what_fits() -> None:
    (header,) = unpack(pack([Header(refusal="x" * 5000)]))
    assert NBYTES * 0.7 < len(header.refusal) < NBYTES


def test_room_is_as_large_as_the_headers_and_empty() -> None:
    assert room(3).nbytes == pack([Header()] * 3).nbytes
    assert unpack(room(2)) == [Header(), Header()]


def test_a_header_without_refusal_passes() -> None:
    header = Header(nbytes=5)
    assert header.check() is header
