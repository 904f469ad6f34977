"""Present: the table, the JSON lines and the picture.

Measuring takes minutes, so what would stop any of them is found before.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mpdist.bench import plot, table
from mpdist.bench.case import Case, append
from mpdist.errors import UsageError


def require(ops: Sequence[str], json: str | None, picture: str | None) -> None:
    """Find out whether cases of these operations can be presented in every way that is asked for.

    Args:
        json, picture: paths of files; None: not asked for.

    Raises:
        Unavailable: a package is missing.
        UsageError: a file can't be written, or there is nothing to plot.
    """
    table.require()
    if json:
        _require_writable("--json", Path(json))
    if picture:
        plot.require(ops, picture)
        _require_writable("--plot", Path(picture))


def _require_writable(option: str, path: Path) -> None:
    """Nothing else tells for sure than to open it; what wasn't there is not left behind."""
    is_new = not path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise UsageError(
            f"mpdist bench {option} {path} can't be written: {error.strerror}; name another file"
        ) from error
    if is_new:
        path.resolve().unlink()  # of a link to nowhere what it names, not the link


def present(cases: Sequence[Case], json: str | None, picture: str | None) -> None:
    """Write and show the cases in every way that is asked for."""
    if json:
        append(json, cases)
    table.show(cases)
    if picture:
        plot.plot(cases, picture)
        print(f"mpdist bench: picture in {picture}", file=sys.stderr)
