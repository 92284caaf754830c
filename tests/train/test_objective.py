"""The objectives by themselves: what they measure, where they have no gradient, what they keep in memory."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from app.config import TrainConfig
from app.storage import Store
from app.train import loss as loss_module
from app.train.alignment import pack
from app.train.loss import Teacher, UnrolledLoss, unroll
from app.train.objective import Distribution, Objective, row_losses
from app.train.reference import reference_loss
from app.train.state import load_latest
from app.train.trainer import Trainer
from tests.train.debug import (
    ListSource,
    debug_config,
    debug_draft,
    debug_head,
    kept_ids,
    learnable_samples,
    make_sample,
    random_samples,
    span_mask,
)
from tests.train.test_trainer import Killed, KilledAt, fresh_draft, make_job, weights_of

OBJECTIVES = [
    Objective(),
    Objective(loss="cross_entropy"),
    Objective(loss="lk", lk_form="log_alpha"),
    Objective(loss="lk"),
]


def name_of(objective: Objective) -> str:
    return objective.lk_form if objective.loss == "lk" else objective.loss


def test_the_configuration_reaches_the_objective() -> None:
    config = TrainConfig(
        loss="lk", lk_form="log_alpha", lk_eta=2.0, temperature=0.7, out_of_vocab="drop", unroll_steps=2
    )
    assert Objective.of(config) == Objective("lk", "log_alpha", 2.0, 0.7, True)
    assert Objective.of(TrainConfig()) == Objective()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_alpha_is_how_often_speculative_sampling_accepts(temperature: float) -> None:
    """Simulated over the whole vocabulary: draw from q, accept with min(1, P / q); outside tokens are never drawn."""
    head, sample = debug_head(), make_sample(span_mask(4, [(1, 4)]), seed=2)
    draft = debug_draft(head, draft_vocab_size=12)
    objective = Objective(loss="lk", lk_form="log_alpha", temperature=temperature)
    packed = pack([sample], 1)
    loss, stats = UnrolledLoss(draft, head, 1, 1.0, torch.float64, objective)(packed)
    with torch.no_grad():
        logits = draft.lm_head(torch.cat(unroll(draft.cast(torch.float32), packed)))  # [rows, Vd]
        q = (logits / temperature).softmax(-1)
        truth = (head.logits(packed.teacher) / temperature).softmax(-1)[:, draft.kept_ids]  # [rows, Vd]
    g = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(q, 40000, replacement=True, generator=g)  # [rows, draws]
    accepted = torch.rand(drawn.shape, generator=g) < truth.gather(1, drawn) / q.gather(1, drawn)
    assert float(stats.alpha) == pytest.approx(float(accepted.double().mean(-1).sum()), abs=0.02)
    assert bool((truth.sum(-1) < 0.9).any())  # the cut matters here, and alpha cannot be above what is inside
    assert float(stats.alpha) <= float(truth.sum())
    assert float(loss.detach()) == pytest.approx(float(-torch.minimum(truth, q).sum(-1).log().mean()), rel=1e-3)


def test_the_share_inside_is_that_of_the_whole_softmax() -> None:
    head, config = debug_head(logit_softcap=3.0), debug_config(draft_vocab_size=9)
    ids, s_n = kept_ids(config), torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    for temperature in (1.0, 0.5):
        whole = (head.logits(s_n) / temperature).softmax(-1)
        teacher = Teacher(head, ids, torch.float32).distribution(s_n, temperature, measure_inside=True)
        torch.testing.assert_close(teacher.inside, whole[:, ids].sum(-1))
        torch.testing.assert_close(teacher.probs * teacher.inside[:, None], whole[:, ids])
    full = Teacher(head, torch.arange(96), torch.float32).distribution(s_n, measure_inside=True)
    assert full.inside.tolist() == [1.0] * 7


def test_cross_entropy_of_a_token_that_cannot_be_said_is_a_miss_without_gradient() -> None:
    head = debug_head()
    draft = debug_draft(head, draft_vocab_size=5)
    sample = make_sample(span_mask(9, [(2, 9)]))
    outside = next(i for i in range(96) if i not in draft.kept_ids)
    ids = torch.full((9,), outside)
    fast = UnrolledLoss(draft, head, 2, 0.8, torch.float32, Objective(loss="cross_entropy"))
    loss, stats = fast(pack([replace(sample, token_ids=ids)], 2))
    loss.backward()
    assert float(loss.detach()) == 0.0 and stats.hits.tolist() == [0, 0] and stats.rows.tolist() == [6, 5]
    assert all(p.grad is None or not bool(p.grad.any()) for p in draft.parameters())

    ids[-1] = draft.kept_ids[3]  # the last row of step 0 learns now, over the same number of rows
    loss, stats = fast(pack([replace(sample, token_ids=ids)], 1))
    draft.zero_grad()
    loss.backward()
    assert 0 < float(loss.detach()) == pytest.approx(float(stats.loss[0]) / 6)
    assert draft.lm_head.weight.grad is not None and bool(draft.lm_head.weight.grad.any())


@pytest.mark.parametrize("objective", OBJECTIVES, ids=name_of)
def test_a_draft_that_is_the_teacher_is_at_the_optimum(objective: Objective) -> None:
    """The loss of kl and lk is 0 where q = P; cross-entropy is at rest there over many draws of the token."""
    head = debug_head()
    s_n = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    logits = Teacher(head, torch.arange(96), torch.float64).logits(s_n).clone()  # [3, V]
    teacher = Teacher(head, torch.arange(96), torch.float64).distribution(s_n, measure_inside=True)
    index = torch.arange(3).repeat(2000)  # [n]
    g = torch.Generator().manual_seed(0)
    labels = torch.multinomial(teacher.probs, 2000, replacement=True, generator=g).T.flatten()  # [n]
    rows, every = logits[index].clone(), torch.arange(len(index))
    spread = type(teacher)(teacher.probs[index], teacher.self_term[index], teacher.inside[index])
    buffers: dict[str, Tensor] = {}

    def buffer(name: str, n: int, columns: int, dtype: torch.dtype) -> Tensor:
        return buffers.setdefault(f"{name}{n}", torch.empty(n, columns, dtype=dtype))

    result = row_losses(objective, rows, every, labels, spread, torch.full((len(rows),), 0.3), buffer)
    mean = rows.unflatten(0, (2000, 3)).mean(0)  # [3, V] the gradient over all draws
    if objective.loss != "lk":  # alpha has a kink at its optimum
        assert float(mean.abs().max()) < (0.04 if objective.loss == "cross_entropy" else 1e-9)
    if objective.loss != "cross_entropy":
        assert float(result.loss.abs().max()) < 1e-9
    if result.alpha is not None:
        torch.testing.assert_close(result.alpha, torch.ones_like(result.alpha))


def test_log_alpha_has_a_gradient_where_one_minus_alpha_has_none() -> None:
    """Section 4.3 of the paper: a draft that puts nothing where the teacher is still learns."""
    probs = torch.zeros(1, 50)
    probs[0, 7] = 1.0
    teacher = Distribution(probs, torch.zeros(1), torch.ones(1))
    norms = {}
    for form, share in (("log_alpha", 0.0), ("hybrid", 0.0)):
        logits = torch.zeros(1, 50)
        logits[0, 7] = -20.0
        at = torch.zeros(1, dtype=torch.int64)
        objective = Objective(loss="lk", lk_form=form)  # type: ignore[arg-type]
        row_losses(objective, logits, at, at + 7, teacher, torch.tensor([share]), lambda *a: torch.empty(0))
        norms[form] = float(logits.norm())
        assert float(logits[0, 7]) < 0  # descent raises the logit of the token the teacher wants
    assert norms["hybrid"] < 1e-8 and norms["log_alpha"] > 0.5


@pytest.mark.parametrize("objective", OBJECTIVES, ids=name_of)
def test_bf16_stays_near_fp32(objective: Objective) -> None:
    head, samples = debug_head(), random_samples(12, seed=4, longest=40)
    draft = debug_draft(head)
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        draft.zero_grad()
        fast = UnrolledLoss(draft, head, 4, 0.8, dtype, objective)
        fast.adapt(torch.tensor([0.5, 0.4, 0.3, 0.2]), torch.ones(4))
        loss, _ = fast(pack(samples, 4))
        loss.backward()
        results[dtype] = (float(loss.detach()), torch.cat([p.grad.flatten() for p in draft.parameters()]))  # type: ignore[union-attr]
    assert results[torch.bfloat16][0] == pytest.approx(results[torch.float32][0], rel=0.03)
    assert float(torch.cosine_similarity(results[torch.bfloat16][1], results[torch.float32][1], dim=0)) > 0.998


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if isinstance(tensor, Tensor):
                self.size = max(self.size, tensor.numel())
        return out


@pytest.mark.parametrize("objective", OBJECTIVES, ids=name_of)
def test_a_large_vocabulary_is_never_whole_in_memory_and_the_loss_is_the_same(
    objective: Objective, monkeypatch: Any
) -> None:
    """F61: V = 50,000 and 500 rows; no tensor of [rows, V] is made or kept, and none [rows, Vd] either."""
    vocab, rows = 50_000, 500
    head = debug_head(hidden=16, vocab=vocab)
    draft = debug_draft(
        head, vocab_size=vocab, draft_vocab_size=20_000, hidden_size=16, target_hidden_size=16, intermediate_size=16
    )
    sample = make_sample(span_mask(rows + 12, [(10, rows + 12)]), hidden=16, vocab=vocab)
    packed = pack([sample], 1)
    fast = UnrolledLoss(draft, head, 1, 0.8, torch.float32, objective)
    fast.adapt(torch.tensor([0.5]), torch.ones(1))
    monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", 2**20)
    kept: list[tuple[int, ...]] = []
    largest = LargestTensor()
    with largest, torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(tuple(t.shape)), t)[1], lambda t: t):
        loss, stats = fast(packed)
        loss.backward()
    assert largest.size < 4 * 2**20 < packed.counts[0] * 20_000
    assert [shape for shape in kept if shape and shape[-1] == 20_000] == []
    assert (20_000, 16) in kept  # lm_head's own gradient, the one tensor of that height

    with torch.no_grad():
        q = draft.lm_head(torch.cat(unroll(draft.cast(torch.float32), packed))).double().softmax(-1)  # [rows, Vd]
        truth = head.logits(packed.teacher).double().softmax(-1)[:, draft.kept_ids]  # [rows, Vd]
    p, alpha = truth / truth.sum(-1, keepdim=True), torch.minimum(truth, q).sum(-1)
    kl = (p * (p.log() - q.log())).sum(-1)
    labels = draft.target_to_draft[packed.labels]
    said = labels >= 0
    share = math.exp(-3.0 * 0.5)
    expected = {
        "kl": kl,
        "cross_entropy": -q.gather(1, labels.clamp(min=0)[:, None]).log()[:, 0] * said,
        "log_alpha": -alpha.log(),
        "hybrid": share * kl + (1 - share) * (1 - alpha),
    }[name_of(objective)]
    assert float(loss.detach()) == pytest.approx(float(expected.mean()), rel=1e-5)
    assert float(stats.rows) == packed.counts[0] > rows


def test_acceptance_that_is_no_number_does_not_reach_the_next_step() -> None:
    fast = UnrolledLoss(debug_draft(), debug_head(), 3, 0.8, torch.float32, Objective(loss="lk"))
    fast.adapt(torch.tensor([2.0, 1.0, 0.0]), torch.tensor([4.0, 4.0, 0.0]))
    assert fast.alpha.tolist() == [0.5, 0.25, 0.0]
    fast.adapt(torch.tensor([math.nan, 3.0, 0.0]), torch.tensor([4.0, 4.0, 0.0]))
    assert fast.alpha.tolist() == [0.5, 0.75, 0.0]


def test_the_trainer_takes_lambda_from_the_step_before(tmp_path: Path) -> None:
    """By the definition: after each step the mean acceptance of exactly that step's rows is what it holds."""
    job = make_job(tmp_path, loss="lk", epochs=1, compute_dtype="float32", tokens_per_step=10_000)
    _, report = reference_loss(fresh_draft(), job.head, list(job.train.samples), 3, 0.8, Objective(loss="lk"))  # type: ignore[attr-defined]
    trainer = Trainer(job)
    assert trainer.total_steps == 1 and trainer.loss.alpha.tolist() == [0, 0, 0]
    trainer.run()
    assert trainer.loss.alpha.tolist() == pytest.approx([r["alpha"] for r in report], rel=1e-4)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["alpha_by_step"] == pytest.approx([r["alpha"] for r in report], rel=1e-4)
    assert lines[0]["loss"] == pytest.approx(sum(0.8**k * r["loss"] for k, r in enumerate(report)), rel=1e-4)


@pytest.mark.parametrize("loss", ["lk", "cross_entropy"])
def test_a_killed_and_resumed_run_equals_one_that_was_not_for_every_loss(loss: str, tmp_path: Path) -> None:
    """F64: the acceptance that lambda follows is part of the checkpoint."""
    whole = Trainer(make_job(tmp_path / "whole", loss=loss))
    whole.run()
    job = make_job(tmp_path / "cut", loss=loss)
    with pytest.raises(Killed):
        Trainer(replace(job, train=KilledAt(job.train, 4 * 13))).run()  # type: ignore[arg-type]
    resumed = Trainer(make_job(tmp_path / "cut", loss=loss))
    assert resumed.step == 13
    saved = load_latest(Store(str(tmp_path / "cut")), whole.fingerprint)
    assert saved is not None and resumed.loss.alpha.tolist() == saved.meta["alpha"]
    assert any(saved.meta["alpha"]) == (loss == "lk")
    resumed.run()
    first, second = weights_of(tmp_path / "whole"), weights_of(tmp_path / "cut")
    assert all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize(
    "settings", [{"loss": "lk"}, {"loss": "lk", "lk_form": "log_alpha"}, {"loss": "cross_entropy"}]
)
def test_every_loss_teaches_the_rule(settings: dict[str, Any], tmp_path: Path) -> None:
    head = debug_head()
    job = make_job(tmp_path, epochs=10, learning_rate=1e-2, draft=fresh_draft(draft_vocab_size=96), **settings)
    summary = Trainer(replace(job, valid=ListSource(learnable_samples(6, head, seed=1)))).run()
    lengths = [v["acceptance_length"] for v in summary["validation"]]
    assert lengths[-1] > 2.5 > lengths[0]
