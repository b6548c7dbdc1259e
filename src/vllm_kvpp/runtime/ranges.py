"""Named ranges in a profile, which cost next to nothing while nobody makes one."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

WAIT_RANGE = "kvpp.wait"
EXCHANGE_RANGE = "kvpp.exchange"
_NOTHING: AbstractContextManager[Any] = nullcontext()


def profile_range(name: str) -> AbstractContextManager[Any]:
    """Enclose what shows under `name` in torch's profiler.

    A range takes several microseconds where no profiler is at work, too, and each layer has some. torch says in a
    variable of its own, made for such checks, whether one is; where it does not, ranges are always made.
    """
    is_profiled = getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    return torch.profiler.record_function(name) if is_profiled else _NOTHING
