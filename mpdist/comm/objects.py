"""Collectives of objects: anything that pickles, of any size, different on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpdist.algorithms import objects
from mpdist.algorithms.header import Header
from mpdist.comm.operation import operation
from mpdist.comm.point_to_point import PointToPoint
from mpdist.errors import SizeMismatch, UsageError
from mpdist.memory import Buffer

if TYPE_CHECKING:
    from mpdist.progress.work import Work


class Objects(PointToPoint):
    """Operations of all ranks on objects. A root's object that does not pickle raises on all ranks."""

    @operation
    def broadcast_object(self, item: object = None, src: int = 0) -> Work[Any]:
        """Give rank `src`'s object to all ranks; `item` is ignored on the others."""
        self._check_pickle()
        src = self._rank(src, "src")
        message: Buffer | Header | None = None
        refusal = None
        if self.rank == src:
            message, refusal = self._packed("broadcast_object", item)
        work = self._post_with_headers(
            "broadcast_object", objects.broadcast_object, lambda: f"from {src}", message, item, src
        )
        return self._unless(refusal, work)

    @operation
    def gather_object(self, item: object, dst: int = 0) -> Work[Any]:
        """Collect an object of each rank: a list on rank `dst`, None elsewhere."""
        self._check_pickle()
        dst = self._rank(dst, "dst")
        return self._post_with_headers(
            "gather_object", objects.gather_object, lambda: f"to {dst}", objects.packed(item), dst
        )

    @operation
    def all_gather_object(self, item: object) -> Work[list[Any]]:
        """Collect an object of each rank: a list on all ranks."""
        self._check_pickle()
        return self._post_with_headers("all_gather_object", objects.all_gather_object, str, objects.packed(item))

    @operation
    def scatter_object(self, items: Sequence[object] | None = None, src: int = 0) -> Work[Any]:
        """Hand rank `src`'s objects out, object r to rank r; `items` is ignored on the others."""
        self._check_pickle()
        src = self._rank(src, "src")
        messages: list[Buffer] | Header | None = None
        refusal = None
        if self.rank == src:
            messages, refusal = self._all_packed("scatter_object", items)
        work = self._post_with_headers("scatter_object", objects.scatter_object, lambda: f"from {src}", messages, src)
        return self._unless(refusal, work)

    @operation
    def all_to_all_object(self, items: Sequence[object]) -> Work[list[Any]]:
        """Send object r to rank r; object r of the result came from rank r."""
        self._check_pickle()
        self._check_number(items)
        return self._post_with_headers(
            "all_to_all_object", objects.all_to_all_object, str, [objects.packed(item) for item in items]
        )

    def _check_number(self, items: object) -> None:
        if not isinstance(items, list | tuple):
            raise UsageError(f"a list of {self.size} objects is needed, one for each rank, got {type(items).__name__}")
        if len(items) != self.size:
            raise SizeMismatch(f"{len(items)} objects were given, one for each of the {self.size} ranks is needed")

    def _packed(self, op: str, item: object) -> tuple[Buffer | Header, Exception | None]:
        """The root's object, or the Header that tells the others, and the error."""
        try:
            return objects.packed(item), None
        except Exception as error:  # whatever an object's own pickling raises
            return self._refused(op, error)

    def _all_packed(self, op: str, items: Sequence[object] | None) -> tuple[list[Buffer] | Header, Exception | None]:
        try:
            self._check_number(items)
            return [objects.packed(item) for item in items or ()], None
        except Exception as error:  # whatever an object's own pickling raises
            return self._refused(op, error)

    def _refused(self, op: str, error: Exception) -> tuple[Header, Exception]:
        if isinstance(error, UsageError):
            explained = self._explained(op, error)
            return Header(refusal=str(explained)), explained
        told = self._explained(op, UsageError(f"{type(error).__name__}: {error}"))
        return Header(refusal=str(told)), error

    @staticmethod
    def _unless(refusal: Exception | None, work: Work[Any]) -> Work[Any]:
        if refusal is None:
            return work
        work.forget()
        raise refusal
