"""Device messages: from and to arrays on a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mpdist.comm.mirror import Mirror
from mpdist.comm.staging import Staging, pinned_of
from mpdist.comm.ways import Way, way_of_message
from mpdist.progress.device_receive import DeviceReceive
from mpdist.progress.marks import Attended
from mpdist.progress.outbox import Outbox
from mpdist.progress.receive import Receive
from mpdist.progress.sending import send
from mpdist.progress.shown.show import show
from mpdist.progress.shown.showing import may_show
from mpdist.progress.staged_receive import ReceiveBeside, StagedReceive

if TYPE_CHECKING:
    from mpdist.memory import Buffer
    from mpdist.memory.mark import Mark
    from mpdist.progress.channel import Channel
    from mpdist.progress.message import Message
    from mpdist.progress.work import Work


def send_from_device(channel: Channel, x: Buffer, dst: int, tag: int) -> Work[None]:
    """Post a message of an array on a device; the other arguments are checked."""
    channel.check_usable("send")
    if dst != channel.rank and _way("send", channel, x) is Way.GIVEN:
        return _send_given(channel, x, dst, tag)
    return show(channel, x, dst, tag) or _send_staged(channel, x, dst, tag)


def receive_on_device(
    channel: Channel, x: Buffer, src: int, tag: int, post: Callable[[Receive], Work[Message]] | None = None
) -> Work[Message]:
    """Receive a message into an array on a device; the arguments are checked.

    Args:
        post: posts the receive, instead of the channel's inbox.
    """
    post = post or channel.inbox.receive
    staging = Staging(channel.engine, x.device)
    is_given = _way("recv", channel, x) is Way.GIVEN
    if is_given or may_show(channel, x.nbytes):
        host = partial(Mirror, staging, x)
        return post(DeviceReceive(channel, x, src, tag, staging.accelerator, host, is_given))
    mirror = staging.mirror(x)

    def copy_in(nbytes: int) -> Mark:
        return staging.accelerator.copy_in(mirror.octets[:nbytes], x, 0)

    return StagedReceive(post(ReceiveBeside(channel, mirror, src, tag)), copy_in, x.owner)


def _way(op: str, channel: Channel, x: Buffer) -> Way:
    return way_of_message(op, x.nbytes, lambda op: channel.engine.awareness.takes(op, x.device))


def _send_given(channel: Channel, x: Buffer, dst: int, tag: int) -> Work[None]:
    """MPI reads the array itself, when it has been computed."""
    accelerator = pinned_of(channel.engine, x.device).accelerator
    channel.engine.attend(accelerator)
    channel.outbox = channel.outbox or Outbox(channel)
    channel.outbox.hold(Attended(accelerator.ready(x), accelerator))
    return send(channel, x, dst, tag)


def _send_staged(channel: Channel, x: Buffer, dst: int, tag: int) -> Work[None]:
    staging = Staging(channel.engine, x.device)
    mirror = staging.mirror(x, is_source=True)
    marks = staging.copy_out()
    staging.forget()
    try:
        for mark in marks:
            if dst == channel.rank:  # a message to this rank is complete at once
                mark.wait()
            else:
                channel.outbox = channel.outbox or Outbox(channel)
                channel.outbox.hold(mark)
        return send(channel, mirror, dst, tag)
    except BaseException:
        for mark in marks:  # the copy still writes
            mark.wait()
        raise
