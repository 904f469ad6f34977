"""Sizes in words: `8..64M` to bytes, and bytes to `64 KiB`."""

from __future__ import annotations

import re

from mpdist.errors import UsageError

# With three digits, what is as near to 1000 is 1000.
ROUNDED_UP = 0.9995
UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}


def parse_size(text: str) -> int:
    """Bytes of `8`, `64K`, `1M`.

    Raises:
        UsageError: it is none.
    """
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise UsageError(f"{text!r} is not a size: write 8, 64K, 1M or 1G")
    return int(match[1]) * UNITS[match[2].upper()]


def parse_sizes(text: str, factor: int) -> list[int]:
    """Bytes of `8..64M` (steps of `factor` down from its end, and its begin) or of a list, `8,64K,1M`.

    Raises:
        UsageError: it is neither.
    """
    if ".." not in text:
        return sorted({parse_size(part) for part in text.split(",")})
    first, last = (parse_size(part) for part in text.split("..", 1))
    if first > last or factor < 2:
        raise UsageError(f"sizes {text!r} with factor {factor}: the first must not be larger, the factor at least 2")
    sizes = [last]
    while sizes[-1] // factor >= first * factor:
        sizes.append(sizes[-1] // factor)
    return sorted({first, *sizes})


def size_text(nbytes: int) -> str:
    """`64 KiB`; whole numbers where they are exact."""
    for unit in ("G", "M", "K"):
        if nbytes >= UNITS[unit]:
            return f"{three_digits(nbytes / UNITS[unit])} {unit}iB"
    return f"{nbytes} B"


def time_text(seconds: float) -> str:
    """`4.69 us`, `12.3 ms`."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= ROUNDED_UP * unit:
            return f"{three_digits(seconds / unit)} {name}"
    return f"{seconds * 1e6:.3g} us"


def three_digits(value: float) -> str:
    """Of 1000 and more all digits before the point."""
    return f"{value:.3g}" if value < 1000 * ROUNDED_UP else f"{value:.0f}"
