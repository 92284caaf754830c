"""What the backward pass makes again instead of keeping it.

At K unroll steps the activations of all steps wait for the backward pass. A norm or an activation in front of a product
is a short elementwise pass; kept, it would be a third of them: it is always made again. Whole parts of the unroll are
where the rest is too much (app/train/activations.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from app.train.fusion import rms_norm, swiglu

R = TypeVar("R")


def made_again(function: Callable[..., R], *args: Any) -> R:
    """`function`, of which only the tensors among `args` are kept: it runs once more in the backward pass.

    It must draw no random numbers. Gradients reach whatever it reads, parameters too.
    """
    made: R = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return made


def norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """rms_norm(x): [N, H], [H] -> [N, H]; keeps x in its own dtype and not in fp32."""
    out: Tensor = _Norm.apply(x, gain, eps)
    return out


def norm_linear(x: Tensor, gain: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) @ weight^T: [N, H], [H], [M, H] -> [N, M]; keeps x and not its norm."""
    out: Tensor = _NormLinear.apply(x, gain, weight, eps)
    return out


def swiglu_linear(gate_up: Tensor, weight: Tensor) -> Tensor:
    """swiglu(gate_up) @ weight^T: [N, 2 I], [H, I] -> [N, H]; keeps gate_up and not the activation."""
    out: Tensor = _SwigluLinear.apply(gate_up, weight)
    return out


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, gain)
        ctx.eps = eps
        return rms_norm(x, gain, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gain = ctx.saved_tensors
        with torch.enable_grad():
            inputs = x.detach().requires_grad_(), gain.detach().requires_grad_()
            normed = rms_norm(*inputs, ctx.eps)  # [N, H]
        return *torch.autograd.grad(normed, inputs, grads[0]), None


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, gain, weight)
        ctx.eps = eps
        return F.linear(rms_norm(x, gain, eps), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, weight = ctx.saved_tensors
        with torch.enable_grad():
            inputs = x.detach().requires_grad_(), gain.detach().requires_grad_()
            normed = rms_norm(*inputs, ctx.eps)  # [N, H]
        d_x, d_gain = torch.autograd.grad(normed, inputs, grads[0] @ weight)
        return d_x, d_gain, grads[0].T @ normed.detach(), None


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        return F.linear(swiglu(gate_up), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate_up, weight = ctx.saved_tensors
        with torch.enable_grad():
            source = gate_up.detach().requires_grad_()
            active = swiglu(source)  # [N, I]
        (d_gate_up,) = torch.autograd.grad(active, source, grads[0] @ weight)
        return d_gate_up, grads[0].T @ active.detach()
