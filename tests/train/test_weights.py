"""A weight's gradient is the sum over its uses, whatever part of it they read, summed in the master's dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from app.train.recompute import made_again
from app.train.weights import cast, cast_columns, linear


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def masters(*shapes: tuple[int, int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(s, dtype=dtype)) for s in shapes]


def test_uses_add_up_over_masters_columns_and_rows() -> None:
    q, k = masters((6, 8), (4, 8))
    xs = [torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (5, 3, 7)]
    left, right = torch.cat([q, k])[:, :4], torch.cat([q, k])[:, 4:]
    wanted = [xs[0] @ left[:6].T, xs[1] @ left[6:].T, xs[1] @ right.T, xs[2] @ right[:6].T, xs[0] @ left.T]
    one, two = cast_columns(torch.float64, 2, q, k)
    got = [
        linear(xs[0], one.part(slice(0, 6))),
        linear(xs[1], one.part(slice(6, None))),
        linear(xs[1], two),
        linear(xs[2], two.part(slice(0, 6))),
        linear(xs[0], one.part(slice(None))),
    ]
    pulls = [torch.randn_like(out) for out in wanted]
    mine = torch.autograd.grad(got, [q, k, *xs], pulls)
    for a, b in zip([*got, *mine], [*wanted, *torch.autograd.grad(wanted, [q, k, *xs], pulls)], strict=True):
        same(a, b)


def test_a_half_that_nobody_reads_has_no_gradient() -> None:
    (q,) = masters((6, 8))
    one, _ = cast_columns(torch.float64, 2, q)
    linear(torch.ones(2, 4, dtype=torch.float64), one).sum().backward()
    assert q.grad is not None
    assert torch.equal(q.grad, torch.cat([torch.full((6, 4), 2.0), torch.zeros(6, 4)], 1).double())


def test_a_second_backward_pass_begins_anew() -> None:
    (w,) = masters((3, 4))
    out = linear(torch.randn(5, 4, dtype=torch.float64), cast(torch.float64, w))
    first = torch.autograd.grad(out.sum(), w, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out.sum(), w)[0], first)


def test_uses_that_are_made_again_count_once() -> None:
    (w,) = masters((4, 4))
    x = torch.randn(5, 4, dtype=torch.float64)
    weight = cast(torch.float64, w)
    out = made_again(lambda y: linear(linear(y, weight), weight), x)
    same(torch.autograd.grad(out.sum(), w)[0], torch.autograd.grad((x @ w.T @ w.T).sum(), w)[0])


def test_bf16_products_are_summed_in_fp32() -> None:
    (w,) = masters((1, 1), dtype=torch.float32)
    weight = cast(torch.bfloat16, w)
    uses = [linear(torch.ones(1, 1, dtype=torch.bfloat16), weight).float() * factor for factor in (256.0, 1.0)]
    (uses[0] + uses[1]).sum().backward()
    assert w.grad is not None and w.grad.dtype == torch.float32
    assert w.grad.item() == 257.0  # no bf16 number


def test_a_weight_read_by_itself_is_refused() -> None:
    (w,) = masters((3, 4))
    weight = cast(torch.float64, w)
    with pytest.raises(AssertionError, match="otherwise"):
        (weight.value * 2).sum().backward()
