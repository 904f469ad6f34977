"""Mistakes: what a backward shows to be wrong, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpdist.errors import CollectiveMismatch, UsageError
from mpdist.torch.data_parallel.slot import Slot

if TYPE_CHECKING:
    from mpdist.torch.data_parallel.bucket import Bucket


def fired_twice(slot: Slot) -> UsageError:
    """A gradient came once more than it should."""
    if slot.due == 0:
        return UsageError(
            f"{slot.name} got a gradient, which it did not in the first backward, but static_graph=True says that all "
            "are alike; leave static_graph out, and say find_unused_parameters=True"
        )
    return UsageError(
        f"the gradient of {slot.name} became ready twice in one backward. Reentrant checkpointing does that to a "
        "parameter that several checkpointed parts use: take checkpoint(..., use_reentrant=False), or say "
        "static_graph=True if each backward does the same"
    )


def has_other_parameters(where: str, name: str) -> UsageError:
    """None of the module's parameters is one that is averaged."""
    return UsageError(
        f"DistributedDataParallel on {where}: all parameters that are trained, {name} the first, are other tensors "
        "than when the module was wrapped, as load_state_dict(assign=True) makes them, or are new; wrap the module "
        "after that"
    )


def no_entrance(where: str, output: str, name: str) -> UsageError:
    """A gradient came although nothing that forward returned could have one."""
    return UsageError(
        f"DistributedDataParallel on {where}: forward returned {output}, in which nothing requires grad, so this rank "
        f"has taken part in the average with zeros; now {name} gets a gradient. Return what backward begins with, in "
        "a list, a dict or a dataclass"
    )


def hidden_entrance(where: str, name: str) -> UsageError:
    """The first gradient comes from within a checkpoint, whose end is not that of backward."""
    return UsageError(
        f"DistributedDataParallel on {where}: the gradient of {name} comes from a reentrant checkpoint, before "
        "backward has come to an output of the module, so its end cannot be seen. Return what backward begins with, in "
        "a list, a dict or a dataclass, or take checkpoint(..., use_reentrant=False)"
    )


def compiled_backward(where: str) -> UsageError:
    """Backward has been compiled, and tells nobody when it is over."""
    return UsageError(
        f"DistributedDataParallel on {where}: this backward is one of torch's compiled autograd, whose end cannot be "
        "seen, so gradients would stay this rank's own; leave torch._dynamo.config.compiled_autograd False, for "
        "torch.compile of the module compiles its backward without that"
    )


def different_buffers(error: CollectiveMismatch) -> CollectiveMismatch:
    """Ranks do not bring the same buffers before a forward, or are not all there."""
    return CollectiveMismatch(
        f"{error}. This call gives all ranks the module's buffers before a forward: if that of the other ranks is a "
        "broadcast, too, a buffer has changed its size on some, as a cache that grows with the batch. Say "
        "broadcast_buffers=False, or keep it as a plain attribute",
        error.calls,
    )


def is_replaced(where: str, name: str) -> UsageError:
    """A parameter without a gradient is no longer the module's."""
    return UsageError(
        f"DistributedDataParallel on {where}: {name} is another tensor than when the module was wrapped, so its "
        "gradient was not averaged; wrap the module after its parts are replaced or loaded with assign=True"
    )


def no_future(where: str, hook: object, returned: object) -> UsageError:
    """A communication hook returned something else."""
    return UsageError(
        f"DistributedDataParallel on {where}: the communication hook {_name(hook)} returned a "
        f"{type(returned).__name__}; it must return a torch.futures.Future of the reduced tensor"
    )


def future_of(where: str, hook: object, bucket: Bucket) -> str:
    """The Future that a communication hook returned, in words."""
    others = f" and {len(bucket.slots) - 1} more" if len(bucket.slots) > 1 else ""
    return (
        f"DistributedDataParallel on {where}: the Future that the communication hook {_name(hook)} returned for bucket "
        f"{bucket.index()}, the gradients of {bucket.slots[0].name}{others},"
    )


def _name(function: object) -> str:
    return getattr(function, "__qualname__", repr(function))


def uneven_forwards(where: str, mine: int, ranks: int, total: int) -> str:
    """Ranks made different numbers of forwards for one backward."""
    return (
        f"DistributedDataParallel on {where}: this rank made {mine} forwards for this backward, all {ranks} ranks "
        f"together {total}. A rank that skips a backward averages its next one with this one of the others, and is "
        "missing at the end; use join() for uneven inputs"
    )


def cannot_shadow_norm(where: str, name: str) -> UsageError:
    """A rank without inputs is to take part in what it makes no forward for."""
    return UsageError(
        f"DistributedDataParallel on {where}: this rank has no inputs left, and {name} normalises over the batches of "
        "all ranks in their forwards, where this rank would be missing: give all ranks as many batches "
        "(drop_last=True), end all with the first, by join(throw_on_early_termination=True), or train with plain "
        "batch norm"
    )
