"""Elementwise functions that a GPU should run as one kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

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


@fused_on_gpu
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of [N, H] in at least fp32 with gain [H]; the result has the dtype of x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps).to(x.dtype)


@fused_on_gpu
def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [N, 2 I] -> [N, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
