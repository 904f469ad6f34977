"""Team: what one member sees of another that gives up at any moment; pure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mpdist.algorithms.shared.team import GIVEN_UP, STAGED, Reached, Team
from mpdist.errors import CommRevoked


class Line:
    """A member's words, which change after so many have been read."""

    def __init__(self, before: dict[int, int], after: dict[int, int], reads: int) -> None:
        self.before, self.after, self.reads = before, after, reads

    def __getitem__(self, word: int) -> int:
        self.reads -= 1
        return (self.after if self.reads < 0 else self.before)[word]


def team_of(line: Line, monkeypatch: pytest.MonkeyPatch) -> Any:
    team = Team.__new__(Team)
    team.fence, team.others = None, [line]  # type: ignore[list-item]  # reads like one
    team.shared = SimpleNamespace(fence=None)  # type: ignore[assignment]  # all that is asked for
    monkeypatch.setattr(Team, "deserted", lambda team: CommRevoked("in vain"))
    return team


@pytest.mark.parametrize("reads", range(4))
def test_a_member_that_has_come_and_then_given_up_has_come(reads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for is_request in (True, False):
        line = Line({STAGED: 6, GIVEN_UP: 0}, {STAGED: 7, GIVEN_UP: 1}, reads)
        team = team_of(line, monkeypatch)
        seen = [
            Reached(team, team.others, STAGED, 7).Test() if is_request else team.have_come(STAGED, 7) for _ in range(3)
        ]
        assert seen[-1]


def test_a_member_that_gives_up_before_it_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    team = team_of(Line({STAGED: 6, GIVEN_UP: 0}, {STAGED: 6, GIVEN_UP: 1}, 2), monkeypatch)
    assert not team.have_come(STAGED, 7)
    for look in (Reached(team, team.others, STAGED, 7).Test, lambda: team.have_come(STAGED, 7)):
        with pytest.raises(CommRevoked):
            look()
