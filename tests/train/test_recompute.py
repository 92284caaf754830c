"""Norms and products are the plain ones, whether they make a factor again or keep it; making it again keeps less."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.train.fusion import rms_norm, swiglu
from app.train.recompute import norm, norm_linear, swiglu_linear
from app.train.weights import cast

Product = Callable[..., Tensor]


def plain_norm(x: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
    return F.linear(rms_norm(x, gain, 1e-5), weight)


def lean_norm(x: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
    return norm_linear(x, gain, cast(weight.dtype, weight), 1e-5)


def kept_norm(x: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
    return norm_linear(x, gain, cast(weight.dtype, weight), 1e-5, keeps=True)


def plain_swiglu(gate_up: Tensor, weight: Tensor) -> Tensor:
    return F.linear(swiglu(gate_up), weight)


def lean_swiglu(gate_up: Tensor, weight: Tensor) -> Tensor:
    return swiglu_linear(gate_up, cast(weight.dtype, weight))


def kept_swiglu(gate_up: Tensor, weight: Tensor) -> Tensor:
    return swiglu_linear(gate_up, cast(weight.dtype, weight), keeps=True)


CASES = [
    (plain_norm, lean_norm, [(7, 12), (12,), (5, 12)]),
    (plain_swiglu, lean_swiglu, [(7, 24), (5, 12)]),
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


KEPT = [(plain_norm, kept_norm, CASES[0][2]), (plain_swiglu, kept_swiglu, CASES[1][2])]


@pytest.mark.parametrize(("plain", "ours", "shapes"), CASES + KEPT, ids=["norm", "swiglu", "norm kept", "swiglu kept"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients_are_the_plain_ones(
    plain: Product, ours: Product, shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]
    pull = torch.randn(plain(*inputs).shape, dtype=dtype)
    wanted = torch.autograd.grad(plain(*inputs), inputs, pull)
    got = torch.autograd.grad(ours(*inputs), inputs, pull)
    exact: dict[str, float] = {"rtol": 1e-12, "atol": 1e-13}
    near = exact if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(ours(*inputs), plain(*inputs), **near)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, **near)


def test_a_norm_of_bf16_is_computed_in_fp32_and_its_gradients_are_rounded_once() -> None:
    torch.manual_seed(0)
    x, gain = torch.randn(50, 32).bfloat16().requires_grad_(), torch.randn(32, requires_grad=True)
    pull = torch.randn(50, 32).bfloat16()
    wide = x.detach().double().requires_grad_()
    exact = torch.autograd.grad(rms_norm(wide, gain.double(), 1e-5), [wide, gain], pull.double())
    for keeps in (False, True):
        out = norm(x, gain, 1e-5, keeps)
        assert out.dtype == torch.bfloat16
        d_x, d_gain = torch.autograd.grad(out, [x, gain], pull)
        assert d_x.dtype == torch.bfloat16 and d_gain.dtype == torch.float32
        torch.testing.assert_close(d_x.double(), exact[0], rtol=2**-8, atol=1e-6)
        torch.testing.assert_close(d_gain, exact[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("plain", "lean", "shapes"), CASES, ids=["norm", "swiglu"])
def test_nothing_but_the_inputs_is_kept(plain: Product, lean: Product, shapes: list[tuple[int, ...]]) -> None:
    inputs = [torch.randn(s, requires_grad=True) for s in shapes]
    assert kept(lean, inputs) == 0
    assert kept(plain, inputs) >= 7 * 12  # the factor at least
