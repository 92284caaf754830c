"""What the backward pass makes again instead of keeping it.

At K unroll steps the activations of all steps wait for the backward pass. A norm or an activation in front of a product
is a short elementwise pass; kept, it would be a third of them. A GPU fuses it and always makes it again. On a CPU it is
several passes over its rows, so there it is kept where the budget has room (`keeps`). Whole parts of the unroll are
made again where the rest is too much (app/train/activations.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from app.train.fusion import rms_norm, swiglu
from app.train.weights import Weight, linear

R = TypeVar("R")


def made_again(function: Callable[..., R], *args: Any) -> R:
    """`function`, of which only the tensors among `args` are kept: it runs once more in the backward pass.

    It must draw no random numbers. Gradients reach whatever it reads, parameters too.
    """
    made: R = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return made


def norm(x: Tensor, gain: Tensor, eps: float, keeps: bool = False) -> Tensor:
    """rms_norm(x): [N, H], [H] -> [N, H]; keeps x in its own dtype, or x / rms(x) in at least fp32."""
    out: Tensor = (_KeptNorm if keeps else _Norm).apply(x, gain, eps)
    return out


def norm_linear(x: Tensor, gain: Tensor, weight: Weight, eps: float, keeps: bool = False) -> Tensor:
    """rms_norm(x) @ weight^T: [N, H], [H], [M, H] -> [N, M]; keeps x and not its norm, or what `norm` does and that."""
    if keeps:
        return linear(norm(x, gain, eps, keeps), weight)
    out: Tensor = _NormLinear.apply(x, gain, weight.value, weight, eps)
    return out


def swiglu_linear(gate_up: Tensor, weight: Weight, keeps: bool = False) -> Tensor:
    """swiglu(gate_up) @ weight^T: [N, 2 I], [H, I] -> [N, H]; keeps gate_up and not the activation, or both."""
    if keeps:
        return linear(swiglu(gate_up), weight)
    out: Tensor = _SwigluLinear.apply(gate_up, weight.value, weight)
    return out


class _KeptNorm(torch.autograd.Function):
    """With u = x / rms(x) and y = u * gain, dx = (dy * gain - u * mean(dy * gain * u)) / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        unit = x.to(wide, copy=True)  # [N, H]
        inverse = unit.square().mean(-1, keepdim=True).add_(eps).rsqrt_()  # [N, 1] 1 / rms(x)
        unit.mul_(inverse)
        ctx.save_for_backward(unit, inverse, gain)
        ctx.dtype = x.dtype
        return (unit * gain.to(wide)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        unit, inverse, gain = ctx.saved_tensors
        d_normed = grads[0].to(unit.dtype)  # [N, H]
        product = d_normed * unit  # [N, H]
        d_gain = product.sum(0).to(gain.dtype)
        d_unit = d_normed * gain.to(unit.dtype)  # [N, H]
        along = product.mul_(gain.to(unit.dtype)).mean(-1, keepdim=True)  # [N, 1]
        return d_unit.addcmul_(unit, along, value=-1.0).mul_(inverse).to(ctx.dtype), d_gain, None


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
    def forward(ctx: Any, x: Tensor, gain: Tensor, value: Tensor, weight: Weight, eps: float) -> Tensor:
        ctx.save_for_backward(x, gain, value)
        ctx.weight, ctx.eps = weight, eps
        return F.linear(rms_norm(x, gain, eps), value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, value = ctx.saved_tensors
        with torch.enable_grad():
            inputs = x.detach().requires_grad_(), gain.detach().requires_grad_()
            normed = rms_norm(*inputs, ctx.eps)  # [N, H]
        ctx.weight.gradient.add(ctx.weight.rows, grads[0], normed.detach())
        return *torch.autograd.grad(normed, inputs, grads[0] @ value), None, None, None


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, value: Tensor, weight: Weight) -> Tensor:
        ctx.save_for_backward(gate_up, value)
        ctx.weight = weight
        return F.linear(swiglu(gate_up), value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, value = ctx.saved_tensors
        with torch.enable_grad():
            source = gate_up.detach().requires_grad_()
            active = swiglu(source)  # [N, I]
        ctx.weight.gradient.add(ctx.weight.rows, grads[0], active.detach())
        (d_gate_up,) = torch.autograd.grad(active, source, grads[0] @ value)
        return d_gate_up, None, None
