"""What a pass keeps: worked out as it is measured, held to a budget, and the same gradient whatever is kept."""

from __future__ import annotations

import gc
import logging
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from app.config import TrainConfig
from app.errors import UserError
from app.train import loss as loss_module
from app.train.activations import GIB, GPU_SHARE, LEAST_ROOM, Activations, Rows, fixed_bytes, room
from app.train.alignment import Pack, pack
from app.train.draft import CastDraft
from app.train.loss import UnrolledLoss
from app.train.objective import Objective
from app.train.trainer import Trainer
from tests.train.debug import (
    FakeSample,
    Length,
    ListSource,
    debug_config,
    debug_draft,
    debug_head,
    make_sample,
    random_samples,
    span_mask,
)
from tests.train.test_objective import LargestTensor
from tests.train.test_trainer import make_job, weights_of

K = 4
SHAPES: list[dict[str, Any]] = [
    {},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_residual": True, "norm_before_fc": True, "intermediate_size": 200},
    {"num_key_value_heads": 4, "target_hidden_size": 48},
]


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made inside that are alive at once, at the most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self.known:
                size = tensor.untyped_storage().nbytes()
                self.known.add(key)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(tensor.untyped_storage(), self._freed, key, size)
        return out

    def _freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def saved_bytes(fast: UnrolledLoss, packed: Pack, again: int, keeps: bool = False) -> int:
    """Of the storages that wait for the backward pass."""
    held: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        loss, _ = fast(packed, again=again, keeps=keeps)
    del loss
    return sum(held.values())


def document(length: int, hidden: int = 32) -> FakeSample:
    """Two answers with a gap, so that slots are more than learning rows."""
    return make_sample(span_mask(length, [(16, length // 3), (length // 2, length)]), hidden=hidden)


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch memory of logits and scores that does not drown what is looked at."""
    monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", 2**10)
    monkeypatch.setattr("app.train.attention.QUERY_BLOCK", 8)


def test_rows_are_those_of_the_pack() -> None:
    samples = random_samples(20, seed=3, longest=40)
    found = sum((Rows.of_mask(s.loss_mask, K) for s in samples), Rows(0, 0, (0,) * K))
    assert found == Rows.of_pack(pack(samples, K))
    for s in samples:
        one, most = Rows.of_mask(s.loss_mask, K), Rows.most(len(s.token_ids), len(s.teacher_pos), K)
        assert one.rows <= most.rows and one.slots <= most.slots
        assert all(a <= b for a, b in zip(one.learning, most.learning, strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_kept_is_what_is_worked_out(shape: dict[str, Any]) -> None:
    """The difference of two lengths, so that weights do not count."""
    hidden = shape.get("target_hidden_size", 32)
    head = debug_head(hidden=hidden)
    draft = debug_draft(head, **shape)
    fast, planned = UnrolledLoss(draft, head, K, 0.8, torch.float32), Activations(draft.config, 4, K, 0)
    packs = [pack([document(n, hidden)], K) for n in (256, 512)]
    kept = []
    for again in range(planned.parts + 1):
        measured = [saved_bytes(fast, p, again) for p in packs]
        expected = [planned.kept(Rows.of_pack(p), again) for p in packs]
        assert expected[1] - expected[0] == pytest.approx(measured[1] - measured[0], rel=0.02), again
        kept.append(measured[1])
    assert kept == sorted(kept, reverse=True) and kept[-1] < 0.35 * kept[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_norms_and_activations_add_is_what_is_worked_out(shape: dict[str, Any], dtype: torch.dtype) -> None:
    hidden = shape.get("target_hidden_size", 32)
    head = debug_head(hidden=hidden)
    draft = debug_draft(head, **shape)
    fast, planned = UnrolledLoss(draft, head, K, 0.8, dtype), Activations(draft.config, dtype.itemsize, K, 0)
    packs = [pack([document(n, hidden)], K) for n in (256, 512)]
    measured = [saved_bytes(fast, p, 0, keeps=True) - saved_bytes(fast, p, 0) for p in packs]
    expected = [planned.more(Rows.of_pack(p)) for p in packs]
    assert measured[1] - measured[0] == pytest.approx(expected[1] - expected[0], rel=0.01)
    assert measured[1] > measured[0] > 0


@pytest.mark.parametrize("shape", SHAPES[::2], ids=str)
def test_the_peak_falls_and_is_near_what_is_worked_out(shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    head = debug_head()
    draft = debug_draft(head, **shape)
    fast, planned = UnrolledLoss(draft, head, K, 0.8, torch.float32), Activations(draft.config, 4, K, 0)
    packs = [pack([document(n)], K) for n in (64, 160)]
    peaks = []
    for again in (0, 2, planned.parts):
        measured = []
        for packed in packs:
            gc.collect()
            with LiveBytes() as live:
                loss, _ = fast(packed, again=again)
                loss.backward()
            del loss
            draft.zero_grad()
            measured.append(live.peak)
        expected = [planned.need(Rows.of_pack(p), again) for p in packs]
        assert 0.85 < (expected[1] - expected[0]) / (measured[1] - measured[0]) < 1.25, again
        peaks.append(measured[1])
    assert peaks[0] > peaks[1] > peaks[2] and peaks[2] < 0.75 * peaks[0]


@pytest.mark.parametrize("objective", [Objective(), Objective(loss="lk", temperature=0.7)], ids=lambda o: o.loss)
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_the_gradient_is_the_same_whatever_is_kept_and_however_documents_share_passes(
    shape: dict[str, Any], objective: Objective
) -> None:
    head, samples = debug_head(wide=True), random_samples(8, seed=2, longest=40)
    draft = debug_draft(head, **shape).double()
    fast = UnrolledLoss(draft, head, K, 0.8, torch.float64, objective)
    fast.adapt(torch.tensor([0.6, 0.5, 0.4, 0.3]), torch.ones(K))
    whole = pack(samples, K)
    expected, _ = fast(whole)
    gradients = torch.autograd.grad(expected, list(draft.parameters()))
    counts = fast.counts(whole)
    groupings = [([samples], again, False) for again in range(1, K + 2)]
    groupings += [([samples[:3], samples[3:4], samples[4:]], 0, False), ([[s] for s in samples], K + 1, False)]
    groupings += [([samples], 0, True), ([[s] for s in samples], 0, True), ([samples], K, True)]
    for groups, again, keeps in groupings:
        draft.zero_grad()
        total = 0.0
        for group in groups:
            loss, _ = fast(pack(group, K), counts, again=again, keeps=keeps)
            total += float(loss.detach())
            if loss.requires_grad:
                loss.backward()
        assert total == pytest.approx(float(expected.detach()), rel=1e-12)
        for (name, p), g in zip(draft.named_parameters(), gradients, strict=True):
            assert p.grad is not None
            assert torch.allclose(p.grad, g, rtol=1e-10, atol=1e-12), (name, again, keeps)


def test_the_fewest_parts_that_fit_are_made_again() -> None:
    rows = Rows.of_mask(document(400).loss_mask, K)
    sizes = Activations(debug_config(), 4, K, 0)
    needs = [sizes.need(rows, n) for n in range(sizes.parts + 1)]
    for budget in (needs[0], needs[0] - 1, needs[3], needs[3] - 1, min(needs)):
        chosen = replace(sizes, budget=budget)
        n = chosen.again(rows)
        assert needs[n] <= budget and all(need > budget for need in needs[:n])
        assert chosen.fits_whole(rows) == (n == 0)
    assert replace(sizes, budget=1).again(rows) == needs.index(min(needs))


def test_norms_and_activations_are_kept_where_they_fit_and_nowhere_on_a_gpu() -> None:
    rows = Rows.of_mask(document(400).loss_mask, K)
    sizes = Activations(debug_config(), 4, K, 0)
    least = sizes.need(rows, 0) + sizes.more(rows)
    for budget, kept in ((least, True), (least - 1, False), (sizes.need(rows, 2), False)):
        on_cpu = replace(sizes, budget=budget, keeps_more=True)
        assert on_cpu.plan(rows) == (on_cpu.again(rows), kept)
        assert not replace(on_cpu, keeps_more=False).plan(rows)[1]


def budgeted(folder: Path, gib: float | str, **changes: Any) -> Trainer:
    samples = [*random_samples(30, seed=6, longest=60), document(300)]
    job = make_job(
        folder, train=ListSource(samples), compute_dtype="float32", tokens_per_step=400, epochs=1, unroll_steps=K,
        activation_gib=gib, **changes,
    )  # fmt: skip
    return Trainer(job)


def least_gib(trainer: Trainer) -> float:
    """The smallest budget that its longest document allows."""
    longest = max(trainer.job.train.infos, key=lambda i: i.num_tokens)
    return 1.001 * trainer.activations._least(longest.num_tokens, longest.num_supervised) / GIB


def test_a_training_within_a_budget_is_the_training_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = budgeted(tmp_path / "free", "auto")
    free.run()
    passes: list[tuple[int, int]] = []  # documents, parts made again
    all_kept: list[bool] = []
    call = UnrolledLoss.__call__

    def watched(
        self: UnrolledLoss, packed: Pack, counts: Any = None, keep: Any = None, again: int = 0, keeps: bool = False
    ) -> Any:
        if torch.is_grad_enabled():
            rows = Rows.of_pack(packed)
            assert self_budget.need(rows, again) + keeps * self_budget.more(rows) <= self_budget.budget
            passes.append((len(packed.documents), again))
            all_kept.append(keeps)
        return call(self, packed, counts, keep, again, keeps)

    monkeypatch.setattr(UnrolledLoss, "__call__", watched)
    tight = budgeted(tmp_path / "tight", least_gib(free))
    self_budget = tight.activations
    assert tight.fingerprint == free.fingerprint and tight.total_steps == free.total_steps
    tight.run()
    assert len(passes) > tight.total_steps  # a step takes several
    assert {again for _, again in passes} > {0} and max(again for _, again in passes) >= K
    assert all(again == 0 for documents, again in passes if documents > 1)
    assert set(all_kept) == {True, False} and not any(k for k, (_, n) in zip(all_kept, passes, strict=True) if n)
    first, second = weights_of(tmp_path / "free"), weights_of(tmp_path / "tight")
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-3, atol=1e-4)


def test_a_document_over_the_budget_is_named_before_the_first_step(tmp_path: Path) -> None:
    gib = least_gib(budgeted(tmp_path / "a", "auto"))
    with pytest.raises(UserError, match=r"^sample s0 of 300 tokens needs 0\.00\d+ GiB.*activation_gib\): set ") as e:
        budgeted(tmp_path / "b", gib / 2)
    assert "train.max_document" in str(e.value) and "\n" not in str(e.value)
    assert budgeted(tmp_path / "c", gib / 2, max_document=80).plan.cut == 1


def test_too_long_documents_are_cut_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither a limit of ours nor the draft's positions drop anything without a word."""
    with caplog.at_level(logging.WARNING, "draftmill"):
        trainer = budgeted(tmp_path / "own", "auto", max_document=100)
    assert "1 of " in caplog.text and "longer than 100 tokens (train.max_document)" in caplog.text
    assert "200 tokens are not learnt" in caplog.text
    assert trainer.summary()["samples_cut"] == 1
    caplog.clear()
    long = ListSource([document(600), document(40)])
    with caplog.at_level(logging.WARNING, "draftmill"):
        trainer = Trainer(make_job(tmp_path / "draft", train=long, max_document=4096))
    assert "longer than 512 tokens (the draft's max_position_embeddings)" in caplog.text
    assert trainer.plan.tokens == {0: 512, 1: 40}


def test_auto_is_what_the_memory_leaves() -> None:
    config, train = debug_config(), TrainConfig()
    small, large = (fixed_bytes(train, config, torch.device("cpu"), 1, n) for n in (10**5, 2 * 10**5))
    assert large - small == 2 * 10**5 * 8 * 32  # two steps' states of bf16
    assert room(train, config, torch.device("cpu"), 1, 100) > LEAST_ROOM
    assert room(train, config, torch.device("cpu"), 10**6, 100) == LEAST_ROOM
    kimi = debug_config(hidden_size=7168, target_hidden_size=7168, vocab_size=163840, draft_vocab_size=32000)
    whole = fixed_bytes(train, kimi, torch.device("cpu"), 8, 100)
    assert whole - fixed_bytes(train.model_copy(update={"shard": True}), kimi, torch.device("cpu"), 8, 100) > 5 * GIB


def test_a_draft_of_kimis_size_fits_a_gpu_with_documents_of_65536_tokens() -> None:
    """H 7,168, V 163,840: bytes of a worker by what is sharded and where the embedding lies (docs/training.md)."""
    kimi = debug_config(
        hidden_size=7168, target_hidden_size=7168, vocab_size=163840, draft_vocab_size=32000, intermediate_size=18432,
        num_attention_heads=64, num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    gpu = torch.device("cuda")

    def gib(workers: int, tokens: int, **settings: Any) -> float:
        return fixed_bytes(TrainConfig(**settings), kimi, gpu, workers, tokens) / GIB

    assert gib(1, 65536) == pytest.approx(35.5, abs=0.1)
    assert gib(8, 65536, shard=True) == pytest.approx(22.6, abs=0.1)
    off_gpu = gib(8, 65536, shard=True, embedding_device="cpu")
    assert gib(8, 65536, shard=True) - off_gpu == pytest.approx(2 * 163840 * 7168 / GIB)
    planned = Activations(kimi, 2, 7, int(GPU_SHARE * 80 * GIB - off_gpu * GIB))
    whole_answer = Rows.most(65536, 65536, 7)
    assert 0 < planned.again(whole_answer) <= planned.parts
    assert planned.need(whole_answer, planned.again(whole_answer)) <= planned.budget


# The embedding on the CPU


def test_an_embedding_on_the_cpu_comes_with_the_pass_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = budgeted(tmp_path / "gpu", "auto", valid=None)
    free.run()

    def never(self: CastDraft, ids: Tensor) -> Tensor:
        raise AssertionError("looked up in the step")

    monkeypatch.setattr(CastDraft, "embedding", never)
    trainer = budgeted(tmp_path / "cpu", "auto", valid=None, embedding_device="cpu")
    assert trainer.fingerprint == free.fingerprint
    trainer.run()
    first, second = weights_of(tmp_path / "gpu"), weights_of(tmp_path / "cpu")
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_an_embedding_may_lie_elsewhere_than_the_draft() -> None:
    draft = debug_draft()
    ids = torch.tensor([5, 7, 5])
    expected = draft.cast(torch.float32).embedding(ids)
    draft.place(torch.device("meta"), torch.device("cpu"))
    assert draft.fc.weight.is_meta and not draft.embed_tokens.weight.is_meta
    assert torch.equal(draft.embed_tokens.weight[ids].float(), expected)


# Documents of 65,536 tokens


def long_document(length: int, answer: int) -> FakeSample:
    return make_sample(span_mask(length, [(length - answer, length)]), hidden=8)


THIN: dict[str, Any] = {
    "hidden_size": 8, "target_hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 4,
    "num_key_value_heads": 1, "max_position_embeddings": 131072,
}  # fmt: skip


def test_memory_is_linear_up_to_65536_tokens() -> None:
    head = debug_head(hidden=8)
    draft = debug_draft(head, **THIN)
    fast = UnrolledLoss(draft, head, 2, 0.8, torch.float32)
    saved, largest = [], LargestTensor()
    for length in (16384, 32768, 65536):
        packed = pack([long_document(length, length // 16)], 2)
        assert len(packed.next_ids) == length - 2
        with largest:
            saved.append(saved_bytes(fast, packed, 0))
    assert saved[2] - saved[1] == pytest.approx(2 * (saved[1] - saved[0]), rel=0.01)
    assert largest.size < 2**27 < 65536 * 65536  # a block of scores, and never those of the document


def test_a_document_of_65536_tokens_trains(tmp_path: Path) -> None:
    """It is a step of its own, whole; with a budget that only steps made again hold to, as without."""
    weights, gib = [], 8.0
    for name in ("free", "tight"):
        head = debug_head(hidden=8)
        source = ListSource([long_document(65536, 768), *random_samples(6, hidden=8)])
        job = make_job(
            tmp_path / name, head=head, draft=debug_draft(head, **THIN), train=source, valid=None, unroll_steps=2,
            epochs=1, compute_dtype="float32", activation_gib=gib, tokens_per_step=64,
        )  # fmt: skip
        trainer = Trainer(job)
        gib = least_gib(trainer)
        assert trainer.plan.cut == 0 and trainer.plan.tokens[0] == 65536
        assert [0] in trainer.plan.epoch(0)
        rows = Rows.of_mask(source[0].loss_mask, 2)
        assert (trainer.activations.again(rows) > 0) == (name == "tight")
        assert trainer.run()["skipped_steps"] == 0
        weights.append(weights_of(tmp_path / name))
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-3, atol=1e-4)


# Documents whose every token is supervised. The attention of 65,536 rows with all before them takes minutes on two
# cores, so it is left out at that length; the real one has 16,384.

NARROW: dict[str, Any] = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}


def whole_answer(length: int) -> FakeSample:
    return make_sample(span_mask(length, [(0, length)]))


def peak_bytes(fast: UnrolledLoss, packed: Pack) -> int:
    gc.collect()
    with LiveBytes() as live:
        loss, _ = fast(packed)
        loss.backward()
    fast.draft.zero_grad()
    return live.peak


def linear(values: list[int]) -> bool:
    """Whether values of three lengths, each twice the one before, lie on a line."""
    return values[2] - values[1] == pytest.approx(2 * (values[1] - values[0]), rel=0.03) and values[1] > values[0]


def test_16384_supervised_tokens_take_memory_that_is_linear_in_them() -> None:
    """F61, at the lengths that matter."""
    head = debug_head()
    fast = UnrolledLoss(debug_draft(head, **NARROW), head, 2, 0.8, torch.float32)
    packs = [pack([whole_answer(n)], 2) for n in (4096, 8192, 16384)]
    assert packs[2].counts == [16382, 16381]
    largest = LargestTensor()
    with largest:
        peaks = [peak_bytes(fast, p) for p in packs]
    assert linear(peaks), peaks
    assert largest.size <= 512 * 16384  # the scores of one block of queries


def test_65536_supervised_tokens_train_whole_within_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three unroll steps over all rows but the last ones; memory is linear and as large as worked out."""

    def own_value(q: Tensor, k: Tensor, v: Tensor, pack: Pack) -> tuple[Tensor, Tensor, list[Tensor]]:
        return v.expand(-1, q.shape[1], -1).clone(), q.new_zeros(q.shape[1], len(q)), []

    def of_value(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, Tensor, Tensor]:
        return torch.zeros_like(q), torch.zeros_like(k), grad.sum(1, keepdim=True)

    monkeypatch.setattr("app.train.attention._documents_forward", own_value)
    monkeypatch.setattr("app.train.attention._documents_backward", of_value)
    monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", 2**16)
    head = debug_head()
    draft = debug_draft(head, **NARROW, max_position_embeddings=131072)
    fast, planned = UnrolledLoss(draft, head, 3, 0.8, torch.float32), Activations(draft.config, 4, 3, 0)
    packs = [pack([whole_answer(n)], 3) for n in (16384, 32768, 65536)]
    assert packs[2].counts == [65534, 65533, 65532]
    peaks = [peak_bytes(fast, p) for p in packs]
    assert linear(peaks), peaks
    needs = [planned.need(Rows.of_pack(p), 0) for p in packs]
    assert 0.85 < (needs[2] - needs[0]) / (peaks[2] - peaks[0]) < 1.25
    job = make_job(
        tmp_path, head=head, draft=draft, train=ListSource([whole_answer(65536)]), valid=None, unroll_steps=3, epochs=1,
        compute_dtype="float32", activation_gib=0.6 * needs[2] / GIB, tokens_per_step=64,
    )  # fmt: skip
    trainer = Trainer(job)
    assert trainer.plan.cut == 0 and trainer.activations.again(Rows.of_pack(packs[2])) > 0
    before = draft.lm_head.weight.detach().clone()
    summary = trainer.run()
    assert summary["steps"] == 1 and summary["skipped_steps"] == 0
    assert not torch.equal(before, draft.lm_head.weight)


def test_lengths_alone_decide_what_is_refused() -> None:
    planned = Activations(debug_config(), 4, K, 0)
    planned = replace(planned, budget=planned._least(300, 100))
    fine = [Length(100, 50, "a"), Length(200, 10, "b")]
    planned.require(fine, 10**6, "auto")
    with pytest.raises(UserError, match="sample c of 5,000 tokens"):
        planned.require([*fine, Length(5000, 4000, "c")], 10**6, "auto")
    planned.require([*fine, Length(5000, 100, "c")], 300, "auto")
