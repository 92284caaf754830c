"""All rules over one draft."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from app.draft_config import DraftConfig
from app.errors import UserError
from app.lint.config_rules import config_differences
from app.lint.difference import ENGINES, SGLANG, Difference
from app.lint.id_rules import id_differences, known_ids
from app.lint.layer_ids import why_not_sglang
from app.lint.map_rules import map_differences
from app.lint.subject import Subject
from app.lint.tensor_rules import tensor_differences
from app.lint.value_rules import value_differences
from app.target import TargetInfo

NOT_SPECULATORS = "it does not read the speculators layout; use the flat one"


def check_draft(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target: TargetInfo | None = None,
    target_embed: Tensor | None = None,
    aux_layer_ids: Sequence[int] | None = None,
    engines: Sequence[str] | None = None,
) -> list[Difference]:
    """Every difference between a draft and what engines need of its layout; empty when it is right.

    Args:
        config: the parsed config.json, in the flat layout of CONTRACTS section 5 or in the speculators layout.
        tensors: the file's tensors under the names they have there.
        target: the target it will serve, where known.
        target_embed: [V, H] the target's embedding as stored; compared bit for bit (in the file's dtype).
        aux_layer_ids: the ids the draft was trained with (k convention), where known.
        engines: to check for; by default those that can serve a draft of this kind (`left_out`).
    """
    d = Subject(config, tensors, target, target_embed, aux_layer_ids)
    unfit = _left_out(d)
    chosen = set(ENGINES) - unfit.keys() if engines is None else set(engines)
    found = [
        Difference(engine, "a draft it can serve", reason, "serve this one with vLLM", (engine,))
        for engine, reason in unfit.items()
        if engine in chosen
    ]
    fit = chosen - unfit.keys()
    return found + [difference for difference in _differences(d) if fit & set(difference.engines)]


def left_out(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetInfo | None = None
) -> dict[str, str]:
    """The engines that cannot serve a draft of this kind however well it is written, with the reason."""
    return _left_out(Subject(config, tensors, target))


def _left_out(d: Subject) -> dict[str, str]:
    if d.is_speculators:
        return {SGLANG: NOT_SPECULATORS}
    reason = why_not_sglang(bool(d.config.get("norm_before_residual")), known_ids(d), d.target)
    return {SGLANG: reason} if reason is not None else {}


def _differences(d: Subject) -> Iterator[Difference]:
    yield from id_differences(d)
    yield from config_differences(d)
    try:
        draft = DraftConfig.from_hf_config(d.mended)
    except UserError as error:
        fix = "correct the key named; the tensors are checked then"
        yield Difference("config.json", "a single-layer Llama EAGLE-3 draft", str(error), fix)
        return
    yield from tensor_differences(d, draft)
    yield from map_differences(d, draft)
    yield from value_differences(d, draft)
