"""Job: one rank's life, from MPI's start to the agreement that all have finished."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from mpdist.algorithms.choose import Thresholds, read_thresholds
from mpdist.comm import Communicator
from mpdist.config import Config, unknown_variables
from mpdist.debug import install_debug
from mpdist.errors import UsageError
from mpdist.progress import current
from mpdist.progress.backoff import policy
from mpdist.progress.channel import Channel
from mpdist.progress.doorbell import SilentDoorbell, connect
from mpdist.progress.engine import Engine
from mpdist.progress.roll import Roll, roll_bytes
from mpdist.runtime import exits, finish, fork
from mpdist.runtime.answers import describe_pending
from mpdist.runtime.board import Board, board_bytes
from mpdist.runtime.completion import record_attempt, record_completion, record_opening, record_start
from mpdist.runtime.control import Control
from mpdist.runtime.cores import Place, crowd
from mpdist.runtime.failure import FINALLY_SECONDS, Ender, describe_error, exit_code
from mpdist.runtime.hooks import INTERRUPT, Hooks
from mpdist.runtime.outside import has_joined_threads
from mpdist.runtime.signals import Signals, Terminated, end_with_launcher
from mpdist.transport import neighbours
from mpdist.transport.cuda_aware import Awareness
from mpdist.transport.cuda_aware.claim import cuda_support, library_path
from mpdist.transport.facts import launch_mismatch
from mpdist.transport.leftovers import unlink_segments
from mpdist.transport.sharing import shared_bytes

if TYPE_CHECKING:
    from mpdist.transport.mpi import Transport

T = TypeVar("T")
Main = Callable[..., Coroutine[Any, Any, T]]

# How often to look whether other threads have ended.
LOOK_SECONDS = 0.01

FINALIZED = "mpdist was finalized"

_job: Job | None = None
_starting = threading.Lock()
_ending = threading.RLock()  # a signal's handler may call finalize() while its thread is in it


def init() -> Communicator:
    """Start mpdist and return the world communicator; the same one when called again.

    All ranks call it: it is collective, and blocks. From now on an uncaught exception, `sys.exit` with a
    status other than 0, or a signal on one rank ends the whole job, and the program's end on one rank waits
    for that of all others. In a world of one rank Python's own rules stay.

    Raises:
        UsageError: in a child process of a rank; after `finalize()`; or a variable MPDIST_... is not valid.
    """
    return _start().world


def started() -> Communicator | None:
    """The world communicator where mpdist is started, closed after `finalize()`; None before."""
    return None if _job is None else _job.world


def finalize() -> None:
    """Complete what is pending here, wait until all ranks have called it, and stop MPI.

    The end of the program does the same.
    Messages that nobody has received are reported on stderr.

    Raises:
        UsageError: an event loop runs in this thread; or this is another than the main thread, and one runs there.
    """
    if _job is None or _job.is_closed or _job.pid != os.getpid():
        return
    loop = None if threading.current_thread() is threading.main_thread() else _job.engine.ticking.loop
    if loop is not None and loop.is_running():
        raise UsageError(
            "finalize() was called while an event loop runs in another thread: call it when that has ended, or leave "
            "it to the end of the program"
        )
    if asyncio._get_running_loop() is not None:
        raise UsageError(
            "finalize() was called in a running event loop, which would stand still: call it when that has ended, or "
            "leave it to the end of the program"
        )
    _job.finish()


def run(main: Main[T], *args: object) -> T:
    """Run the coroutine function `main(world, *args)` in a new event loop of the current policy, as asyncio.run does.

    Returns its result, when all that it has posted is complete. May be called again, or together with `init()`.

    Raises:
        UsageError: `main` is not a coroutine function, or takes no world; an event loop runs already; or see `init`.
    """
    _check_main(main, args)
    job = _start()
    if job.is_guarded:
        return job.run_guarded(main, *args)
    return job.run(main(job.world, *args))


@dataclass
class Job:
    """mpdist in this process, while it is started.

    Attributes:
        pid: the process that owns it; in a forked child another.
        is_guarded: a failure of this rank ends the other ranks; there are others.
    """

    engine: Engine
    world: Communicator
    control: Control
    ender: Ender
    hooks: Hooks
    signals: Signals
    is_guarded: bool
    pid: int
    is_closed: bool = False

    # ------------------------------------------------------------------ running

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in a loop of its own, and complete what it has posted."""
        loop: asyncio.AbstractEventLoop | None = None
        try:
            with contextlib.ExitStack() as limits, asyncio.Runner() as runner:
                loop = runner.get_loop()
                if self.is_guarded:
                    self.hooks.watch(loop)
                try:
                    result = runner.run(main)
                except BaseException as error:
                    self._limit_the_rest(error, limits)
                    raise
                self.engine.ticking.leave(loop)
        finally:
            self.engine.ticking.leave(loop)
        finish.drain(self.engine, None if self.is_guarded else finish.ALONE_SECONDS)
        return result

    def run_guarded(self, main: Main[T], *args: object) -> T:
        """The same, where a failure must not leave other ranks waiting."""

        async def guarded() -> T:
            self.signals.rearm()  # asyncio.Runner has set its own handler of SIGINT
            return await main(self.world, *args)

        try:
            return self.run(guarded())
        except SystemExit as error:
            raise exits.Exit(error.code) from None
        finally:
            self.signals.rearm()

    def _limit_the_rest(self, error: BaseException, limits: contextlib.ExitStack) -> None:
        """`finally` blocks of other tasks, and their threads, are left: they may wait for ranks that wait for us."""
        reason, status = _failure(error)
        if self.is_guarded and status:
            limits.callback(self.ender.end_after(FINALLY_SECONDS, reason, status).cancel)

    # ------------------------------------------------------------------ ending

    def finish(self) -> None:
        """Drain, agree, stop; once, and whoever calls it meanwhile in another thread waits for that."""
        with _ending:
            if not self.is_closed:
                self._finish()

    def _finish(self) -> None:
        if self.is_guarded:
            self.hooks.report_forgotten_tasks()
        self.control.announce_finished()
        self._drain()
        finish.agree(self.engine)
        finish.drain_left(self.engine)
        record_completion()
        self.disarm()
        self.control.stop()
        self.engine.stop_thread()
        finish.refuse_all(self.engine, FINALIZED)
        with self.engine.lock:  # no thread is to drive meanwhile
            self._stop()
        self.engine.flush()

    def _stop(self) -> None:
        self.engine.ticking.detach()
        finish.close_all(self.engine, FINALIZED)
        finish.drop_all(self.engine, FINALIZED)
        current.set_engine(None)
        self.is_closed = True
        from mpdist.transport import mpi

        mpi.stop()

    def _drain(self) -> None:
        if self.is_guarded:
            finish.drain(self.engine)
        elif not finish.drain(self.engine, finish.ALONE_SECONDS):
            self.ender.end("it ended with operations that nobody can complete", 1)

    def at_exit(self) -> None:
        """The program has ended: by its last line, by sys.exit, or by a signal."""
        if self.is_closed or self.pid != os.getpid():
            return
        try:
            if self.is_guarded:
                self._end_if_failed()
            self.finish()
        except KeyboardInterrupt:
            self.ender.end(*INTERRUPT, patient=True)
        except BaseException as error:
            if self.signals.reason:
                self.signals.end()
            self.ender.end(f"the end of the job failed: {describe_error(error)}", 1)

    def before_joins(self) -> None:
        """The main thread has ended; Python waits for the others, and those may wait for ranks that wait for us."""
        if self.is_closed or self.pid != os.getpid() or self._why_it_failed() is None:
            return
        end = monotonic() + FINALLY_SECONDS
        while has_joined_threads():
            if monotonic() > end:
                self._end_if_failed()
            sleep(LOOK_SECONDS)

    def _end_if_failed(self) -> None:
        if self.signals.reason:
            self.signals.end()
        failure = self._why_it_failed()
        if failure is not None:
            self.ender.end(*failure, patient=failure == INTERRUPT)

    def _why_it_failed(self) -> tuple[str, int] | None:
        """Reason and status, if the program has ended so."""
        status = exit_code(exits.status())
        if status:
            return exits.words(), status
        error = exits.uncaught()  # a hook of the program's own, in the place of ours, has been told of it
        if error is None:
            return None
        return _failure(error)

    def on_stuck(self, reason: str) -> None:
        """Some rank waits for ranks that have finished."""
        self.ender.end(reason, exit_code(exits.status()) or 1)

    def disarm(self) -> None:
        """From now on nothing here ends the job."""
        self.ender.is_disarmed = True
        self.hooks.remove()
        self.signals.remove()
        if self.is_guarded:
            exits.remove()

    def disarm_child(self) -> None:
        """This is a forked child, with a copy of everything."""
        refusal = (
            f"this process was forked from rank {self.world.rank} of {self.world.size} (pid {self.pid}), and MPI does "
            "not survive a fork: communicate in the rank itself"
        )
        fork.disarm_engine(self.engine, refusal)
        self.disarm()
        from mpdist.transport import mpi

        if mpi.finalizes_by_itself():
            exits.install()
            fork.prevent_finalize(exits.status)


# ---------------------------------------------------------------------- the start


def _start() -> Job:
    global _job
    with _starting:
        if _job is None:
            fork.refuse_child()
            _job = _launch()
    if _job.pid != os.getpid():
        raise UsageError(
            f"mpdist was started before this process was forked from pid {_job.pid}, and MPI does not survive a fork: "
            "communicate in the rank itself"
        )
    if _job.is_closed:
        raise UsageError("mpdist was finalized, and MPI cannot be started a second time in one process")
    return _job


def _launch() -> Job:
    """Start MPI and put everything together; collective."""
    record_attempt()
    from mpdist.transport import mpi

    record_start()
    transport = mpi.start()
    try:
        return _put_together(transport)
    except UsageError:  # on all ranks
        raise
    except Exception as error:
        if transport.size > 1:
            _end_start(transport, error)
        raise


def _end_start(transport: Transport, error: Exception) -> NoReturn:
    """The start has failed on this rank, perhaps on it alone: the others wait for it within MPI."""
    board = Board(bytearray(board_bytes(transport.size)), transport.rank, [transport.rank])
    ender = Ender(transport.rank, transport.size, board, describe_pending)
    ender.end(f"mpdist could not start: {describe_error(error)}", 1, traceback.print_exc)


def _put_together(transport: Transport) -> Job:
    from mpdist.transport import mpi

    mismatch = launch_mismatch(os.environ, transport.size, mpi.family())
    if mismatch is not None:
        raise UsageError(mismatch)
    fork.mark_owner()
    config = _common_config(transport)
    node = transport.split_node(config.ranks_per_node)
    engine = _make_engine(transport, node, config, mpi.is_threaded())
    if node.rank == 0:  # all ranks have been heard: MPI has started on them
        unlink_segments()
    world = Communicator(engine, transport, "world", transport.world_ranks())
    world._node = Communicator(engine, node, f"world/node{min(node.world_ranks())}", node.world_ranks())
    job = _guard(engine, world, node, config)
    current.set_engine(engine)
    fork.on_fork(job.disarm_child)
    atexit.register(job.at_exit)
    job.control.start()
    if config.progress_thread:
        engine.start_thread()
    record_opening()
    return job


def _common_config(transport: Transport) -> Config:
    """Rank 0's configuration, on all ranks: what steers an algorithm must be the same everywhere."""
    mine: Config | str | None = None
    if transport.rank == 0:
        try:
            mine = Config.read()
        except UsageError as error:
            mine = str(error)
        for line in unknown_variables():
            print(f"mpdist: {line}", file=sys.stderr, flush=True)
    first: Config | str = transport.all_gather_now(mine)[0]
    if isinstance(first, str):
        raise UsageError(first)
    return first


def _make_engine(transport: Transport, node: Transport, config: Config, is_threaded: bool) -> Engine:
    doorbell = connect(transport, node) if transport.size > 1 else SilentDoorbell(1)
    own = Place.here()
    places = transport.all_gather_now(own)
    near = crowd(own, places)
    engine = Engine(policy(*near), doorbell)
    engine.crowd = near
    engine.nodes = transport.all_gather_now(min(node.world_ranks()))
    if node.size > 1:
        at = {rank: place for place, rank in enumerate(node.world_ranks())}
        engine.roll = Roll(shared_bytes(node, roll_bytes(node.size)), at)
    if config.shared_memory and transport.size > 1:
        engine.shared = neighbours.connect(node, config.shared_memory_dir, config.reach)
    shared = engine.shared
    able = transport.all_gather_now((shared is not None, shared is not None and shared.reach is not None))
    engine.is_sharing = all(shares for shares, _ in able)
    if shared is not None and not all(reaches for _, reaches in able):
        shared.reach = None  # rounds must be as long on every node
    cores = frozenset().union(*(places[rank].cores for rank in node.world_ranks()))
    engine.thresholds = _thresholds(transport, engine.nodes, config, len(cores))
    engine.is_threaded = is_threaded
    engine.awareness = Awareness("no" if config.debug else config.cuda_aware)  # debug looks into all memory
    engine.allow_pickle = config.allow_pickle
    engine.keep_bytes = config.keep_memory * 1024**2
    engine.has_ipc = config.ipc
    engine.maker = transport.dup()
    engine.meeting = Channel(engine, transport.dup(), "meeting", range(transport.size))
    if config.debug:
        install_debug(engine)
    return engine


def _thresholds(transport: Transport, nodes: Sequence[int], config: Config, cores: int) -> Thresholds:
    """Rank 0's table, on all ranks."""
    from mpdist.transport import mpi

    mine: Thresholds | str | None = None
    if transport.rank == 0:
        try:
            ranks = max(Counter(nodes).values())
            tables = read_thresholds(config.algorithm, config.tuning, mpi.family(), ranks, cores)
            if tables.note:
                print(f"mpdist: {tables.note}", file=sys.stderr, flush=True)
            mine = replace(tables, is_given_devices=len(set(nodes)) > 1 and _is_given_devices(config))
        except UsageError as error:
            mine = str(error)
    first: Thresholds | str = transport.all_gather_now(mine)[0]
    if isinstance(first, str):
        raise UsageError(first)
    return first


def _is_given_devices(config: Config) -> bool:
    """Whether MPI may be given the memory of GPUs; what MPI says of itself is the same on all ranks."""
    if config.debug or config.cuda_aware == "no":
        return False
    return config.cuda_aware != "auto" or cuda_support(library_path()) == "yes"


def _guard(engine: Engine, world: Communicator, node: Transport, config: Config) -> Job:
    """Let failures on this rank end the job."""
    memory = shared_bytes(node, board_bytes(world.size)) if world.size > 1 else bytearray(board_bytes(1))
    ender = Ender(world.rank, world.size, Board(memory, world.rank, node.world_ranks()), describe_pending)
    hooks, signals = Hooks(ender), Signals(ender)
    own = world._channel.transport.dup() if world.size > 1 and engine.is_threaded else None
    control = Control(engine, own, config, lambda reason: job.on_stuck(reason))
    job = Job(engine, world, control, ender, hooks, signals, world.size > 1, os.getpid())
    if job.is_guarded:
        _call_before_joins(job.before_joins)
        hooks.install()
        signals.install()
        exits.install()
        end_with_launcher()
    return job


def _call_before_joins(fn: Callable[[], None]) -> None:
    """Call it when the main thread has ended, before Python waits for other threads; atexit comes after."""
    import concurrent.futures.thread  # noqa: F401  # it waits for its threads; what is registered last is called first

    with contextlib.suppress(AttributeError, RuntimeError):  # private; or the main thread had ended before
        threading._register_atexit(fn)  # type: ignore[attr-defined]


def _failure(error: BaseException) -> tuple[str, int]:
    """What ends `run`, and the status of that; 0 for a SystemExit that says so, and for one of a signal's."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPT
    if not isinstance(error, SystemExit):
        return describe_error(error), 1
    if isinstance(error, Terminated):
        return "", 0
    name = "sys.exit" if isinstance(error, exits.Exit) else "SystemExit"
    return f"{name}({error.code!r})", exit_code(error.code)


def _check_main(main: object, args: Sequence[object]) -> None:
    if inspect.iscoroutine(main):
        name = main.__name__
        main.close()
        raise UsageError(f"run() takes the function, not the coroutine: write mpdist.run({name}), not {name}()")
    call = getattr(type(main), "__call__", None)  # noqa: B004  # an object may be called like a coroutine function
    if not (inspect.iscoroutinefunction(main) or inspect.iscoroutinefunction(call)):
        raise UsageError(f"run() takes a coroutine function, `async def main(world)`, got {main!r}")
    _check_arguments(main, args)  # type: ignore[arg-type]  # it is callable
    if asyncio._get_running_loop() is not None:
        raise UsageError("run() was called in a running event loop: write `await main(mpdist.init())`")


def _check_arguments(main: Callable[..., object], args: Sequence[object]) -> None:
    """What is passed to asyncio.run takes no world, and is soon passed to run()."""
    signature = inspect.signature(main, follow_wrapped=False)  # what a decorator takes, not what it wraps
    try:
        signature.bind(None, *args)
    except TypeError as error:
        name = getattr(main, "__name__", repr(main))
        passed = ", ".join(["world", *map(repr, args)])
        raise UsageError(
            f"run() passes the world first: it would call {name}({passed}), but {name} takes {signature}: {error}"
        ) from error
