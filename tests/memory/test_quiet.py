"""Quiet: calls of NumPy that warn of nothing, and change nothing for others."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from mpdist.memory import quiet

HUGE = np.array([3e38, -np.inf], np.float32)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("is_of_context", [True, False])
def test_nothing_warns_in_any_thread_and_everything_does_afterwards(
    is_of_context: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_of_context and not quiet.IS_ONE_CALL:
        pytest.skip("before NumPy 2 what warns belongs to the thread")
    monkeypatch.setattr(quiet, "IS_ONE_CALL", is_of_context)
    made = quiet._Quiet()
    before = np.geterr()
    results = []

    def work() -> None:
        for _ in range(200):
            out = np.empty(2, np.float32)
            made.call(np.subtract, HUGE, HUGE, out=out)  # inf - inf is invalid
            made.call(np.add, HUGE, HUGE, out=out)  # too large
        results.append(out.tolist())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    assert results == [[np.inf, -np.inf]] * 5
    assert np.geterr() == before
    with pytest.raises(RuntimeWarning, match="overflow"):
        np.add(HUGE, HUGE)
