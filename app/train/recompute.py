"""Products whose factor is cheap to make again: what the backward pass needs of it is not kept.

At K unroll steps the activations of all steps wait for the backward pass. A norm or an activation in front of a product
is a short elementwise pass; kept, it would be a third of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from app.train.fusion import rms_norm, swiglu


def norm_linear(x: Tensor, gain: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) @ weight^T: [N, H], [H], [M, H] -> [N, M]; keeps x and not its norm."""
    out: Tensor = _NormLinear.apply(x, gain, weight, eps)
    return out


def swiglu_linear(gate_up: Tensor, weight: Tensor) -> Tensor:
    """swiglu(gate_up) @ weight^T: [N, 2 I], [H, I] -> [N, H]; keeps gate_up and not the activation."""
    out: Tensor = _SwigluLinear.apply(gate_up, weight)
    return out


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
