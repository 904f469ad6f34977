"""No garbage is collected while frames of other threads are read."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from mpdist.debug.uncollected import uncollected
from mpdist.runtime import waiting


@pytest.fixture(autouse=True)
def _enabled_again() -> Iterator[None]:
    yield
    gc.enable()


def test_what_was_enabled_is_enabled_after_the_last_of_several_threads() -> None:
    inside, leave = threading.Event(), threading.Event()

    @uncollected
    def stay() -> None:
        inside.set()
        leave.wait()

    thread = threading.Thread(target=stay)
    with uncollected, uncollected:
        thread.start()
        inside.wait()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_what_was_disabled_stays_so() -> None:
    gc.disable()
    with uncollected:
        pass
    assert not gc.isenabled()


def test_an_error_ends_it() -> None:
    with pytest.raises(KeyError), uncollected:
        raise KeyError
    assert gc.isenabled()


def test_nothing_is_collected_while_the_place_of_another_thread_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def watched(frame: object) -> None:
        seen.append(gc.isenabled())

    monkeypatch.setattr(waiting, "_waiting_thread", watched)
    assert waiting.place_of(None) == ""  # type: ignore[arg-type]  # nothing is compared
    assert seen
    assert not any(seen)
