"""ProcessGroup: the backend "mpdist", put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpdist.errors import MpdistError
from mpdist.torch.coalesced import Coalesced
from mpdist.torch.compiling import leave_alone
from mpdist.torch.errors import OperationFailed, OperationTimeout, WrongCall, translated
from mpdist.torch.names import with_all_names
from mpdist.torch.point_to_point import PointToPoint
from mpdist.torch.unwaited import waited_for


class ProcessGroup(Coalesced, PointToPoint):
    """A torch process group over an mpdist Communicator."""


def _with_torch_errors(operation: Callable[..., Any]) -> Any:
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return operation(*args, **kwargs)
        except (OperationTimeout, OperationFailed):
            raise
        except (MpdistError, RuntimeError) as error:
            plain = waited_for(args)
            if plain is None:
                if isinstance(error, WrongCall) or not isinstance(error, MpdistError):
                    raise
                raise translated(error) from error
        return called(*plain, **kwargs)

    return leave_alone(called)


with_all_names(ProcessGroup, _with_torch_errors)
