"""No false alarm: tiny runs of 20 seeds, of every codec, variant of the target and shape of the draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.doctor.command import BEFORE_BENCH, BEFORE_TRAIN, examine
from app.doctor.finding import MASK
from app.pipeline import run_stage
from tests.doctor.test_matrix import causes, masked
from tests.doctor.tiny_run import Target, benched, generated, run_config, trained
from tests.pipelines.finished import stage
from tests.runs import context, prompts, write_rows
from tests.templates import THINK
from tests.tiny import make_tiny

KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("base", {}),
    ("llama3rope", {"capture__codec": "fp8"}),
    ("base", {"capture__codec": "int8", "train__fc_norm": True}),
    ("base", {"capture__codec": "int4", "train__norm_output": True}),
    ("base", {"vocab__size": None, "train__norm_before_fc": True}),
    ("base", {"capture__layers": [1, 2, 7], "export__embed_tokens": False}),
    ("llama3rope", {"capture__compression": "zstd", "export__format": "speculators"}),
    ("base", {"train__norm_before_residual": True, "evaluate__num_draft_tokens": 5}),
    ("base", {"train__num_attention_heads": 2, "train__head_dim": 16, "vocab__size": 400}),
    ("5L", {"capture__layers": [1, 2, 4]}),
)


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_passes_at_every_stage(seed: int, tmp_path: Path) -> None:
    variant, changes = KINDS[seed % len(KINDS)]
    target = make_tiny(tmp_path / "tiny", variant, seed)
    config = run_config(target, tmp_path, 14, f"Say {seed} words of day", train__epochs=4, train__seed=seed, **changes)
    benched(trained(generated(config, Target(target))))
    for stages in (BEFORE_TRAIN, BEFORE_BENCH):
        report = examine(context(config), stages)
        assert not causes(report), "\n".join(report.text())
    report = examine(context(config))
    assert not causes(report), "\n".join(report.text())
    assert sum(line.finding.state in ("passed", "advice") for line in report.lines) >= 30, "\n".join(report.text())


TALKS = [
    {
        "messages": [
            {"role": "user", "content": f"How many sacks on day {i}?"},
            {"role": "assistant", "content": f"There are {i + 3} sacks of flour."},
            {"role": "user", "content": "And the day after?"},
            {"role": "assistant", "content": f"{i} sacks and a half, as the miller wrote."},
        ]
    }
    for i in range(12)
]


KINDS_AS_IS: tuple[dict[str, Any], ...] = (
    {},
    {"capture__mask": "prefix"},
    {"generate__max_length": 36},  # which cuts some
    {"target__chat_template": THINK},  # which rewrites earlier turns: a sample for each answer
)


@pytest.mark.parametrize("changes", KINDS_AS_IS)
def test_conversations_taken_as_they_are_pass_too(
    changes: dict[str, Any], tiny: Path, target: Target, tmp_path: Path
) -> None:
    if "target__chat_template" in changes:
        template = tmp_path / "think.jinja"
        template.write_text(changes["target__chat_template"])
        changes = {"target__chat_template": str(template)}
    path = write_rows(tmp_path / "talks.jsonl", TALKS)
    sources = [
        {"name": "talks", "path": str(path), "use": "as_is"},
        {"name": "asked", "path": str(write_rows(tmp_path / "asked.jsonl", prompts(8)))},
    ]
    config = run_config(tiny, tmp_path, 20, sources=sources, ray__num_cpus=2, **changes)
    run_stage(stage("vocab"), generated(config, target))
    report = examine(context(config))
    assert not causes(report), "\n".join(report.text())
    (mask,) = [line.finding.evidence for line in report.lines if line.id == "C1"]
    assert "engine" in mask and ("prefix" in mask or "generation_tags" in mask)


def test_a_shifted_mask_of_conversations_as_they_are_is_named(tiny: Path, target: Target, tmp_path: Path) -> None:
    sources = [{"name": "talks", "path": str(write_rows(tmp_path / "talks.jsonl", TALKS)), "use": "as_is"}]
    config = run_config(tiny, tmp_path, 12, sources=sources)
    generated(config, target, masked(1))
    assert {line.finding.cause for line in examine(context(config)).failures} == {MASK}
