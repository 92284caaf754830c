"""The alignment table, and the fast loss against the written definition: value and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from app.errors import UserError
from app.train import loss as loss_module
from app.train.alignment import pack, supervision_mask
from app.train.loss import UnrolledLoss
from app.train.objective import Objective
from app.train.reference import reference_loss
from tests.train.debug import debug_draft, debug_head, make_sample, random_samples, span_mask


def test_worked_example_of_the_alignment_table() -> None:
    """CONTRACTS section 2: prompt x0..x3, answer x4..x9."""
    mask = span_mask(10, [(4, 10)])
    rows = [supervision_mask(mask, k).nonzero().flatten().tolist() for k in range(6)]
    assert rows == [[3, 4, 5, 6, 7], [3, 4, 5, 6], [3, 4, 5], [3, 4], [3], []]

    sample = make_sample(mask)
    p = pack([sample], 6)
    assert p.next_ids.tolist() == sample.token_ids[1:9].tolist()  # rows 0..7: nothing after row 7 is read
    assert p.labels.tolist() == sample.token_ids[5:10].tolist()  # x5..x9
    assert torch.equal(p.teacher, sample.teacher[[0, 1, 2, 3, 4]])  # positions 4..8
    assert sample.teacher_pos.tolist() == [4, 5, 6, 7, 8]
    for k in range(6):
        teacher_positions = [4 + i for i in p.ahead[k].tolist()]
        assert teacher_positions == [t + 1 + k for t in rows[k]]
        assert [p.labels[i] for i in p.ahead[k]] == [sample.token_ids[t + 2 + k] for t in rows[k]]
    assert p.counts == [5, 4, 3, 2, 1, 0]


def test_a_gap_in_the_mask_ends_a_turn() -> None:
    mask = span_mask(12, [(2, 5), (7, 12)])
    assert supervision_mask(mask, 0).nonzero().flatten().tolist() == [1, 2, 6, 7, 8, 9]
    assert supervision_mask(mask, 1).nonzero().flatten().tolist() == [1, 6, 7, 8]
    assert supervision_mask(mask, 2).nonzero().flatten().tolist() == [6, 7]


def test_masks_are_nested_and_never_read_outside() -> None:
    for sample in random_samples(30, seed=5):
        before = None
        for k in range(8):
            mask = supervision_mask(sample.loss_mask, k)
            assert len(mask) == len(sample.token_ids) - 1
            for t in mask.nonzero().flatten().tolist():
                assert t + 2 + k < len(sample.token_ids)
            assert before is None or not bool((mask & ~before).any())
            before = mask


def test_missing_teacher_position_is_named() -> None:
    sample = make_sample(span_mask(10, [(4, 10)]), name="row-17")
    broken = type(sample)(**{**sample.__dict__, "teacher": sample.teacher[1:], "teacher_pos": sample.teacher_pos[1:]})
    with pytest.raises(UserError, match=r"row-17.*position 4"):
        pack([broken], 2)


CASES: list[dict[str, Any]] = [
    {"steps": 1},
    {"steps": 3},
    {"steps": 8, "longest": 40},
    {"steps": 3, "norm_before_residual": True},
    {"steps": 3, "norm_output": True, "fc_norm": True},
    {"steps": 3, "norm_before_fc": True},
    {"steps": 4, "draft_vocab_size": 96},
    {"steps": 4, "draft_vocab_size": 5},
    {"steps": 2, "num_key_value_heads": 4, "head_dim": 6},
    {"steps": 2, "num_key_value_heads": 1, "target_hidden_size": 48},
    {"steps": 3, "objective": Objective(drop_out_of_vocab=True)},
    {"steps": 3, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    {"steps": 3, "head": {"norm_plus_one": True, "logit_scale": 0.5, "logit_softcap": 4.0}},
]
# Each objective at each number of steps once, with another vocabulary, temperature and rule for what lies outside.
LOSSES: list[dict[str, Any]] = [
    {"loss": "kl"},
    {"loss": "cross_entropy"},
    {"loss": "lk", "lk_form": "log_alpha"},
    {"loss": "lk", "lk_form": "hybrid", "lk_eta": 2.0},
]
for number, settings in enumerate(LOSSES):
    for steps in range(1, 9):
        objective = Objective(
            **settings, temperature=(1.0, 0.7, 1.9)[steps % 3], drop_out_of_vocab=bool((steps + number) % 2)
        )
        vocab = {"draft_vocab_size": (40, 96, 7)[(steps + number) % 3]}
        CASES.append({"steps": steps, "longest": 24 + 2 * steps, "objective": objective, **vocab})


def label(case: dict[str, Any]) -> str:
    return ",".join(f"{k}={v}" for k, v in case.items()).replace("Objective", "")


@pytest.mark.parametrize("case", CASES, ids=label)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fast_path_equals_the_definition(case: dict[str, Any], dtype: torch.dtype, monkeypatch: Any) -> None:
    case = dict(case)
    steps, objective, longest = case.pop("steps"), case.pop("objective", Objective()), case.pop("longest", 20)
    alpha = [0.9 - 0.1 * k for k in range(steps)]  # of a step before: every step has another lambda
    hidden = case.get("target_hidden_size", 32)
    head = debug_head(hidden=hidden, wide=dtype == torch.float64, **case.pop("head", {}))
    draft = debug_draft(head, **case).to(dtype)
    # Small blocks, so that every loop runs more than once.
    monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", 7 * steps * draft.config.draft_vocab_size)
    monkeypatch.setattr("app.train.objective.ELEMENTWISE_ROWS", 3)
    monkeypatch.setattr("app.train.attention.QUERY_BLOCK", 5)
    for seed in range(3):
        samples = random_samples(6, seed=seed, longest=longest, hidden=hidden)
        expected, report = reference_loss(draft, head, list(samples), steps, 0.8, objective, alpha)
        gradients = torch.autograd.grad(expected, list(draft.parameters()), allow_unused=True)

        fast = UnrolledLoss(draft, head, steps, 0.8, dtype, objective)
        fast.adapt(torch.tensor(alpha, dtype=torch.float64) * 4, torch.full((steps,), 4.0))
        packed = pack(samples, steps)
        keep = fast.keep(packed)
        loss, stats = fast(packed, keep=keep)
        loss.backward()
        close = {"rtol": 2e-4, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-12}
        torch.testing.assert_close(loss, expected, **close, check_dtype=False)
        for (name, p), g in zip(draft.named_parameters(), gradients, strict=True):
            torch.testing.assert_close(p.grad, g, **close, msg=lambda m, name=name: f"{name}: {m}")
            p.grad = None
        assert stats.rows.tolist() == [r["rows"] for r in report]
        for k, r in enumerate(report):
            n = max(r["rows"], 1)
            assert float(stats.loss[k]) / n == pytest.approx(r["loss"], rel=1e-4, abs=1e-6)
            assert float(stats.hits[k]) / n == pytest.approx(r["hits"])
            measured = r["alpha"] if objective.measures_alpha else 0.0
            assert float(stats.alpha[k]) / n == pytest.approx(measured, rel=1e-4, abs=1e-6)


def test_packs_with_global_counts_add_up_to_one_batch() -> None:
    head, samples = debug_head(), random_samples(9, seed=3)
    draft = debug_draft(head)
    fast = UnrolledLoss(draft, head, 3, 0.8, torch.float32)
    whole, _ = fast(pack(samples, 3))
    whole.backward()
    expected = [p.grad.clone() for p in draft.parameters()]  # type: ignore[union-attr]
    draft.zero_grad()
    packs = [pack(samples[:4], 3), pack([], 3), pack(samples[4:5], 3), pack(samples[5:], 3)]
    counts = sum((fast.counts(p) for p in packs), torch.zeros(3, dtype=torch.float64))
    total = 0.0
    for p in packs:
        loss, _ = fast(p, counts)
        total += float(loss)
        if loss.requires_grad:
            loss.backward()
    assert total == pytest.approx(float(whole), rel=1e-5)
    for p, g in zip(draft.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-4, atol=1e-6)


def test_bf16_compute_stays_near_fp32_and_masters_stay_fp32() -> None:
    head, samples = debug_head(), random_samples(12, seed=4, longest=40)
    draft = debug_draft(head)
    grads = {}
    for dtype in (torch.float32, torch.bfloat16):
        draft.zero_grad()
        loss, _ = UnrolledLoss(draft, head, 4, 0.8, dtype)(pack(samples, 4))
        loss.backward()
        grads[dtype] = (float(loss), torch.cat([p.grad.flatten() for p in draft.parameters()]))  # type: ignore[union-attr]
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in draft.parameters())  # type: ignore[union-attr]
    assert grads[torch.bfloat16][0] == pytest.approx(grads[torch.float32][0], rel=0.02)
    cosine = torch.cosine_similarity(grads[torch.bfloat16][1], grads[torch.float32][1], dim=0)
    assert float(cosine) > 0.999


def test_a_token_outside_the_draft_vocabulary_is_a_miss() -> None:
    head = debug_head()
    draft = debug_draft(head, draft_vocab_size=1)
    sample = make_sample(span_mask(12, [(2, 12)]))
    outside = type(sample)(**{**sample.__dict__, "token_ids": torch.full((12,), (int(draft.kept_ids[0]) + 1) % 96)})
    inside = type(sample)(**{**sample.__dict__, "token_ids": torch.full((12,), int(draft.kept_ids[0]))})
    fast = UnrolledLoss(draft, head, 2, 0.8, torch.float32)
    assert fast(pack([outside], 2))[1].hits.tolist() == [0, 0]
    assert fast(pack([inside], 2))[1].hits.tolist() == [9, 8]
