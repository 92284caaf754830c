"""Tensor names: the root names of CONTRACTS section 5, and which engine finds a tensor under another."""

from __future__ import annotations

from app.lint.difference import SGLANG, VLLM

IDS = "eagle_aux_hidden_state_layer_ids"
_PREFIXES = (("model.", ""), ("layers.0.", "midlayer."))
_RENAMED = {"draft_id_to_target_id": "d2t"}
_LAYER, _LISTED_LAYER = "midlayer.", "layers.0."


def canonical_name(name: str) -> str:
    """The root name of a tensor named as in any layout."""
    for prefix, replacement in _PREFIXES:
        if name.startswith(prefix):
            name = replacement + name.removeprefix(prefix)
    return _RENAMED.get(name, name)


def listed_name(root: str) -> str:
    """The name of root name `root` in the speculators layout, whose layers are a list."""
    return root.replace(_LAYER, _LISTED_LAYER, 1) if root.startswith(_LAYER) else root


def engines_without(name: str, root: str) -> tuple[str, ...]:
    """The engines that do not take a tensor called `name` for the one they know as `root`.

    vLLM puts `model.` before every name but the head's and refuses what it does not know then; it takes `midlayer.`
    and `layers.0.` for the same. SGLang tries a name as it is and with `model.`, knows `midlayer.` alone, and drops
    what it does not find without a word. Both find the maps by the letters d2t and t2d.
    """
    if name == root or (root == "t2d" and "t2d" in name):
        return ()
    without = []
    if name != listed_name(root):
        without.append(VLLM)
    by_letters = root == "d2t" and "d2t" in name
    if not by_letters and (name != f"model.{root}" or root == "lm_head.weight"):
        without.append(SGLANG)
    return tuple(without)
