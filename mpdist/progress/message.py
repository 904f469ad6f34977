"""Messages: what a receive gives, and what has arrived without a receive."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from mpdist.errors import MpdistError, UsageError
from mpdist.memory import as_buffer
from mpdist.progress import wire

if TYPE_CHECKING:
    from mpdist.memory import Buffer, Element
    from mpdist.progress.channel import Channel
    from mpdist.progress.receive import Receive
    from mpdist.progress.shown.taking import Shown
    from mpdist.progress.work import Work

# What receives into a Buffer on a device, from a rank and with a tag, by a Receive that is then posted in this way.
ReceiveThere = Callable[["Channel", "Buffer", int, int, Callable[["Receive"], "Work[Message]"]], "Work[Message]"]


class Message:
    """A received message.

    Attributes:
        data: the array that was given, or the new one; the object of an object message.
        src: rank that sent it.
        tag: its tag.
        count: number of elements received; 1 for an object.
        nbytes: their size.
    """

    __slots__ = ("count", "data", "element", "nbytes", "src", "tag")

    def __init__(self, data: Any, src: int, tag: int, count: int, nbytes: int, element: Element | None) -> None:
        self.data = data
        self.src = src
        self.tag = tag
        self.count = count
        self.nbytes = nbytes
        self.element = element

    @property
    def dtype(self) -> object:
        """The data's dtype; "bfloat16" where NumPy has none; None for an object."""
        own = getattr(self.data, "dtype", None)
        if own is not None or self.element is None:
            return own
        return self.element.numpy if self.element.numpy is not None else self.element.name

    def __repr__(self) -> str:
        kind = "object" if self.element is None else f"{self.element.name} x {self.count}"
        return f"<Message {kind} from {self.src}, tag {self.tag}>"


class ProbedMessage(Message):
    """A message that was matched, and is received by its own `recv`, by nobody else."""

    __slots__ = ("_channel", "_incoming", "_receive_there")

    def __init__(self, channel: Channel, incoming: Incoming, receive_there: ReceiveThere) -> None:
        element = incoming.element()
        count = 1 if element is None else incoming.nbytes // element.itemsize
        super().__init__(None, incoming.src, incoming.tag, count, incoming.nbytes, element)
        self._channel = channel
        self._incoming: Incoming | None = incoming
        self._receive_there = receive_there

    def recv(self, x: object = None) -> Work[Message]:
        """Receive it into `x`, or into a new array; see Communicator.recv.

        Raises:
            UsageError: it was received already.
        """
        incoming = self._incoming
        if incoming is None:
            raise UsageError(f"{self!r} was received already")
        self._incoming = None
        channel = self._channel
        try:
            buffer = None if x is None else as_buffer(x, writable=True)
            if buffer is None or buffer.device.is_host:
                return channel.inbox.receive_probed(incoming, buffer)
            return self._receive_there(
                channel, buffer, self.src, self.tag, partial(channel.inbox.take_probed, incoming)
            )
        except MpdistError as error:
            self._incoming = incoming
            if isinstance(error, UsageError):
                raise type(error)(f"recv on {self._channel.where()}: {error}") from error.__cause__
            raise

    def _restored(self, incoming: Incoming) -> None:
        self._incoming = incoming


class Incoming:
    """A message that MPI has matched for us and that is not received yet.

    Attributes:
        handle: MPI's matched message; None once its data were received.
        code: element code or wire.OBJECT...; of an array in pieces the element's code.
        nbytes: of the whole; of an object in pieces of its first message.
        parts: matched pieces, in order; None if it has none.
        head: of an object in pieces its first message, where that was received already.
        request: what its receive has posted: MPI's request, or its Pieces.
        result: the data, where a receive that got them was cancelled afterwards.
        arriving: the receive into which it still comes, though that was given up; whoever gets it waits for that.
        lost: why it will never come.
        shown: how this rank takes the data, where the sender lets it; see ShownIncoming.
    """

    shown: Shown | None = None

    __slots__ = (
        "arriving", "code", "handle", "head", "lost", "nbytes", "order", "parts", "probed", "request", "result", "src",
        "tag",
    )  # fmt: skip

    def __init__(self, handle: Any, src: int, tag: int, code: int, nbytes: int) -> None:
        self.handle = handle
        self.src = src
        self.tag = tag
        self.code = code
        self.nbytes = nbytes
        self.order = 0
        self.parts: list[tuple[Any, int]] | None = None
        self.head: Any = None
        self.request: Any = None
        self.arriving: Work[Message] | None = None
        self.lost = ""
        self.result: Message | None = None
        self.probed: ProbedMessage | None = None

    def forget(self) -> None:
        """What it consisted of has been received."""
        self.handle = self.parts = self.head = self.request = None

    @property
    def is_object(self) -> bool:
        return self.code in (wire.OBJECT, wire.OBJECT_IN_PIECES)

    def element(self) -> Element | None:
        """Its element type; None for an object."""
        from mpdist.memory import BY_CODE

        return None if self.is_object else BY_CODE[self.code]

    def describe(self) -> str:
        """`float32 x 10 from rank 1, tag 5`."""
        element = self.element()
        what = (
            f"an object of {self.nbytes} bytes"
            if element is None
            else f"{element.name} x {self.nbytes // element.itemsize}"
        )
        return f"{what} from rank {self.src}, tag {self.tag}"


class ShownIncoming(Incoming):
    """A message whose data are on a device of the sender, where this rank takes them; ordinary ones pay nothing."""

    __slots__ = ("shown",)

    def __init__(self, shown: Shown, src: int, tag: int, code: int, nbytes: int) -> None:
        super().__init__(None, src, tag, code, nbytes)
        self.shown: Shown | None = shown
