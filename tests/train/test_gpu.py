"""On a GPU: the flash path and the fused loss against fp32 on the CPU. Skipped where there is no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from app.train.alignment import pack
from app.train.attention import attend
from app.train.evaluate import GreedyDraft, evaluate
from app.train.loss import UnrolledLoss
from app.train.objective import Objective
from tests.train.debug import debug_draft, debug_head, make_sample, random_samples, span_mask

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("step", [0, 1, 4])
@pytest.mark.parametrize("kv", [1, 4])
def test_flash_attention_and_its_merged_backward(step: int, kv: int) -> None:
    samples = [make_sample(span_mask(n, [(a, b)]), seed=n) for n, a, b in ((90, 30, 90), (40, 2, 30), (700, 99, 600))]
    samples.append(make_sample(span_mask(200, [(10, 60), (90, 96), (120, 200)])))
    packed = pack(samples, step + 1)
    rows, n = len(packed.next_ids), packed.counts[step]
    torch.manual_seed(0)
    shapes = [(n, 4, 64), (rows, kv, 64), (rows, kv, 64), (step, n, kv, 64), (step, n, kv, 64)]
    inputs = [torch.randn(s).bfloat16() for s in shapes]
    grad = torch.randn(n, 4, 64).bfloat16()
    results = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16), ("cuda", torch.float32)):
        given = [x.to(device, dtype).requires_grad_() for x in inputs]
        out = attend(*given, packed.to(device), step)
        out.backward(grad.to(device, dtype))
        results.append([out.detach(), *(x.grad for x in given)])
    for expected, flash, portable in zip(*results, strict=True):
        assert expected is not None and flash is not None and portable is not None
        if not expected.numel():
            continue
        error = (flash.cpu().float() - expected).norm() / expected.norm()
        assert float(error) < 0.01
        torch.testing.assert_close(portable.cpu(), expected, rtol=1e-3, atol=1e-3)


OBJECTIVES = [
    Objective(),
    Objective(temperature=0.7, drop_out_of_vocab=True),
    Objective(loss="cross_entropy"),
    Objective(loss="lk", lk_form="log_alpha", temperature=0.7),
    Objective(loss="lk", drop_out_of_vocab=True),
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: f"{o.loss}-{o.lk_form}-{o.temperature}")
def test_loss_and_gradients_agree_with_the_cpu(objective: Objective) -> None:
    samples, head = random_samples(40, seed=2, longest=80), debug_head()
    results = {}
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float32), ("cuda", torch.bfloat16)):
        draft = debug_draft(head).to(device)
        fast, packed = UnrolledLoss(draft, head, 4, 0.8, dtype, objective), pack(samples, 4).to(device)
        fast.adapt(torch.tensor([0.6, 0.5, 0.4, 0.3]), torch.ones(4))
        keep = fast.keep(packed)
        loss, stats = fast(packed, keep=None if keep is None else keep.to(device))
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in draft.parameters() if p.grad is not None]).cpu()
        results[device, dtype] = (float(loss.detach()), flat, stats)
    expected, gradient, stats = results["cpu", torch.float32]
    loss, flat, mine = results["cuda", torch.float32]
    assert loss == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(flat, gradient, rtol=1e-2, atol=1e-4)
    assert mine.rows.tolist() == stats.rows.tolist()
    torch.testing.assert_close(mine.alpha.cpu(), stats.alpha, rtol=1e-4, atol=1e-4)
    loss, flat, _ = results["cuda", torch.bfloat16]
    assert loss == pytest.approx(expected, rel=0.02)
    # With bf16's near-ties other rows may be dropped than in fp32.
    assert float(torch.cosine_similarity(flat, gradient, dim=0)) > (0.99 if objective.drop_out_of_vocab else 0.998)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_made_again_and_an_embedding_elsewhere_change_no_gradient(dtype: torch.dtype) -> None:
    samples, head = random_samples(40, seed=2, longest=80), debug_head()
    draft = debug_draft(head)
    draft.place(torch.device("cuda"), torch.device("cpu"))
    fast, packed = UnrolledLoss(draft, head, 4, 0.8, dtype), pack(samples, 4)
    found = []
    for again in range(6):
        draft.zero_grad()
        given = replace(packed, embedded=draft.embed_tokens.weight[packed.next_ids]) if again % 2 else packed
        fast(given.to("cuda"), again=again)[0].backward()
        found.append(torch.cat([p.grad.flatten() for p in draft.parameters() if p.grad is not None]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-3, atol=1e-5)


def test_the_walk_agrees_with_the_cpu() -> None:
    samples, draft = random_samples(40, seed=3, longest=60), debug_draft()
    on_cpu = evaluate(samples, GreedyDraft(draft, torch.float32), 3)
    on_gpu = evaluate(samples, GreedyDraft(draft.cuda(), torch.float32), 3)
    assert on_cpu == on_gpu
