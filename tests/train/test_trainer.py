"""The loop: resume, several workers, schedule, warnings, and that it learns."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from app.config import TrainConfig
from app.errors import UserError
from app.storage import Store
from app.train.draft import Eagle3Draft
from app.train.state import load_draft_state, load_latest, read_weights
from app.train.trainer import Trainer, TrainJob, learning_rate
from tests.train.debug import (
    ListSource,
    debug_config,
    debug_head,
    kept_ids,
    learnable_samples,
    random_samples,
    run_workers,
)

# 40 samples of 24 tokens, 96 tokens a step: 10 steps an epoch.
SETTINGS: dict[str, Any] = {
    "epochs": 3,
    "learning_rate": 3e-3,
    "unroll_steps": 3,
    "tokens_per_step": 96,
    "validate_every_epochs": 1.0,
    "checkpoint_every_s": 1e-9,
}


class Killed(Exception):
    pass


class KilledAt(ListSource):
    """Reads samples until the loader comes to step `step` of `per_step` samples each."""

    def __init__(self, source: ListSource, reads: int) -> None:
        super().__init__(source.samples)
        self.reads = reads

    def __getitem__(self, index: int) -> Any:
        self.reads -= 1
        if self.reads < 0:
            raise Killed
        return super().__getitem__(index)


def fresh_draft(seed: int = 0, **changes: Any) -> Eagle3Draft:
    torch.manual_seed(seed)
    draft = Eagle3Draft(debug_config(**changes))
    draft.init_from_target(debug_head(), kept_ids(draft.config))
    return draft


def make_job(folder: Path, **changes: Any) -> TrainJob:
    settings = {**SETTINGS, **{k: changes.pop(k) for k in list(changes) if k in TrainConfig.model_fields}}
    head = debug_head()
    job = TrainJob(
        draft=fresh_draft(),
        head=head,
        train=ListSource(learnable_samples(40, head)),
        valid=ListSource(learnable_samples(6, head, seed=1)),
        config=TrainConfig(**settings),
        store=Store(str(folder)),
    )
    return replace(job, **changes)


def weights_of(folder: Path) -> dict[str, Tensor]:
    return read_weights(Store(str(folder)), "last")[0]


@pytest.mark.parametrize("killed_at", [10, 13, 20])
def test_a_killed_and_resumed_run_equals_one_that_was_not(
    killed_at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """F64, F65: same samples a step, bit-equal weights and moments, metrics without gaps or repeats."""
    whole = Trainer(make_job(tmp_path / "whole"))
    assert (whole.plan.steps_per_epoch, whole.total_steps) == (10, 30)
    whole.run()
    job = make_job(tmp_path / "cut")
    source = KilledAt(job.train, 4 * killed_at)  # type: ignore[arg-type]
    with pytest.raises(Killed):
        Trainer(replace(job, train=source)).run()
    torch.randn(7)  # whatever else the process does
    with caplog.at_level(logging.INFO, "draftmill"):
        resumed = Trainer(make_job(tmp_path / "cut"))
    assert resumed.step == killed_at
    assert f"resumed at step {killed_at}, epoch {killed_at // 10}" in caplog.text
    resumed.run()
    for a, b in ((tmp_path / "whole", tmp_path / "cut"),):
        first, second = (load_latest(Store(str(p)), whole.fingerprint) for p in (a, b))
        assert first is not None and second is not None
        for mine, other in ((first.weights, second.weights), (first.optimizer, second.optimizer)):
            assert mine.keys() == other.keys()
            assert all(torch.equal(mine[n], other[n]) for n in mine if not n.startswith("rng"))
        assert all(t.dtype == torch.float32 for n, t in second.optimizer.items() if "exp_avg" in n)  # F60
    lines = [json.loads(line) for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 31))
    straight = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [x["loss"] for x in lines if "loss" in x] == [x["loss"] for x in straight if "loss" in x]
    assert [x["validation"]["step"] for x in lines if "validation" in x] == [10, 20, 30]


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    summary = Trainer(make_job(tmp_path)).run()
    again = Trainer(make_job(tmp_path))
    assert again.step == again.total_steps
    assert again.run()["validation"] == summary["validation"]


def test_other_settings_do_not_take_up_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Trainer(make_job(tmp_path)).run()
    assert Trainer(make_job(tmp_path, cpus_per_worker=7)).step == 30
    assert Trainer(make_job(tmp_path, learning_rate=1e-3)).step == 0
    assert "other data or settings" in caplog.text


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(tmp_path: Path) -> None:
    Trainer(make_job(tmp_path)).run()
    folders = sorted((tmp_path / "checkpoints").iterdir())
    assert [f.name for f in folders] == ["step-00000029", "step-00000030"]  # keep_checkpoints
    (folders[1] / "optimizer.safetensors").write_bytes(b"cut")
    assert Trainer(make_job(tmp_path)).step == 29
    (folders[0] / "state.json").unlink()
    assert Trainer(make_job(tmp_path)).step == 0


def test_it_learns_and_the_draft_comes_back_from_its_checkpoint(tmp_path: Path) -> None:
    job = make_job(tmp_path, epochs=12, learning_rate=1e-2, draft=fresh_draft(draft_vocab_size=96))
    trainer = Trainer(job)
    summary = trainer.run()
    lengths = [v["acceptance_length"] for v in summary["validation"]]
    assert lengths[0] < lengths[-1]
    assert lengths[-1] > 3.0  # of 4
    weights, meta = read_weights(job.store, "best")
    assert meta["acceptance_length"] == summary["best_acceptance_length"] == max(lengths)
    last, _ = read_weights(job.store, "last")
    draft = load_draft_state(job.draft.config, last, job.head.embed_tokens)
    assert torch.equal(draft.lm_head.weight, trainer.draft.lm_head.weight)
    assert weights.keys() == last.keys()


def test_every_norm_moves_in_fifty_bf16_steps_at_a_small_rate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F60."""
    job = make_job(tmp_path, epochs=5, learning_rate=1e-4, compute_dtype="bfloat16")
    start = {n: p.detach().clone() for n, p in job.draft.named_parameters() if p.dim() == 1}
    Trainer(job).run()
    assert len(start) == 4
    for name, p in job.draft.named_parameters():
        if name in start:
            assert not bool((p == start[name]).all()), name
    assert "did not change" not in caplog.text


def test_a_draft_that_was_not_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lm_head\.weight, embed_tokens\.weight"):
        Trainer(make_job(tmp_path, draft=Eagle3Draft(debug_config())))


def test_warm_start_keeps_the_mapping_and_a_new_one_permutes_the_head(tmp_path: Path) -> None:
    """F54."""
    job = make_job(tmp_path / "a", epochs=2)
    Trainer(job).run()
    weights = weights_of(tmp_path / "a")
    head = job.head
    warm = load_draft_state(debug_config(), weights, head.embed_tokens)
    other = learnable_samples(40, head, seed=5)
    Trainer(make_job(tmp_path / "b", epochs=1, draft=warm, train=ListSource(other))).run()
    assert torch.equal(weights_of(tmp_path / "b")["d2t"], weights["d2t"])

    draft = load_draft_state(debug_config(), weights, head.embed_tokens)
    before, old = draft.lm_head.weight.detach().clone(), draft.kept_ids.tolist()
    new = kept_ids(draft.config, seed=7)
    draft.remap_vocabulary(new, head)
    assert torch.equal(draft.kept_ids, new)
    for row, target in enumerate(new.tolist()):
        expected = before[old.index(target)] if target in old else head.lm_head[target].float()
        assert torch.equal(draft.lm_head.weight[row], expected)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_learning_rate_schedule(schedule: str) -> None:
    config = TrainConfig(
        learning_rate=1.0,
        warmup_ratio=0.1,
        schedule=schedule,
        min_learning_rate_ratio=0.1,  # type: ignore[arg-type]
    )
    rates = [learning_rate(config, step, 100) for step in range(100)]
    assert all(a < b for a, b in itertools.pairwise(rates[:11]))
    assert rates[10] == 1.0
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))
    assert rates[-1] == 1.0 if schedule == "constant" else 0.1 < rates[-1] < 0.12


def _worker(rank: int, world: int, folder: str, address: str, fail_at: int | None, broken: int | None) -> None:
    """One gloo worker; after `fail_at` reads the second one dies; sample `broken` has NaN in its states."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=world)
    _train(Path(folder), fail_at if rank == 1 else None, broken)
    dist.destroy_process_group()


def mixed_job(folder: Path, broken: int | None = None) -> TrainJob:
    """101 samples of mixed length, many with nothing to learn."""
    samples = random_samples(101, seed=6, longest=60)
    if broken is not None:
        samples[broken] = replace(samples[broken], aux=torch.full_like(samples[broken].aux, math.nan))
    return make_job(
        folder,
        train=ListSource(samples),
        valid=ListSource(learnable_samples(5, debug_head(), seed=1)),
        compute_dtype="float32",
        tokens_per_step=200,
    )


def _train(folder: Path, fail_at: int | None, broken: int | None = None) -> None:
    job = mixed_job(folder, broken)
    if fail_at is not None:
        job = replace(job, train=KilledAt(job.train, fail_at))  # type: ignore[arg-type]
    Trainer(job).run()


def spawn_workers(world: int, folder: Path, fail_at: int | None = None, broken_sample: int | None = None) -> None:
    address = folder.parent / f"rendezvous-{folder.name}-{fail_at}-{uuid.uuid4().hex[:6]}"
    run_workers(_worker, (world, str(folder), str(address), fail_at, broken_sample), world)


def test_two_workers_equal_one_and_resume_after_one_died(tmp_path: Path) -> None:
    """F63, F65: 101 mixed rows; same global batch; killing worker 1 of 2 loses nothing."""
    _train(tmp_path / "one", None)
    spawn_workers(2, tmp_path / "two")
    one, two = weights_of(tmp_path / "one"), weights_of(tmp_path / "two")
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=1e-4)
    metrics = [
        [json.loads(x) for x in (tmp_path / n / "metrics.jsonl").read_text().splitlines()] for n in ("one", "two")
    ]
    for a, b in zip(*metrics, strict=True):
        assert a["step"] == b["step"]
        if "loss" in a:
            assert a["rows_by_step"] == b["rows_by_step"]
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)
            assert a["learning_rate"] == b["learning_rate"]

    with pytest.raises(mp.ProcessRaisedException):
        spawn_workers(2, tmp_path / "killed", fail_at=60)
    saved = read_weights(Store(str(tmp_path / "killed")), "last")[1]
    assert 0 < saved["step"] < saved["total_steps"]
    spawn_workers(2, tmp_path / "killed")
    resumed = weights_of(tmp_path / "killed")
    assert all(torch.equal(resumed[n], two[n]) for n in two)
