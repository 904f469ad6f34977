"""Programs: collectives of a device team, for posting."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from mpdist.algorithms.devices.order import Do, Tell, Wait, order
from mpdist.algorithms.devices.plan import At, Fold, Plan, Where
from mpdist.algorithms.devices.team import HaveTold, Team
from mpdist.errors import DeviceFailed
from mpdist.progress.marks import copied

if TYPE_CHECKING:
    from mpdist.memory import Folder
    from mpdist.progress.collective import Steps


class Running:
    """One collective of this member.

    Args:
        folder: what reduces, if anything does.
        x, out: the addresses of the members' arrays; of others where the plan asks for them.
    """

    def __init__(self, team: Team, folder: Folder | None, x: Mapping[int, int], out: Mapping[int, int]) -> None:
        self._team = team
        self._folder = folder
        self._arrays = {Where.X: x, Where.OUT: out}

    def run(self, plan: Plan) -> Steps[None]:
        """Done when this member's result is there, for every stream to see.

        Whatever ends it before leaves the members out of step: they give the communicator up.

        Raises:
            DeviceFailed: this member's device has failed.
            CommRevoked: another's has.
        """
        team = self._team
        team.lane.follow()
        first = team.rounds
        team.rounds += plan.rounds
        try:
            for step in order(plan, first):
                if isinstance(step, Wait):
                    if not team.have_told(step.told, step.rounds):
                        yield HaveTold(team, step.told, step.rounds)
                    team.follow(step.told, step.rounds)
                elif isinstance(step, Tell):
                    if plan.tells_late:
                        yield from copied([team.lane.mark()])
                    team.tell(step.told, step.rounds, is_over=plan.tells_late)
                else:
                    self._do(step)
            if not plan.tells_late:
                yield from copied([team.lane.mark()])
        except BaseException:
            with suppress(DeviceFailed):  # what is queued still reads and writes, also what is the others'
                team.lane.mark().wait()
            team.give_up()
            raise

    def _do(self, step: Do) -> None:
        lane, number = self._team.lane, step.number
        for piece in step.pieces:
            if isinstance(piece, Fold):
                assert self._folder is not None
                sources = [self._address(at, number) for at in piece.sources]
                lane.fold(self._folder, sources, [self._address(at, number) for at in piece.targets], piece.length)
            else:
                lane.copy(self._address(piece.source, number), self._address(piece.target, number), piece.nbytes)

    def _address(self, at: At, number: int) -> int:
        if at.where in self._arrays:
            return self._arrays[at.where][at.member] + at.offset
        return self._team.address(at.where, at.member, number) + at.offset
