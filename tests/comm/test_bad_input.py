"""Bad input: an error on the rank that made it, which says what to do; nothing is sent, all stays usable."""

from __future__ import annotations

import array
import asyncio
import datetime
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from comm.arrays import torch_library

import mpdist
from mpdist import Communicator, InvalidRank, MessageTruncated, SizeMismatch, UnsupportedBuffer, UsageError
from mpdist.progress import current

pytestmark = pytest.mark.ranks(2, 3)

Call = Callable[[Communicator], Any]
Case = tuple[str, Call, type[Exception], tuple[str, ...]]


def frozen(count: int = 4) -> Any:
    x = np.zeros(count)
    x.flags.writeable = False
    return x


def matrix() -> Any:
    return np.arange(16.0).reshape(4, 4)


def arrays_that_cannot_be_sent() -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Name, array, and words of the error."""
    yield "None", None, ("None", "Give a NumPy array")
    yield "an int", 5, ("Python int 5", "np.array(v)")
    yield "a float", 2.5, ("Python float", "np.array(v)")
    yield "a bool", True, ("Python bool", "np.array(v)")
    yield "a complex", 1j, ("Python complex", "np.array(v)")
    yield "a str", "text", ("str", "send_object")
    yield "a dict", {}, ("dict", "send_object")
    yield "a strided array", np.zeros(8)[::2], ("not contiguous", "np.ascontiguousarray")
    yield "a reversed array", np.zeros(8)[::-1], ("not contiguous", "np.ascontiguousarray")
    yield "a Fortran-ordered array", np.asfortranarray(matrix()), ("Fortran", "np.ascontiguousarray")
    yield "a column", matrix()[:, 1], ("not contiguous",)
    yield "an object array", np.array([1, None]), ("object",)
    yield "a datetime array", np.array(["2020-01-01"], "datetime64[D]"), ("datetime64", "view(np.int64)")
    yield "a structured array", np.zeros(2, [("a", "i4")]), ("'a'", "view(np.uint8)")
    yield "a big-endian array", np.zeros(2, ">f8"), ("byte order", "newbyteorder")
    yield "an array of text", np.array(["a"]), ("<U1",)
    yield "a longdouble array", np.zeros(2, np.longdouble), ("float128", "float64")
    yield "a masked array", np.ma.masked_array([1, 2], [0, 1]), ("filled",)
    yield "an array.array of text", array.array("u", "ab"), ("'u'",)
    yield "a strided memoryview", memoryview(b"abcd")[::2], ("not contiguous",)
    yield "a date", datetime.date(2020, 1, 1), ("date",)
    if torch_library() is not None:
        import torch

        yield "a transposed tensor", torch.zeros(3, 2).T, ("not contiguous", "x.contiguous()")
        yield "a sparse tensor", torch.zeros(3).to_sparse(), ("layout", "to_dense")
        yield "a float8 tensor", torch.zeros(2, dtype=torch.float8_e4m3fn), ("float8_e4m3fn",)
        yield "a conjugated tensor", torch.zeros(2, dtype=torch.complex64).conj(), ("conj",)
        yield "a meta tensor", torch.zeros(2, device="meta"), ("meta",)


def array_cases() -> Iterator[Case]:
    """Every operation with an array that it can't take."""
    operations: dict[str, Callable[[Communicator, Any], Any]] = {
        "send": lambda comm, x: comm.send(x, 0),
        "sendrecv": lambda comm, x: comm.sendrecv(x, 0),
        "broadcast": lambda comm, x: comm.broadcast(x, 0),
        "all_reduce": lambda comm, x: comm.all_reduce(x),
        "reduce": lambda comm, x: comm.reduce(x, 0),
        "scan": lambda comm, x: comm.scan(x),
        "exscan": lambda comm, x: comm.exscan(x),
        "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
        "gather": lambda comm, x: comm.gather(x, 0),
        "all_gather": lambda comm, x: comm.all_gather(x),
        "all_to_all": lambda comm, x: comm.all_to_all(x),
        "reduce_scatter of a list": lambda comm, x: comm.reduce_scatter([x] * comm.size),
        "gather of a list": lambda comm, x: comm.gather([x], 0),
        "all_gather of a list": lambda comm, x: comm.all_gather([x]),
        "all_to_all of a list": lambda comm, x: comm.all_to_all([x] * comm.size),
    }
    for what, x, words in arrays_that_cannot_be_sent():
        for name, operation in operations.items():
            yield (
                f"{name}: {what}", lambda comm, x=x, operation=operation: operation(comm, x), UnsupportedBuffer,
                (name.split()[0], *words),
            )  # fmt: skip
        if x is not None:
            yield f"recv: {what}", lambda comm, x=x: comm.recv(x), UnsupportedBuffer, ("recv", *words)


def read_only_cases() -> Iterator[Case]:
    targets: dict[str, Call] = {
        "recv": lambda comm: comm.recv(frozen()),
        "sendrecv": lambda comm: comm.sendrecv(np.zeros(4), 0, frozen()),
        "all_reduce in place": lambda comm: comm.all_reduce(frozen()),
        "all_reduce into out": lambda comm: comm.all_reduce(np.zeros(4), out=frozen()),
        "reduce": lambda comm: comm.reduce(np.zeros(4), comm.rank, out=frozen()),
        "scan": lambda comm: comm.scan(np.zeros(4), out=frozen()),
        "exscan": lambda comm: comm.exscan(np.zeros(4), out=frozen()),
        "reduce_scatter": lambda comm: comm.reduce_scatter(np.zeros(4 * comm.size), out=frozen()),
        "gather": lambda comm: comm.gather(np.zeros(4), comm.rank, out=frozen(4 * comm.size)),
        "gather of a list": lambda comm: comm.gather([np.zeros(4)], comm.rank, out=[frozen()] * comm.size),
        "all_gather": lambda comm: comm.all_gather(np.zeros(4), out=frozen(4 * comm.size)),
        "all_gather of a list": lambda comm: comm.all_gather([np.zeros(4)], out=[frozen()] * comm.size),
        "scatter": lambda comm: comm.scatter(np.zeros(4 * comm.size), 0, out=frozen()),
        "all_to_all": lambda comm: comm.all_to_all(np.zeros(comm.size), out=frozen(comm.size)),
        "broadcast of bytes": lambda comm: comm.recv(b"abc"),
    }
    for name, call in targets.items():
        op = "recv" if "bytes" in name else name.split()[0]
        yield (
            f"read-only: {name}",
            call,
            UnsupportedBuffer,
            (op, "cannot be written" if "bytes" in name else "read-only"),
        )


def rank_and_tag_cases() -> Iterator[Case]:
    x = np.zeros(4)
    yield "recv: mpi4py's any source", lambda comm: comm.recv(x, -2), InvalidRank, ("src is -2", "mpdist.ANY_SOURCE")
    yield "recv: mpi4py's any tag", lambda comm: comm.recv(x, 0, -1), UsageError, ("tag is -1", "mpdist.ANY_TAG")
    yield (
        "send: mpi4py's null process",
        lambda comm: comm.send(x, -1),
        InvalidRank,
        ("dst is -1", "to no rank is no call"),
    )
    takes_rank: dict[str, Callable[[Communicator, Any], Any]] = {
        "send": lambda comm, rank: comm.send(x, rank),
        "recv": lambda comm, rank: comm.recv(x, rank),
        "probe": lambda comm, rank: comm.probe(rank),
        "sendrecv": lambda comm, rank: comm.sendrecv(x, rank),
        "sendrecv ": lambda comm, rank: comm.sendrecv(x, 0, None, rank),
        "send_object": lambda comm, rank: comm.send_object(1, rank),
        "recv_object": lambda comm, rank: comm.recv_object(rank),
        "broadcast": lambda comm, rank: comm.broadcast(x, rank),
        "reduce": lambda comm, rank: comm.reduce(x, rank),
        "gather": lambda comm, rank: comm.gather(x, rank),
        "scatter": lambda comm, rank: comm.scatter(x, rank),
        "broadcast_object": lambda comm, rank: comm.broadcast_object(1, rank),
        "gather_object": lambda comm, rank: comm.gather_object(1, rank),
        "scatter_object": lambda comm, rank: comm.scatter_object(None, rank),
        "subgroup": lambda comm, rank: comm.subgroup([comm.rank, rank]),
    }
    for name, operation in takes_rank.items():
        for rank in (-1, -2, 1000, 2**40, "0", 1.0, None):
            if name == "sendrecv " and rank is None:
                continue  # the default: from where it sends
            word = "recv" if name == "sendrecv " else name
            yield (
                f"{name} with rank {rank!r}", lambda comm, rank=rank, operation=operation: operation(comm, rank),
                InvalidRank, (word, repr(rank), "0 to "),
            )  # fmt: skip
    takes_tag: dict[str, Callable[[Communicator, Any], Any]] = {
        "send": lambda comm, tag: comm.send(x, 0, tag),
        "recv": lambda comm, tag: comm.recv(x, 0, tag),
        "probe": lambda comm, tag: comm.probe(0, tag),
        "sendrecv": lambda comm, tag: comm.sendrecv(x, 0, tag=tag),
        "send_object": lambda comm, tag: comm.send_object(1, 0, tag),
        "recv_object": lambda comm, tag: comm.recv_object(0, tag),
    }
    for name, operation in takes_tag.items():
        for tag in (-1, 2**20, 2**70, "1", None):
            yield (
                f"{name} with tag {tag!r}", lambda comm, tag=tag, operation=operation: operation(comm, tag),
                UsageError, (name, repr(tag), f"0 to {2**20 - 1}"),
            )  # fmt: skip


def reduce_by_mpi4py(comm: Communicator) -> Any:
    from mpi4py import MPI

    return comm.all_reduce(np.zeros(4), MPI.MAX)


def op_cases() -> Iterator[Case]:
    yield "all_reduce: an op of mpi4py", reduce_by_mpi4py, UsageError, ("all_reduce", "one of mpi4py's", "sum, ")
    misfits = [
        ("float32", "band"), ("float64", "bor"), ("float16", "bxor"), ("float32", "land"), ("complex64", "min"),
        ("complex128", "max"), ("complex64", "lor"), ("int32", "avg"), ("uint8", "avg"), ("bool", "sum"),
        ("bool", "prod"), ("bool", "avg"),
    ]  # fmt: skip
    reductions: dict[str, Callable[[Communicator, Any, Any], Any]] = {
        "all_reduce": lambda comm, x, op: comm.all_reduce(x, op),
        "reduce": lambda comm, x, op: comm.reduce(x, 0, op),
        "scan": lambda comm, x, op: comm.scan(x, op),
        "exscan": lambda comm, x, op: comm.exscan(x, op),
        "reduce_scatter": lambda comm, x, op: comm.reduce_scatter(x, op),
    }
    for name, operation in reductions.items():
        for dtype, op in misfits:
            yield (
                f"{name}: {op} of {dtype}",
                lambda comm, dtype=dtype, op=op, operation=operation: operation(comm, np.zeros(comm.size, dtype), op),
                UsageError, (name, op, dtype),
            )  # fmt: skip
        for op in ("SUM", "mean", "", None, 3):
            yield (
                f"{name}: op {op!r}", lambda comm, op=op, operation=operation: operation(comm, np.zeros(comm.size), op),
                UsageError, (name, repr(op), "needed one of sum"),
            )  # fmt: skip
        yield (
            f"{name}: a factor that is no integer",
            lambda comm, operation=operation: operation(comm, np.zeros(comm.size, int), mpdist.premul_sum(0.5)),
            UsageError, (name, "0.5", "int64"),
        )  # fmt: skip


def size_cases() -> Iterator[Case]:
    yield (
        "all_reduce: out too small", lambda comm: comm.all_reduce(np.zeros(4), out=np.zeros(3)), SizeMismatch,
        ("all_reduce", "x has 4", "out has 3"),
    )  # fmt: skip
    yield (
        "all_reduce: out too large", lambda comm: comm.all_reduce(np.zeros(4), out=np.zeros(5)), SizeMismatch,
        ("all_reduce", "x has 4", "out has 5"),
    )  # fmt: skip
    yield (
        "reduce: out too small", lambda comm: comm.reduce(np.zeros(4), comm.rank, out=np.zeros(3)), SizeMismatch,
        ("reduce", "x has 4", "out has 3"),
    )  # fmt: skip
    yield (
        "scan: out too small", lambda comm: comm.scan(np.zeros(4), out=np.zeros(3)), SizeMismatch,
        ("scan", "x has 4", "out has 3"),
    )  # fmt: skip
    yield (
        "gather: out too small", lambda comm: comm.gather(np.zeros(4), comm.rank, out=np.zeros(4 * comm.size - 1)),
        SizeMismatch, ("gather", "x has 4", "out must have"),
    )  # fmt: skip
    yield (
        "all_gather: out too large", lambda comm: comm.all_gather(np.zeros(4), out=np.zeros(4 * comm.size + 1)),
        SizeMismatch, ("all_gather", "x has 4", "out must have"),
    )  # fmt: skip
    yield (
        "all_gather: out a list, x not", lambda comm: comm.all_gather(np.zeros(4), out=[np.zeros(4)] * comm.size),
        UsageError, ("all_gather", "[x]"),
    )  # fmt: skip
    yield (
        "all_gather: x a list, out not", lambda comm: comm.all_gather([np.zeros(4)], out=np.zeros(4 * comm.size)),
        UsageError, ("all_gather", "out must be a list"),
    )  # fmt: skip
    yield (
        "all_gather: x a list of two", lambda comm: comm.all_gather([np.zeros(4)] * 2), UsageError,
        ("all_gather", "[x]"),
    )  # fmt: skip
    yield (
        "reduce_scatter: rows that do not divide", lambda comm: comm.reduce_scatter(np.zeros(4 * comm.size + 1)),
        SizeMismatch, ("reduce_scatter", "multiple"),
    )  # fmt: skip
    yield (
        "reduce_scatter: a 0-d array", lambda comm: comm.reduce_scatter(np.array(1.0)), SizeMismatch,
        ("reduce_scatter", "()"),
    )  # fmt: skip
    yield (
        "reduce_scatter: out too small",
        lambda comm: comm.reduce_scatter(np.zeros(4 * comm.size + 4), out=np.zeros(4)), SizeMismatch,
        ("reduce_scatter", "out has 4"),
    )  # fmt: skip
    yield (
        "reduce_scatter: too many blocks", lambda comm: comm.reduce_scatter([np.zeros(1)] * (comm.size + 1)),
        SizeMismatch, ("reduce_scatter", "list of"),
    )  # fmt: skip
    yield (
        "all_to_all: rows that do not divide", lambda comm: comm.all_to_all(np.zeros(4 * comm.size + 1)),
        SizeMismatch, ("all_to_all", "multiple"),
    )  # fmt: skip
    yield (
        "all_to_all: too few blocks", lambda comm: comm.all_to_all([np.zeros(1)] * (comm.size - 1)), SizeMismatch,
        ("all_to_all", "list of"),
    )  # fmt: skip
    yield (
        "all_to_all: out too small", lambda comm: comm.all_to_all(np.zeros(comm.size), out=np.zeros(comm.size - 1)),
        SizeMismatch, ("all_to_all", "out has"),
    )  # fmt: skip
    yield (
        "all_to_all: blocks of two types",
        lambda comm: comm.all_to_all([np.zeros(1)] * (comm.size - 1) + [np.zeros(1, int)]), UnsupportedBuffer,
        ("all_to_all", "x[0] is float64, x[", "] is int64"),
    )  # fmt: skip
    yield (
        "reduce_scatter: blocks of two types",
        lambda comm: comm.reduce_scatter([np.zeros(1, np.float32)] + [np.zeros(1)] * (comm.size - 1)),
        UnsupportedBuffer, ("reduce_scatter", "x[0] is float32, x[1] is float64"),
    )  # fmt: skip
    yield (
        "all_gather: out of two types",
        lambda comm: comm.all_gather([np.zeros(1)], out=[np.zeros(1), *[np.zeros(1, int)] * (comm.size - 1)]),
        UnsupportedBuffer, ("all_gather", "out[0] is float64, out[1] is int64"),
    )  # fmt: skip
    yield (
        "all_to_all_object: too many", lambda comm: comm.all_to_all_object([1] * (comm.size + 1)), SizeMismatch,
        ("all_to_all_object", "objects"),
    )  # fmt: skip
    yield (
        "all_to_all_object: not a list", lambda comm: comm.all_to_all_object(7), UsageError,
        ("all_to_all_object", "list"),
    )  # fmt: skip


def pair_cases() -> Iterator[Case]:
    """in and out that do not go together."""
    x = np.zeros(8)
    yield (
        "all_reduce: out of another type", lambda comm: comm.all_reduce(np.zeros(4), out=np.zeros(4, np.float32)),
        UnsupportedBuffer, ("all_reduce", "float64", "float32"),
    )  # fmt: skip
    yield (
        "scan: out of another type", lambda comm: comm.scan(np.zeros(4), out=np.zeros(4, int)), UnsupportedBuffer,
        ("scan", "float64", "int64"),
    )  # fmt: skip
    yield (
        "all_gather: out of another type",
        lambda comm: comm.all_gather(np.zeros(4), out=np.zeros(4 * comm.size, np.float32)), UnsupportedBuffer,
        ("all_gather", "float64", "float32"),
    )  # fmt: skip
    yield (
        "all_reduce: overlap", lambda comm: comm.all_reduce(x[:5], out=x[3:]), UsageError, ("all_reduce", "overlap"),
    )  # fmt: skip
    yield "reduce: overlap", lambda comm: comm.reduce(x, comm.rank, out=x), UsageError, ("reduce", "overlap")
    yield "scan: overlap", lambda comm: comm.scan(x[:4], out=x[2:6]), UsageError, ("scan", "overlap")
    yield (
        "all_to_all: overlap", lambda comm: comm.all_to_all(np.broadcast_to(x, 8)[: comm.size], out=x[: comm.size]),
        UsageError, ("all_to_all", "overlap"),
    )  # fmt: skip
    yield (
        "all_gather: overlap", lambda comm: comm.all_gather(x[:1], out=x[: comm.size]), UsageError,
        ("all_gather", "overlap"),
    )  # fmt: skip
    yield "sendrecv: overlap", lambda comm: comm.sendrecv(x[:5], 0, x[4:]), UsageError, ("sendrecv", "overlap")
    yield "sendrecv: the same", lambda comm: comm.sendrecv(x, 0, x), UsageError, ("sendrecv", "overlap")
    octets = x.view("u1")
    yield (
        "sendrecv: one byte",
        lambda comm: comm.sendrecv(octets[:5], 0, octets[4:]),
        UsageError,
        ("sendrecv", "overlap"),
    )
    yield "sendrecv: types", lambda comm: comm.sendrecv(x, 0, octets[8:16]), UsageError, ("sendrecv", "overlap")


def group_cases() -> Iterator[Case]:
    yield "split: a negative color", lambda comm: comm.split(-1), UsageError, ("split", "-1")
    yield "split: a color that is no integer", lambda comm: comm.split("a"), UsageError, ("split", "'a'")  # type: ignore[arg-type]
    yield "split: a key that is no integer", lambda comm: comm.split(0, 0.5), UsageError, ("split", "0.5")  # type: ignore[arg-type]
    yield "subgroup: twice the same", lambda comm: comm.subgroup([comm.rank] * 2), InvalidRank, ("subgroup", "twice")
    yield "subgroup: a number", lambda comm: comm.subgroup(3), UsageError, ("subgroup", "sequence of ranks, got 3")  # type: ignore[arg-type]
    yield "subgroup: empty", lambda comm: comm.subgroup([]), InvalidRank, ("subgroup", "members")
    yield "timeout: negative", lambda comm: setattr(comm, "timeout", -1), UsageError, ("timeout", "-1")
    yield (
        "timeout: a str",
        lambda comm: setattr(comm, "timeout", "a"),
        UsageError,
        ("timeout", "number of seconds", "'a'"),
    )
    yield "recv: a rank", lambda comm: comm.recv(1), UnsupportedBuffer, ("recv", "Did you mean recv(src=1)?")
    yield "recv: a rank and a tag", lambda comm: comm.recv(1, 5), UnsupportedBuffer, ("recv", "recv(src=1, tag=5)?")
    yield "within: negative", lambda comm: comm.recv(tag=77).within(-1), UsageError, ("within", "-1")


def memory_cases() -> Iterator[Case]:
    for shape in (None, "ab", 2.5, (2, 0.5), [None]):
        for device in ("cpu", "cuda"):
            yield (
                f"empty: shape {shape!r} on {device}",
                lambda comm, shape=shape, device=device: comm.empty(shape, device=device),
                UsageError,
                ("empty", f"shape is {shape!r}; it must be an integer or a sequence of integers"),
            )
    for shape in (2**70, (0, 2**70), 2**62, (2**40, 2**40), (1,) * 65):
        for device in ("cpu", "cuda"):
            yield (
                f"empty: shape {shape} on {device}",
                lambda comm, shape=shape, device=device: comm.empty(shape, device=device),
                UsageError,
                ("empty", f"of shape {shape if isinstance(shape, tuple) else (shape,)} and type float32 is impossible"),
            )
    yield "empty: a negative length", lambda comm: comm.empty((2, -1)), UsageError, ("empty", "(2, -1)", ">= 0")
    yield "empty: objects", lambda comm: comm.empty(2, object), UsageError, ("empty", "type object")
    yield "empty: no type", lambda comm: comm.empty(2, "float31"), UsageError, ("empty", "dtype is 'float31'")
    yield "empty: no device", lambda comm: comm.empty(2, device="gpu"), UsageError, ("empty", "device is 'gpu'")


def all_cases() -> Iterator[Case]:
    for source in (
        array_cases, read_only_cases, rank_and_tag_cases, op_cases, size_cases, pair_cases, group_cases, memory_cases,
    ):  # fmt: skip
        yield from source()


async def assert_usable(comm: Communicator, case: str) -> None:
    """Nothing was sent, nothing waits, and collectives pair up."""
    assert list(comm._channel.pending()) == [], case
    x = np.full(1, comm.rank)
    await comm.all_reduce(x)
    assert x[0] == sum(range(comm.size)), case


@pytest.mark.limit(120)
async def test_every_bad_call_raises_a_clear_error_and_the_communicator_stays_usable(comm: Communicator) -> None:
    count = 0
    for case, call, error, words in all_cases():
        if case == "within: negative":
            continue
        try:
            call(comm)
        except error as caught:
            text = str(caught)
        except BaseException as caught:
            pytest.fail(f"{case}: {caught!r} instead of {error.__name__}")
        else:
            pytest.fail(f"{case}: accepted")
        for word in words:
            assert word in text, f"{case}: {word!r} is not in: {text}"
        if not case.startswith("timeout"):
            assert comm.name in text, f"{case}: the communicator is not in: {text}"
            assert f"rank {comm.rank} of {comm.size}" in text, f"{case}: the rank is not in: {text}"
        count += 1
        if count % 20 == 0:
            await assert_usable(comm, case)
    await assert_usable(comm, "the last")
    assert count > 600
    await assert_no_message(comm)


async def assert_no_message(comm: Communicator) -> None:
    """A marker is the first message that arrives from each rank."""
    for dst in range(comm.size):
        await comm.send(np.array([17]), dst, 5)
    for src in range(comm.size):
        message = await comm.recv(src=src)
        assert (message.tag, message.data.tolist()) == (5, [17])


async def test_uneven_blocks_that_overlap_are_refused_by_name(comm: Communicator) -> None:
    n, last = comm.size, comm.size - 1
    base, x = np.zeros(2 * n), np.zeros(2)
    apart = [base[2 * rank : 2 * rank + 2] for rank in range(n)]
    between = base[1:3]
    shifted = [*apart[:last], between]
    for calls, words in (
        (
            [
                lambda: comm.gather([x], comm.rank, out=shifted),
                lambda: comm.all_gather([x], out=shifted),
                lambda: comm.all_to_all([x] * n, out=shifted),
            ],
            rf"out\[0\] and out\[{last}\] overlap in memory",
        ),
        (
            [
                lambda: comm.gather([between], comm.rank, out=apart),
                lambda: comm.all_gather([between], out=apart),
                lambda: comm.all_to_all([between] + [x] * last, out=apart),
            ],
            r"out\[0\] and x\[0\] overlap in memory",
        ),
    ):
        for call in calls:
            with pytest.raises(UsageError, match=rf" on '{comm.name}' .*{words}"):
                call()
    for blocks in (base, apart):
        with pytest.raises(UsageError, match=r"scatter on .* overlap in memory"):
            await comm.scatter(blocks, 0, out=between if comm.rank == 0 else x)
    await comm.all_to_all([x] * n, out=apart)
    assert (await comm.all_gather([x], out=apart))[last].tolist() == [0, 0]


async def test_a_bad_call_takes_no_place_in_the_order(comm: Communicator) -> None:
    """One rank makes a mistake and corrects it; the others see nothing of it."""
    if comm.rank == 0:
        with pytest.raises(SizeMismatch):
            comm.all_reduce(np.zeros(3), out=np.zeros(2))
    assert (await comm.all_reduce(np.ones(3)))[0] == comm.size


async def test_a_refused_sendrecv_leaves_no_receive_behind(comm: Communicator) -> None:
    for call in (
        lambda: comm.sendrecv(np.zeros(4)[::2], 0),
        lambda: comm.sendrecv(None, 0),
        lambda: comm.sendrecv(np.zeros(4), 0, tag=-1),
        lambda: comm.sendrecv(np.zeros(4), 0, frozen()),
    ):
        with pytest.raises(UsageError):
            call()
    await comm.send(np.ones(4), comm.rank)
    assert (await asyncio.wait_for(comm.recv(src=comm.rank), 10)).data.tolist() == [1] * 4


async def test_a_wrong_limit_is_refused(comm: Communicator) -> None:
    work = comm.recv(tag=77)
    for seconds in (-1, 0, float("nan")):
        with pytest.raises(UsageError, match="positive"):
            work.within(seconds)
    assert work.cancel()


# ---------------------------------------------------------------------- only some ranks are wrong


async def test_a_roots_bad_array_raises_on_all_ranks(comm: Communicator) -> None:
    src = comm.size - 1
    many = [np.zeros(1)] * (comm.size + 1)
    for x in (np.zeros(comm.size + 1), None, many, np.zeros((comm.size, 2))[:, 1], [None] * comm.size):
        with pytest.raises(UsageError, match="scatter on") as caught:
            await comm.scatter(x if comm.rank == src else None, src)
        assert f"rank {src} of" in str(caught.value)
    assert (await comm.all_reduce(np.ones(1)))[0] == comm.size


def copies(x: np.ndarray, number: int) -> list[np.ndarray]:
    return [x.copy() for _ in range(number)]


async def test_an_uneven_block_that_does_not_fit_fails_there_and_the_order_stays(comm: Communicator) -> None:
    """The others get their blocks, and the next collective is the next one everywhere."""
    victim = comm.size - 1
    wrong = {"size": np.zeros(3), "type": np.zeros(2, np.int64)}
    for what, bad in wrong.items():
        error = SizeMismatch if what == "size" else UnsupportedBuffer
        x = np.full(2, float(comm.rank))
        calls: dict[str, Callable[[], Any]] = {
            "scatter": lambda bad=bad: comm.scatter(
                [np.full(2, float(rank)) for rank in range(comm.size)] if comm.rank == 0 else None,
                0,
                out=bad if comm.rank == victim else None,
            ),
            "gather": lambda x=x, bad=bad: comm.gather([x], victim, out=copies(bad, comm.size)),
            "all_gather": lambda x=x, bad=bad: comm.all_gather(
                [x], out=copies(bad, comm.size) if comm.rank == victim else None
            ),
            "all_to_all": lambda x=x, bad=bad: comm.all_to_all(
                [x] * comm.size, out=copies(bad, comm.size) if comm.rank == victim else None
            ),
        }
        for op, call in calls.items():
            if comm.rank == victim:
                with pytest.raises(error, match=f"{op} .* on '{comm.name}'"):
                    await call()
            else:
                await call()
            assert (await comm.all_reduce(np.ones(1)))[0] == comm.size, (op, what)


async def test_uneven_blocks_of_different_types_are_refused(comm: Communicator) -> None:
    x = np.zeros(3, np.float32 if comm.rank else np.float64)
    for call in (lambda: comm.all_gather([x]), lambda: comm.all_to_all([x] * comm.size)):
        with pytest.raises(UnsupportedBuffer, match=r"rank 0: float64.*rank 1: float32"):
            await call()
    if comm.rank == 0:
        with pytest.raises(UnsupportedBuffer, match=r"rank 0: float64.*rank 1: float32"):
            await comm.gather([x], 0)
    else:
        assert await comm.gather([x], 0) is None
    assert (await comm.all_reduce(np.ones(1)))[0] == comm.size


async def test_a_function_that_returns_nonsense_is_named(comm: Communicator) -> None:
    for nonsense in (lambda a, b: a[:1], lambda a, b: None, lambda a, b: a + 1j):
        with pytest.raises(UsageError, match=r"all_reduce .* on '.*function .*lambda"):
            await comm.all_reduce(np.zeros(3), nonsense)
    assert (await comm.all_reduce(np.ones(1)))[0] == comm.size


# ---------------------------------------------------------------------- states


async def test_wait_on_a_running_loops_thread_says_await(comm: Communicator) -> None:
    for work in (comm.recv(tag=9), comm.sendrecv(np.zeros(1), comm.rank, tag=10), comm.probe(tag=9)):
        if work.done():
            continue
        with pytest.raises(UsageError, match="await work"):
            work.wait()
        assert work.cancel()
    await comm.barrier()


async def test_objects_are_refused_where_pickle_is_not_allowed(comm: Communicator) -> None:
    await comm.send_object("sent before", comm.rank)
    comm.allow_pickle = False
    calls: list[Call] = [
        lambda comm: comm.send_object(1, 0), lambda comm: comm.recv_object(), lambda comm: comm.broadcast_object(1),
        lambda comm: comm.gather_object(1), lambda comm: comm.all_gather_object(1),
        lambda comm: comm.scatter_object([1] * comm.size), lambda comm: comm.all_to_all_object([1] * comm.size),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(UsageError, match=rf"object on '{comm.name}' \(rank {comm.rank} .*MPDIST_ALLOW_PICKLE"):
            call(comm)
    with pytest.raises(UnsupportedBuffer):
        await anext(aiter(comm.messages()))
    comm.allow_pickle = True
    assert (await comm.recv_object()).data == "sent before"


async def test_no_way_of_receiving_unpickles_where_it_is_not_allowed(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await comm.send_object("one", (comm.rank + 1) % comm.size)
    await comm.send_object("two", (comm.rank + 1) % comm.size)
    probed = await comm.probe()
    with monkeypatch.context() as patch:
        patch.setattr(comm._channel.engine, "allow_pickle", False)
        with pytest.raises(UsageError, match="MPDIST_ALLOW_PICKLE"):
            await probed.recv()
        with pytest.raises(UsageError, match="MPDIST_ALLOW_PICKLE"):
            await anext(aiter(comm.messages()))
    assert (await probed.recv()).data == "one"
    assert (await comm.recv_object()).data == "two"


async def test_from_mpi4py_before_the_start_is_refused(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "_engine", None)
    with pytest.raises(UsageError, match=r"before mpdist.init\(\)"):
        Communicator.from_mpi4py(None)


async def test_a_probed_message_is_refused_like_any_other(comm: Communicator) -> None:
    await comm.send(np.arange(5), comm.rank)
    probed = await comm.probe()
    for x, error in ((np.zeros(4, int), MessageTruncated), (frozen(5), UnsupportedBuffer), (5, UnsupportedBuffer)):
        with pytest.raises(error, match=f"'{comm.name}'"):
            await probed.recv(x)
    assert (await probed.recv()).data.tolist() == list(range(5))


async def test_a_forked_child_is_refused(comm: Communicator) -> None:
    """It shares the parent's connections, and must not speak through them."""
    calls: list[Call] = [
        lambda comm: comm.barrier(), lambda comm: comm.send(np.zeros(1), 0), lambda comm: comm.recv(),
        lambda comm: comm.all_reduce(np.zeros(1)), lambda comm: mpdist.init(),
    ]  # fmt: skip
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        for call in calls:
            try:
                call(comm)
                os.write(writing, b"accepted\n")
            except mpdist.MpdistError as error:
                os.write(writing, f"{'fork' in str(error)}\n".encode())
            except BaseException as error:
                os.write(writing, f"{error!r}\n".encode())
        os._exit(0)
    os.close(writing)
    told = b""
    while part := os.read(reading, 4096):
        told += part
    os.close(reading)
    await asyncio.to_thread(os.waitpid, pid, 0)
    assert told.decode().split() == ["True"] * len(calls)
    await assert_usable(comm, "fork")
