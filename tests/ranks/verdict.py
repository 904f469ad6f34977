"""Verdict: what all ranks say about one test, as one outcome and one text.

Pure: records in, a verdict out. A failure with a traceback comes first, because
ranks that hang or die beside it usually do so for its sake.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Calls that every test has around it.
HARNESS = (
    "/_pytest/", "/pluggy/", "/pytest/", "/pytest_asyncio/", "/asyncio/runners.py", "/asyncio/base_events.py",
    "/tests/ranks/", "<frozen runpy>",
)  # fmt: skip
# The end of a traceback as Python prints it.
ERROR_LINE = re.compile(r"[\w.]+(Error|Exception|Timeout|Exit)\b")


@dataclass
class Record:
    """What is known of one rank in one test.

    Attributes:
        outcomes: phase (setup, call, teardown) -> passed, failed, skipped or xfailed.
        texts: phase -> traceback, or the reason of a skip.
        sections: title -> captured output.
        is_done: whether the rank came to the end of the test.
        is_lost: whether its process ended before that.
        where: where it hangs: `at`, `stack`, `tasks`, `pending`.
    """

    rank: int
    outcomes: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    sections: dict[str, str] = field(default_factory=dict)
    is_done: bool = False
    is_lost: bool = False
    where: Mapping[str, object] | None = None

    @property
    def outcome(self) -> str | None:
        """The worst phase's outcome; None if the rank did not come to an end."""
        for outcome in ("failed", "xfailed", "skipped"):
            if outcome in self.outcomes.values():
                return outcome
        return "passed" if self.is_done else None

    @property
    def has_left(self) -> bool:
        """Whether the rank left the test early, so that others may wait for it in vain."""
        return any(outcome != "passed" for outcome in self.outcomes.values())

    @property
    def failure(self) -> str:
        """The failed phases' tracebacks."""
        texts = {phase: self.texts[phase] for phase, outcome in self.outcomes.items() if outcome == "failed"}
        return "\n\n".join(text if phase == "call" else f"in {phase}:\n{text}" for phase, text in texts.items())


@dataclass(frozen=True)
class Verdict:
    """Outcome (passed, failed, skipped, xfailed), its headline, and the whole text."""

    outcome: str
    headline: str = ""
    text: str = ""


def judge(records: Sequence[Record], seconds: float, test_file: str, launcher: str) -> Verdict:
    """Join the ranks' records.

    Args:
        seconds: how long the ranks that hang were waited for.
        test_file: its path; a rank that hangs is said to be at a line of it, if possible.
        launcher: what the launcher said, if a rank was lost.
    """
    parts = _failures(records) + _hung(records, seconds, test_file) + _lost(records, launcher)
    if parts:
        headlines = "; ".join(headline for headline, _ in parts)
        return Verdict("failed", headlines, "\n\n".join(f"{headline}\n{text}".rstrip() for headline, text in parts))
    outcomes = {record.outcome for record in records}
    if outcomes == {"passed"}:
        return Verdict("passed")
    reasons = {text for record in records for text in record.texts.values()}
    if len(outcomes) == 1:
        return Verdict(str(outcomes.pop()), " / ".join(sorted(reasons)))
    headline = "the ranks disagree: " + ", ".join(f"rank {record.rank} {record.outcome}" for record in records)
    return Verdict("failed", headline, "\n".join([headline, *sorted(reasons)]))


def _failures(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Headline and traceback; ranks that fail alike share one."""
    ranks: dict[str, list[int]] = {}
    for record in records:
        if record.outcome == "failed":
            ranks.setdefault(record.failure, []).append(record.rank)
    return [(f"{name_ranks(group)} failed: {_last_error(text)}", text) for text, group in ranks.items()]


def _hung(records: Sequence[Record], seconds: float, test_file: str) -> list[tuple[str, str]]:
    """Headline and place; ranks that hang at the same place share one."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for record in records:
        if record.where is not None:
            ranks.setdefault((_line(record.where, test_file), _where_text(record.where)), []).append(record.rank)
    return [
        (f"{name_ranks(group)}: no result within {seconds:.3g} s{line}", text) for (line, text), group in ranks.items()
    ]


def _lost(records: Sequence[Record], launcher: str) -> list[tuple[str, str]]:
    lost = [record.rank for record in records if record.is_lost]
    if not lost:
        return []
    return [(f"{name_ranks(lost)} ended in the middle of the test", launcher)]


def _line(where: Mapping[str, object], test_file: str) -> str:
    """` at test_x.py:12 in test_y`, if the stacks show the test file."""
    text = f"{where.get('tasks', '')}\n{where.get('stack', '')}"
    found = re.findall(r'File "(.+?)", line (\d+),? in (\w+)', text)
    lines = [(line, name) for path, line, name in found if path == test_file]
    if not lines:
        return ""
    # faulthandler lists the innermost call first, all others last.
    line, name = lines[0] if "most recent call first" in text else lines[-1]
    return f", at {test_file.rsplit('/', 1)[-1]}:{line} in {name}"


def _where_text(where: Mapping[str, object]) -> str:
    titles = {"pending": "pending operations", "tasks": "tasks", "stack": "stack"}
    return "\n".join(f"{title}:\n{_shorten(str(where[key]))}" for key, title in titles.items() if where.get(key))


def _shorten(stack: str) -> str:
    """Without the harness's own calls in what faulthandler wrote, and without addresses of threads."""
    lines = [line for line in stack.rstrip().splitlines() if not is_harness(line)]
    return re.sub(r"hread 0x[0-9a-f]+", "hread", "\n".join(lines))


def is_harness(path: str) -> bool:
    """Whether a call in that file is of no interest to the author of a test."""
    return any(part in path for part in HARNESS)


def _last_error(text: str) -> str:
    """pytest's `E   ...` line that names the error, or the last line."""
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    errors = [line[1:].strip() for line in lines if line.startswith("E  ")]
    return (errors or [line for line in lines if ERROR_LINE.match(line)] or lines[-1:])[0]


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 1`, or `ranks 0, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
