"""Export: trained weights to a checkpoint that vLLM and SGLang load, checked by lint before it is kept."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from app.checkpoint import DraftConfig, Verifier, write_checkpoint
from app.draft_config import NORM_FLAGS
from app.errors import UserError
from app.lint.check import NOT_SPECULATORS
from app.lint.difference import SGLANG
from app.pipeline import StageContext, StageResult
from app.pipelines.vocab import VocabMap, load_vocab
from app.serving import SERVE_FILE, left_out, serve_commands, serve_record, serving_name
from app.storage import Store, explained
from app.target import TargetInfo, load_target_head
from app.train.state import read_weights

log = logging.getLogger("draftmill")

DRAFT = "export/draft"
SPECULATORS = "export/speculators"  # with export.format=speculators
_CARD = """\
---
base_model: {target}
library_name: vllm
tags:
- eagle3
- speculative-decoding
---

# EAGLE-3 draft for {target}

Proposes tokens that {target} verifies; the text is the target's own. It fits this target only.

| | |
| --- | --- |
| auxiliary hidden states | after layers {layers} of {num_layers} |
| draft vocabulary | {draft_vocab_size} of the target's {vocab_size} ids |
| context | {max_position_embeddings} tokens |
| embedding | {embedding} |
{variant}| trained on | {tokens} supervised tokens |

It was measured with {k} draft tokens a step. Run from the folder that holds this one:

{commands}
"""


def run(ctx: StageContext) -> StageResult:
    """Write `export/draft/`, on request `export/speculators/`, and the commands that serve them, `export/serve.json`.

    Raises:
        UserError: capture, training and this run do not agree on layers or vocabulary, or lint finds an error.
    """
    config, target, store = ctx.config, ctx.target, ctx.run.store
    store.delete("export")
    draft, weights, step = trained_draft(ctx)
    k = config.evaluate.num_draft_tokens
    embed = load_target_head(target).embed_tokens if config.export.embed_tokens else None
    tokens = ctx.input("vocab").counts["supervised_tokens"]["train"]
    formats: dict[str, Verifier | None] = {DRAFT: None}
    if config.export.format == "speculators":
        formats[SPECULATORS] = Verifier(serving_name(target), target.architecture, k)
    commands: dict[str, str] = {}
    outputs: list[str] = []
    for path, verifier in formats.items():
        without = left_out(draft, target) if verifier is None else {SGLANG: NOT_SPECULATORS}
        with explained(store.url), store.open_folder(path, write=True) as folder:
            write_checkpoint(folder, draft, weights, embed, target, verifier)
            card = model_card(draft, target, k, tokens, embed is not None, folder.name, without)
            (folder / "README.md").write_text(card, encoding="utf-8")
            record = serve_record(_shown_name(target), folder.name, k, without)
            (folder / SERVE_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        outputs += [f"{path}/{file}" for file in store.files(path)]
        served = _announce(store, path, target, k, without)
        commands |= served if verifier is None else {f"{e}, speculators layout": c for e, c in served.items()}
    store.write_json(f"export/{SERVE_FILE}", commands)
    log.info("export: step %d of training", step)
    return StageResult(
        outputs=[*outputs, f"export/{SERVE_FILE}"],
        counts={"step": step, "bytes": sum(store.size(path) or 0 for path in outputs)},
        extra={"draft_config": draft.model_dump(mode="json")},
    )


def _announce(store: Store, path: str, target: TargetInfo, k: int, without: Mapping[str, str]) -> dict[str, str]:
    """The commands by engine that serve folder `path`, after they are logged."""
    where = store.full(path) if store.is_local else f"{store.url}/{path}"
    commands = serve_commands(serving_name(target), where, k, without)
    log.info("export: checked, in %s", where)
    for engine, command in commands.items():
        log.info("export: %s, %d draft tokens a step: %s", engine, k, command)
    for engine, reason in without.items():
        log.warning("export: no command for %s: %s", engine, reason)
    return commands


def trained_draft(ctx: StageContext) -> tuple[DraftConfig, dict[str, Tensor], int]:
    """Config, fp32 weights by root name and step of the checkpoint that `export.checkpoint` names.

    Raises:
        UserError: there is none, or it was trained with other layers or another map than this run's.
    """
    draft = DraftConfig(**ctx.input("train").extra["draft_config"])
    captured = tuple(ctx.input("generate").extra["layers"])
    if draft.aux_layer_ids != captured:
        raise UserError(
            f"the draft was trained with auxiliary layers {list(draft.aux_layer_ids)} and the states are "
            f"those of {list(captured)}; run the train stage again"
        )
    weights, state = read_weights(ctx.run.store.sub("train"), ctx.config.export.checkpoint)
    vocab = load_vocab(ctx.run.store)
    if draft.has_vocab_map and not same_map(weights, vocab):
        raise UserError(
            "the draft's head was trained with another vocabulary map than the vocab stage has now; "
            "run the train stage again"
        )
    return draft, weights, int(state["step"])


def same_map(weights: Mapping[str, Tensor], vocab: VocabMap) -> bool:
    """True where `d2t` [Vd] of trained weights is the map `vocab`."""
    d2t = weights.get("d2t")
    return d2t is not None and d2t.shape == vocab.d2t.shape and bool((d2t == vocab.d2t).all())


def model_card(
    draft: DraftConfig,
    target: TargetInfo,
    k: int,
    supervised_tokens: int,
    has_embed: bool,
    folder: str,
    without: Mapping[str, str],
) -> str:
    """README of the checkpoint's folder; a target that is a folder is called by the folder's name."""
    shown = _shown_name(target)
    flags = [name for name in NORM_FLAGS if getattr(draft, name)]
    return _CARD.format(
        target=shown,
        layers=", ".join(map(str, draft.aux_layer_ids)),
        num_layers=target.num_layers,
        draft_vocab_size=f"{draft.draft_vocab_size:,}",
        vocab_size=f"{draft.vocab_size:,}",
        max_position_embeddings=f"{draft.max_position_embeddings:,}",
        embedding="a bit-exact copy of the target's" if has_embed else "the target's, shared by the engine",
        variant=f"| variant | {', '.join(flags)} |\n" if flags else "",
        tokens=f"{supervised_tokens:,}",
        k=k,
        commands="\n\n".join(f"```\n{c}\n```" for c in serve_commands(shown, folder, k, without).values()),
    )


def _shown_name(target: TargetInfo) -> str:
    """The target without a path of this machine."""
    is_folder = serving_name(target) == target.model and "/" in target.name
    return Path(target.model).name if is_folder else target.name
