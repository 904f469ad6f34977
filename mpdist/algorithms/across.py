"""Across: all_reduce over several nodes, as a pipeline.

Round by round each member reduces its slice in the node and sends it over its
rail; a few slices are under way while the next is reduced. When one comes back,
in the order in which they went, it is handed out in the node.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from mpdist.algorithms.crossing import SLICE_BYTES, WINDOW, Crossing, crosses_in_two_steps
from mpdist.algorithms.shared.calls import kind_of
from mpdist.algorithms.shared.members import PRIVATE
from mpdist.algorithms.shared.reduction import Reducing
from mpdist.algorithms.shared.team import CONSUMED, REDUCED, STAGED, TAKEN
from mpdist.algorithms.shared.turn import Turn
from mpdist.memory import as_buffer

if TYPE_CHECKING:
    from mpdist.algorithms.cluster import Cluster
    from mpdist.algorithms.reduction import Reduction
    from mpdist.memory import Buffer
    from mpdist.memory.elements import Array
    from mpdist.progress.collective import Steps

# So many slices that cross in two steps are on their second while the next are waited for.
RETURNING = 1

# Rounds at the end in which nothing is shown: the next collective may write a result slot when all have ended.
_QUIET_ROUNDS = 2


def all_reduce(cluster: Cluster, x: Buffer, out: Buffer, how: Reduction) -> Steps[None]:
    """Reduce x over all members of all nodes into out of all; x may be out."""
    team = cluster.team
    task = Reducing(team, x, out, how.op, None, range(team.size), cluster.rails)
    is_crossing = crosses_in_two_steps(cluster, how)
    if is_crossing:
        task.limit(cluster.rails * SLICE_BYTES)
    if not team.is_free():
        yield team.free()
    before = team.begin(task.rounds + _QUIET_ROUNDS, task.name, x.nbytes, kind_of(x.element, how.op), *task.facts())
    last = before + task.rounds + _QUIET_ROUNDS
    turn = Turn(team.channel.engine)
    is_staging = task.x_place == PRIVATE
    if not is_staging:
        team.tell(STAGED, last)
    going: deque[Slice] = deque()
    returning: deque[Slice] = deque()
    for step in range(task.rounds + WINDOW + RETURNING):
        if step < task.rounds:
            number = before + step + 1
            if is_staging:
                if not team.are_at(CONSUMED, number - 2):
                    yield team.all_at(CONSUMED, number - 2)
                task.stage(step, number)
                team.tell(STAGED, number)
            if not team.are_at(STAGED, number):
                yield team.all_at(STAGED, number)
            if step == 0:
                task.look_up()
            going.append(Slice(cluster, task.reduce_part(step, number), how, is_crossing))
            team.tell(CONSUMED, number)
        if WINDOW <= step < task.rounds + WINDOW:
            returning.append(going.popleft())
            yield from returning[-1].turn_back()
        if step >= WINDOW + RETURNING:
            result = yield from returning.popleft().result()
            yield from _hand_out(task, step - WINDOW - RETURNING, before, result)
        if turn.is_over:
            yield turn
    team.note(STAGED, last)
    team.tell(REDUCED, last)
    team.tell(CONSUMED, last)
    if (task.x_place != PRIVATE or task.out_place != PRIVATE) and not team.are_at(CONSUMED, last):
        yield team.all_at(CONSUMED, last)


def _hand_out(task: Reducing, place: int, before: int, result: Array) -> Steps[None]:
    """Give this member's slice of a round to the members of its node, and take theirs."""
    team = task.team
    number = before + place + 1
    word, free = (TAKEN, number - 2) if place >= 2 else (CONSUMED, before)
    if not team.are_at(word, free):
        yield team.all_at(word, free)
    task.put_slice(place, number, result)
    team.tell(REDUCED, number)
    if task.out_place == PRIVATE:
        if not team.are_at(REDUCED, number):
            yield team.all_at(REDUCED, number)
        task.consume(place, number)
    team.tell(TAKEN, number)


class Slice:
    """One slice on its way over a rail."""

    def __init__(self, cluster: Cluster, part: Array, how: Reduction, is_crossing: bool) -> None:
        self._cluster = cluster
        self._part = part
        self._how = how
        rail = cluster.rail
        self._crossing: Crossing | None = None
        if rail is None:
            return
        if is_crossing:
            self._crossing = Crossing(cluster, rail, part, -(-part.size // rail.size), how)
        else:
            self._request = rail.iall_reduce(None, as_buffer(part), how.mpi_op)

    def turn_back(self) -> Steps[None]:
        """Post the way back of a slice that crosses in two steps, when it has come."""
        second = self._cluster.second
        if self._crossing is not None and second is not None:
            yield from self._crossing.turn_back(second)

    def result(self) -> Steps[Array]:
        """What all nodes have together, in the element's type."""
        how = self._how
        if self._cluster.second is None:
            return np.empty(0, how.element.storage)
        if self._crossing is not None:
            return (yield from self._crossing.gathered())
        yield self._request
        if how.op.name == "avg":
            how.folder.fold([self._part], [self._part])
        return self._part
