"""The replay is what an engine computes, and where an engine departs from it the cause fits the profile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from app.captured import load_entries
from app.codecs import decoded
from app.config import Config
from app.doctor import profile
from app.doctor.command import examine
from app.doctor.facts import Facts
from app.doctor.finding import BAD_MAP, NORM, SWAPPED
from app.doctor.profile import FEATURES, RECURRENCE, SAMPLING, SERVED_OTHERWISE, Profile, compare, replay
from app.doctor.replay import StepDraft, compare_orders
from app.samples import Sample, SampleReader, load_split
from tests.doctor.tiny_run import Target, benched, copied, generated, run_config, trained
from tests.runs import context
from tests.train.debug import debug_draft, make_sample, span_mask
from tests.train.serving import serve

K = 4
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_output": {"norm_output": True},
    "fc_norm": {"fc_norm": True, "norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "scaled rope": {"rope_scaling": LLAMA3},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_replay_proposes_what_a_server_with_a_cache_proposes(shape: str) -> None:
    draft = debug_draft(**SHAPES[shape])
    step = StepDraft(draft.config, draft.export_state_dict())
    samples = [make_sample(span_mask(30, [(9, 30)]), 0), make_sample(span_mask(14, [(3, 14)]), 1)]
    for sample, proposals in zip(samples, step(samples, K), strict=True):
        for row, start in enumerate(range(int(sample.loss_mask.nonzero()[0]) - 1, len(sample.token_ids) - 2)):
            assert torch.equal(proposals[row], serve(draft, sample, start, K)[0]), start
    equal, seen = compare_orders(draft.config, draft.export_state_dict(), samples, K)
    assert seen[0] == 21 + 11 - 2 and equal == seen


def test_a_trainer_with_another_order_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = debug_draft()
    samples = [make_sample(span_mask(40, [(5, 40)]), 1)]
    right = StepDraft._qkv
    monkeypatch.setattr(StepDraft, "_qkv", lambda self, tokens, state, at: right(self, tokens, state, at * 3))
    equal, seen = compare_orders(draft.config, draft.export_state_dict(), samples, K)
    assert equal[0] < seen[0]


def test_the_walk_counts_to_the_last_token_and_what_lies_past_it() -> None:
    """Prompt of 3, answer x3..x8; the draft is right at rows 2 and 3 and wrong at 4, then right to the end."""
    sample = make_sample(span_mask(9, [(3, 9)]))
    ids = sample.token_ids
    right = torch.stack([ids[(t + 2 + torch.arange(3)).clamp(max=8)] for t in range(2, 7)])  # starts 2..6
    wrong = right.clone()
    wrong[0, 1] += 1
    found = replay([sample], lambda samples, k: [wrong], 3)  # type: ignore[arg-type]
    # Start 2: one hit, on to 4: three hits (x6, x7, x8) and the end.
    assert found == Profile((1.0, 0.5, 0.5), 2, (0.0, 0.0, 0.0))
    wrong[0, 0] += 1
    found = replay([sample], lambda samples, k: [wrong], 3)  # type: ignore[arg-type]
    # Start 2: none, on to 3: three hits (x5..x7), on to 7: nothing is left to draft.
    assert found == Profile((0.5, 0.5, 0.5), 2, (0.0, 0.0, 0.0))
    wrong[1, 2] += 1
    found = replay([sample], lambda samples, k: [wrong], 3)  # type: ignore[arg-type]
    # ... on from 3 with two hits to 6: x8 is right, the other two lie past the end.
    assert found == Profile((2 / 3, 1 / 3, 0.0), 3, (0.0, 1 / 3, 1 / 3))


RIGHT = Profile((0.751, 0.567, 0.453), 5000)


@pytest.mark.parametrize(
    ("engine", "cause"),
    [
        ((0.751, 0.567, 0.453), None),
        ((0.770, 0.550, 0.470), None),
        ((0.036, 0.0006, 0.0), FEATURES),  # vllm PR#50170: wrong layers
        ((0.100, 0.050, 0.010), FEATURES),  # vllm PR#43671: layers off by one
        ((0.750, 0.300, 0.060), RECURRENCE),
        ((0.745, 0.560, 0.300), RECURRENCE),
        ((0.790, 0.450, 0.200), RECURRENCE),  # other starts are visited, and the first position moves a little
        ((0.0, 0.0, 0.0), SERVED_OTHERWISE),
        ((0.638, 0.410, 0.278), SAMPLING),  # each by 0.85
    ],
)
def test_the_profile_names_the_cause(engine: tuple[float, ...], cause: str | None) -> None:
    verdict = compare(RIGHT, Profile(engine, 5000))
    assert verdict.cause == cause, verdict


def test_positions_with_few_drafts_are_not_judged() -> None:
    few = compare(Profile((0.3, 0.05, 0.01), 2000), Profile((0.3, 0.10, 0.01), 2000))
    assert few.cause == RECURRENCE and few.judged == 2  # 600 drafts reach position 1, 100 position 2
    assert compare(Profile((0.2, 0.05), 2000), Profile((0.2, 0.10), 2000)).cause is None
    assert compare(Profile((0.7,), 400), Profile((0.2,), 400)).judged == 0


def test_what_lies_past_the_ends_is_no_departure() -> None:
    short = Profile((0.50, 0.30), 3000, (0.0, 0.06))
    assert compare(short, Profile((0.50, 0.36), 3000)).cause is None
    assert compare(short, Profile((0.50, 0.39), 3000)).cause == RECURRENCE


# Engines that serve the healthy run's draft wrongly.


class _Feeding:
    """An engine that gives the draft other states."""

    def __init__(self, draft: StepDraft, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.draft, self.change = draft, change

    def __call__(self, samples: list[Sample], k: int) -> list[torch.Tensor]:
        return self.draft([replace(s, aux=self.change(decoded(s.aux))) for s in samples], k)


def engines(facts: Facts) -> dict[str, tuple[str | None, Any]]:
    config, tensors = facts.draft_config, facts.draft_tensors
    right = StepDraft(config, tensors)
    no_map = {**tensors, "d2t": torch.zeros_like(tensors["d2t"])}
    other = {**tensors, "embed_tokens.weight": tensors["embed_tokens.weight"].flip(0)}
    return {
        "right": (None, right),
        "swapped layers": (SWAPPED, _Feeding(right, lambda aux: torch.cat(aux.chunk(3, -1)[::-1], -1))),
        "other states": (FEATURES, _Feeding(right, lambda aux: torch.randn_like(aux))),
        "other embeddings": (FEATURES, StepDraft(config, other)),
        "normed feedback": (NORM, StepDraft(config.model_copy(update={"norm_output": True}), tensors)),
        "no map": (BAD_MAP, StepDraft(config, no_map)),
    }


NAMES = ("right", "swapped layers", "other states", "other embeddings", "normed feedback", "no map")


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_that_departs_is_told_from_one_that_does_not(
    name: str, healthy: Config, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "MIN_DRAFTS", 15)
    monkeypatch.setattr(profile, "_SOME_DRAFTS", 15)
    # The margin of twelve short conversations would hide the milder of these.
    monkeypatch.setattr(profile, "acceptance_intervals", lambda counts, resamples, seed: None)
    torch.manual_seed(0)
    config = copied(healthy, tmp_path / "run")
    ctx = context(config)
    facts = Facts(ctx, ("ingest", "generate", "vocab", "train", "export", "bench"))
    cause, engine = engines(facts)[name]
    reader = facts.holdout()
    served = replay((reader[i] for i in range(len(reader))), engine, 3)
    manifest = ctx.run.manifest("bench")
    assert manifest is not None
    accepted = [round(p * served.drafts) for p in served.joint]
    counts = {
        **manifest.counts, "drafts": served.drafts, "draft_tokens": 3 * served.drafts, "accepted": sum(accepted),
        "acceptance_per_position": [n / served.drafts for n in accepted],
        "acceptance_length": 1 + sum(accepted) / served.drafts,
    }  # fmt: skip
    ctx.run.write_manifest(replace(manifest, counts=counts))
    report = examine(context(config))
    (line,) = [line for line in report.lines if line.id == "P2"]
    assert line.finding.cause == cause, line.finding
    assert [x.id for x in report.failures] == ([] if cause is None else ["P2"])


def test_a_draft_that_knows_one_answer_by_heart_is_accepted_whole(target: Target, tmp_path: Any) -> None:
    """F78: what training learnt is there after export, depth by depth, in the order of rows that an engine has."""
    config = run_config(
        target.folder, tmp_path, 3,
        evaluate__holdout=1, train__epochs=90, train__learning_rate=2e-2, train__unroll_steps=K,
    )  # fmt: skip
    ctx = benched(trained(generated(config, target)))
    facts = Facts(context(config), ("ingest", "generate", "vocab", "train", "export"))
    entries = load_entries(ctx)
    learnt = SampleReader(ctx.run.store, entries, load_split(ctx.run.store, entries, config), ("train",))
    found = replay((learnt[i] for i in range(len(learnt))), StepDraft(facts.draft_config, facts.draft_tensors), K)
    # All but what the first row after the prompt cannot know and the last draft that the end cuts.
    assert 1 + sum(found.joint) + sum(found.unknown) > K, found
    lines = {line.id: line.finding for line in examine(context(config)).lines}
    assert lines["C3"].state == lines["C4"].state == "passed"
    assert lines["C4"].evidence.endswith("proposals are equal by depth"), lines["C4"]
