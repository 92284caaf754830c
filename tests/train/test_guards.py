"""What stops or warns of a training that goes wrong: each guard speaks where it should and is quiet where not."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from app.captured import load_entries
from app.codecs import encode
from app.config import TrainConfig
from app.errors import UserError
from app.pipeline import run_stage
from app.target import TargetHead
from app.train.guards import (
    MIN_TOKENS,
    Agreement,
    agreement,
    agreement_words,
    overfits,
    random_level,
    require_agreement,
)
from app.train.loop import least_agreement, run_worker
from app.train.state import load_latest, read_weights
from app.train.trainer import Trainer
from tests.pipelines.finished import finish_generate, stage
from tests.runs import tiny_config, write_rows
from tests.train.debug import FakeSample, ListSource, debug_head, make_sample, span_mask
from tests.train.test_trainer import make_job, spawn_workers, weights_of


def broken(source: Any, which: tuple[int, ...]) -> ListSource:
    """`source` with NaN in the states of some samples."""
    samples = list(source.samples)
    for i in which:
        samples[i] = replace(samples[i], aux=torch.full_like(samples[i].aux, math.nan))
    return ListSource(samples)


def test_a_step_without_numbers_is_skipped_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = make_job(tmp_path)
    trainer = Trainer(replace(job, train=broken(job.train, (5,))))
    before = [p.detach().clone() for p in trainer.draft.parameters()]
    summary = trainer.run()
    trainer.draft.check_loaded()
    assert summary["skipped_steps"] == 3 and summary["steps"] == 30  # once an epoch
    assert math.isfinite(summary["loss"])
    assert not all(torch.equal(a, b) for a, b in zip(before, trainer.draft.parameters(), strict=True))
    said = [r.getMessage() for r in caplog.records if "is skipped" in r.getMessage()]
    assert len(said) == 3
    assert all("samples: c0-5 (its states hold NaN or infinity)" in s for s in said)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    skipped = [line for line in lines if "skipped" in line]
    assert len(skipped) == 3 and all(line["skipped"] == [line["step"]] and "loss" not in line for line in skipped)
    assert len([line for line in lines if "loss" in line]) == 27


def test_a_skipped_step_changes_neither_weights_nor_moments(tmp_path: Path) -> None:
    job = make_job(tmp_path, epochs=1)
    trainer = Trainer(replace(job, train=broken(job.train, (5,))))
    steps = [[trainer.job.train.infos[i].sample_id for i in step] for step in trainer.plan.epoch(0)]
    at = next(n for n, names in enumerate(steps) if "c0-5" in names)
    trainer.run()
    kept: list[dict[str, Tensor]] = []
    for step in (at, at + 1):  # checkpoints before and after the skipped step
        again = Trainer(make_job(tmp_path / f"{step}", epochs=1, train=broken(job.train, (5,)), keep_checkpoints=30))
        again.run()
        folder = tmp_path / f"{step}" / "checkpoints" / f"step-{step:08d}"
        from safetensors.torch import load_file

        tensors = {**load_file(folder / "weights.safetensors"), **load_file(folder / "optimizer.safetensors")}
        kept.append({n: t for n, t in tensors.items() if not n.startswith("rng")})
    assert kept[0].keys() == kept[1].keys() and kept[0]
    assert all(torch.equal(kept[0][n], kept[1][n]) for n in kept[0])


def test_more_bad_steps_than_the_limit_stop_with_a_sentence(tmp_path: Path) -> None:
    job = make_job(tmp_path, max_bad_steps=2)
    trainer = Trainer(replace(job, train=broken(job.train, (5,))))
    with pytest.raises(UserError, match=r"training broke at step .*norm is nan.*3 steps.*max_bad_steps = 2.*c0-5"):
        trainer.run()
    trainer.draft.check_loaded()
    saved = load_latest(job.store, trainer.fingerprint)
    assert saved is not None and saved.meta["step"] == trainer.step and saved.meta["bad_steps"] == 2
    with pytest.raises(UserError, match="max_bad_steps = 2"):  # a resume does not start counting anew
        Trainer(replace(make_job(tmp_path, max_bad_steps=2), train=broken(job.train, (5,)))).run()
    assert Trainer(replace(make_job(tmp_path), train=broken(job.train, (5,)))).run()["skipped_steps"] == 3


def test_a_first_step_that_is_skipped_can_be_resumed_from(tmp_path: Path) -> None:
    job = make_job(tmp_path, max_bad_steps=99)
    bad = broken(job.train, tuple(range(40)))
    with torch.no_grad():
        start = [p.detach().clone() for p in job.draft.parameters()]
    Trainer(replace(job, train=bad, config=job.config.model_copy(update={"epochs": 1.0}))).run()
    again = Trainer(replace(make_job(tmp_path, max_bad_steps=99, epochs=1.0), train=bad))
    assert again.step == 10
    assert all(torch.equal(a, b) for a, b in zip(start, again.draft.parameters(), strict=True))


def test_workers_agree_on_skipping(tmp_path: Path) -> None:
    """NaN on one worker's samples alone: both skip, and end with the weights of one worker."""
    for world in (1, 2):
        spawn_workers(world, tmp_path / str(world), broken_sample=7)
    one, two = weights_of(tmp_path / "1"), weights_of(tmp_path / "2")
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=1e-4)
    states = [read_weights(make_job(tmp_path / n).store, "last")[1] for n in ("1", "2")]
    assert states[0]["bad_steps"] == states[1]["bad_steps"] == 3


def test_a_norm_that_never_moves_is_reported_early_and_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = make_job(tmp_path, epochs=12)
    job.draft.midlayer.hidden_norm.weight.requires_grad_(False)
    Trainer(job).run()
    said = [r.getMessage() for r in caplog.records if "did not change" in r.getMessage()]
    assert len(said) == 1 and "midlayer.hidden_norm.weight did not change in 50 steps" in said[0]


def test_a_loss_at_the_random_level_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Far too small a rate: after a tenth of the steps the draft knows nothing."""
    job = make_job(tmp_path / "still", epochs=6, learning_rate=1e-9)
    with torch.no_grad():
        job.draft.lm_head.weight.zero_()  # every token equally likely
        job.draft.lm_head.weight.requires_grad_(False)
    Trainer(job).run()
    assert "the loss of the first draft token is" in caplog.text and "log(Vd) = 3.69" in caplog.text  # log 40
    caplog.clear()
    Trainer(make_job(tmp_path / "learns", epochs=6, learning_rate=1e-2)).run()
    assert "a draft that knows nothing" not in caplog.text


def test_the_random_level_by_kind_of_loss() -> None:
    level = math.log(32000)
    assert random_level({"loss_by_step": [level]}, 32000) is not None
    assert random_level({"loss_by_step": [math.nan]}, 32000) is not None
    assert random_level({"loss_by_step": [0.7 * level]}, 32000) is None
    # lk: its loss is no scale, the acceptance is
    assert random_level({"loss_by_step": [0.9], "alpha_by_step": [0.3]}, 32000) is None
    assert "would be accepted" in str(random_level({"loss_by_step": [0.9], "alpha_by_step": [0.001]}, 32000))


def test_a_growing_gap_between_training_and_validation_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    def validations(valid: list[float], train: list[float]) -> list[dict[str, Any]]:
        return [{"loss": v, "train_loss": t} for v, t in zip(valid, train, strict=True)]

    assert overfits(validations([2.0, 2.1, 2.2, 2.3], [1.9, 1.5, 1.2, 1.0]))
    assert not overfits(validations([2.1, 2.2, 2.3], [1.5, 1.2, 1.0]))  # two rises are no trend
    assert not overfits(validations([2.0, 2.1, 2.05, 2.3], [1.9, 1.5, 1.2, 1.0]))
    assert not overfits(validations([2.0, 2.1, 2.2, 2.3], [1.9, 1.5, 1.6, 1.0]))


def test_training_by_heart_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Random tokens can only be learnt by heart."""
    job = make_job(tmp_path, epochs=30, learning_rate=1e-2)
    head = job.head
    train, valid = (_random_answers(8, head, seed) for seed in (1, 2))
    Trainer(replace(job, train=ListSource(train), valid=ListSource(valid))).run()
    assert caplog.text.count("validation loss rises since 3 validations") == 1


def _random_answers(n: int, head: TargetHead, seed: int) -> list[FakeSample]:
    return [make_sample(span_mask(24, [(4, 24)]), seed=100 * seed + i, name=f"r{seed}-{i}") for i in range(n)]


def answers(head: TargetHead, n: int, temperature: float, seed: int = 0) -> ListSource:
    """Answers that the head itself gives to random states: the best token, or one drawn at a temperature."""
    g = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(n):
        sample = make_sample(span_mask(24, [(4, 24)]), seed=seed * 1000 + i, name=f"a{seed}-{i}")
        ids, logits = sample.token_ids.clone(), head.logits(sample.teacher)
        if temperature == 0:
            ids[sample.teacher_pos + 1] = logits.argmax(-1)
        else:
            p = torch.softmax(logits / temperature, -1)
            ids[sample.teacher_pos + 1] = torch.multinomial(p, 1, generator=g).squeeze(1)
        samples.append(replace(sample, token_ids=ids, greedy=temperature == 0))
    return ListSource(samples)


def measured(head: TargetHead, source: ListSource, temperature: float) -> Agreement:
    return agreement(head, source, [(i, temperature) for i in range(len(source))])


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_states_that_give_the_emitted_tokens_pass(temperature: float) -> None:
    head = debug_head(norm_eps=1e-6)
    found = measured(head, answers(head, 40, temperature), temperature)
    numbers = require_agreement(found, 0.9)
    if temperature == 0:
        assert numbers == {"greedy_tokens": 40 * 19, "greedy_share": 1.0}
        assert "100.0 % of 760 greedy tokens" in agreement_words(numbers)
    else:
        assert numbers["sampled_tokens"] == 40 * 19
        assert numbers["sampled_ratio"] == pytest.approx(1.0, abs=0.09)


def wrong_layer(source: ListSource, head: TargetHead) -> ListSource:
    g = torch.Generator().manual_seed(5)
    return ListSource([replace(s, teacher=torch.randn(s.teacher.shape, generator=g)) for s in source.samples])


def shifted(source: ListSource, head: TargetHead) -> ListSource:
    return ListSource([replace(s, teacher=s.teacher.roll(1, 0)) for s in source.samples])


def normed_before(source: ListSource, head: TargetHead) -> ListSource:
    return ListSource([replace(s, teacher=head.normed(s.teacher)) for s in source.samples])


@pytest.mark.parametrize("fault", [wrong_layer, shifted, normed_before])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_states_of_something_else_stop_the_training(fault: Any, temperature: float) -> None:
    """Wrong layer, wrong position, and a norm applied twice by a gain far from 1, as real ones are."""
    g = torch.Generator().manual_seed(3)
    head = debug_head(norm_weight=torch.exp(1.5 * torch.randn(32, generator=g)))
    source = fault(answers(head, 40, temperature), head)
    with pytest.raises(UserError, match=r"do not give the tokens.*last layer's.*final norm.*revision"):
        require_agreement(measured(head, source, temperature), 0.9)


def test_another_revision_of_the_target_stops_the_training() -> None:
    head = debug_head()
    source = answers(head, 40, 0.0)
    other = replace(head, lm_head=debug_head(seed=9).lm_head)
    with pytest.raises(UserError, match="greedy tokens are their first choice"):
        require_agreement(measured(other, source, 0.0), 0.9)
    assert require_agreement(measured(other, source, 0.0), 0.0)["greedy_share"] < 0.2


def test_too_few_tokens_say_nothing_and_encoded_states_are_decoded() -> None:
    head = debug_head()
    few = Agreement(greedy=MIN_TOKENS - 1)
    assert require_agreement(few, 0.9) == {} and "too few" in agreement_words({})
    source = answers(head, 40, 0.0)
    source = ListSource([replace(s, teacher=encode(s.teacher.unsqueeze(1), "int8")) for s in source.samples])
    assert require_agreement(measured(head, source, 0.0), 0.9)["greedy_share"] > 0.9


def test_the_threshold_gives_way_to_int4_alone() -> None:
    config = TrainConfig(min_teacher_agreement=0.9)
    parts = [SimpleNamespace(codec=codec) for codec in ("bf16", "fp8", "int8")]
    assert least_agreement(config, parts) == 0.9  # type: ignore[arg-type]
    assert least_agreement(config, [*parts, SimpleNamespace(codec="int4")]) == 0.75  # type: ignore[list-item]
    off = TrainConfig(min_teacher_agreement=0.0)
    assert least_agreement(off, [SimpleNamespace(codec="int4")]) == 0.0  # type: ignore[list-item]


def test_the_check_comes_before_step_1_and_not_again(tmp_path: Path) -> None:
    calls = []

    def check(ranks: Any) -> dict[str, Any]:
        calls.append(ranks.rank)
        return {"greedy_share": 0.97}

    assert Trainer(make_job(tmp_path, check=check)).run()["teacher_agreement"] == {"greedy_share": 0.97}
    assert Trainer(make_job(tmp_path, check=check)).run()["teacher_agreement"] == {"greedy_share": 0.97}
    assert calls == [0]

    def refuse(ranks: Any) -> dict[str, Any]:
        raise UserError("no")

    with pytest.raises(UserError):
        Trainer(make_job(tmp_path / "b", check=refuse)).run()
    assert not (tmp_path / "b" / "checkpoints").exists()


@pytest.mark.parametrize("use", ["regenerate", "as_is"])
def test_a_run_whose_states_are_of_something_else_does_not_begin(use: str, tiny: Path, tmp_path: Path) -> None:
    """A stub's states; conversations taken as they are say nothing about them."""
    rows = [
        {"messages": [{"role": "user", "content": f"Day {i}?"}, {"role": "assistant", "content": f"{i} sacks"}]}
        for i in range(12)
    ]
    config = tiny_config(
        tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", rows),
        sources=[{"name": "rows", "path": str(tmp_path / "r.jsonl"), "use": use}],
        train__min_teacher_agreement=0.9, capture__mask="prefix" if use == "as_is" else "auto",
    )  # fmt: skip
    ctx = finish_generate(config)
    run_stage(stage("vocab"), ctx)
    arguments = (config.model_dump(mode="json"), ctx.target.to_json(), load_entries(ctx), torch.device("cpu"))
    if use == "as_is":
        assert run_worker(ctx.run.store, *arguments)["teacher_agreement"] == {}
        return
    with pytest.raises(UserError, match=r"0\.\d % of \d+ greedy tokens are their first choice"):
        run_worker(ctx.run.store, *arguments)
    assert not ctx.run.store.exists("train/checkpoints")
