"""Export: the trained weights in a folder that needs nothing else, refused where stages do not agree."""

from __future__ import annotations

import json
import logging
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.captured import load_entries
from app.checkpoint import DraftConfig, check_checkpoint, read_checkpoint
from app.errors import UserError
from app.lint.command import lint
from app.pipeline import StageContext, run_stage
from app.pipelines.vocab import VocabMap, load_vocab
from app.target import load_target_head
from app.train.loop import draft_config as loop_config
from app.train.loop import run_worker
from app.train.state import read_weights, save_best
from tests.drafts import draft_config, random_tensors
from tests.pipelines.finished import finish_generate, finish_random, finish_train, stage
from tests.runs import prompts, tiny_config, write_rows
from tests.tiny import VOCAB


def trained(target: Path, folder: Path, draft_changes: dict[str, Any] | None = None, **changes: Any) -> StageContext:
    """A run whose train stage is finished with random weights on the run's own vocabulary map."""
    config = tiny_config(target, folder / "run", write_rows(folder / "r.jsonl", prompts(8)), **changes)
    return finish_random(config, **draft_changes or {})


def trained_weights(ctx: StageContext, seed: int = 0) -> tuple[DraftConfig, dict[str, Tensor]]:
    vocab = load_vocab(ctx.run.store)
    draft = draft_config(ctx.target, draft_vocab_size=len(vocab.kept_ids))
    return draft, random_tensors(draft, vocab.kept_ids, seed)


@pytest.mark.parametrize("variant", ["tiny", "tiny_tied", "tiny_llama3rope"])
def test_the_folder_alone_gives_the_draft_back(variant: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """F55, F67, F69, F70: no side file is needed, and the embedding is the target's bit for bit."""
    ctx = trained(request.getfixturevalue(variant), tmp_path)
    manifest, _ = run_stage(stage("export"), ctx)
    folder = tmp_path / "run" / "export" / "draft"
    head = load_target_head(ctx.target)
    assert check_checkpoint(folder, ctx.target, head.embed_tokens, ctx.layers) == []
    draft, weights = trained_weights(ctx)
    config, tensors = read_checkpoint(folder)
    assert config == draft and torch.equal(tensors["embed_tokens.weight"], head.embed_tokens)
    assert all(torch.equal(tensors[n], w.to(tensors[n].dtype)) for n, w in weights.items())
    assert torch.equal(VocabMap.from_d2t(tensors["d2t"], VOCAB).kept_ids, load_vocab(ctx.run.store).kept_ids)
    assert sorted(manifest.outputs) == [
        "export/draft/README.md",
        "export/draft/config.json",
        "export/draft/model.safetensors",
        "export/draft/serve.json",
        "export/serve.json",
    ]
    assert manifest.counts["step"] == 7
    if variant == "tiny_llama3rope":
        assert json.loads((folder / "config.json").read_text())["rope_scaling"]["rope_type"] == "llama3"


def test_serve_commands_and_card(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ctx = trained(tiny, tmp_path, evaluate__num_draft_tokens=5)
    with caplog.at_level(logging.INFO, "draftmill"):
        run_stage(stage("export"), ctx)
    folder = tmp_path / "run" / "export" / "draft"
    commands = json.loads((tmp_path / "run" / "export" / "serve.json").read_text())
    words = shlex.split(commands["vLLM"])
    spec = json.loads(words[words.index("--speculative-config") + 1])
    assert spec == {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 5}
    assert words[2] == str(tiny) and "--speculative-algorithm EAGLE3" in commands["SGLang"]
    stored = json.loads((folder / "serve.json").read_text())  # what travels with the folder
    assert stored["num_draft_tokens"] == 5 and stored["target"] == tiny.name
    assert stored["vLLM"]["speculative_config"] == {**spec, "model": "draft"}
    assert stored["SGLang"]["command"] == commands["SGLang"].replace(str(folder), "draft").replace(str(tiny), tiny.name)
    report = lint(str(folder), str(tiny))
    assert report.differences == [] and report.num_draft_tokens == 5
    assert (
        report.commands
        == commands
        == {e: c for e, c in commands.items() if f"5 draft tokens a step: {c}" in caplog.text}
    )
    card = (folder / "README.md").read_text()
    assert "after layers 2, 4, 5 of 8" in card and "320 of the target's 640 ids" in card
    assert str(tmp_path) not in card and str(tiny) not in card


@pytest.mark.parametrize("variant", ["tiny", "tiny_tied", "tiny_llama3rope"])
def test_the_speculators_layout_beside_the_flat_one(
    variant: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    target = request.getfixturevalue(variant)
    ctx = trained(target, tmp_path, export__format="speculators")
    manifest, _ = run_stage(stage("export"), ctx)
    export = tmp_path / "run" / "export"
    assert {f"export/{name}/config.json" for name in ("draft", "speculators")} <= set(manifest.outputs)
    flat, listed = (read_checkpoint(export / name) for name in ("draft", "speculators"))
    assert flat[0] == listed[0] and flat[1].keys() == listed[1].keys()
    assert all(torch.equal(flat[1][name], listed[1][name]) for name in flat[1])
    for name in ("draft", "speculators"):
        assert lint(str(export / name), str(target)).differences == []
    commands = json.loads((export / "serve.json").read_text())
    assert commands.keys() == {"vLLM", "SGLang", "vLLM, speculators layout"}
    assert str(export / "speculators") in commands["vLLM, speculators layout"]
    stored = json.loads((export / "speculators" / "serve.json").read_text())
    assert "does not read the speculators layout" in stored["SGLang"]["left_out"]
    verifier = json.loads((export / "speculators" / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]}


def test_sglang_is_not_offered_where_it_would_compute_another_draft(tiny: Path, tmp_path: Path) -> None:
    ctx = trained(tiny, tmp_path, {"norm_before_residual": True})
    run_stage(stage("export"), ctx)
    assert json.loads((tmp_path / "run" / "export" / "serve.json").read_text()).keys() == {"vLLM"}
    config = json.loads((tmp_path / "run" / "export" / "draft" / "config.json").read_text())
    assert config["norm_before_residual"] is True


def test_a_really_trained_draft_is_exported_as_it_was_trained(tiny: Path, tmp_path: Path) -> None:
    """The loop itself, in this process: fp32 masters to bf16, nothing else changes on the way."""
    config = tiny_config(tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(8)))
    ctx = finish_generate(config)
    run_stage(stage("vocab"), ctx)
    store = ctx.run.store
    run_worker(store, config.model_dump(mode="json"), ctx.target.to_json(), load_entries(ctx), torch.device("cpu"))
    weights, state = read_weights(store.sub("train"), "last")
    vocab = load_vocab(store)
    draft = loop_config(ctx.target, config.train, list(ctx.layers), len(vocab.kept_ids))
    finish_train(ctx, draft, weights, step=state["step"])
    run_stage(stage("export"), ctx)
    read, tensors = read_checkpoint(tmp_path / "run" / "export" / "draft")
    assert read == draft and read.aux_layer_ids == ctx.layers
    assert all(torch.equal(tensors[n], w.to(tensors[n].dtype)) for n, w in weights.items())
    start = load_target_head(ctx.target).lm_head[vocab.kept_ids]
    assert not torch.equal(tensors["lm_head.weight"], start)  # it was trained


def test_embedding_can_be_left_to_the_engine(tiny: Path, tmp_path: Path) -> None:
    ctx = trained(tiny, tmp_path, export__embed_tokens=False)
    run_stage(stage("export"), ctx)
    _, tensors = read_checkpoint(tmp_path / "run" / "export" / "draft")
    assert "embed_tokens.weight" not in tensors
    assert "shared by the engine" in (tmp_path / "run" / "export" / "draft" / "README.md").read_text()


def test_best_or_last_checkpoint(tiny: Path, tmp_path: Path) -> None:
    ctx = trained(tiny, tmp_path, export__checkpoint="best")
    _, best = trained_weights(ctx, seed=5)
    save_best(ctx.run.store.sub("train"), best, {"step": 3})
    manifest, _ = run_stage(stage("export"), ctx)
    _, tensors = read_checkpoint(tmp_path / "run" / "export" / "draft")
    assert manifest.counts["step"] == 3
    assert torch.equal(tensors["fc.weight"], best["fc.weight"].bfloat16())


def test_equal_vocabularies_export_no_map(tiny: Path, tmp_path: Path) -> None:
    ctx = trained(tiny, tmp_path, vocab__size=None)
    run_stage(stage("export"), ctx)
    config, tensors = read_checkpoint(tmp_path / "run" / "export" / "draft")
    assert config.draft_vocab_size == VOCAB and "d2t" not in tensors


def test_f48_layers_of_capture_and_training_must_agree(tiny: Path, tmp_path: Path) -> None:
    ctx = trained(tiny, tmp_path, {"aux_layer_ids": (3, 5, 6)})
    with pytest.raises(UserError, match=r"trained with auxiliary layers \[3, 5, 6\].*\[2, 4, 5\]"):
        run_stage(stage("export"), ctx)
    assert not (tmp_path / "run" / "export").exists()


def test_f54_a_head_of_another_map_is_refused(tiny: Path, tmp_path: Path) -> None:
    ctx = trained(tiny, tmp_path)
    draft, _ = trained_weights(ctx)
    finish_train(ctx, draft, random_tensors(draft, torch.arange(280, 600)), step=9)
    with pytest.raises(UserError, match="another vocabulary map"):
        run_stage(stage("export"), ctx)


def test_weights_that_are_not_finite_are_not_exported(tiny: Path, tmp_path: Path) -> None:
    ctx = trained(tiny, tmp_path, export__checkpoint="best")
    _, weights = trained_weights(ctx)
    weights["norm.weight"][0] = torch.nan
    save_best(ctx.run.store.sub("train"), weights, {"step": 8})
    with pytest.raises(UserError, match=r"norm\.weight.*1 not finite"):
        run_stage(stage("export"), ctx)
    assert not (tmp_path / "run" / "export" / "draft").exists()
