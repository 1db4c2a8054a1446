"""torch's settings of a program that calls the Python API, which count nowhere else in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")


def with_torch_defaults(call: Callable[ParamsT, ResultT]) -> Callable[ParamsT, ResultT]:
    """The call, within which the program's default device and autocast do not hold."""

    @wraps(call)
    def wrapper(*args: ParamsT.args, **kwargs: ParamsT.kwargs) -> ResultT:
        import torch

        with ExitStack() as settings:
            # In this context every operation takes some microseconds more.
            if not _makes_tensors_on_cpu():
                settings.enter_context(torch.device("cpu"))
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    settings.enter_context(torch.autocast(kind, enabled=False))
            return call(*args, **kwargs)

    return wrapper


def _makes_tensors_on_cpu() -> bool:
    import torch

    try:
        return torch.empty(0).device.type == "cpu"
    except (AssertionError, RuntimeError):  # a device that this machine lacks
        return False
