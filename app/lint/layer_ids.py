"""Which states each engine captures for the layer ids in a config (k: the residual stream after k decoder layers)."""

from __future__ import annotations

from collections.abc import Sequence

from app.errors import UserError
from app.target import TargetInfo, default_aux_layers

# SGLang's target classes that do not simply add 1 to the nested ids.
_SHIFT_IF_FIRST_IS_1 = ("DeepseekV2", "DeepseekV3", "KimiK2", "Glm4MoeLite")
_SHIFT_UNLESS_LAST_IS_N = ("GptOss",)


def default_ids(num_layers: int | None) -> tuple[int, ...] | None:
    """What both engines capture where they read no ids; None where the target is unknown or too shallow."""
    try:
        return default_aux_layers(num_layers) if num_layers is not None else None
    except UserError:
        return None


def sglang_captures(nested: Sequence[int], target: TargetInfo | None) -> tuple[int, ...]:
    """The states that SGLang captures for the ids in `eagle_config` (CONTRACTS section 5).

    Most of its target classes add 1. DeepSeek's, Kimi's and GLM's light one add 1 only where the first id is 1,
    gpt-oss's unless the largest is the number of layers.
    """
    as_is = False
    if target is not None and target.architecture.startswith(_SHIFT_IF_FIRST_IS_1):
        as_is = nested[0] != 1
    elif target is not None and target.architecture.startswith(_SHIFT_UNLESS_LAST_IS_N):
        as_is = max(nested) == target.num_layers
    return tuple(nested) if as_is else tuple(j + 1 for j in nested)


def nested_ids(ids: Sequence[int], target: TargetInfo | None) -> list[int] | None:
    """The ids to write into `eagle_config` so that SGLang captures `ids`; None where no such ids exist."""
    for nested in ([k - 1 for k in ids], list(ids)):
        if sglang_captures(nested, target) == tuple(ids):
            return nested
    return None


def why_not_sglang(norm_before_residual: bool, ids: Sequence[int] | None, target: TargetInfo | None) -> str | None:
    """Why SGLang cannot serve a draft of this kind, however it is written down; None where it can."""
    if norm_before_residual:
        return "it has no switch for norm_before_residual and would compute another draft"
    if ids and nested_ids(ids, target) is None:
        return f"its class for {target.architecture if target else 'this target'} cannot capture layers {list(ids)}"
    return None
