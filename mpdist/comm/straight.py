"""Straight: collectives of arrays that go from device to device on one node, and not through host memory.

Whether one does is decided when its turn comes, and alike on all ranks: it hangs on
the operation, its size, and what all ranks have told by then, see algorithms/devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from mpdist.algorithms.devices import direct_plan, one_gpu_plan, plan
from mpdist.algorithms.devices.joining import Joining, can_join
from mpdist.algorithms.devices.plan import Plan
from mpdist.algorithms.devices.programs import Running
from mpdist.algorithms.devices.team import HaveCome, Team
from mpdist.algorithms.devices.words import Facts, State, handle_in, words_of_handle
from mpdist.algorithms.reduction import Reduction
from mpdist.algorithms.shared.calls import kind_of
from mpdist.algorithms.shared.reduction import factors_in, words_of
from mpdist.comm.mirror import Mirror
from mpdist.comm.staging import flat
from mpdist.errors import CollectiveMismatch
from mpdist.memory import Buffer, Folder
from mpdist.memory.exports import PRIVATE
from mpdist.memory.sharing import HANDLE_BYTES

if TYPE_CHECKING:
    from mpdist.progress.channel import Channel
    from mpdist.progress.collective import Steps

# Bytes of one rank's input from which on IPC takes the place of staging, on a GPU for each rank. A guess: staging costs
# two copies and MPI's call, some 50 us and more; IPC some events and launches, as many us.
IPC_FROM = {
    "all_reduce": 128 * 1024,
    "reduce_scatter": 128 * 1024,
    "all_gather": 128 * 1024,
    "broadcast": 128 * 1024,
}
# The same where all ranks use one GPU: where one of them reaches all arrays, and where not. Their kernels take turns,
# which takes longer than copies to the host and back, which need not. On an H100 both ways take the same time at these
# sizes (2026-11-22).
LED_FROM = 256 * 1024
ONE_GPU_FROM = 2 * 1024 * 1024


# Where the facts that ranks tell each other are; the first is the call itself.
_SRC, _FACTOR, _X_AT, _OUT_AT, _X_HANDLE, _OUT_HANDLE = 1, 2, 4, 5, 6, 14
_NO_HANDLE = bytes(HANDLE_BYTES)


@dataclass(frozen=True)
class Call:
    """A collective that may go by IPC.

    Attributes:
        x, out: the arrays on the device; out is x where it has none.
        how: what is reduced, if anything is.
        src: the root, if there is one.
        result: what the Mirrors of the result stand for.
        forget: drops the Mirrors.
    """

    op: str
    x: Buffer
    out: Buffer
    how: Reduction | None
    src: int
    result: Any
    forget: Callable[[], None]

    @classmethod
    def of(cls, op: str, arguments: Sequence[Any]) -> Call | None:
        """The call of these arguments of a program; None for one that is always staged."""
        if op not in IPC_FROM:
            return None
        given = list(flat(arguments))
        mirrors = [each for each in given if isinstance(each, Mirror)]
        how = next((each for each in given if isinstance(each, Reduction)), None)
        src = next((each for each in given if isinstance(each, int)), 0)
        if not mirrors or (how is None and op in ("all_reduce", "reduce_scatter")):
            return None
        x = mirrors[0]
        if x.nbytes < IPC_FROM[op] or not x.staging.is_even:
            return None
        out = x if op == "broadcast" else mirrors[-1] if op == "all_reduce" else mirrors[1] if mirrors[1:] else x
        return cls(op, x.there, out.there, how, src, out.original, x.staging.forget)

    def facts(self, joining: Joining) -> list[int]:
        """What the others need of this rank's."""
        words = (0, 0) if self.how is None else words_of(self.how.op, self.x.element)
        (x_at, x_handle), (out_at, out_handle) = joining.place_of(self.x), joining.place_of(self.out)
        handles = [*words_of_handle(x_handle or _NO_HANDLE), *words_of_handle(out_handle or _NO_HANDLE)]
        return [self.src, *words, x_at, out_at, *handles]

    def folder(self, told: Sequence[Facts]) -> Folder | None:
        """What reduces, by the factors of all ranks."""
        if self.how is None:
            return None
        op, element = self.how.op, self.x.element
        factors = factors_in(_column(told, _FACTOR), _column(told, _FACTOR + 1), op, element)
        return Folder(op, element, self.how.size, factors)

    def way(self, team: Team, told: Sequence[Facts]) -> Way | None:
        """How it goes; None: through the host. The same on all ranks."""
        size = team.size
        if team.is_on_one_gpu:
            if self._are_reachable(told, everything := self._all_arrays(size)):
                opened = everything if team.rank == one_gpu_plan.LEADER else []
                return Way(LED[self.op], opened) if self.x.nbytes >= LED_FROM else None
            if self.x.nbytes < ONE_GPU_FROM:
                return None
        if self._are_reachable(told, self._read_by_others(size)):
            return Way(DIRECT[self.op], self._read_by_others(size))
        return Way((ONE_GPU_SLOTS if team.is_on_one_gpu else SLOTS)[self.op], [])

    def _are_reachable(self, told: Sequence[Facts], arrays: Sequence[tuple[int, int]]) -> bool:
        """Whether these arrays are all in memory that others reach."""
        return all(told[member][at] != PRIVATE for at, member in arrays)

    def _read_by_others(self, size: int) -> list[tuple[int, int]]:
        """Of which members which array, by the fact that says where it is."""
        if self.op == "broadcast":
            return [(_X_AT, self.src)]
        arrays = (_X_AT, _OUT_AT) if self.op == "all_reduce" else (_X_AT,)
        return [(at, member) for at in arrays for member in range(size)]

    def _all_arrays(self, size: int) -> list[tuple[int, int]]:
        """The same of all that is read or written; a broadcast has one array of each member, which is its out, too."""
        arrays = (_X_AT,) if self.op == "broadcast" else (_X_AT, _OUT_AT)
        return [(at, member) for at in arrays for member in range(size)]

    def run(self, team: Team, told: Sequence[Facts], way: Way) -> Steps[Any]:
        """The program; its result is the array on the device."""
        arguments = team.rank, team.size, self.x.count, self.x.element.itemsize
        chosen = way.plan(*arguments, *([self.src] if self.op == "broadcast" else []))
        try:
            yield from Running(team, self.folder(told), *self._arrays(team, told, way)).run(chosen)
        except BaseException:
            if chosen.tells_late:
                team.keep(self.x, self.out)
            raise
        finally:
            self.forget()
        return self.result

    def _arrays(self, team: Team, told: Sequence[Facts], way: Way) -> tuple[dict[int, int], dict[int, int]]:
        """Where the members' arrays are, as far as this rank needs them: what is reduced, and the results."""
        x, out = {team.rank: self.x.address}, {team.rank: self.out.address}
        for at, member in way.opened:
            if member != team.rank:
                (x if at == _X_AT else out)[member] = _opened(team, told[member], at)
        return x, out


class Way(NamedTuple):
    """How a collective goes.

    Attributes:
        plan: makes this rank's part.
        opened: which arrays of which members this rank needs, by the fact that says where it is.
    """

    plan: Callable[..., Plan]
    opened: list[tuple[int, int]]


def _opened(team: Team, facts: Facts, at: int) -> int:
    """Address of another member's array."""
    return team.opened(handle_in(facts, _X_HANDLE if at == _X_AT else _OUT_HANDLE)) + facts[at]


def _column(told: Sequence[Facts], at: int) -> list[int]:
    return [facts[at] for facts in told]


SLOTS: dict[str, Callable[..., Plan]] = {
    "all_reduce": plan.AllReduce,
    "reduce_scatter": plan.ReduceScatter,
    "all_gather": plan.AllGather,
    "broadcast": plan.Broadcast,
}
DIRECT: dict[str, Callable[..., Plan]] = {
    "all_reduce": direct_plan.AllReduce,
    "reduce_scatter": direct_plan.ReduceScatter,
    "all_gather": direct_plan.AllGather,
    "broadcast": direct_plan.Broadcast,
}
ONE_GPU_SLOTS = {**SLOTS, "all_reduce": one_gpu_plan.AllReduceOverSlots}
LED: dict[str, Callable[..., Plan]] = {
    "all_reduce": one_gpu_plan.AllReduce,
    "reduce_scatter": one_gpu_plan.ReduceScatter,
    "all_gather": one_gpu_plan.AllGather,
    "broadcast": one_gpu_plan.Broadcast,
}


def straight(channel: Channel, op: str, arguments: Sequence[Any]) -> Steps[Steps[Any] | None]:
    """The program of a collective whose turn has come; None: it goes another way.

    Raises:
        SizeMismatch, CollectiveMismatch: the ranks' calls do not go together; all stay in step.
    """
    if not isinstance(channel.devices, Joining) and not can_join(channel):
        return None
    call, number = Call.of(op, arguments), channel.turn
    if call is not None and channel.devices is None:
        channel.devices = Joining(channel, call.x.device)
    joining = channel.devices
    if not isinstance(joining, Joining):
        return None
    team = None if call is None else joining.come(number, call.x.device)
    if team is None or call is None:
        joining.tell_host(number)
        return None
    kind = kind_of(call.x.element, None if call.how is None else call.how.op)
    team.tell_device(number, op, call.x.nbytes, kind, *call.facts(joining))
    if not team.have_come(number):
        yield HaveCome(team, number)
    told = team.calls.facts(number)
    if told is None:
        return None
    _check(channel, team, op, told)
    way = call.way(team, told)
    return None if way is None else call.run(team, told, way)


def is_compared(channel: Channel, op: str, arguments: Sequence[Any]) -> bool:
    """Whether the ranks tell each other of a collective of these arguments before it goes any way."""
    joining = channel.devices
    has_joined = isinstance(joining, Joining) and joining.state is State.PROVEN
    return has_joined and Call.of(op, arguments) is not None


def give_up(channel: Channel) -> None:
    """This rank cannot go on with what it and others do on devices: they are not to wait for it."""
    if isinstance(channel.devices, Joining):
        channel.devices.give_up()


def _check(channel: Channel, team: Team, op: str, told: Sequence[Facts]) -> None:
    misfit = team.misfit(told)
    if misfit is not None:
        raise misfit
    if len({facts[_SRC] for facts in told}) > 1:
        raise CollectiveMismatch(f"{op} on {channel.where()}: the ranks differ in src or dst; give all the same")
