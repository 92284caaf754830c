"""Weights in the compute dtype, whose gradients are summed inside the products that make them.

A weight of the layer is used at every unroll step. Left to autograd, each use makes a gradient [M, N] of its own in the
compute dtype and adds it to the others: as many passes over memory as steps, and as many roundings. Here a use adds its
share to one sum in the master's dtype, in the same matrix product (`add_product`), and the sum goes to the masters when
all uses are done.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Gradient:
    """The gradient of a weight [M, N] so far; None before the first use's backward pass."""

    shape: torch.Size
    dtype: torch.dtype
    total: Tensor | None = None

    def add(self, rows: slice, d_out: Tensor, x: Tensor) -> None:
        """Add d_out^T @ x to `rows` of the sum: d_out [N_rows, m], x [N_rows, N]."""
        if rows == slice(None):
            self.total = add_product(self.total, d_out.T, x, self.dtype)
            return
        self.total = self._sum(x.device)
        add_product(self.total[rows], d_out.T, x, self.dtype)

    def take(self, device: torch.device) -> Tensor:
        """The sum [M, N], which begins anew."""
        total, self.total = self._sum(device), None
        return total

    def _sum(self, device: torch.device) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=device) if self.total is None else self.total


@dataclass(frozen=True)
class Weight:
    """Rows of a weight in the compute dtype, and where their gradient goes."""

    value: Tensor  # [m, N]
    gradient: Gradient
    rows: slice = field(default_factory=lambda: slice(None))

    def part(self, rows: slice) -> Weight:
        """Some rows of a whole weight."""
        return self if rows == slice(None) else Weight(self.value[rows], self.gradient, rows)


def cast(dtype: torch.dtype, *masters: Tensor) -> Weight:
    """The masters [m_i, N], one below the other, as one weight in `dtype`."""
    return cast_columns(dtype, 1, *masters)[0]


def cast_columns(dtype: torch.dtype, parts: int, *masters: Tensor) -> tuple[Weight, ...]:
    """As `cast`, cut into `parts` weights of as many columns each."""
    rows, columns = sum(len(m) for m in masters), masters[0].shape[1]
    shape = torch.Size((rows, columns // parts))
    gradients = tuple(Gradient(shape, masters[0].dtype) for _ in range(parts))
    values = _Cast.apply(gradients, dtype, *masters)
    return tuple(map(Weight, values, gradients))


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x @ weight^T: [n, N] -> [n, m]."""
    out: Tensor = _Linear.apply(x, weight.value, weight)
    return out


def add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """total (None is 0) + a @ b in `dtype`, in place; a GPU multiplies bf16 into fp32 directly."""
    if a.dtype == dtype:
        return torch.mm(a, b) if total is None else total.addmm_(a, b)
    if not a.is_cuda:
        product = torch.mm(a, b)
        return product.to(dtype) if total is None else total.add_(product)
    if total is None:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.addmm(total, a, b, out_dtype=dtype, out=total)


class _Cast(torch.autograd.Function):
    """Its backward pass runs after that of every use; none gives it a gradient, as the sums are in `gradients`."""

    @staticmethod
    def forward(ctx: Any, gradients: tuple[Gradient, ...], dtype: torch.dtype, *masters: Tensor) -> tuple[Tensor, ...]:
        ctx.gradients, ctx.heights, ctx.device = gradients, [len(m) for m in masters], masters[0].device
        ctx.set_materialize_grads(False)
        whole = masters[0].to(dtype) if len(masters) == 1 else torch.cat([m.to(dtype) for m in masters])
        return tuple(part.contiguous() for part in whole.chunk(len(gradients), 1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        assert not any(g is not None for g in grads), "a weight was used otherwise than through app/train/weights.py"
        sums = [g.take(ctx.device) for g in ctx.gradients]
        whole = sums[0] if len(sums) == 1 else torch.cat(sums, 1)  # [M, parts * N]
        return None, None, *whole.split(ctx.heights)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, weight: Weight) -> Tensor:
        ctx.save_for_backward(x, value)
        ctx.weight = weight
        return F.linear(x, value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, value = ctx.saved_tensors
        ctx.weight.gradient.add(ctx.weight.rows, grads[0], x)
        return grads[0] @ value if ctx.needs_input_grad[0] else None, None, None
