"""One round: a collective as a request that takes part in a single round of its team.

It is a request, not a program: nothing but what it shows and the flag happens when
posting. Several may be under way; each begins when those before it are over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from mpdist.algorithms.shared.calls import ROUND_MASK, all_reduce_of, call_word, kind_of
from mpdist.algorithms.shared.members import Members
from mpdist.algorithms.shared.team import CALL_AT, CONSUMED, FAILED, GIVEN_UP, REDUCED, STAGED, START_AT, Team
from mpdist.errors import CommunicationError, MpdistError
from mpdist.progress.backoff import message_credit

if TYPE_CHECKING:
    from mpdist.algorithms.reduction import Reduction
    from mpdist.memory import Buffer, Element, ReduceOp
    from mpdist.memory.elements import Array

# A plan keeps so many views of each member's slots: all where arrays have 64 KiB and more, see `spread`.
VIEWS = 256

M = TypeVar("M", bound=Members)


class Plan:
    """What all such collectives of one kind, element type and size have in common on a team; made for the first.

    Attributes:
        request: makes one of them.
        is_unchecked: whether it compares nothing by itself, as MPI's calls.
        call: its word, but for its number.
        op: the operation, for texts.
        count: elements; nbytes: of them.
        element: their type.
    """

    __slots__ = ("call", "count", "element", "nbytes", "op")

    request: type[TeamRequest[Any]]
    is_unchecked = False

    def __init__(self, op: str, element: Element, nbytes: int, reduces: ReduceOp | None = None) -> None:
        self.op = op
        self.call = call_word(op, nbytes, kind_of(element, reduces), 0, is_one_round=True, is_request=True)
        self.count = nbytes // element.itemsize
        self.nbytes = nbytes
        self.element = element


class RoundPlan(Plan):
    """Of those that take a round of their team.

    Attributes:
        slots: where members show private memory.
        credit: of a turn's, what one costs more than others.
    """

    __slots__ = ("credit", "slots")

    def __init__(self, team: Team, op: str, element: Element, nbytes: int, reduces: ReduceOp | None = None) -> None:
        super().__init__(op, element, nbytes, reduces)
        self.credit = message_credit(nbytes) - 1
        self.slots = team.slots(element)


class AllReducePlan(RoundPlan):
    """Of all_reduces of one op.

    Attributes:
        rank: of this member.
        folder: what reduces.
    """

    __slots__ = ("_views", "folder", "rank")

    def __init__(self, team: Team, how: Reduction, nbytes: int) -> None:
        super().__init__(team, all_reduce_of(how.element), how.element, nbytes, how.op)
        self.rank = team.rank
        self.folder = how.folder
        # Of each member, by where they begin, see `spread`; VIEWS of them at the most.
        self._views: list[dict[int, Array]] = [{} for _ in team.members]

    def fill(self, team: Team, side: int, x: Array) -> None:
        """Copy x into this member's slot, and put down where it begins."""
        spread = team.spread
        if spread.plain:
            spread.plain -= 1
            start = spread.slots[side]
            self.view(self.rank, start)[...] = x
        else:
            start = spread.begin(side, self.nbytes)
            self.view(self.rank, start)[...] = x
            spread.end(self.nbytes)
        team.mine[START_AT + side] = start

    def view(self, member: int, start: int) -> Array:
        """What a member shows, by what it has put down as beginning there."""
        if start < 0:
            start = ~start
        views = self._views[member]
        known = views.get(start)
        if known is None:
            known = self.slots.array(member, start, self.count)
            if len(views) < VIEWS:
                views[start] = known
        return known


class TeamRequest(Generic[M]):
    """One such collective; complete when `Test` has seen all members and done this one's share.

    Whoever posts it wakes the other members.
    """

    _team: M | None
    """None when it is over."""
    _why: MpdistError | None = None

    def __init__(self, team: M, plan: Any, x: Buffer, out: Buffer) -> None:
        raise NotImplementedError

    def Test(self) -> bool:
        """A signal's handler may raise anywhere in it; then it is called again."""
        raise NotImplementedError

    def is_over(self) -> bool:
        """As `Test`, for those that come after it: where all stay in step, its error is its own."""
        try:
            return self.Test()
        except MpdistError:
            if self._team is None:
                return True
            raise


class OneRound(TeamRequest[Team]):
    """One in a single round of its team."""

    _is_done = False
    """This member's share, which is not to be done again: the others may have gone on."""

    def __init__(self, team: Team, plan: RoundPlan, x: Buffer, out: Buffer) -> None:
        self._plan = plan
        self._held = x, out
        self._team = team
        self._number = number = team.rounds + 1
        self._side = number & 1
        self._call = plan.call | number & ROUND_MASK
        under_way = team.under_way
        is_next = not under_way
        if is_next:  # before `try`: from Python 3.12 on it does not hold where a loop jumps back
            for line in team.others:
                if line[CONSUMED] < number - 2:
                    is_next = False
            if team.fence is not None:
                team.fence()
        try:
            under_way.append(self)
            team.rounds = number
            if is_next:
                self._stage(team)
        except BaseException:  # of a signal's handler
            if team.mine[STAGED] < number:  # nobody knows of it, so it may be posted again
                under_way.pop()
                team.rounds = number - 1
            raise

    def _stage(self, team: Team) -> None:
        """Show this member's part and its call, and then tell that they are there."""
        self._show(team)
        team.first = self._number
        mine = team.mine
        mine[CALL_AT + self._side] = self._call
        if team.fence is not None:
            team.fence()
        mine[STAGED] = self._number

    def _show(self, team: Team) -> None:
        """Copy this member's array to where the others look for it, or put down where it is."""
        raise NotImplementedError

    def _make_arrays(self) -> None:
        """Make arrays of what it holds; some need none."""
        x, out = self._held
        self._x = array = x.bare_array()
        self._out = array if out is x else out.bare_array()

    def _has_begun(self, team: Team) -> bool:
        """Whether those whose rounds come before this one are over, and it has shown its own."""
        under_way = team.under_way
        while (first := under_way[0]) is not self:
            if not first.is_over():
                return False
            if under_way[0] is first:  # interrupted before it went
                under_way.popleft()
        if team.mine[STAGED] < self._number:
            if not team.have_come(CONSUMED, self._number - 2):
                return False
            self._stage(team)
            team.ring()
        return True

    def _end(self, team: Team) -> bool:
        """Have the others go on, after this member's share."""
        mine = team.mine
        if team.fence is not None:
            team.fence()
        mine[REDUCED] = mine[CONSUMED] = self._number
        team.ring()
        return self._leave(team)

    def _leave(self, team: Team) -> bool:
        self._team = None
        team.under_way.popleft()
        return self._is_told()

    def _is_told(self) -> bool:
        """As `Test`, of one that is over."""
        if self._why is not None:
            raise self._why
        return True

    def _fail(self, team: Team) -> NoReturn:
        """Raise on all members alike; out of step it stays the first of those under way, which then all fail so."""
        self._why = why = team.misfit(range(team.size))
        assert why is not None
        if team.are_in_step():
            self._is_done = True
            self._end(team)
        team.give_up()
        raise why


class TwoWays(OneRound):
    """One that goes through slots, or straight: each member does a share, from and to where the arrays are."""

    _is_through = False

    def Test(self) -> bool:
        team = self._team
        if team is None:
            return self._is_told()
        if self._is_done:
            return self._end(team) if self._is_through else self._has_gone_straight(team)
        if (team.under_way[0] is not self or team.mine[STAGED] < self._number) and not self._has_begun(team):
            return False
        return self._go_on(team)

    def _go_on(self, team: Team) -> bool:
        """As `Test`, of one that is the first of those under way."""
        if not self._have_come(team):
            return False
        if not self._is_through:
            return self._go_straight(team)
        self._do_share(team)
        team.channel.engine.credit -= self._plan.credit
        self._is_done = True
        return self._end(team)

    def _have_come(self, team: Team) -> bool:
        """Whether all others have shown what they have; raises if they call something else."""
        if not team.have_come(STAGED, self._number):
            return False
        call, call_at = self._call, CALL_AT + self._side
        for line in team.others:
            if line[call_at] != call:
                self._fail(team)
        return True

    def _go_straight(self, team: Team) -> bool:
        """Do this member's share, and look whether the others have done theirs."""
        try:
            self._do_share(team)
        except CommunicationError as error:  # it waits for the end, for the others are still at this one's arrays
            self._why = error
            team.note(FAILED, self._number)
        self._is_done = True
        return self._has_gone_straight(team)

    def _do_share(self, team: Team) -> None:
        """This member's share of the work; as `Test`, it may be interrupted and called again."""
        raise NotImplementedError

    def _has_gone_straight(self, team: Team) -> bool:
        """Whether the others are done with this one's arrays; then it is over."""
        number, mine = self._number, team.mine
        if mine[CONSUMED] < number:
            if team.fence is not None:
                team.fence()
            mine[REDUCED] = mine[CONSUMED] = number
            team.ring()
        for line in team.others:  # as `have_come`, without its call: asked again and again, 0.5 us of 12
            if line[CONSUMED] < number:
                if line[GIVEN_UP]:
                    team.check_there(line, CONSUMED, number)
                return False
        if team.fence is not None:
            team.fence()
        team.channel.engine.credit -= self._plan.credit
        for line in team.others:
            if line[FAILED] == number:
                self._why = self._why or team.undone(self._plan.op, number)
        return self._leave(team)
