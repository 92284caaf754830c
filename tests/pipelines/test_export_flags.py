"""Norm flags from the configuration to the checkpoint: trained with, written down, offered where they are served."""

from __future__ import annotations

import json
import logging
from itertools import chain, combinations
from pathlib import Path

import pytest
import torch

from app.captured import load_entries
from app.checkpoint import read_checkpoint, write_checkpoint
from app.draft_config import NORM_FLAGS
from app.pipeline import run_stage
from app.pipelines.vocab import load_vocab
from app.target import inspect_target
from app.train.loop import draft_config, run_worker
from app.train.state import read_weights
from tests.drafts import draft_config as shape
from tests.drafts import random_tensors
from tests.pipelines.finished import finish_generate, finish_train, stage
from tests.runs import prompts, tiny_config, write_rows

NEW_TENSORS = {"fc_norm": [f"fc_norm.{i}.weight" for i in range(3)], "norm_before_fc": ["input_norm.weight"]}


@pytest.mark.parametrize(
    "flags", [(), ("fc_norm", "norm_output"), ("norm_before_fc",), ("norm_before_residual",)], ids="+".join
)
def test_a_draft_is_exported_with_the_flags_it_was_trained_with(
    flags: tuple[str, ...], tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """F50: as the configuration's own keys say; every tensor of a flag moved in training and is in the file."""
    changes = {"train__epochs": 4, **{f"train__{name}": True for name in flags}}
    config = tiny_config(tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(8)), **changes)
    ctx = finish_generate(config)
    run_stage(stage("vocab"), ctx)
    store = ctx.run.store
    run_worker(store, config.model_dump(mode="json"), ctx.target.to_json(), load_entries(ctx), torch.device("cpu"))
    lost = store.read_json("train/summary.json")["outside_vocabulary"]
    assert lost["rows"] > 0 and 0 <= lost["mass"] < 1 and 0 <= lost["first"] <= 1
    weights, _ = read_weights(store.sub("train"), "last")
    draft = draft_config(ctx.target, config.train, list(ctx.layers), len(load_vocab(store).kept_ids))
    assert {name for name in NORM_FLAGS if getattr(draft, name)} == set(flags)
    finish_train(ctx, draft, weights)
    with caplog.at_level(logging.WARNING, "draftmill"):
        run_stage(stage("export"), ctx)

    folder = tmp_path / "run" / "export" / "draft"
    written = json.loads((folder / "config.json").read_text())
    assert {name: written[name] for name in NORM_FLAGS} == {name: name in flags for name in NORM_FLAGS}
    assert written["eagle_config"]["norm_before_fc"] == ("norm_before_fc" in flags)  # read first by both engines
    read, tensors = read_checkpoint(folder)
    assert read == draft
    added = set(chain.from_iterable(NEW_TENSORS.get(name, []) for name in flags))
    assert {n for n in tensors if n.startswith(("fc_norm", "input_norm"))} == added
    assert [name for name in added if bool((weights[name] == 1).all())] == []
    served = json.loads((tmp_path / "run" / "export" / "serve.json").read_text())
    assert ("SGLang" in served) == ("norm_before_residual" not in flags)
    assert ("no switch for norm_before_residual" in caplog.text) == ("norm_before_residual" in flags)
    card = (folder / "README.md").read_text()
    assert all(name in card for name in flags) and ("variant" in card) == bool(flags)


def test_every_combination_writes_what_it_reads(tiny: Path, tmp_path: Path) -> None:
    info = inspect_target(str(tiny))
    for number in range(len(NORM_FLAGS) + 1):
        for flags in combinations(NORM_FLAGS, number):
            config = shape(info, **dict.fromkeys(flags, True))
            folder = write_checkpoint(
                tmp_path / "_".join(flags or ("none",)), config, random_tensors(config), None, info
            )
            assert read_checkpoint(folder)[0] == config
