"""Rules for the tensors' names, shapes and dtypes, rebuilt from the config."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from app.draft_config import DraftConfig, Shape
from app.lint.difference import ABSENT, ENGINES, SGLANG, VLLM, Difference
from app.lint.names import canonical_name, engines_without, listed_name
from app.lint.subject import Subject

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_IGNORED = "rotary_emb.inv_freq"  # some trainers save it along; engines make their own
_INPUTS = tuple(f"midlayer.self_attn.{x}_proj.weight" for x in "qkv")
_STANDARD = (torch.bfloat16, torch.float16, torch.float32)


def tensor_differences(d: Subject, draft: DraftConfig) -> Iterator[Difference]:
    """Names that engines do not find, tensors that are missing or too many, shapes and dtypes."""
    expected = draft.tensor_shapes(embed_tokens=_EMBEDDING in d.by_root)
    yield from _name_differences(d, draft, set(expected))
    for root, (shape, dtype) in expected.items():
        if root not in d.by_root:
            yield _missing(d, draft, root, f"{list(shape)} {dtype_text(dtype)}")
            continue
        tensor = d.by_root[root]
        if tuple(tensor.shape) != shape:
            fix = _shape_fix(draft, root, tuple(tensor.shape))
            yield Difference(f"tensor {root}", str(list(shape)), str(list(tensor.shape)), fix)
        if tensor.dtype != dtype:
            yield _dtype_difference(root, dtype, tensor.dtype)
    if draft.hidden_size != draft.target_hidden_size and _EMBEDDING not in d.by_root:
        size = f"[{draft.vocab_size}, {draft.hidden_size}]"
        fix = "write it: an embedding of another width than the target's cannot be shared"
        yield Difference(f"tensor {_EMBEDDING}", size, ABSENT, fix)


def _name_differences(d: Subject, draft: DraftConfig, expected: set[str]) -> Iterator[Difference]:
    seen: dict[str, str] = {}
    for name in d.tensors:
        root = canonical_name(name)
        if root.endswith(_IGNORED):
            continue
        if root in seen:
            yield Difference(f"tensor {name}", "once", f"also there as {seen[root]}", "remove one of the two")
            continue
        seen[root] = name
        if root in ("d2t", "t2d") and not draft.has_vocab_map:
            fix = "remove it: both vocabularies are equal, and vLLM refuses a map then"
            yield Difference(f"tensor {name}", ABSENT, "present", fix, (VLLM,), "error" if root == "d2t" else "warning")
        elif root not in expected:
            fix = "remove it: vLLM refuses tensors it does not know, SGLang drops them"
            yield Difference(f"tensor {name}", ABSENT, "present", fix)
        elif engines := engines_without(name, root):
            wanted = listed_name(root) if d.is_speculators else root
            fix = "rename it: vLLM refuses this name, SGLang drops the tensor without a word"
            if root == "d2t":
                fix = "rename it: engines do not see the map under this name and take draft ids for target ids"
            yield Difference(f"tensor {name}", wanted, name, fix, engines)
        elif d.is_speculators and name != listed_name(root):
            fix = "rename it: the speculators library lists its layers"
            yield Difference(f"tensor {name}", listed_name(root), name, fix, ENGINES, "warning")


def _missing(d: Subject, draft: DraftConfig, root: str, expected: str) -> Difference:
    name = listed_name(root) if d.is_speculators else root
    if root == "t2d":
        fix = "write it: trainers that start from this draft need it; engines do not"
        return Difference(f"tensor {name}", expected, ABSENT, fix, ENGINES, "warning")
    if root == _HEAD and not draft.has_vocab_map:
        fix = "write it: vLLM would share the target's head, SGLang leaves it unset"
        return Difference(f"tensor {name}", expected, ABSENT, fix, (SGLANG,))
    why = {
        "d2t": "without it engines take draft ids for target ids",
        _HEAD: "without it vLLM shares the target's head, whose rows are other tokens",
    }.get(root, "engines leave it unset without a word, and acceptance falls to nothing")
    return Difference(f"tensor {name}", expected, ABSENT, f"write it: {why}")


def _shape_fix(draft: DraftConfig, root: str, found: Shape) -> str:
    """What a wrong shape usually means."""
    h, rows, width = draft.hidden_size, found[0] if found else 0, found[-1] if found else 0
    if root in _INPUTS and width == h:
        return "a plain layer's projection: EAGLE-3's read embedding and state side by side, 2 x hidden_size"
    if root == "fc.weight" and width == 2 * h:
        return "an EAGLE-1 fusion of embedding and one state: EAGLE-3's reads three states, 3 x target_hidden_size"
    if root == "fc.weight":
        return "fc reads three states of the target: correct target_hidden_size, or this is another target's draft"
    if root in (_HEAD, "d2t") and rows != draft.draft_vocab_size:
        return f"write draft_vocab_size {rows}, or this head is of another vocabulary"
    if root in ("t2d", _EMBEDDING) and rows != draft.vocab_size:
        return f"its rows are the target's vocabulary: write vocab_size {rows}, or this is another target's"
    return "make the config's sizes and the tensor agree"


def _dtype_difference(root: str, expected: torch.dtype, found: torch.dtype) -> Difference:
    """Engines convert between the usual float types and between whole numbers; nothing else."""
    usual = (expected in _STANDARD and found in _STANDARD) or (
        root in ("d2t", "t2d") and not found.is_floating_point and not found.is_complex
    )
    fix = "convert it" if usual else "convert it: engines would misread it"
    harmless = usual or root == "t2d"  # which no engine reads
    words = (f"tensor {root}", dtype_text(expected), dtype_text(found), fix)
    return Difference(*words, severity="warning" if harmless else "error")


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
