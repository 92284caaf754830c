"""Runs whose early stages are finished without engine and Ray: parts committed from stub answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.captured import part_keys
from app.config import Config
from app.draft_config import DraftConfig
from app.parts import PartEntry, write_part
from app.parts import read_ingest_part as read_part
from app.pipeline import Stage, StageContext, StageResult, run_stage
from app.pipelines.vocab import load_vocab
from app.stages import STAGES
from app.train.state import save_state
from tests.drafts import draft_config, random_tensors
from tests.runs import context
from tests.stubs import HIDDEN, answer_of, states_of


def stage(name: str) -> Stage:
    return next(s for s in STAGES if s.name == name)


def finish_generate(config: Config, answer: Callable[[str, int], list[int]] = answer_of) -> StageContext:
    """Ingest, then commit every part with `answer(request_id, length)`: generate has nothing left to do."""
    ctx = context(config)
    run_stage(stage("ingest"), ctx)
    for part, key in part_keys(ctx).items():
        make_part(ctx, part, key, answer)
    run_stage(stage("generate"), ctx)
    return ctx


def make_part(ctx: StageContext, part: int, key: str, answer: Callable[[str, int], list[int]] = answer_of) -> PartEntry:
    """Commit a part with `answer(request_id, length)`."""
    source = read_part(ctx.run.store, part)
    rows = [_sample_row(row, answer(f"{row['id']}-0", 12)) for row in source]
    supervised = sum(sum(r["loss_mask"]) for r in rows)
    entry = {
        "part": part,
        "key": key,
        "rows_in": len(rows),
        "conversations": len(rows),
        "rejects": [],
        "tokens": {"prompt": 0, "answer": supervised, "supervised": supervised},
        "finish_reasons": {"stop": len(rows)},
        "cut_short": [],
        "layers": list(ctx.layers),
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "seconds": 0.0,
        "codec": ctx.config.capture.codec,
        "compression": ctx.config.capture.compression,
    }
    return write_part(ctx.run.store, entry, rows, [states_of(r["prompt_ids"] + r["answer_ids"]) for r in rows])


def finish_random(config: Config, **draft_changes: Any) -> StageContext:
    """A run whose train stage is finished with random weights on the run's own vocabulary map."""
    ctx = finish_generate(config)
    run_stage(stage("vocab"), ctx)
    kept = load_vocab(ctx.run.store).kept_ids
    draft = draft_config(ctx.target, draft_vocab_size=len(kept), **draft_changes)
    finish_train(ctx, draft, random_tensors(draft, kept))
    return ctx


def finish_train(ctx: StageContext, draft: DraftConfig, weights: dict[str, Tensor], step: int = 7) -> None:
    """A train stage that only saves `weights` as its last checkpoint."""

    def save(ctx: StageContext) -> StageResult:
        save_state(ctx.run.store.sub("train"), step, weights, {"x": torch.zeros(1)}, {"fingerprint": "f"}, keep=1)
        return StageResult(outputs=[], digest="d", extra={"draft_config": draft.model_dump(mode="json")})

    run_stage(Stage("train", save, inputs=("generate", "vocab"), version=step), ctx)


def template_file(tiny: Path, folder: Path, change: tuple[str, str] = ("", "")) -> Path:
    """A copy of the tiny target's chat template, with one string replaced."""
    path = folder / "template.jinja"
    path.write_text((tiny / "chat_template.jinja").read_text().replace(*change, 1))
    return path


def _sample_row(row: dict[str, Any], answer: list[int]) -> dict[str, Any]:
    prompt = list(row["requests"][0]["prompt_ids"])
    return {
        "sample_id": f"{row['id']}-0",
        "conversation_id": row["id"],
        "turn": 0,
        "source": row["source"],
        "domain": row["domain"],
        "use": row["use"],
        "private": row["private"],
        "messages": row["messages"],
        "template_kwargs": row["template_kwargs"],
        "sampling": json.dumps({"temperature": 0.0}),
        "prompt_ids": prompt,
        "answer_ids": answer,
        "loss_mask": [False] * len(prompt) + [True] * len(answer),
        "mask_method": "engine",
        "finish_reason": "stop",
        "truncated": False,
    }
