"""Unwaited: results of functional collectives for which nobody has waited yet, as arguments of other operations.

Such a tensor has no memory of its own and is refused, before anything is posted. Only then are they looked for, and the
operation is called again with what they hold: so it costs nothing where there are none.
"""

from __future__ import annotations

import sys
from typing import Any

_MODULE = "torch.distributed._functional_collectives"


def waited_for(arguments: Any) -> Any:
    """The arguments, with such tensors replaced, in tuples and lists too; None if there are none."""
    module = sys.modules.get(_MODULE)  # imported by whoever has made one
    return None if module is None else _replaced(arguments, module.AsyncCollectiveTensor)


def _replaced(value: Any, kind: Any) -> Any:
    if isinstance(value, kind):
        return value.trigger_wait()
    if not isinstance(value, tuple | list):
        return None
    parts = [_replaced(part, kind) for part in value]
    if all(part is None for part in parts):
        return None
    return [part if new is None else new for part, new in zip(value, parts, strict=True)]
