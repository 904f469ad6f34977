"""Requests: what a posted operation gives, several as one, and what must live until it is complete.

Import it when mpi4py is set up, see `mpi`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from mpi4py import MPI


class Request(Protocol):
    """A posted operation."""

    def Test(self) -> bool:
        """Whether it is complete; making progress on the way."""


class Leased(MPI.Request):
    """A request that keeps alive what MPI reads and writes; mpi4py drops some of it, of reductions all."""

    lease: object


class Requests:
    """Several requests as one."""

    lease: object
    __slots__ = ("_requests", "lease")

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests

    def Test(self) -> bool:
        while self._requests and self._requests[-1].Test():
            self._requests.pop()
        return not self._requests


Post = TypeVar("Post", bound=Callable[..., Any])


def leases(post: Post) -> Post:
    """Let the request that a method returns keep the method's arguments alive."""

    @functools.wraps(post)
    def leasing(*arguments: Any) -> Any:
        request = post(*arguments)
        if isinstance(request, Leased | Requests):
            return request
        leased = Leased(request)
        leased.lease = (request, arguments)
        return leased

    return leasing  # type: ignore[return-value]  # the same signature
