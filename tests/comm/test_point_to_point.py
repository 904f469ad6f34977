"""Messages between two ranks: arrays of every library, matching, objects, misfits."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
from comm.arrays import Library, assert_values, libraries, numbers, torch_library

import mpdist
from mpdist import ANY_SOURCE, ANY_TAG, Communicator
from mpdist.progress import sending, wire
from mpdist.progress.receive import EAGER_BYTES

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

COUNTS = (0, 1, 7, 1000)


def after(comm: Communicator) -> int:
    return (comm.rank + 1) % comm.size


def before(comm: Communicator) -> int:
    return (comm.rank - 1) % comm.size


def byte_counts() -> list[int]:
    """Sizes around the limits between ways of sending."""
    return [EAGER_BYTES - 1, EAGER_BYTES, EAGER_BYTES + 1, 4096, 16 * 1024, 64 * 1024 + 3, 100_000, 1_000_003]


async def exchange(comm: Communicator, library: Library, dtype: str, count: int) -> None:
    """Send to the next rank, receive from the one before, into an array of that library."""
    case = f"{library} {dtype} x {count}"
    x = library.make(numbers(count, dtype, comm.rank), dtype)
    out = library.make(numbers(count, dtype, 99), dtype)
    sent = comm.send(x, after(comm), tag=count)
    message = await comm.recv(out, before(comm), count)
    assert await sent is None
    assert message.data is out, case
    assert_values(library.read(out), numbers(count, dtype, before(comm)), case)
    assert_values(library.read(x), numbers(count, dtype, comm.rank), f"{case}, the sent array")
    assert (message.src, message.tag, message.count) == (before(comm), count, count), case


async def test_arrays_of_every_library_and_type_arrive(comm: Communicator) -> None:
    for library in libraries():
        for dtype in library.dtypes:
            for count in COUNTS:
                await exchange(comm, library, dtype, count)


async def test_arrays_of_every_size_arrive(comm: Communicator) -> None:
    for library in libraries():
        for nbytes in byte_counts():
            await exchange(comm, library, "uint8", nbytes)
            if "float64" in library.dtypes:
                await exchange(comm, library, "float64", nbytes // 8)


async def test_arrays_in_pieces_arrive(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PIECE_BYTES", 600)
    for library in libraries():
        for dtype in library.dtypes:
            for count in (1, 300, 601, 1111):
                await exchange(comm, library, dtype, count)


async def test_arrays_in_pieces_of_one_tag_arrive_in_order(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PIECE_BYTES", 1000)
    sizes = [5000, 10, 1000, 1001, 0, 9999, 3]
    works = [comm.send(numbers(size, "uint8", size), after(comm), 4) for size in sizes]
    others = [comm.send(numbers(size, "int16", size), after(comm), 5) for size in sizes]
    await asyncio.sleep(0)
    for size in sizes:
        message = await comm.recv(src=before(comm), tag=5)
        assert_values(message.data, numbers(size, "int16", size), size)
    for size in sizes:
        message = await comm.recv(src=before(comm), tag=4)
        assert_values(message.data, numbers(size, "uint8", size), size)
    await asyncio.gather(*works, *others)


async def test_a_probe_and_misfits_see_the_whole_of_an_array_in_pieces(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "PIECE_BYTES", 64)
    x = numbers(500, "int32", comm.rank)
    sent = comm.send(x, after(comm))
    with pytest.raises(mpdist.MessageTruncated, match="int32 x 500"):
        await comm.recv(np.zeros(499, np.int32))
    with pytest.raises(mpdist.UnsupportedBuffer, match="int32 x 500"):
        await comm.recv(np.zeros(500, np.float32))
    probed = await comm.probe()
    assert (probed.count, probed.nbytes, probed.src) == (500, 2000, before(comm))
    message = await probed.recv()
    await sent
    assert_values(message.data, numbers(500, "int32", before(comm)), "probed")


async def test_a_new_array_has_the_sent_type_and_size(comm: Communicator) -> None:
    for dtype in ("bool", "int8", "uint64", "float16", "float32", "complex128"):
        for count in COUNTS:
            sent = comm.send(numbers(count, dtype, comm.rank), after(comm))
            message = await comm.recv()
            await sent
            assert isinstance(message.data, np.ndarray)
            assert message.data.dtype == message.dtype == dtype
            assert message.data.flags.writeable
            assert message.nbytes == count * np.dtype(dtype).itemsize
            assert_values(message.data, numbers(count, dtype, before(comm)), (dtype, count))


async def test_a_message_may_be_smaller_than_the_buffer(comm: Communicator) -> None:
    for count in (0, 1, 100, 5000):
        sent = comm.send(numbers(count, "int64", comm.rank), after(comm))
        out = np.full(6000, 77)
        message = await comm.recv(out)
        await sent
        assert message.count == count
        assert_values(out[:count], numbers(count, "int64", before(comm)), count)
        assert (out[count:] == 77).all(), f"behind the end of {count} elements"


async def test_shapes_do_not_matter_and_0_d_arrays_work(comm: Communicator) -> None:
    sent = comm.send(np.arange(6).reshape(2, 3), after(comm))
    out = np.zeros((3, 2, 1), int)
    await comm.recv(out)
    await sent
    assert_values(out, range(6), "reshaped")
    sent = comm.send(np.array(5), after(comm))
    zero_d = np.array(0)
    await comm.recv(zero_d)
    await sent
    assert zero_d == 5


async def test_read_only_arrays_can_be_sent(comm: Communicator) -> None:
    frozen = np.arange(5)
    frozen.flags.writeable = False
    for x, dtype in (
        (frozen, np.int64),
        (b"abcde", np.uint8),
        (memoryview(b"abcde"), np.uint8),
        (np.float32(3), np.float32),
    ):
        sent = comm.send(x, after(comm))
        message = await comm.recv()
        await sent
        assert message.dtype == dtype
        assert_values(message.data, np.frombuffer(x, np.uint8) if isinstance(x, bytes | memoryview) else x, x)


async def test_a_tensor_that_requires_grad_can_be_sent_and_received_into(comm: Communicator) -> None:
    if torch_library() is None:
        pytest.skip("torch is not installed")
    import torch

    x = torch.full((3,), float(comm.rank), requires_grad=True)
    out = torch.zeros(3, requires_grad=True)
    sent = comm.send(x, after(comm))
    await comm.recv(out)
    await sent
    assert out.tolist() == [float(before(comm))] * 3
    assert out.requires_grad


async def test_the_sent_array_may_be_dropped_at_once(comm: Communicator) -> None:
    works = [comm.send(numbers(50_000, "float64", comm.rank + number), after(comm)) for number in range(20)]
    junk = [np.full(50_000, np.nan) for _ in range(20)]
    for number in range(20):
        message = await comm.recv()
        assert_values(message.data, numbers(50_000, "float64", before(comm) + number), number)
    await asyncio.gather(*works)
    del junk


# ---------------------------------------------------------------------- matching


async def test_messages_of_one_source_and_tag_keep_their_order(comm: Communicator) -> None:
    sizes = [3, 1000, 50_000, 1, 0, 70_000, 5]
    works = [comm.send(numbers(size, "int32", number), after(comm)) for number, size in enumerate(sizes)]
    for number, size in enumerate(sizes):
        message = await comm.recv(src=before(comm), tag=0)
        assert_values(message.data, numbers(size, "int32", number), number)
    await asyncio.gather(*works)


async def test_receives_posted_before_the_messages_come_are_met_in_order(comm: Communicator) -> None:
    receives = [comm.recv(src=before(comm)) for _ in range(300)]
    await comm.barrier()
    for number in range(300):
        await comm.send(np.array([number]), after(comm))
    for number, receive in enumerate(receives):
        assert (await receive).data[0] == number


async def test_tags_select_messages_out_of_order(comm: Communicator) -> None:
    tags = list(range(50))
    for tag in tags:
        await comm.send(np.array([tag]), after(comm), tag)
    random.Random(comm.rank).shuffle(tags)
    for tag in tags:
        message = await comm.recv(tag=tag)
        assert (message.tag, message.data[0]) == (tag, tag)


async def test_any_source_meets_each_rank_once(comm: Communicator) -> None:
    works = [comm.send(np.array([comm.rank, dst]), dst, tag=comm.rank) for dst in range(comm.size)]
    messages = [await comm.recv(src=ANY_SOURCE, tag=ANY_TAG) for _ in range(comm.size)]
    await asyncio.gather(*works)
    assert sorted(message.src for message in messages) == list(range(comm.size))
    for message in messages:
        assert message.tag == message.src
        assert_values(message.data, [message.src, comm.rank], message)


async def test_the_earliest_receive_that_fits_gets_a_message(comm: Communicator) -> None:
    """Wildcard or not: posting order decides."""
    me = comm.rank
    patterns = [(me, 1), (ANY_SOURCE, ANY_TAG), (me, 2), (ANY_SOURCE, 1), (me, ANY_TAG), (ANY_SOURCE, 2)]
    receives = [comm.recv(src=src, tag=tag) for src, tag in patterns]
    for number, tag in enumerate((2, 1, 1, 1, 2, 2)):
        await comm.send(np.array([number]), me, tag)
    got = [int((await receive).data[0]) for receive in receives]
    # tag 2 -> any; 1 -> (me, 1); 1 -> (any, 1); 1 -> (me, any); 2 -> (me, 2); 2 -> (any, 2)
    assert got == [1, 0, 4, 2, 3, 5]


async def test_the_largest_tag_works(comm: Communicator) -> None:
    tag = comm._channel.max_tag
    assert tag == 2**20 - 1
    await comm.send(np.array([1]), after(comm), tag)
    assert (await comm.recv(tag=tag)).tag == tag


async def test_numpy_integers_are_ranks_and_tags(comm: Communicator) -> None:
    await comm.send(np.arange(2), np.int32(after(comm)), np.uint8(3))
    message = await comm.recv(src=np.int64(before(comm)), tag=np.int16(3))
    assert (type(message.src), message.tag) == (int, 3)


async def test_a_rank_sends_to_itself(comm: Communicator) -> None:
    for count in (0, 1, 5000, 200_000):
        sent = comm.send(numbers(count, "float32", comm.rank), comm.rank)
        message = await comm.recv(src=comm.rank)
        await sent
        assert_values(message.data, numbers(count, "float32", comm.rank), count)


async def test_sendrecv_exchanges_around_the_ring(comm: Communicator) -> None:
    for count in (0, 1, 300, 100_000):
        x = numbers(count, "float64", comm.rank)
        out = np.zeros(count)
        message = await comm.sendrecv(x, after(comm), out, before(comm), tag=5)
        assert message.data is out
        assert (message.src, message.tag) == (before(comm), 5)
        assert_values(out, numbers(count, "float64", before(comm)), count)
        assert_values(x, numbers(count, "float64", comm.rank), count)


async def test_sendrecv_receives_from_where_it_sends_and_into_a_new_array(comm: Communicator) -> None:
    peer = comm.size - 1 - comm.rank
    message = await comm.sendrecv(np.array([comm.rank]), peer)
    assert message.data.tolist() == [peer]


async def test_sendrecv_takes_memory_side_by_side(comm: Communicator) -> None:
    x = np.zeros(8)
    x[4:] = comm.rank
    await comm.sendrecv(x[4:], after(comm), x[:4], before(comm))
    assert x.tolist() == [before(comm)] * 4 + [comm.rank] * 4
    assert (await comm.sendrecv(x[:0], after(comm), x[:0], before(comm))).count == 0


def test_sendrecv_can_be_waited_for_without_a_loop(comm: Communicator) -> None:
    for count in (1, 2000, 100_000):
        for out in (None, np.zeros(count, "int16")):
            message = comm.sendrecv(numbers(count, "int16", comm.rank), after(comm), out, before(comm)).wait()
            assert out is None or message.data is out
            assert_values(message.data, numbers(count, "int16", before(comm)), count)


# ---------------------------------------------------------------------- probe, messages


async def test_a_probed_message_is_received_by_its_own_recv_only(comm: Communicator) -> None:
    await comm.send(np.arange(3), after(comm), 1)
    await comm.send(np.arange(4), after(comm), 1)
    probed = await comm.probe(before(comm), 1)
    assert (probed.src, probed.tag, probed.count, probed.nbytes, probed.data) == (before(comm), 1, 3, 24, None)
    second = await comm.recv(tag=1)
    assert second.count == 4
    out = np.zeros(3, int)
    first = await probed.recv(out)
    assert first.data is out
    assert_values(out, range(3), "first")


async def test_a_probed_message_is_received_once(comm: Communicator) -> None:
    await comm.send(np.arange(3), after(comm))
    probed = await comm.probe()
    await probed.recv()
    with pytest.raises(mpdist.UsageError, match="received already"):
        probed.recv()


async def test_a_probed_message_that_does_not_fit_can_be_received_again(comm: Communicator) -> None:
    await comm.send(np.arange(300), after(comm))
    probed = await comm.probe()
    with pytest.raises(mpdist.MessageTruncated):
        await probed.recv(np.zeros(299, int))
    with pytest.raises(mpdist.UnsupportedBuffer):
        await probed.recv(np.zeros(300))
    with pytest.raises(mpdist.UnsupportedBuffer, match=rf"'{comm.name}' \(rank {comm.rank} of {comm.size}\)"):
        probed.recv(np.zeros(300, int)[::2])
    message = await probed.recv()
    assert_values(message.data, range(300), "at last")


async def test_a_probed_object_can_be_received(comm: Communicator) -> None:
    await comm.send_object({"rank": comm.rank}, after(comm))
    probed = await comm.probe()
    assert probed.dtype is None
    message = await probed.recv()
    assert message.data == {"rank": before(comm)}


async def test_messages_yields_arrays_and_objects_as_they_come(comm: Communicator) -> None:
    for number in range(20):
        if number % 3:
            await comm.send(np.array([number]), after(comm), 7)
        else:
            await comm.send_object(number, after(comm), 7)
    got = []
    async for message in comm.messages(tag=7):
        got.append(message.data if number_of_object(message) else int(message.data[0]))
        if len(got) == 20:
            break
    assert got == list(range(20))


def number_of_object(message: Any) -> bool:
    return message.dtype is None


async def test_messages_ends_when_the_communicator_is_closed(comm: Communicator) -> None:
    part = await comm.dup()
    await part.send(np.array([1]), part.rank)
    iterator = aiter(part.messages())
    assert (await anext(iterator)).data == [1]
    await part.close()
    with pytest.raises(StopAsyncIteration):
        await anext(iterator)


# ---------------------------------------------------------------------- misfits


async def test_a_message_that_is_too_large_touches_nothing_and_stays_queued(comm: Communicator) -> None:
    """Guard bytes before, in and behind the buffer."""
    for nbytes in (1, 7, *byte_counts()):
        x = numbers(nbytes, "uint8", comm.rank, top=200)
        sent = comm.send(x, after(comm), 3)
        for room in {0, 1, nbytes // 2, nbytes - 1} - {nbytes}:
            memory = np.full(nbytes + 4096, 251, np.uint8)
            out = memory[2048 : 2048 + room]
            with pytest.raises(mpdist.MessageTruncated) as caught:
                await comm.recv(out, before(comm), 3)
            assert (memory == 251).all(), (nbytes, room)
            for word in ("recv", comm.name, f"rank {comm.rank} of", str(nbytes), str(room)):
                assert word in str(caught.value), (word, str(caught.value))
        message = await comm.recv(tag=3)
        await sent
        assert_values(message.data, numbers(nbytes, "uint8", before(comm), top=200), nbytes)


async def test_a_message_of_another_type_stays_queued(comm: Communicator) -> None:
    for count in (0, 1, 5000):
        await_later = comm.send(numbers(count, "float32", comm.rank), after(comm))
        for dtype in ("float64", "int32", "uint32"):
            out = np.full(count, 1, dtype)
            with pytest.raises(mpdist.UnsupportedBuffer, match="float32"):
                await comm.recv(out)
            assert (out == 1).all()
        with pytest.raises(mpdist.UnsupportedBuffer, match="take it with recv"):
            await comm.recv_object()
        message = await comm.recv(np.zeros(count, np.float32))
        await await_later
        assert_values(message.data, numbers(count, "float32", before(comm)), count)


async def test_a_message_that_fits_no_early_receive_goes_to_a_later_one(comm: Communicator) -> None:
    """All are posted before it comes."""
    wrong = [comm.recv(np.zeros(2, np.int8)), comm.recv_object(), comm.recv(np.zeros(1, np.float32))]
    right = comm.recv(np.zeros(2, np.float32))
    await comm.barrier()
    await comm.send(np.full(2, comm.rank, np.float32), after(comm))
    message = await asyncio.wait_for(right, 20)
    assert message.data.tolist() == [before(comm)] * 2
    for work in wrong:
        assert isinstance(work.exception(), mpdist.UnsupportedBuffer | mpdist.MessageTruncated)


async def test_an_object_met_by_a_receive_of_an_array_stays_queued(comm: Communicator) -> None:
    await comm.send_object([1, 2], after(comm))
    with pytest.raises(mpdist.UnsupportedBuffer, match="recv_object"):
        await comm.recv()
    assert (await comm.recv_object()).data == [1, 2]


async def test_bfloat16_is_received_into_a_tensor_only(comm: Communicator) -> None:
    library = torch_library()
    if library is None:
        pytest.skip("torch is not installed")
    await comm.send(library.make(numbers(5, "bfloat16", comm.rank), "bfloat16"), after(comm))
    with pytest.raises(mpdist.UnsupportedBuffer, match="bfloat16"):
        await comm.recv(np.zeros(5, np.uint16))
    with pytest.raises(mpdist.UnsupportedBuffer, match="bfloat16") as caught:
        await comm.recv()
    for words in (
        f"recv from any rank, any tag on '{comm.name}'",
        f"from rank {before(comm)}",
        "stays queued",
        "torch",
    ):
        assert words in str(caught.value)
    out = library.make(np.zeros(5), "bfloat16")
    await comm.recv(out)
    assert_values(library.read(out), numbers(5, "bfloat16", before(comm)), "tensor")


async def test_target_of_a_finished_receive_may_be_resized(comm: Communicator) -> None:
    target = bytearray(100)
    received = comm.recv(target, comm.rank)
    await comm.send(np.arange(100, dtype=np.uint8), comm.rank)
    await received
    target.extend(b"more")
    assert target[98:] == b"bcmore"


# ---------------------------------------------------------------------- objects

OBJECTS: dict[str, Any] = {
    "none": None,
    "text": "é" * 10,
    "large text": "x" * 300_000,
    "array": np.arange(10.0),
    "large array": np.arange(100_000).reshape(100, 1000),
    "arrays": {"a": np.zeros(0), "b": np.ones((3, 3), order="F"), "c": np.arange(20)[::2], "d": np.arange(9999)},
    "bytearray": bytearray(5000),
}


async def round_trip(comm: Communicator, name: str, item: Any) -> None:
    sent = comm.send_object(item, after(comm), 2)
    message = await comm.recv_object(before(comm), 2)
    await sent
    np.testing.assert_equal(message.data, item, err_msg=name)
    assert (message.src, message.tag, message.count, message.dtype) == (before(comm), 2, 1, None) or isinstance(
        item, np.ndarray
    )


async def test_objects_arrive(comm: Communicator) -> None:
    for name, item in OBJECTS.items():
        await round_trip(comm, name, item)


@pytest.mark.parametrize("inline", [0, 1000])
@pytest.mark.parametrize("small", [-1, 200])
@pytest.mark.parametrize("piece", [300, 5000])
async def test_objects_in_pieces_arrive(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, inline: int, small: int, piece: int
) -> None:
    monkeypatch.setattr(sending, "INLINE_OBJECT_BYTES", inline)
    monkeypatch.setattr(wire, "SMALL_FRAME_BYTES", small)
    monkeypatch.setattr(wire, "PIECE_BYTES", piece)
    for name, item in OBJECTS.items():
        if not (piece == 300 and name == "large array"):  # thousands of pieces are slow, and show nothing new
            await round_trip(comm, name, item)


@pytest.mark.parametrize("small", [-1, 200])
async def test_large_pickles_arrive_in_pieces(comm: Communicator, monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    """As one of more than 2**31 bytes does, which MPI takes as no single message."""
    monkeypatch.setattr(sending, "INLINE_OBJECT_BYTES", 0)
    monkeypatch.setattr(wire, "SMALL_FRAME_BYTES", small)
    monkeypatch.setattr(wire, "PACK_BYTES", 100)
    monkeypatch.setattr(wire, "PIECE_BYTES", 300)
    for item in ("x" * 5000, ["x" * 5000, np.arange(500), np.arange(3)], b"x" * 301, np.arange(3)):
        await round_trip(comm, str(item)[:10], item)


async def test_an_object_of_many_arrays_travels_in_few_messages(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them as a message would be slow; large ones are sent from where they are."""
    channel = comm._channel
    isend = channel.isend
    sizes: list[int] = []

    def counted(message: list[Any], dst: int, wire_tag: int) -> Any:
        sizes.append(message[1])
        return isend(message, dst, wire_tag)

    monkeypatch.setattr(channel, "isend", counted)
    large = np.arange(200_000)
    await round_trip(comm, "many", [large, *(np.full(200, number) for number in range(1000))])
    assert len(sizes) in ([0] if comm.size == 1 else [4])
    assert comm.size == 1 or large.nbytes in sizes


async def test_received_arrays_in_objects_are_writable_and_independent(comm: Communicator) -> None:
    for size in (10, 100_000):
        x = np.full(size, comm.rank)
        sent = comm.send_object([x, x], comm.rank)
        first, second = (await comm.recv_object()).data
        await sent
        first[:] = -1
        assert (x == comm.rank).all()
        assert first is second


async def test_an_object_that_does_not_pickle_is_not_sent(comm: Communicator) -> None:
    with pytest.raises((TypeError, AttributeError, mpdist.UsageError)):
        comm.send_object(lambda: None, after(comm))
    await comm.send_object("next", after(comm))
    assert (await comm.recv_object()).data == "next"


async def test_an_object_that_does_not_unpickle_fails_its_receive_only(comm: Communicator) -> None:
    if comm.size == 1:
        pytest.skip("a message to oneself is unpickled when it is sent")
    await comm.send_object(Stubborn(), after(comm))
    await comm.send_object("next", after(comm))
    with pytest.raises(mpdist.CommunicationError, match="not today") as caught:
        await comm.recv_object()
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert (await comm.recv_object()).data == "next"


async def test_an_object_that_exits_when_it_is_unpickled_fails_its_receive_only(comm: Communicator) -> None:
    if comm.size == 1:
        pytest.skip("a message to oneself is unpickled when it is sent")
    await comm.send_object(Leaving(), after(comm))
    await comm.send_object("next", after(comm))
    with pytest.raises(mpdist.CommunicationError, match="SystemExit: not today"):
        await comm.recv_object()
    assert (await comm.recv_object()).data == "next"
    with pytest.raises(mpdist.CommunicationError, match="SystemExit: not today"):
        await comm.all_gather_object(Leaving())


def leave() -> None:
    raise SystemExit("not today")


def refuse() -> None:
    raise ArithmeticError("not today")


class Stubborn:
    """Raises when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return refuse, ()


class Leaving:
    """Exits when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return leave, ()


# ---------------------------------------------------------------------- load


async def test_ten_thousand_outstanding_receives_and_unexpected_messages(comm: Communicator) -> None:
    number = 10_000 if comm.size <= 2 else 2000
    receives = [comm.recv(np.zeros(1, np.int64), before(comm), tag % 100) for tag in range(number)]
    await comm.barrier()
    for tag in range(number):
        await comm.send(np.array([tag]), after(comm), tag % 100)
    assert [int((await receive).data[0]) for receive in receives] == list(range(number))
    await comm.barrier()
    for tag in range(number):
        await comm.send(np.array([tag]), after(comm), tag % 100)
    await comm.send(np.array([0]), after(comm), 1000)
    await comm.recv(tag=1000)
    for tag in reversed(range(100)):
        got = [int((await comm.recv(tag=tag)).data[0]) for _ in range(number // 100)]
        assert got == list(range(tag, number, 100))


async def test_many_tasks_exchange_freely(comm: Communicator) -> None:
    async def talk(tag: int) -> None:
        for turn in range(20):
            size = 1 if turn % 5 else 20_000
            sent = comm.send(np.full(size, comm.rank * 1000 + turn), after(comm), tag)
            message = await comm.recv(src=before(comm), tag=tag)
            assert (message.data == before(comm) * 1000 + turn).all()
            assert message.count == size
            await sent

    async with asyncio.TaskGroup() as group:
        for tag in range(30):
            group.create_task(talk(tag))
