"""Products that make their factor again are the plain ones, and keep less."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.train.fusion import rms_norm, swiglu
from app.train.recompute import norm_linear, swiglu_linear

Product = Callable[..., Tensor]


def plain_norm(x: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
    return F.linear(rms_norm(x, gain, 1e-5), weight)


def lean_norm(x: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
    return norm_linear(x, gain, weight, 1e-5)


def plain_swiglu(gate_up: Tensor, weight: Tensor) -> Tensor:
    return F.linear(swiglu(gate_up), weight)


CASES = [
    (plain_norm, lean_norm, [(7, 12), (12,), (5, 12)]),
    (plain_swiglu, swiglu_linear, [(7, 24), (5, 12)]),
]


def kept(product: Product, inputs: list[Tensor]) -> int:
    """Elements that wait for the backward pass, the inputs not counted."""
    held: dict[int, int] = {}
    ours = {i.data_ptr() for i in inputs}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in ours:
            held[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        product(*inputs)
    return sum(held.values())


@pytest.mark.parametrize(("plain", "lean", "shapes"), CASES, ids=["norm", "swiglu"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients_are_the_plain_ones(
    plain: Product, lean: Product, shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]
    pull = torch.randn(plain(*inputs).shape, dtype=dtype)
    wanted = torch.autograd.grad(plain(*inputs), inputs, pull)
    got = torch.autograd.grad(lean(*inputs), inputs, pull)
    assert torch.equal(plain(*inputs), lean(*inputs))
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12 if dtype == torch.float64 else 1e-5, atol=1e-6)


@pytest.mark.parametrize(("plain", "lean", "shapes"), CASES, ids=["norm", "swiglu"])
def test_nothing_but_the_inputs_is_kept(plain: Product, lean: Product, shapes: list[tuple[int, ...]]) -> None:
    inputs = [torch.randn(s, requires_grad=True) for s in shapes]
    assert kept(lean, inputs) == 0
    assert kept(plain, inputs) >= 7 * 12  # the factor at least
