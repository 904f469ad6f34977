"""Arrays: what the collectives check of their arrays, and where results go.

A missing `out` is allocated like `x`. Even blocks lie along axis 0 of one array;
uneven ones are a list of arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mpdist.algorithms.reduction import Reduction
from mpdist.algorithms.shared.team import Team
from mpdist.comm.operation import Operations, host_buffer
from mpdist.errors import SizeMismatch, UnsupportedBuffer, UsageError
from mpdist.memory import Buffer, Element, ReduceOp, allocate_like, function_name, overlap
from mpdist.progress.channel import CALLER

if TYPE_CHECKING:
    from mpdist.algorithms.shared.one_round import Plan
    from mpdist.progress.collective import Words
    from mpdist.progress.work import Work

OpLike = str | ReduceOp | Callable[[Any, Any], Any]


class Arrays(Operations):
    """Checks of the arrays of a collective.

    Attributes:
        _ordered: programs that reduce in the order of ranks.
        _large: programs that take the place of MPI's own calls for large arrays.
        _is_large_unchecked: whether some of them meet ranks of other nodes before those of this node compare.
        _large_from: from how many bytes on, for each operation; barrier: 0 or never; see `choose.sizes`.
    """

    _ordered: ModuleType
    _large: ModuleType
    _is_large_unchecked: bool
    _large_from: Mapping[str, int]

    def _post_large(
        self,
        op: str,
        words: Words,
        result: Any,
        plan_of: Callable[..., Plan | None],
        key: tuple[Any, ...],
        arrays: tuple[Buffer, Buffer],
        *arguments: Any,
    ) -> Work[Any]:
        """Post what takes the place of MPI's own call: one request where there is a plan of it, else a program.

        Args:
            key: what the plan depends on besides the team.
            arrays: x and out.
            arguments: of the program.
        """
        channel, team = self._channel, self._channel.team
        if isinstance(team, Team) and type(arrays[0]) is type(arrays[1]) is Buffer:  # no Mirror
            plan = plan_of(team, *key)
            if plan is not None:
                return channel.post_direct(
                    op, words, result, plan.request, team, plan, *arrays, caller=CALLER + 1, is_unchecked=False
                )
        program, details = getattr(self._large, op), partial(words[0], *words[1:])
        return channel.post(op, program, details, channel, *arguments, is_unchecked=self._is_large_unchecked)

    def _output(self, source: Buffer, out: object, shape: Sequence[int], parts: int = 1) -> Buffer:
        """`out` checked, or allocated like the source; the source has `parts` times its elements."""
        if out is None:
            return host_buffer(allocate_like(source.owner, tuple(shape)), writable=True)
        target = host_buffer(out, writable=True)
        check_same(source, target, parts)
        check_apart(source, target)
        return target

    def _gathered(self, source: Buffer, out: object) -> Buffer:
        if out is None:
            return host_buffer(allocate_like(source.owner, (self.size, *source.shape)), writable=True)
        if isinstance(out, list | tuple):
            raise UsageError("out is a list, which is for uneven blocks: then give x as a list too, [x], on all ranks")
        target = host_buffer(out, writable=True)
        check_element(source, target)
        if target.count != self.size * source.count:
            raise SizeMismatch(
                f"x has {source.count} elements, out has {target.count}; out must have size * x = "
                f"{self.size * source.count}; for uneven blocks give x as a list, [x], on all ranks"
            )
        check_apart(source, target)
        return target

    def _block_shape(self, source: Buffer) -> tuple[int, ...]:
        """Shape of one of `size` blocks along axis 0."""
        shape = tuple(source.shape)
        if not shape or shape[0] % self.size:
            raise SizeMismatch(
                f"x has shape {shape}, and its axis 0 must be a multiple of the {self.size} ranks; "
                "pad it, or give a list of arrays for uneven blocks"
            )
        return (shape[0] // self.size, *shape[1:])

    def _out_blocks(self, out: object, sources: Sequence[Buffer]) -> list[Buffer] | None:
        """One array for each rank, that share no memory with each other or with the inputs; None if `out` is."""
        if out is None:
            return None
        blocks = self._blocks(out, "out", writable=True)
        check_all_apart(sources, blocks)
        return blocks

    def _blocks(self, arrays: object, what: str, *, writable: bool = False) -> list[Buffer]:
        """One array for each rank, all of one type."""
        if not isinstance(arrays, list | tuple):
            raise UsageError(
                f"{what} must be a list of {self.size} arrays, as the blocks are uneven, got {type(arrays).__name__}"
            )
        if len(arrays) != self.size:
            raise SizeMismatch(
                f"{what} is a list of {len(arrays)} arrays, one for each of the {self.size} ranks is needed"
            )
        blocks = [host_buffer(array, writable=writable) for array in arrays]
        first = blocks[0].element
        for place, block in enumerate(blocks):
            if block.element is not first:
                raise UnsupportedBuffer(
                    f"{what}[0] is {first.name}, {what}[{place}] is {block.element.name}; all must be of the same type"
                )
        return blocks

    def _only(self, arrays: Sequence[object]) -> Buffer:
        if len(arrays) != 1:
            raise UsageError(
                f"x is a list of {len(arrays)}; a list means uneven blocks and holds this rank's one array, [x]"
            )
        return host_buffer(arrays[0])


# Texts are remembered when a collective is over, so they are made of what keeps no array alive.


def text_of(element: Element, nbytes: int) -> str:
    """`float32 x 4`."""
    return f"{element.name} x {nbytes // element.itemsize}"


def from_text(element: Element, nbytes: int, src: int) -> str:
    return f"{text_of(element, nbytes)} from {src}"


def to_text(element: Element, nbytes: int, dst: int) -> str:
    return f"{text_of(element, nbytes)} to {dst}"


def reduction_text(nbytes: int, how: Reduction) -> str:
    return f"{text_of(how.element, nbytes)} {how.op.name}"


def op_text(element: Element, nbytes: int, name: str) -> str:
    return f"{text_of(element, nbytes)} {name}"


def op_to_text(element: Element, nbytes: int, name: str, dst: int) -> str:
    return f"{op_text(element, nbytes, name)} to {dst}"


def name_of(op: OpLike, deterministic: bool = False) -> str:
    """An operation's name, the same on all ranks."""
    name = op if isinstance(op, str) else str(getattr(op, "name", None) or function_name(op))
    return f"{name} in order" if deterministic else name


def check_element(source: Buffer, target: Buffer) -> None:
    if source.element is not target.element:
        raise UnsupportedBuffer(
            f"x is {source.element.name}, out is {target.element.name}; they must be of the same type"
        )
    if source.device != target.device:
        raise UnsupportedBuffer(f"x is on {source.device}, out on {target.device}; they must be on the same device")


def check_same(source: Buffer, target: Buffer, parts: int = 1) -> None:
    check_element(source, target)
    if source.count != parts * target.count:
        need = f"size * out = {parts * target.count}" if parts > 1 else f"as many as out, {target.count}"
        raise SizeMismatch(f"x has {source.count} elements, out has {target.count}; x must have {need}")


def check_all_apart(sources: Sequence[Buffer], outs: Sequence[Buffer]) -> None:
    """Raise if an output overlaps another one or an input; inputs may overlap each other."""
    blocks = [(each.address, each, f"x[{place}]", False) for place, each in enumerate(sources) if each.nbytes]
    blocks += [(each.address, each, f"out[{place}]", True) for place, each in enumerate(outs) if each.nbytes]
    blocks.sort(key=lambda block: block[0])
    ends = {False: (0, ""), True: (0, "")}  # of inputs and of outputs: the furthest so far, and whose it is
    for address, buffer, name, is_out in blocks:
        for others in (False, True) if is_out else (True,):
            end, other = ends[others]
            if address < end:
                raise UsageError(f"{other} and {name} overlap in memory; give each block of out memory of its own")
        ends[is_out] = max(ends[is_out], (address + buffer.nbytes, name))


def check_apart(source: Buffer, target: Buffer) -> None:
    if overlap(source, target):
        raise UsageError("x and out overlap in memory; give out memory of its own")
