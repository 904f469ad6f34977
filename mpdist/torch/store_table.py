"""The table of a key-value store: what each request does to it, and who waits for which keys.

Pure data, on one rank: `ask` answers at once, or keeps the request until its keys are there. No MPI, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Reply: TypeAlias = bytes | int | bool | list[bytes] | list[str] | None
Answer: TypeAlias = Callable[[Reply], object]

# Bytes of a value that a text shows.
MOST_SHOWN = 40


class Table:
    """Keys and values, and requests that wait."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._parked: dict[tuple[int, int], tuple[Sequence[str], Callable[[], Reply], Answer]] = {}
        self._requests: dict[str, Callable[..., Reply]] = {
            "set": self._set,
            "multi_set": self._multi_set,
            "add": self._add,
            "append": self._append,
            "compare_set": self._compare_set,
            "check": self._check,
            "delete": self._delete,
            "keys": self._keys,
        }

    def ask(self, who: tuple[int, int], op: str, arguments: Sequence[Any], answer: Answer) -> None:
        """Carry out a request; `answer` is called with its reply, now or when its keys have come.

        Args:
            who: rank and number of the request, to withdraw it.

        Raises:
            ValueError: it cannot be carried out; the table is as before.
        """
        if op == "wait":
            self._when_there(who, arguments[0], lambda: None, answer)
        elif op == "get":
            keys = list(arguments[0])
            self._when_there(who, keys, lambda: [self._values[key] for key in keys], answer)
        else:
            answer(self._requests[op](*arguments))
            self._wake()

    def withdraw(self, who: tuple[int, int]) -> None:
        """The rank does not wait any more."""
        self._parked.pop(who, None)

    def _when_there(
        self, who: tuple[int, int], keys: Sequence[str], reply: Callable[[], Reply], answer: Answer
    ) -> None:
        if self._check(keys):
            answer(reply())
        else:
            self._parked[who] = (keys, reply, answer)

    def _wake(self) -> None:
        ready = [who for who, (keys, _, _) in self._parked.items() if self._check(keys)]
        for who in ready:
            _, reply, answer = self._parked.pop(who)
            answer(reply())

    # ------------------------------------------------------------------ requests

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def _multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        self._values.update(zip(keys, values, strict=True))

    def _add(self, key: str, amount: int) -> int:
        held = self._values.get(key, b"0")
        try:
            total = int(held) + amount
        except ValueError:
            raise ValueError(f"{key!r} holds {held[:MOST_SHOWN]!r}, which is no number to add to") from None
        self._values[key] = str(total).encode()
        return total

    def _append(self, key: str, value: bytes) -> None:
        self._values[key] = self._values.get(key, b"") + value

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """What the key holds afterwards, as torch's TCPStore says it; `expected` where the key stays unset."""
        if key not in self._values:
            if expected:
                return expected
        elif self._values[key] != expected:
            return self._values[key]
        self._values[key] = desired
        return desired

    def _check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def _delete(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def _keys(self, prefix: str) -> list[str]:
        return [key for key in self._values if key.startswith(prefix)]
