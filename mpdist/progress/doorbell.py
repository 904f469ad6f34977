"""Doorbell: wakes a peer that sleeps.

A rank that waits for long sleeps, and says so in a byte that all ranks of its
node see. Whoever sends it something looks at that byte, one load, and only if it
is set rings: a datagram, for which the sleeper's event loop listens. Ranks of
other nodes can't be looked at, they are rung without looking, at most once per
millisecond. A bell that is lost costs no more than the sleeper's timer.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import socket
import sys
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from mpdist.transport.sharing import shared_bytes

if TYPE_CHECKING:
    from mpdist.transport.mpi import Transport

AWAKE, ASLEEP, REMOTE = 0, 1, 2
WAITING = 1
REMOTE_SECONDS = 0.001
"""A ring keeps its peer hot for at least so long, so ringing more often is of no use."""

SELECTABLE = 1024
"""select() takes descriptors below this, by microseconds; poll() takes all, but sleeps whole milliseconds."""

Address = Any


class Doorbell:
    """The bells of all ranks, and the byte that says who sleeps.

    Attributes:
        flags: one byte for each rank of the world: AWAKE, ASLEEP, or REMOTE for ranks of other nodes. As many follow,
            which are WAITING for a rank of this node with a thread that has waited in vain for some time.
        has_rung: somebody was rung since the last `give_way`.
        rings_all: all peers are of this node, so that no ring is lost on the way.
    """

    flags: mmap.mmap | bytearray
    has_rung = False
    rings_all = False

    def fileno(self) -> int:
        """What a sleeper's loop listens on; -1 for none."""
        raise NotImplementedError

    def sleep(self) -> None:
        """Tell the peers that this rank sleeps."""
        raise NotImplementedError

    def wake(self) -> None:
        """Tell the peers that this rank is awake."""
        raise NotImplementedError

    def quiet(self) -> None:
        """Forget the rings so far."""

    def tell_waiting(self, is_waiting: bool) -> None:
        """Tell the peers of this node whether a thread of this rank waits, and nothing moves."""

    def is_awaited(self) -> bool:
        """Whether a rank of this node waits, perhaps for this one."""
        return False

    def ring(self, rank: int) -> None:
        """Wake the rank of the world, whose flag is not AWAKE; best before what it is woken for is posted."""
        raise NotImplementedError

    def give_way(self) -> None:
        """Let a rank that was rung run, when what it was woken for is posted.

        The kernel may place it behind this one on the same processor, where it would wait for this one's time
        slice to end: seen as wake-ups of 1.2 ms instead of 0.1.
        """
        self.has_rung = False
        os.sched_yield()

    def close(self) -> None:
        """Give the sockets and the shared byte back."""

    def ring_sleepers(self, ranks: Sequence[int]) -> None:
        """Wake those of `ranks` that may sleep."""
        flags = self.flags
        for rank in ranks:
            if flags[rank]:
                self.ring(rank)

    def nap(self, seconds: float, look: Callable[[], bool]) -> bool:
        """Sleep outside a loop until rung; True if rung, or if `look()` found something at the last moment."""
        self.sleep()
        try:
            if look():
                return True
            fd = self.fileno()
            try:
                return _has_come(fd, seconds)
            except OSError:
                if self.fileno() == fd:
                    raise
                return True  # closed meanwhile by finalize() in another thread, which has ended what is waited for
        finally:
            self.wake()
            self.quiet()


class SilentDoorbell(Doorbell):
    """For a rank without peers: nobody can ring."""

    def __init__(self, size: int = 1) -> None:
        self.flags = bytearray(2 * size)

    def fileno(self) -> int:
        return -1

    def sleep(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def ring(self, rank: int) -> None:
        pass


class DatagramDoorbell(Doorbell):
    """Datagram sockets: of the UNIX family within a node, UDP between nodes."""

    def __init__(
        self,
        rank: int,
        flags: mmap.mmap,
        sockets: list[socket.socket],
        addresses: list[Address],
        neighbours: Sequence[int],
    ) -> None:
        self.flags = flags
        self._rank = rank
        self._size = len(addresses)
        self._neighbours = neighbours
        self.rings_all = len(neighbours) == self._size - 1
        self._sockets = sockets
        self._addresses = addresses
        self._rung_at = [0.0] * len(addresses)
        self._poller = select.epoll() if len(sockets) > 1 and hasattr(select, "epoll") else None
        if self._poller is not None:
            for each in sockets:
                self._poller.register(each, select.EPOLLIN)

    def fileno(self) -> int:
        if self._poller is not None:
            return self._poller.fileno()
        return self._sockets[-1].fileno() if self._sockets else -1

    def sleep(self) -> None:
        self.flags[self._rank] = ASLEEP

    def wake(self) -> None:
        self.flags[self._rank] = AWAKE

    def quiet(self) -> None:
        for each in self._sockets:
            _drain(each)

    def tell_waiting(self, is_waiting: bool) -> None:
        self.flags[self._size + self._rank] = is_waiting * WAITING

    def is_awaited(self) -> bool:
        flags, size = self.flags, self._size
        return any(flags[size + rank] or flags[rank] == ASLEEP for rank in self._neighbours)

    def ring(self, rank: int) -> None:
        if self.flags[rank] == REMOTE:
            now = monotonic()
            if now - self._rung_at[rank] < REMOTE_SECONDS:
                return
            self._rung_at[rank] = now
        else:
            self.flags[rank] = AWAKE  # one ring is enough, whoever else sends meanwhile
        _send(self._sockets, self._addresses[rank])
        self.has_rung = True

    def close(self) -> None:
        poller, sockets, flags = self._poller, self._sockets, self.flags
        # What a thread that still waits looks at.
        self._poller, self._sockets, self.flags = None, [], bytearray(2 * self._size)
        if poller is not None:
            poller.close()
        for each in sockets:
            each.close()
        flags.close()  # type: ignore[union-attr]  # this class is made with an mmap


def _has_come(fd: int, seconds: float) -> bool:
    """Wait for something to read, no longer than that; True if there is. Below 0 is no descriptor."""
    if fd < SELECTABLE:
        return bool(select.select([fd] if fd >= 0 else [], [], [], seconds)[0])
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _drain(receiver: socket.socket) -> None:
    try:
        while True:
            receiver.recv(16)
    except BlockingIOError:
        return
    except OSError:
        if receiver.fileno() >= 0:  # else closed meanwhile, as in `nap`
            raise


def _send(sockets: list[socket.socket], address: Address) -> None:
    sender = sockets[0] if isinstance(address, bytes) or len(sockets) == 1 else sockets[1]
    try:
        sender.sendto(b"!", address)
    except OSError:  # full queue: it is rung already; gone or unreachable: its timer wakes it
        return


def connect(world: Transport, node: Transport) -> Doorbell:
    """Set the bells up; collective and blocking, at start.

    Args:
        world: all ranks.
        node: the ranks of this node.
    """
    sockets, address = _local_bell(world.rank)
    nodes_differ = any(size != world.size for size in world.all_gather_now(node.size))
    udp_address = None
    if nodes_differ or not isinstance(address, bytes):
        udp, udp_address = _udp_bell()
        sockets.append(udp)
    everyone = world.all_gather_now((address, udp_address))
    neighbours = [world_rank for world_rank, _ in node.all_gather_now((world.rank, None))]
    addresses = [near if rank in neighbours and near else far for rank, (near, far) in enumerate(everyone)]
    flags = shared_bytes(node, 2 * world.size)
    if node.rank == 0:
        for rank in range(world.size):
            flags[rank] = AWAKE if rank in neighbours else REMOTE
    node.all_gather_now(None)
    return DatagramDoorbell(world.rank, flags, sockets, addresses, [rank for rank in neighbours if rank != world.rank])


def _local_bell(rank: int) -> tuple[list[socket.socket], bytes | None]:
    """A UNIX datagram socket with a name outside the file system: nothing is left behind."""
    if sys.platform != "linux":
        return [], None
    bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    address = f"\0mpdist-{os.getuid()}-{secrets.token_hex(8)}-{rank}".encode()
    bell.bind(address)
    bell.setblocking(False)
    return [bell], address


def _udp_bell() -> tuple[socket.socket, tuple[str, int]]:
    bell = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        host = socket.gethostbyname(socket.gethostname())
        bell.bind((host, 0))
    except OSError:  # a host that does not know its own name: only ranks beside it can ring
        host = "127.0.0.1"
        bell.bind((host, 0))
    bell.setblocking(False)
    return bell, (host, bell.getsockname()[1])
