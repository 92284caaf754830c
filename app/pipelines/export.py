"""Export: trained weights to a checkpoint that vLLM and SGLang load, checked before it is kept."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from app.checkpoint import DraftConfig, sglang_command, vllm_serve_command, write_checkpoint
from app.draft_config import NORM_FLAGS
from app.errors import UserError
from app.pipeline import StageContext, StageResult
from app.pipelines.vocab import VocabMap, load_vocab
from app.storage import Store, explained
from app.target import TargetInfo, load_target_head
from app.train.state import read_weights

log = logging.getLogger("draftmill")

DRAFT = "export/draft"
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

Run from the folder that holds this one:

{commands}
"""


def run(ctx: StageContext) -> StageResult:
    """Write `export/draft/` and the commands that serve it, `export/serve.json`.

    Raises:
        UserError: capture, training and this run do not agree on layers or vocabulary, or the draft would
            not pass `check_checkpoint`.
    """
    config, target, store = ctx.config, ctx.target, ctx.run.store
    store.delete("export")
    draft, weights, step = trained_draft(ctx)
    k = config.evaluate.num_draft_tokens
    embed = load_target_head(target).embed_tokens if config.export.embed_tokens else None
    tokens = ctx.input("vocab").counts["supervised_tokens"]["train"]
    with explained(store.url), _local_folder(store, DRAFT) as folder:
        write_checkpoint(folder, draft, weights, embed, target)
        card = model_card(draft, target, k, tokens, embed is not None)
        (folder / "README.md").write_text(card, encoding="utf-8")
    where = store.full(DRAFT) if store.is_local else f"{store.url}/{DRAFT}"
    commands = serve_commands(draft, serving_name(target), where, k)
    store.write_json("export/serve.json", commands)
    outputs = [f"{DRAFT}/{file}" for file in store.files(DRAFT)]
    log.info("export: step %d of training, checked, in %s", step, where)
    log.info("export: %s", commands["vLLM"])
    if "SGLang" not in commands:
        log.warning("export: no command for SGLang: it has no switch for norm_before_residual")
    return StageResult(
        outputs=[*outputs, "export/serve.json"],
        counts={"step": step, "bytes": sum(store.size(path) or 0 for path in outputs)},
        extra={"draft_config": draft.model_dump(mode="json")},
    )


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


def serve_commands(draft: DraftConfig, target: str, where: str, k: int) -> dict[str, str]:
    """Shell commands by engine that serve the draft in `where`, proposing `k` tokens per step.

    SGLang is left out for norm_before_residual: it has no such switch and would compute another draft. It reads the
    other norm flags and their tensors from 0.5.20 on, under the names that vLLM gave them.
    """
    commands = {"vLLM": vllm_serve_command(target, where, k)}
    if not draft.norm_before_residual:
        commands["SGLang"] = sglang_command(target, where, k)
    return commands


def serving_name(target: TargetInfo) -> str:
    """What an engine is given as the target: the hub id where the user named one, else the local folder."""
    is_hub_id = target.name.count("/") == 1 and not target.name.startswith((".", "/", "~"))
    return target.name if is_hub_id and not Path(target.name).exists() else target.model


def model_card(draft: DraftConfig, target: TargetInfo, k: int, supervised_tokens: int, has_embed: bool) -> str:
    """README of the checkpoint's folder; a target that is a folder is called by the folder's name."""
    is_folder = serving_name(target) == target.model and "/" in target.name
    shown = Path(target.model).name if is_folder else target.name
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
        commands="\n\n".join(f"```\n{c}\n```" for c in serve_commands(draft, shown, "draft", k).values()),
    )


@contextlib.contextmanager
def _local_folder(store: Store, path: str) -> Iterator[Path]:
    """A local folder that is, or becomes, folder `path` of the store."""
    if store.is_local:
        yield Path(store.full(path))
        return
    with tempfile.TemporaryDirectory(prefix="draftmill-") as name:
        folder = Path(name) / "draft"
        yield folder
        for file in sorted(folder.iterdir()):
            store.put(file, f"{path}/{file.name}")
