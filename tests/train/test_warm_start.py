"""`train.init_from`: an earlier or published draft goes on, with its own vocabulary map (F54)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.captured import load_entries
from app.checkpoint import write_checkpoint
from app.config import Config
from app.draft_config import DraftConfig
from app.errors import UserError
from app.pipeline import StageContext, run_stage, stage_state
from app.pipelines.vocab import load_vocab
from app.target import TargetInfo, load_target_head
from app.train import stage as train_stage
from app.train import warm_start
from app.train.loop import Place, run_worker
from app.train.loop import draft_config as loop_config
from app.train.stage import check
from app.train.state import read_weights
from app.train.warm_start import INITIAL, is_placed, place, read_draft, warm_draft
from tests.drafts import draft_config, edit_config, edit_tensors, random_tensors
from tests.pipelines.finished import finish_generate, finish_train, stage
from tests.runs import Command, context, prompts, save_config, tiny_config, write_rows

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "_digests", {})


def published(folder: Path, target: TargetInfo, embed: Tensor, seed: int = 0, **changes: Any) -> Path:
    config = draft_config(target, **changes)
    return write_checkpoint(folder, config, random_tensors(config, seed=seed), embed, target)


def as_speculators(folder: Path) -> Path:
    """The same checkpoint in the layout speculators writes: nested config, its tensor names, no layer ids."""
    ours = json.loads((folder / "config.json").read_text())
    own = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "fc_norm", "norm_output", "norm_before_fc")
    ids = ("eagle_aux_hidden_state_layer_ids", "eagle_config")
    layer = {k: v for k, v in ours.items() if k not in (*own, *ids, "architectures", "torch_dtype")}
    nested = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/target"}},
        "transformer_layer_config": layer,
        "eagle_aux_hidden_state_layer_ids": None,
        **{k: ours[k] for k in ("draft_vocab_size", "target_hidden_size", "norm_before_residual")},
    }
    (folder / "config.json").write_text(json.dumps(nested))
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    return folder


def warm_run(target: Path, folder: Path, draft: Path | str, **changes: Any) -> StageContext:
    """A run on the stub's parts that starts from `draft`, up to its vocabulary."""
    config = tiny_config(
        target, folder / "run", write_rows(folder / "r.jsonl", prompts(12)), train__init_from=str(draft), **changes
    )
    ctx = finish_generate(config)
    run_stage(stage("vocab"), ctx)
    return ctx


def train(ctx: StageContext) -> dict[str, Tensor]:
    """The train stage's work without Ray; the last checkpoint's weights."""
    initial = warm_start.initial_draft(ctx)
    assert initial is not None
    store = ctx.run.store
    place(initial, store.sub("train"))
    run_worker(store, ctx.config.model_dump(mode="json"), ctx.target.to_json(), load_entries(ctx), CPU)
    return read_weights(store.sub("train"), "last")[0]


@pytest.mark.parametrize("layout", ["ours", "speculators"])
def test_a_published_draft_is_read_and_keeps_its_map(
    layout: str, tiny: Path, tiny_target: TargetInfo, tiny_embed: Tensor, tmp_path: Path
) -> None:
    folder = published(tmp_path / "draft", tiny_target, tiny_embed, seed=3)
    tensors = load_file(folder / "model.safetensors")
    if layout == "speculators":
        as_speculators(folder)
    ctx = warm_run(tiny, tmp_path, folder, train__learning_rate=1e-9, vocab__size=400)
    initial = warm_start.initial_draft(ctx)
    assert initial is not None and initial.config.aux_layer_ids == ctx.layers
    vocab = load_vocab(ctx.run.store)
    assert torch.equal(vocab.d2t, tensors["d2t"])  # not one of this data, and not of vocab.size
    head = load_target_head(ctx.target)
    draft = warm_draft(initial, initial.config, head, vocab.kept_ids)
    for name, p in draft.named_parameters():
        assert torch.equal(p, tensors[name].float()), name
    assert torch.equal(draft.embed_tokens.weight, head.embed_tokens)
    after = train(ctx)  # at next to no rate: the weights it started from
    assert torch.equal(after["d2t"], tensors["d2t"])
    for name in ("fc.weight", "lm_head.weight", "midlayer.self_attn.q_proj.weight"):
        torch.testing.assert_close(after[name], tensors[name].float(), rtol=0, atol=1e-6)


def test_without_it_the_draft_is_new(tiny: Path, tiny_target: TargetInfo, tiny_embed: Tensor, tmp_path: Path) -> None:
    """No implicit pick-up: a draft that lies about is not looked at."""
    folder = published(tmp_path / "run" / "draft", tiny_target, tiny_embed, seed=3)
    config = tiny_config(tiny, tmp_path / "run2", write_rows(tmp_path / "r.jsonl", prompts(12)))
    ctx = finish_generate(config)
    assert warm_start.initial_draft(ctx) is None and warm_start.outside(ctx) == {}
    run_stage(stage("vocab"), ctx)
    assert not torch.equal(load_vocab(ctx.run.store).d2t, load_file(folder / "model.safetensors")["d2t"])


def test_an_earlier_run_goes_on_with_its_full_precision(tiny: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny, tmp_path / "old" / "run", write_rows(tmp_path / "old.jsonl", prompts(8)))
    old = finish_generate(config)
    run_stage(stage("vocab"), old)
    kept = load_vocab(old.run.store).kept_ids
    shape = draft_config(old.target, draft_vocab_size=len(kept))
    weights = random_tensors(shape, kept, seed=5)
    with pytest.raises(UserError, match="has no finished training"):
        old.run.write_config(config)
        read_draft(old.run.url, {}, 8)
    finish_train(old, shape, weights)
    (tmp_path / "new").mkdir()
    ctx = warm_run(tiny, tmp_path / "new", old.run.url, train__learning_rate=1e-9)
    assert torch.equal(load_vocab(ctx.run.store).kept_ids, kept)
    assert torch.equal(warm_start.initial_draft(ctx).tensors["fc.weight"], weights["fc.weight"])  # type: ignore[union-attr]
    torch.testing.assert_close(train(ctx)["fc.weight"], weights["fc.weight"], rtol=0, atol=1e-6)


def test_a_draft_that_was_cleaned_is_laid_down_again(
    tiny: Path, tiny_target: TargetInfo, tiny_embed: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = warm_run(tiny, tmp_path, published(tmp_path / "draft", tiny_target, tiny_embed, seed=3))
    own = ctx.run.store.sub("train")

    def fit(config: Config, store: Any, settings: dict[str, Any]) -> None:
        assert is_placed(own)
        own.write_json("summary.json", {"steps": 1})

    monkeypatch.setattr(train_stage, "connect", lambda config: None)
    monkeypatch.setattr(train_stage, "_fit", fit)
    train_stage.train_in(ctx, Place())
    own.write_bytes("metrics.jsonl", b"{}")
    for name in INITIAL:
        own.delete(name)
    train_stage.train_in(ctx, Place())
    assert own.exists("metrics.jsonl")  # the training goes on where it was


def test_a_new_vocabulary_only_by_name_and_shared_rows_move_along(
    tiny: Path, tiny_target: TargetInfo, tiny_embed: Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = published(tmp_path / "draft", tiny_target, tiny_embed, seed=3)
    tensors = load_file(folder / "model.safetensors")
    ctx = warm_run(tiny, tmp_path, folder, train__new_vocabulary=True, train__learning_rate=1e-9)
    assert "train.new_vocabulary is set" in caplog.text
    new = load_vocab(ctx.run.store).kept_ids
    old = (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).tolist()
    assert new.tolist() != old
    after = train(ctx)
    assert "tokens keep their rows of the head" in caplog.text
    assert torch.equal(after["d2t"] + torch.arange(len(new)), new)
    head = load_target_head(ctx.target)
    for row, token in enumerate(new.tolist()):
        expected = tensors["lm_head.weight"][old.index(token)] if token in old else head.lm_head[token]
        torch.testing.assert_close(after["lm_head.weight"][row], expected.float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("draft", "settings", "said"),
    [
        ({"aux_layer_ids": (1, 2, 3)}, {}, r"aux_layer_ids is \[1, 2, 3\].*set capture\.layers=\[1, 2, 3\]"),
        ({"norm_before_residual": True}, {}, r"norm_before_residual is True.*set train\.norm_before_residual=true"),
        (
            {"intermediate_size": 48},
            {"train__intermediate_size": 64},
            r"intermediate_size is 48 and train\.inter",
        ),
        ({"head_dim": 16}, {"train__head_dim": 32}, r"head_dim is 16 and train\.head_dim is 32"),
        ({}, {"vocab__size": 400, "train__new_vocabulary": True}, r"draft_vocab_size is 320 .* set vocab\.size=320"),
        ({"vocab_size": 512}, {}, r"vocab_size is 512 and this run's is 640; it was made for another target"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    draft: dict[str, Any], settings: dict[str, Any], said: str, tiny: Path, tiny_target: TargetInfo, tmp_path: Path
) -> None:
    config = draft_config(tiny_target, **draft)
    kept = torch.arange(0, 320) + 1
    folder = write_checkpoint(tmp_path / "draft", config, random_tensors(config, kept))
    run = tiny_config(
        tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(2)), train__init_from=str(folder), **settings
    )
    with pytest.raises(UserError, match=said):
        check(context(run))


def test_its_own_sizes_and_rotary_settings_come_along(
    tiny: Path, tiny_target: TargetInfo, tiny_embed: Tensor, tmp_path: Path
) -> None:
    folder = published(tmp_path / "draft", tiny_target, tiny_embed, intermediate_size=48, head_dim=16, rope_theta=5e4)
    ctx = warm_run(tiny, tmp_path, folder)
    check(ctx)
    fresh = loop_config(ctx.target, ctx.config.train, list(ctx.layers), 320)
    initial = warm_start.initial_draft(ctx)
    assert initial is not None
    shape = warm_start.warm_config(fresh, initial.config, ctx.config.train)
    assert (shape.intermediate_size, shape.head_dim, shape.rope_theta) == (48, 16, 5e4)
    assert train(ctx)["midlayer.mlp.up_proj.weight"].shape == (48, 64)


def test_another_embedding_is_told_and_the_targets_used(
    tiny: Path, tiny_target: TargetInfo, tiny_embed: Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = published(tmp_path / "draft", tiny_target, tiny_embed)
    config = tiny_config(
        tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(2)), train__init_from=str(folder)
    )
    check(context(config))
    assert "embedding" not in caplog.text
    edit_tensors(folder, lambda t: t.update({"embed_tokens.weight": t["embed_tokens.weight"] + 1}))
    check(context(config))
    assert "is not the target's; the target's is used" in caplog.text


def test_other_initial_weights_make_vocabulary_and_training_stale(
    tiny: Path, tiny_target: TargetInfo, tiny_embed: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = published(tmp_path / "draft", tiny_target, tiny_embed)
    ctx = warm_run(tiny, tmp_path, folder)
    assert stage_state(stage("vocab"), ctx).state == "done"
    edit_tensors(folder, lambda t: t.update({"fc.weight": t["fc.weight"] + 1}))
    monkeypatch.setattr(warm_start, "_digests", {})  # another invocation
    assert stage_state(stage("vocab"), ctx).reasons == ("initial draft changed",)
    assert stage("train").outside is warm_start.outside
    without = ctx.config.model_copy(update={"train": ctx.config.train.model_copy(update={"init_from": None})})
    reasons = stage_state(stage("vocab"), context(Config(**without.model_dump()))).reasons
    assert any("train.init_from changed" in reason for reason in reasons)


def test_a_pickled_draft_is_the_same_draft_and_its_weights_count(
    tiny_target: TargetInfo, tiny_embed: Tensor, tmp_path: Path
) -> None:
    folder = published(tmp_path / "draft", tiny_target, tiny_embed)
    plain = read_draft(str(folder), {}, tiny_target.num_layers)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    pickled = read_draft(str(folder), {}, tiny_target.num_layers)
    assert pickled.config == plain.config and pickled.tensors.keys() == plain.tensors.keys()
    assert all(torch.equal(pickled.tensors[name], tensor) for name, tensor in plain.tensors.items())
    torch.save({**tensors, "fc.weight": tensors["fc.weight"] + 1}, folder / "pytorch_model.bin")
    assert read_draft(str(folder), {}, tiny_target.num_layers).digest != pickled.digest


def test_what_is_no_draft_is_one_sentence_before_anything_runs(
    tiny: Path, tmp_path: Path, draftmill_here: Command
) -> None:
    source = write_rows(tmp_path / "r.jsonl", prompts(4))
    for where, said in (
        (tmp_path, "holds neither config.json (a checkpoint) nor config.yaml (a run folder)"),
        (tmp_path / "absent", "holds neither config.json"),
        (tiny, "num_hidden_layers is 8; an EAGLE-3 draft has one (is this the target's config.json?)"),
    ):
        path = save_config(
            tiny_config(tiny, tmp_path / "run", source, train__init_from=str(where)), tmp_path / "c.yaml"
        )
        result = draftmill_here("train", str(path))
        assert result.returncode == 1 and said in result.stderr and "Traceback" not in result.stderr, result.stderr
        assert not (tmp_path / "run" / "ingest").exists()
    alone = save_config(tiny_config(tiny, tmp_path / "run", source, train__new_vocabulary=True), tmp_path / "c.yaml")
    assert "without train.init_from" in draftmill_here("train", str(alone)).stderr


def test_the_config_in_speculators_layout_is_the_one_that_was_nested(
    tiny_target: TargetInfo, tiny_embed: Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = as_speculators(published(tmp_path / "draft", tiny_target, tiny_embed))
    initial = read_draft(str(folder), {}, tiny_target.num_layers)
    assert initial.config == draft_config(tiny_target, dtype=initial.config.dtype)
    assert isinstance(initial.config, DraftConfig)
    edit_config(folder, lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 3]))
    assert read_draft(str(folder), {}, tiny_target.num_layers).config.aux_layer_ids == (1, 2, 3)
