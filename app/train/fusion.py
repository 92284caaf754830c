"""Elementwise functions that a GPU should run as one kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def fused_on_gpu(function: Callable[P, R]) -> Callable[P, R]:
    """`function` compiled where its first argument is on a GPU, and as it is elsewhere.

    Compiling takes seconds at a function's first call. On the CPU the parts are short and a compiler may be absent.
    """
    compiled: Callable[P, R] | None = None

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal compiled
        first = args[0]
        if not isinstance(first, torch.Tensor) or not first.is_cuda:
            return function(*args, **kwargs)
        if compiled is None:
            compiled = torch.compile(function, dynamic=True)
        return compiled(*args, **kwargs)

    return call
