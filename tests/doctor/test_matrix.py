"""Planted faults, each named: what was captured, what was chosen, what was exported, how it is served."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.config import Config
from app.doctor import finding as f
from app.doctor.checklist import BROKE
from app.doctor.command import ALL, BEFORE_TRAIN, DoctorReport, examine
from app.pipeline import run_stage
from app.pipelines.vocab import VOCAB_FILE, VocabMap, load_vocab
from tests.doctor.tiny_run import Row, Spoil, Target, copied, generated, run_config
from tests.drafts import IDS, edit_config, edit_tensors
from tests.pipelines.finished import stage, template_file
from tests.runs import context
from tests.tiny import make_tiny

LAYERS = (2, 4, 5)


def causes(report: DoctorReport) -> set[str | None]:
    assert not [line for line in report.lines if line.finding.evidence.startswith(BROKE)]
    return {line.finding.cause for line in report.failures}


def states_of(*layers: int, teacher: int = 8) -> Spoil:
    return lambda row, s: (row, torch.stack([s[k] for k in (*layers, teacher)], 1).bfloat16())


def masked(shift: int) -> Spoil:
    """The mask moved against the tokens by `shift`."""

    def spoil(row: Row, s: list[Tensor]) -> tuple[Row, Tensor]:
        mask = [False] * len(row["loss_mask"])
        for i, on in enumerate(row["loss_mask"]):
            if on and 0 <= i + shift < len(mask):
                mask[i + shift] = True
        return states_of(*LAYERS)({**row, "loss_mask": mask}, s)

    return spoil


def set_mask(value: bool) -> Spoil:
    def spoil(row: Row, s: list[Tensor]) -> tuple[Row, Tensor]:
        return states_of(*LAYERS)({**row, "loss_mask": [value] * len(row["loss_mask"])}, s)

    return spoil


def normed_teacher(target: Target) -> Spoil:
    norm = target.model.model.norm

    def spoil(row: Row, s: list[Tensor]) -> tuple[Row, Tensor]:
        with torch.no_grad():
            return states_of(*LAYERS)(row, [*s[:-1], norm(s[-1])])

    return spoil


def rolled(by: int) -> Spoil:
    def spoil(row: Row, s: list[Tensor]) -> tuple[Row, Tensor]:
        return states_of(*LAYERS)(row, [x.roll(by, 0) for x in s])

    return spoil


def with_nan(row: Row, s: list[Tensor]) -> tuple[Row, Tensor]:
    _, states = states_of(*LAYERS)(row, s)
    states[3, 1, 5] = float("nan")
    return row, states


CAPTURED: dict[str, tuple[str, Callable[[Target], Spoil]]] = {
    "layers one too high": (f.LAYERS_OFF, lambda t: states_of(3, 5, 6)),
    "layers one too low": (f.LAYERS_OFF, lambda t: states_of(1, 3, 4)),
    "teacher one layer too low": (f.LAYERS_OFF, lambda t: states_of(*LAYERS, teacher=7)),
    "other layers": (f.WRONG_LAYERS, lambda t: states_of(1, 4, 7)),
    "layers the other way round": (f.SWAPPED, lambda t: states_of(5, 4, 2)),
    "two layers swapped": (f.SWAPPED, lambda t: states_of(4, 2, 5)),
    "teacher normed already": (f.NORM, normed_teacher),
    "mask a token early": (f.MASK, lambda t: masked(-1)),
    "mask a token late": (f.MASK, lambda t: masked(1)),
    "mask empty": (f.EMPTY_MASK, lambda t: set_mask(False)),
    "mask on everywhere": (f.ALL_MASKED, lambda t: set_mask(True)),
    "states a position late": (f.SHIFTED_STATES, lambda t: rolled(1)),
    "a value that is no number": (f.BAD_STATES, lambda t: with_nan),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_a_fault_of_the_capture_is_named_before_training(name: str, tiny: Path, target: Target, tmp_path: Path) -> None:
    cause, spoil = CAPTURED[name]
    config = run_config(tiny, tmp_path, 12)
    ctx = generated(config, target, spoil(target))
    if cause != f.EMPTY_MASK:
        run_stage(stage("vocab"), ctx)
    assert causes(examine(context(config), BEFORE_TRAIN)) == {cause}


def test_states_of_other_rows_are_told_from_those_of_another_target(tiny: Path, target: Target, tmp_path: Path) -> None:
    held: list[Tensor] = []

    def of_the_row_before(row: Row, s: list[Tensor]) -> tuple[Row, Tensor]:
        _, mine = states_of(*LAYERS)(row, s)
        held.append(mine)
        other = held[-2] if len(held) > 1 else mine.roll(7, 0)
        if len(other) < len(mine):
            other = torch.cat([other, mine[len(other) :]])
        return row, other[: len(mine)]

    config = run_config(tiny, tmp_path / "rows", 12)
    generated(config, target, of_the_row_before)
    assert causes(examine(context(config), BEFORE_TRAIN)) == {f.OTHER_ROW}

    other = Target(make_tiny(tmp_path / "other", seed=1))
    config = run_config(tiny, tmp_path / "target", 12)
    generated(
        config, target, lambda row, s: states_of(*LAYERS)(row, other.states([*row["prompt_ids"], *row["answer_ids"]]))
    )
    assert causes(examine(context(config), BEFORE_TRAIN)) == {f.OTHER_TARGET}


# What is done to a finished run's files.


def export_ids(shift: int) -> Callable[[Config], object]:
    def ids(raw: dict[str, Any]) -> None:
        raw[IDS] = [k + shift for k in raw[IDS]]
        raw["eagle_config"][IDS] = [k + shift for k in raw["eagle_config"][IDS]]

    return lambda config: edit_config(draft_of(config), ids)


def draft_of(config: Config) -> Path:
    return Path(config.run_dir) / "export" / "draft"


def set_key(**values: Any) -> Callable[[Config], object]:
    return lambda config: edit_config(draft_of(config), lambda raw: raw.update(values))


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Config], object]:
    return lambda config: edit_tensors(draft_of(config), change)


def rope_base(config: Config) -> None:
    def base(raw: dict[str, Any]) -> None:
        raw["rope_theta"] = raw["rope_parameters"]["rope_theta"] = 1e4

    edit_config(draft_of(config), base)


def other_map(like: VocabMap) -> VocabMap:
    """As many ids, the last of them others."""
    free = [i for i in range(600) if i not in set(like.kept_ids.tolist())][:20]
    dropped = like.kept_ids[like.kept_ids > 300][:20].tolist()
    ids = sorted((set(like.kept_ids.tolist()) - set(dropped)) | set(free))
    return VocabMap(torch.tensor(ids), like.vocab_size)


def export_other_map(config: Config) -> None:
    other = other_map(load_vocab(context(config).run.store))
    edit_tensors(draft_of(config), lambda t: t.update(d2t=other.d2t, t2d=other.t2d))


def vocab_made_again(config: Config) -> None:
    other_map(load_vocab(context(config).run.store)).save(Path(config.run_dir) / VOCAB_FILE)


def first_ids(config: Config) -> None:
    vocab = load_vocab(context(config).run.store)
    VocabMap(torch.arange(len(vocab.kept_ids)), vocab.vocab_size).save(Path(config.run_dir) / VOCAB_FILE)


def export_first_ids(t: dict[str, Tensor]) -> None:
    t["d2t"] = torch.zeros_like(t["d2t"])
    t["t2d"] = torch.arange(len(t["t2d"])) < len(t["d2t"])


def random_embedding(t: dict[str, Tensor]) -> None:
    t["embed_tokens.weight"] = torch.randn_like(t["embed_tokens.weight"])


def samples_made_again(config: Config) -> None:
    run = context(config).run
    manifest = run.manifest("generate")
    assert manifest is not None
    run.write_manifest(replace(manifest, digest="made again"))


def eagle_command(config: Config) -> None:
    path = Path(config.run_dir) / "export" / "serve.json"
    path.write_text(path.read_text().replace("EAGLE3", "EAGLE"))


def eagle_method(config: Config) -> None:
    path = draft_of(config) / "serve.json"
    record = json.loads(path.read_text())
    record["vLLM"]["speculative_config"]["method"] = "eagle"
    path.write_text(json.dumps(record))


FINISHED: dict[str, tuple[str, Callable[[Config], object]]] = {
    "exported ids one too low": (f.LAYERS_OFF, export_ids(-1)),
    "exported ids one too high": (f.LAYERS_OFF, export_ids(1)),
    "no exported ids": (f.LAYERS_OFF, set_key(**{IDS: None})),
    "the last norm lost": (f.NORM, tensors(lambda t: t.update({"norm.weight": torch.ones_like(t["norm.weight"])}))),
    "a norm missing": (f.NORM, tensors(lambda t: t.pop("midlayer.hidden_norm.weight"))),
    "a norm flag flipped": (f.NORM, set_key(norm_output=True)),
    "rope base": (f.ROPE, rope_base),
    "two rope bases": (f.ROPE, set_key(rope_theta=1e4)),
    "first ids in vocab": (f.FIRST_N, first_ids),
    "first ids exported": (f.FIRST_N, tensors(export_first_ids)),
    "random embeddings": (f.EMBEDDING, tensors(random_embedding)),
    "another head": (f.HEAD, tensors(lambda t: t.update({"lm_head.weight": t["lm_head.weight"].flip(0)}))),
    "EAGLE in SGLang's command": (f.FLAG, eagle_command),
    "eagle as vLLM's method": (f.FLAG, eagle_method),
    "another map exported": (f.STALE_MAP, export_other_map),
    "the map of other samples": (f.STALE_MAP, samples_made_again),
    "a renamed tensor": (f.LAYOUT, tensors(lambda t: t.update({"fc_in.weight": t.pop("fc.weight")}))),
    "a shorter context": (f.CONTEXT, set_key(max_position_embeddings=128)),
}  # fmt: skip


@pytest.mark.parametrize("name", FINISHED)
def test_a_fault_of_a_finished_run_is_named(name: str, healthy: Config, tmp_path: Path) -> None:
    cause, spoil = FINISHED[name]
    config = copied(healthy, tmp_path / "run")
    spoil(config)
    report = examine(context(config))
    assert cause in causes(report) and report.failures[0].finding.cause == cause, "\n".join(report.text())
    assert len(causes(report)) == 1, "\n".join(report.text())


def test_a_map_counted_again_after_training_is_stale(healthy: Config, tmp_path: Path) -> None:
    config = copied(healthy, tmp_path / "run")
    vocab_made_again(config)
    assert causes(examine(context(config))) == {f.STALE_MAP}


def test_another_template_is_named(healthy: Config, tiny: Path, tmp_path: Path) -> None:
    other = template_file(tiny, tmp_path, ("<|im_start|>assistant", "<|im_start|>model"))
    changed = healthy.target.model_copy(update={"chat_template": str(other)})
    config = copied(healthy, tmp_path / "run").model_copy(update={"target": changed})
    assert causes(examine(context(config))) == {f.TEMPLATE}
    assert causes(examine(context(config), BEFORE_TRAIN)) == {f.TEMPLATE}


def test_a_healthy_run_has_no_fault(healthy: Config) -> None:
    report = examine(context(healthy), ALL)
    assert report.passes and not causes(report), "\n".join(report.text())
    open_lines = {line.id: line.finding.evidence for line in report.lines if line.finding.state == "not applicable"}
    assert open_lines.keys() <= {"B3", "B6", "D2", "D3", "M3", "P2"}, open_lines
