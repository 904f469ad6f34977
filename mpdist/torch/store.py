"""Store: torch's key-value store, over MPI and without a listening port.

What init_process_group, new_group, gloo groups beside ours, and checkpoints agree by. A subclass of torch's Store:
C++ calls it through the names that torch's own have there.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from operator import index
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

import mpdist
from mpdist.runtime import job
from mpdist.torch.errors import WrongCall
from mpdist.torch.store_service import Refused, StoreService

DEFAULT_TIMEOUT = timedelta(seconds=300)

# C++ counts microseconds in 64 bits on the way, which timedelta.max overflows.
LONGEST_TIMEOUT = timedelta(days=36500)

_StoreError: type[Exception] = getattr(dist, "DistStoreError", RuntimeError)

_service: StoreService | None = None
_alive: list[MpiStore] = []
"""All of them: C++ may hold a store whose Python half nobody else holds."""


class MpiStore(Store):
    """A key-value store of all ranks of the world. Other types than are named raise TypeError, as torch's stores do.

    Attributes:
        namespace: stores of the same one share their keys.
        timeout: how long `get` and `wait` wait.
    """

    timeout: timedelta  # torch's, which its hints leave out

    def __init__(self, namespace: str = "", timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        """Open the store; starts mpdist if it is not started, which is collective."""
        super().__init__()
        self.namespace = namespace
        self.set_timeout(timeout)
        self._service = _the_service()
        _alive.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._ask("set", self._key(key), _bytes(value))

    def get(self, key: str) -> bytes:
        """The value of a key, when it has been set."""
        return self.multi_get([key])[0]

    def add(self, key: str, value: int) -> int:
        """Add to a counter, which begins at 0; returns the sum.

        Raises:
            DistStoreError: the key holds no number.
        """
        return int(self._ask("add", self._key(key), index(value)))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set the key if it holds what is expected (nothing, for an empty value); returns what it holds then."""
        reply: bytes = self._ask("compare_set", self._key(key), _bytes(expected_value), _bytes(desired_value))
        return reply

    def check(self, keys: list[str]) -> bool:
        """Whether all keys have been set."""
        return bool(self._ask("check", self._keys(keys)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return when all keys have been set.

        Raises:
            DistStoreError: not within the timeout.
        """
        self._wait_for("wait", keys, timeout)

    def delete_key(self, key: str) -> bool:
        """Forget a key; whether it was there."""
        return bool(self._ask("delete", self._key(key)))

    def num_keys(self) -> int:
        """How many keys have been set."""
        return len(self.list_keys())

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value."""
        self._ask("append", self._key(key), _bytes(value))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of several keys, when all have been set."""
        values: list[bytes] = self._wait_for("get", keys, None)
        return values

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        """Set several keys.

        Raises:
            WrongCall: not as many values as keys.
        """
        if len(keys) != len(values):
            raise WrongCall(f"multi_set needs one value for each key, got {len(keys)} keys and {len(values)} values")
        self._ask("multi_set", self._keys(keys), [_bytes(value) for value in values])

    def list_keys(self) -> list[str]:
        """All keys that have been set."""
        start = self._key("")
        return [key.removeprefix(start) for key in self._ask("keys", start)]

    def has_extended_api(self) -> bool:
        """append, multi_get and multi_set are there."""
        return True

    def clone(self) -> MpiStore:
        """Another one on the same keys."""
        return MpiStore(self.namespace, self.timeout)

    # As C++ calls them.
    def getNumKeys(self) -> int:
        return self.num_keys()

    def deleteKey(self, key: str) -> bool:
        return self.delete_key(key)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long `get` and `wait` wait. C++ keeps it: a PrefixStore around this store sets it there."""
        super().set_timeout(min(timeout, LONGEST_TIMEOUT))

    # ------------------------------------------------------------------

    def _key(self, key: str) -> str:
        if not isinstance(key, str):
            raise TypeError(f"a key of a store is a str, got {key!r}")
        return f"{self.namespace}/{key}"

    def _keys(self, keys: Sequence[str]) -> list[str]:
        if isinstance(keys, str):
            raise TypeError(f"needed a list of keys, got the str {keys!r}")
        return [self._key(key) for key in keys]

    def _ask(self, op: str, *arguments: Any) -> Any:
        try:
            return self._service.ask(op, arguments, self.timeout.total_seconds())
        except Refused as error:
            raise _StoreError(f"mpdist store: rank 0 cannot carry out '{op}': {error}") from None
        except TimeoutError:
            raise _StoreError(
                f"mpdist store: rank 0 has not answered '{op}' within {self.timeout}: is its process stopped?"
            ) from None

    def _wait_for(self, op: str, keys: list[str], timeout: timedelta | None) -> Any:
        limit = self.timeout if timeout is None else timeout
        try:
            return self._service.ask(op, [self._keys(keys)], limit.total_seconds())
        except TimeoutError:
            milliseconds = int(limit.total_seconds() * 1000)
            raise _StoreError(f"wait timeout after {milliseconds}ms, keys: {', '.join(keys)}") from None

    def __repr__(self) -> str:
        return f"<MpiStore {self.namespace!r}>"


def _bytes(value: str | bytes) -> bytes:
    if isinstance(value, str):
        return value.encode()
    try:
        return bytes(memoryview(value))
    except TypeError:
        raise TypeError(f"a value in a store is a str or bytes, got {type(value).__name__}") from None


def _the_service() -> StoreService:
    global _service
    if _service is None:
        world = mpdist.init()
        assert job._job is not None
        _service = StoreService(job._job.control, world.rank, world.size)
    return _service
