"""Direct: collectives of a team whose members all reach each other's arrays, mapped or private.

Nothing goes through slots, and there is one round: all tell where their arrays
are, everybody copies or reduces his share straight from and to them, and nobody
leaves before all have done so. Work is shared out such that no member is idle
while another copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from mpdist.algorithms.shared.calls import all_reduce_of, kind_of, other_roots
from mpdist.algorithms.shared.members import PRIVATE
from mpdist.algorithms.shared.moving import Folding, copy
from mpdist.algorithms.shared.reduction import cuts, folder_of, words_of
from mpdist.algorithms.shared.team import CONSUMED, DST, FAILED, OUT_AT, REDUCED, ROOT, STAGED, X_AT
from mpdist.algorithms.shared.turn import Turn
from mpdist.errors import CollectiveMismatch, CommunicationError, MpdistError
from mpdist.memory import Folder

if TYPE_CHECKING:
    from mpdist.algorithms.shared.moving import Memory
    from mpdist.algorithms.shared.team import Team
    from mpdist.memory import Buffer, ReduceOp
    from mpdist.memory.elements import Array
    from mpdist.progress.collective import Steps

# A turn may end between two pieces; a copy of one takes 0.1 to 0.25 ms.
COPY_BYTES = 2 * 1024 * 1024

Kept: TypeAlias = "tuple[Array, Array]"
"""Where to and what a member copies of its own."""


class Meeting:
    """One collective of a team: from the moment when all have told where their arrays are until all are done.

    As a context it is this member's share of the work.

    Attributes:
        op, nbytes: of the call.
        is_private: this member's arrays are not in memory that the others map.
    """

    def __init__(
        self,
        team: Team,
        op: str,
        x: Buffer | None,
        out: Buffer | None = None,
        *,
        same: Buffer | None = None,
        reduces: ReduceOp | None = None,
        root: int | None = None,
    ) -> None:
        """Take what must be the same on all members, see Team.misfit, and what others may reach.

        Args:
            same: is as large on all members; missing: x.
            root: of what has one; ranks that take another may find an array there, too.
        """
        self.team = team
        self.op = op
        same = x if same is None else same
        assert same is not None
        self.nbytes = same.nbytes
        self._kind = kind_of(same.element, reduces)
        self.turn = Turn(team.channel.engine)
        place = PRIVATE if x is None else team.place_of(x)
        self._root = root
        self._root_at = ROOT if reduces is None else DST
        self._places = place, place if out is x else PRIVATE if out is None else team.place_of(out)
        self.is_private = max(self._places) < 0
        self._round = 0
        self._error: MpdistError | None = None

    def begin(self, *facts: int, kept: Kept | None = None) -> Steps[None]:
        """Done when all have come; `facts` are told besides the places.

        Args:
            kept: copied while the others are on their way.

        Raises:
            SizeMismatch, CollectiveMismatch: on all members, which stay in step if each is in a meeting.
        """
        team = self.team
        if not team.is_free():
            yield team.free()
        if self._root is not None:
            facts = (*facts, self._root) if self._root_at == DST else (self._root, *facts[1:])
        self._round = team.begin(1, self.op, self.nbytes, self._kind, *self._places, *facts, is_one_round=True) + 1
        team.tell(STAGED, self._round)
        if kept is not None:
            yield from self.copy(*kept, kept[0].itemsize)
        if not team.are_at(STAGED, self._round):
            yield team.all_at(STAGED, self._round)
        self.turn.restart()
        misfit = team.misfit(range(team.size))
        if misfit is None and self._root is not None and not team.have_same(self._root_at):
            misfit = other_roots(self.op, team.channel.where())
        if misfit is not None:
            if team.are_in_step():
                yield from self.end()
            else:
                team.give_up()
            raise misfit

    def __enter__(self) -> None:
        """This member's share of the work begins."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        """An error of the share waits for the end, for others are still at this one's arrays."""
        if not isinstance(error, (CommunicationError, CollectiveMismatch)):
            return False
        self._error = error
        self.team.note(FAILED, self._round)
        return True

    def end(self) -> Steps[None]:
        """Done when all are done.

        Raises:
            CommunicationError, CollectiveMismatch: on all members, which stay in step; one could not do its share.
        """
        team = self.team
        team.note(REDUCED, self._round)
        team.tell(CONSUMED, self._round)
        if not team.are_at(CONSUMED, self._round):
            yield team.all_at(CONSUMED, self._round)
        if self._error is not None:
            raise self._error
        undone = team.undone(self.op, self._round)
        if undone is not None:
            raise undone

    def memory(self, like: Buffer, count: int, fact: int = X_AT) -> list[Memory | None]:
        """Every member's array of `count` elements; None where it has none."""
        team = self.team
        return [team.memory(member, place, count, like.element) for member, place in enumerate(team.facts(fact))]

    def there(self, memory: Memory | None) -> Memory:
        """An array that its owner has told of; all members of this team can be reached.

        Raises:
            CollectiveMismatch: it has told of none, for it took another rank as root.
        """
        if memory is not None:
            return memory
        raise other_roots(self.op, self.team.channel.where())

    def copy(self, target: Memory, source: Memory, itemsize: int) -> Steps[None]:
        """Copy in pieces."""
        width = COPY_BYTES // itemsize
        for start in range(0, len(target), width):
            part = slice(start, start + width)
            copy(target[part], source[part])
            if self.turn.is_over:
                yield self.turn

    def fold(self, folder: Folder, sources: Sequence[Memory], outs: Sequence[Memory]) -> Steps[None]:
        """Reduce in pieces."""
        count = len(outs[0])
        folding = Folding(folder, sources, outs)
        for start in range(0, count, folding.width):
            folding.fold(start, min(start + folding.width, count))
            if self.turn.is_over:
                yield self.turn

    def reduce_slice(self, x: Buffer, out: Buffer | None, folder: Folder, receivers: Sequence[int]) -> Steps[None]:
        """This member's slice of x of all members, into out of the receivers."""
        team = self.team
        at = cuts(x.count, team.size, team.size)
        mine = slice(at[team.rank], at[team.rank + 1])
        inputs = self.memory(x, x.count)
        inputs[team.rank] = x.array()
        sources = [self.there(each)[mine] for each in inputs]
        if out is x and team.facts(OUT_AT) == team.facts(X_AT):
            places = [sources[member] for member in receivers]
        else:
            outputs = self.memory(x, x.count, OUT_AT)
            if out is not None:
                outputs[team.rank] = out.array()
            places = [self.there(outputs[member])[mine] for member in receivers]
        yield from self.fold(folder, sources, places)

    def reduce_rows(self, x: Buffer, columns: int, folder: Folder, mine: Sequence[tuple[int, Array]]) -> Steps[None]:
        """Some rows of x of all members, each into its target."""
        inputs = self.memory(x, x.count)
        inputs[self.team.rank] = x.array()
        for row, target in mine:
            part = slice(row * columns, (row + 1) * columns)
            yield from self.fold(folder, [self.there(each)[part] for each in inputs], [target])

    def spread(self, x: Buffer, src: int) -> Steps[None]:
        """Of x of member src into x of the others: src writes one part in `size`, and each other takes the rest."""
        team, mine, itemsize = self.team, x.array(), x.element.itemsize
        *_, cut, _ = cuts(x.count, team.size, team.size)
        memory = self.memory(x, x.count)
        root = self.there(memory[src])
        if team.rank != src:
            yield from self.copy(mine[:cut], root[:cut], itemsize)
        for member in team.after_own() if team.rank == src else ():
            yield from self.copy(self.there(memory[member])[cut:], mine[cut:], itemsize)

    def gather_rows(self, x: Buffer, rows: Array, part: slice) -> Steps[None]:
        """A part of x of each other into its row; this member's own is there."""
        memory = self.memory(x, x.count)
        for member in self.team.after_own():
            yield from self.copy(rows[member], self.there(memory[member])[part], x.element.itemsize)


def broadcast(team: Team, x: Buffer, src: int) -> Steps[None]:
    """Copy x of member src into x of all others; src itself writes one part in `size` of it."""
    meeting = Meeting(team, "broadcast", x, root=src)
    yield from meeting.begin()
    with meeting:
        if x.count:
            yield from meeting.spread(x, src)
    yield from meeting.end()


def all_gather(team: Team, x: Buffer, out: Buffer) -> Steps[None]:
    """Copy x of all into out of all, in the order of ranks."""
    meeting = Meeting(team, "all_gather", x)
    rows = out.array().reshape(team.size, x.count)
    yield from meeting.begin(kept=(rows[team.rank], x.array()))
    with meeting:
        if x.count:
            yield from meeting.gather_rows(x, rows, slice(0, x.count))
    yield from meeting.end()


def gather(team: Team, x: Buffer, out: Buffer | None, dst: int) -> Steps[None]:
    """Copy x of all into out of member dst; each writes its own."""
    meeting = Meeting(team, "gather", x, out, root=dst)
    yield from meeting.begin()
    with meeting:
        if x.count:
            whole: Memory
            whole = (
                out.array() if out is not None else meeting.there(meeting.memory(x, team.size * x.count, OUT_AT)[dst])
            )
            row = whole[team.rank * x.count : (team.rank + 1) * x.count]
            yield from meeting.copy(row, x.array(), x.element.itemsize)
    yield from meeting.end()


def scatter(team: Team, x: Buffer | None, out: Buffer, src: int) -> Steps[None]:
    """Copy row r of x of member src into out of member r."""
    meeting = Meeting(team, "scatter", x, same=out, root=src)
    yield from meeting.begin()
    with meeting:
        if out.count:
            whole: Memory
            whole = x.array() if x is not None else meeting.there(meeting.memory(out, team.size * out.count)[src])
            row = whole[team.rank * out.count : (team.rank + 1) * out.count]
            yield from meeting.copy(out.array(), row, out.element.itemsize)
    yield from meeting.end()


def all_to_all(team: Team, x: Buffer, out: Buffer) -> Steps[None]:
    """Copy row r of x of each into out of member r."""
    meeting = Meeting(team, "all_to_all", x)
    width = x.count // team.size
    rows = out.array().reshape(team.size, width)
    mine = slice(team.rank * width, (team.rank + 1) * width)
    yield from meeting.begin(kept=(rows[team.rank], x.array()[mine]))
    with meeting:
        if x.count:
            yield from meeting.gather_rows(x, rows, mine)
    yield from meeting.end()


def reduce(
    team: Team, x: Buffer, out: Buffer | None, op: ReduceOp, terms: int | None, receivers: Sequence[int]
) -> Steps[None]:
    """Reduce x over all members into out of the receivers; each member reduces a slice.

    Args:
        out: as large as x, or x itself; None on members that do not receive.
        terms: how many inputs the result stands for, for avg.
    """
    dst = receivers[0] if len(receivers) == 1 else None
    op_name = all_reduce_of(x.element) if dst is None else "reduce"
    meeting = Meeting(team, op_name, x, out, reduces=op, root=dst)
    yield from meeting.begin(*words_of(op, x.element))
    with meeting:
        if x.count:
            folder = folder_of(team, op, x.element, terms)
            yield from meeting.reduce_slice(x, out, folder, receivers)
    yield from meeting.end()


def all_reduce(team: Team, x: Buffer, out: Buffer, op: ReduceOp, terms: int | None) -> Steps[None]:
    """Reduce x over all members into out of all."""
    return reduce(team, x, out, op, terms, range(team.size))


def reduce_scatter(
    team: Team, x: Buffer, columns: int, op: ReduceOp, terms: int | None, mine: Sequence[tuple[int, Array]]
) -> Steps[None]:
    """Reduce x over all members; each keeps some of its rows.

    Args:
        x: rows of `columns` elements.
        terms: as of `reduce`.
        mine: the rows that this member keeps, and where to.
    """
    meeting = Meeting(team, "reduce_scatter", x, reduces=op)
    yield from meeting.begin(*words_of(op, x.element))
    with meeting:
        if x.count:
            folder = folder_of(team, op, x.element, terms)
            yield from meeting.reduce_rows(x, columns, folder, mine)
    yield from meeting.end()
