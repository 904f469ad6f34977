"""Work: a posted operation as torch knows it.

torch's Python code calls all of its methods; from C++ only `wait` and `get_future` arrive. A result that has to be
brought to where it belongs (a strided tensor, a list) is brought there once, by whoever finds the operation done
first. The Future, which is costly, is made when it is asked for.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work as TorchWork

from mpdist.errors import MpdistError
from mpdist.progress.callback import when_done
from mpdist.torch.backward import Backward, running_backward
from mpdist.torch.compiling import leave_alone
from mpdist.torch.devices import devices_of
from mpdist.torch.errors import late, translated
from mpdist.torch.futures import All, Future
from mpdist.torch.options import NO_TIMEOUT

if TYPE_CHECKING:
    from mpdist.progress.work import Work as OwnWork
    from mpdist.torch.profiling import Event
    from mpdist.torch.progress import Progress

# A point-to-point operation has no limit of its own at first: it gets one when somebody has waited this long.
UNWATCHED_SECONDS = 0.2

_making = threading.Lock()


class Waiter:
    """How the works of a group wait.

    Attributes:
        seconds: the group's timeout; 0 for ever.
    """

    def __init__(self, progress: Progress, engine: Any, seconds: float) -> None:
        self.progress = progress
        self.engine = engine
        self.seconds = seconds

    def wait(self, posted: OwnWork[Any], seconds: float | None = None) -> bool:
        """Drive until it is done; False if so many seconds have passed."""
        waiting = self.progress.waiting
        thread = threading.get_ident()
        try:
            waiting.add(thread)
            if posted.sequence or posted.limit is not None:  # a collective: the group's timeout limits it
                return bool(self.engine.wait(posted, seconds))
            return self._wait_for_message(posted, seconds)
        finally:
            waiting.discard(thread)

    def _wait_for_message(self, posted: OwnWork[Any], seconds: float | None) -> bool:
        unwatched = UNWATCHED_SECONDS if self.seconds == 0 else min(UNWATCHED_SECONDS, self.seconds / 2)
        if seconds is not None and seconds <= unwatched:
            return bool(self.engine.wait(posted, seconds))
        start = monotonic()
        if self.engine.wait(posted, unwatched):
            return True
        if self.seconds and posted.limit is None:
            posted.since, posted.limit = start, self.seconds
            self.engine.limit(posted)
        return bool(self.engine.wait(posted, None if seconds is None else seconds - unwatched))


class Work(TorchWork):
    """A posted operation.

    Attributes:
        is_complete: its Future has its result, or gets it now.
    """

    def __init__(
        self,
        waiter: Waiter,
        posted: OwnWork[Any],
        outputs: Sequence[Tensor],
        finish: Callable[[], object] | None = None,
        event: Event | None = None,
    ) -> None:
        """Hold a posted operation.

        Args:
            outputs: what `result()` and the Future give.
            finish: brings the results to where they belong.
            event: of a profiler, which ends with the operation.
        """
        super().__init__()
        self._waiter = waiter
        self._posted = posted
        self._outputs = outputs
        self._finish = finish
        self._event = event
        self._future: Future | None = None
        self.is_complete = False
        self._backward: Callable[[], Backward | None] | None = None
        self._was_waited_for = False
        if finish is not None:
            self._finishing = threading.Lock()
            self._finish_when_done()
        if event is not None:
            when_done(posted, lambda _: event.end())

    # ------------------------------------------------------------------ waiting

    @leave_alone
    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait; raises what went wrong. A timeout ends only this wait, but withdraws a receive."""
        posted = self._posted
        if not posted._done:
            seconds = timeout.total_seconds() if timeout > NO_TIMEOUT else None
            if not self._waiter.wait(posted, seconds):
                posted.cancel()
                raise late(posted, f"waiting {timeout.total_seconds() * 1000:g}ms for {posted.describe()}")
        if self._event is not None:
            self._event.end()
        if posted._error is not None:
            raise translated(posted._seen_error())
        if self._finish is not None:
            self._finish_once()
        self._was_waited_for = True
        if self._backward is not None:
            self.complete_in_turn()
        return True

    def __await__(self) -> Generator[Any, None, list[Tensor]]:
        try:
            yield from self._posted.__await__()
        except MpdistError as error:
            raise translated(error) from error
        self._finish_once()
        return list(self._outputs)

    def synchronize(self) -> None:
        """The same as wait."""
        self.wait()

    def _finish_when_done(self) -> None:
        when_done(self._posted, lambda _: self._finish_once())

    def _finish_once(self) -> None:
        if self._finish is None:
            return
        with self._finishing:
            if self._finish is not None and self._posted._error is None:
                self._bring()
            self._finish = None

    def _bring(self) -> None:
        """Bring the results to where they belong."""
        assert self._finish is not None
        self._finish()

    # ------------------------------------------------------------------ asking

    def is_completed(self) -> bool:
        """Whether it is done; looks once."""
        if not self._posted._done:
            self._waiter.engine.drive()
        if self._posted._done:
            self._finish_once()
            return True
        return False

    def is_success(self) -> bool:
        """Whether it is done and well."""
        return self.is_completed() and self._posted._error is None

    def exception(self) -> BaseException | None:
        """What went wrong; None if nothing has."""
        error = self._posted._error if self._posted._done else None
        return None if error is None else translated(self._posted._seen_error())

    def result(self) -> list[Tensor]:
        """The tensors that hold the result."""
        self.wait()
        return list(self._outputs)

    def source_rank(self) -> int:
        """Which rank of the group a received message came from."""
        return int(self._posted.result().src)

    _source_rank = source_rank

    # ------------------------------------------------------------------ futures

    @leave_alone
    def get_future(self) -> torch.futures.Future[Any]:
        """A Future of the result; its callbacks run on the thread that finds the operation done, see `backward`."""
        # Made before the lock is taken: garbage may be collected meanwhile, and a backward in it completes its Futures.
        future = self._future or Future(self)
        with _making:
            if self._future is not None:
                return self._future
            self._future = future
        # Who has waited for it comes here in the same order on all ranks.
        backward = None if self._was_waited_for else running_backward(self._waiter)
        if backward is None:
            when_done(self._posted, lambda _: self.complete())
        else:
            self._backward = weakref.ref(backward)  # whose end torch decides
            backward.hold(self)
        if not self._posted._done:
            self._waiter.progress.posted(is_urgent=backward is None)  # else its end waits
        return future

    @property
    def is_held(self) -> bool:
        """Whether it has a Future that a backward holds back."""
        return self._backward is not None

    def complete_in_turn(self, *, waits: bool = True) -> None:
        """`complete`, where a backward holds the Future as that has it; see `Backward.complete`."""
        backward = None if self._backward is None else self._backward()
        if backward is None:
            self.complete()
        else:
            backward.complete(self, waits=waits)

    def complete(self) -> None:
        """Give the Future, if there is one, what the operation, which is done, has led to."""
        with _making:
            future = self._future
            if future is None or self.is_complete:
                return
            self.is_complete = True
        future.let_go()
        error = self._posted._error
        if error is None:
            try:
                self._finish_once()
            except Exception as failure:  # to whoever waits, as `wait` raises it
                error = failure
        else:
            error = translated(self._posted._seen_error())
        if error is not None:
            # The thread that tells of a timeout must not wait for what a callback may wait for.
            self._waiter.progress.later(lambda: self._call_back(future.set_exception, error))
        else:
            self._call_back(future.set_result, list(self._outputs))

    def _call_back(self, give: Callable[[Any], None], result: Any) -> None:
        with self._waiter.progress.lent():
            give(result)


class Done(TorchWork):
    """An operation that was complete when its call returned; all share one."""

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    is_success = is_completed

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return []

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([])
        return future


class Complete(Done):
    """An operation that had nothing to wait for, with its result."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._outputs = list(outputs)

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices_of(self._outputs))
        future.set_result(self._outputs)
        return future

    def __await__(self) -> Generator[Any, None, list[Tensor]]:
        return self._outputs
        yield


class Several(TorchWork):
    """Several works as one."""

    def __init__(self, works: Sequence[TorchWork]) -> None:
        super().__init__()
        self._works = works

    @property
    def _outputs(self) -> list[Tensor]:
        return [tensor for work in self._works for tensor in work._outputs]  # type: ignore[attr-defined]  # ours

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return all(work.wait(timeout) for work in self._works)

    def __await__(self) -> Generator[Any, None, list[Tensor]]:
        for work in self._works:
            yield from work.__await__()  # type: ignore[attr-defined]  # ours
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future[Any]:
        futures = All([work.get_future() for work in self._works])
        return futures.then(lambda done: [tensor for each in done.value() for tensor in each.value()])


DONE = Done()
