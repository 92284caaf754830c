"""Checks a draft against what the engines will look for: names, shapes, config, vocabulary map, embedding."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from app.draft_config import NUM_AUX, DraftConfig
from app.errors import UserError
from app.rope import rope_of_config
from app.target import TargetInfo

IDS = "eagle_aux_hidden_state_layer_ids"
_ABSENT = "absent"
_PREFIXES = (("model.", ""), ("layers.0.", "midlayer."))
_RENAMED = {"draft_id_to_target_id": "d2t"}


@dataclass(frozen=True)
class Difference:
    """One fault of a checkpoint: where, what should be there, what is, and how to mend it."""

    what: str
    expected: str
    found: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}: expected {self.expected}, found {self.found}; {self.fix}"


def canonical_name(name: str) -> str:
    """The root name (CONTRACTS section 5) of a tensor named as in any layout."""
    for prefix, replacement in _PREFIXES:
        if name.startswith(prefix):
            name = replacement + name.removeprefix(prefix)
    return _RENAMED.get(name, name)


def check_draft(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target: TargetInfo | None = None,
    target_embed: Tensor | None = None,
    aux_layer_ids: Sequence[int] | None = None,
) -> list[Difference]:
    """Every difference between a draft and the full form both engines load; empty when it is right.

    Args:
        config: the parsed config.json.
        tensors: the file's tensors under the names they have there.
        target: the target it will serve, where known.
        target_embed: [V, H] the target's embedding as stored; compared bit for bit (in the file's dtype).
        aux_layer_ids: the ids the draft was trained with (k convention), where known.
    """
    if "transformer_layer_config" in config:
        fix = "read it with read_checkpoint and write it again with write_checkpoint"
        return [Difference("config.json", "flat keys of a Llama draft", "the speculators layout", fix)]
    by_root = {canonical_name(name): tensor for name, tensor in tensors.items()}
    found = list(_config_differences(config, by_root, target, aux_layer_ids))
    try:
        draft = DraftConfig.from_hf_config(_mended(config, by_root))
    except UserError as error:
        fault = Difference("config.json", "a single-layer Llama EAGLE-3 draft", str(error), "correct the key named")
        return [*found, fault]
    found += _name_differences(draft, tensors, by_root)
    found += _map_differences(draft, by_root, target)
    found += _value_differences(draft, by_root, target_embed)
    return found


def format_differences(differences: Sequence[Difference], width: int = 140) -> str:
    """A table for people; one line when there is nothing to say."""
    if not differences:
        return "no differences"
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for column in ("what", "expected", "found", "fix"):
        table.add_column(column, overflow="fold")
    for difference in differences:
        table.add_row(difference.what, difference.expected, difference.found, difference.fix)
    text = io.StringIO()
    Console(file=text, width=width, markup=False, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())


def _rows(tensors: Mapping[str, Tensor], name: str) -> int | None:
    return tensors[name].shape[0] if name in tensors and tensors[name].dim() else None


def _inferred(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """What the weights say of the keys that are missing in `config`."""
    heads, q_rows = config.get("num_attention_heads"), _rows(tensors, "midlayer.self_attn.q_proj.weight")
    fc, head_rows = tensors.get("fc.weight"), _rows(tensors, "lm_head.weight")
    values = {
        "head_dim": q_rows // heads if q_rows and isinstance(heads, int) and heads > 0 else None,
        "draft_vocab_size": head_rows,
        "target_hidden_size": fc.shape[1] // NUM_AUX if fc is not None and fc.dim() == 2 else None,
    }
    return {key: value for key, value in values.items() if config.get(key) is None and value is not None}


def _mended(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """`config` with reported gaps closed, so that one fault does not hide the tensors from the check."""
    mended = {**config, **_inferred(config, tensors)}
    if not mended.get(IDS):
        mended[IDS] = list(range(1, NUM_AUX + 1))
    try:
        rope_of_config(mended)
    except UserError:
        mended = {key: value for key, value in mended.items() if not key.startswith("rope_")}
    return mended


def _config_differences(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target: TargetInfo | None,
    aux_layer_ids: Sequence[int] | None,
) -> Iterator[Difference]:
    def key(name: str, expected: Any, found: Any, fix: str) -> Difference:
        return Difference(f"config {name}", str(expected), _ABSENT if found is None else str(found), fix)

    architectures = ["LlamaForCausalLMEagle3"]
    if config.get("architectures") != architectures:
        yield key("architectures", architectures, config.get("architectures"), "write it: engines choose by it")
    fallbacks = {
        "head_dim": "hidden_size / heads",
        "draft_vocab_size": "vocab_size",
        "target_hidden_size": "hidden_size",
    }
    inferred = _inferred(config, tensors)
    for name, fallback in fallbacks.items():
        if config.get(name) is None:
            yield key(name, inferred.get(name, "a number"), None, f"write it: engines would take {fallback}")
    if config.get("norm_before_residual") is None:
        yield key("norm_before_residual", "true or false", None, "write it: its default differs between formats")
    yield from _layer_id_differences(config, target, aux_layer_ids, key)

    try:
        rope_of_config(config)
    except UserError as error:
        yield key("rope", "known keys that agree", error, "write what the draft was trained with, in both forms")
    for name in ("rope_theta", "rope_parameters"):
        if config.get(name) is None:
            yield key(name, "the values trained with", None, "write both rotary forms: engines read either")

    if target is not None:
        sizes = (("vocab_size", target.vocab_size), ("target_hidden_size", target.hidden_size))
        for name, size in sizes:
            if config.get(name) is not None and config[name] != size:
                yield key(name, size, config[name], "this draft belongs to another target")
        positions = config.get("max_position_embeddings") or 0
        if positions < target.max_position_embeddings:
            yield key(
                "max_position_embeddings",
                f">= {target.max_position_embeddings}",
                config.get("max_position_embeddings"),
                "write the target's: engines clamp the context to it, or crash",
            )


def _layer_id_differences(
    config: Mapping[str, Any], target: TargetInfo | None, aux_layer_ids: Sequence[int] | None, key: Any
) -> Iterator[Difference]:
    ids, nested = config.get(IDS), (config.get("eagle_config") or {}).get(IDS)
    trained = list(aux_layer_ids) if aux_layer_ids is not None else None
    if not ids:
        guess = trained or ([j + 1 for j in nested] if nested else "the ids trained with")
        yield key(IDS, guess, None, "write them: vLLM guesses or misreads the nested ones")
    elif trained is not None and list(ids) != trained:
        yield key(IDS, trained, ids, "write the ids the states were captured and trained with")
    elif target is not None and not all(1 <= k < target.num_layers for k in ids):
        yield key(IDS, f"ids in 1..{target.num_layers - 1}", ids, "the target has no such layers")
    base = trained or ids
    if base:
        below = [k - 1 for k in base]
        if nested is None:
            yield key(f"eagle_config.{IDS}", below, None, "write them: SGLang reads only these (k - 1)")
        elif list(nested) != below:
            yield key(f"eagle_config.{IDS}", below, nested, "SGLang adds 1 to these: write k - 1")


def _name_differences(
    draft: DraftConfig, tensors: Mapping[str, Tensor], by_root: Mapping[str, Tensor]
) -> Iterator[Difference]:
    expected = draft.tensor_shapes(embed_tokens="embed_tokens.weight" in by_root)
    for name in tensors:
        root = canonical_name(name)
        if root in expected and name != root:
            yield Difference(f"tensor {name}", root, name, "rename it: not every engine knows this name")
        elif root in ("d2t", "t2d") and root not in expected:
            yield Difference(
                f"tensor {name}",
                _ABSENT,
                "present",
                "remove it: both vocabularies are equal, vLLM refuses a map",
            )
        elif root not in expected:
            yield Difference(f"tensor {name}", _ABSENT, "present", "remove it: engines refuse unknown tensors")
    for name, (shape, dtype) in expected.items():
        if name not in by_root:
            why = {
                "d2t": "without it engines take draft ids for target ids",
                "t2d": "trainers that start from this draft need it",
            }.get(name, "engines would leave it unset or refuse to load")
            yield Difference(f"tensor {name}", f"{list(shape)} {_dtype(dtype)}", _ABSENT, f"write it: {why}")
            continue
        tensor = by_root[name]
        if tuple(tensor.shape) != shape:
            fix = "make the config's sizes and the tensor agree"
            yield Difference(f"tensor {name}", str(list(shape)), str(list(tensor.shape)), fix)
        if tensor.dtype != dtype:
            yield Difference(f"tensor {name}", _dtype(dtype), _dtype(tensor.dtype), "convert it")
    needs_own = draft.hidden_size != draft.target_hidden_size
    if needs_own and "embed_tokens.weight" not in by_root:
        size = f"[{draft.vocab_size}, {draft.hidden_size}]"
        fix = "write it: an embedding of another width than the target's cannot be shared"
        yield Difference("tensor embed_tokens.weight", size, _ABSENT, fix)


def _map_differences(
    draft: DraftConfig, tensors: Mapping[str, Tensor], target: TargetInfo | None
) -> Iterator[Difference]:
    """Faults of `d2t` [Vd] and `t2d` [V] by content (CONTRACTS section 4)."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    size, vocab = draft.draft_vocab_size, draft.vocab_size
    if not draft.has_vocab_map or d2t is None or tuple(d2t.shape) != (size,) or d2t.is_floating_point():
        return
    if t2d is not None and tuple(t2d.shape) != (vocab,):
        t2d = None

    def fault(expected: str, found: str, fix: str, name: str = "d2t") -> Difference:
        return Difference(f"tensor {name}", expected, found, fix)

    offsets = d2t.long()
    kept = torch.arange(size) + offsets  # [Vd] target ids
    if _is_kept(kept, vocab, t2d):
        usable = min(target.tokenizer_len, vocab) if target is not None else vocab
        if not offsets.any() and size < usable:
            found = f"all zero: just the ids below {size}"
            yield fault(f"a choice among {usable} usable ids", found, "build the map from token counts")
        elif int(kept[-1]) >= usable:
            found = f"{int((kept >= usable).sum())} at or above it"
            yield fault(f"ids below the tokenizer's length {usable}", found, "leave out what is never emitted")
        return
    if _is_kept(offsets, vocab, t2d):
        yield fault("offsets: target id = i + d2t[i]", "absolute target ids", "write d2t[i] = id - i")
        return
    outside = (kept < 0) | (kept >= vocab)
    if outside.any():
        first = int(outside.nonzero()[0])
        found = f"{int(outside.sum())} outside; d2t[{first}] = {int(offsets[first])}"
        yield fault(f"0 <= i + d2t[i] < {vocab}", found, "build the map anew")
        return
    if not bool((kept[1:] > kept[:-1]).all()):
        first = int((kept[1:] <= kept[:-1]).nonzero()[0])
        found = f"{int(kept[first])} then {int(kept[first + 1])} at row {first}"
        yield fault("target ids strictly increasing", found, "sort the kept ids, and the rows of lm_head with them")
    if t2d is not None:
        wanted = torch.zeros(vocab, dtype=torch.bool)
        wanted[kept] = True
        if wrong := int((wanted != t2d.bool()).sum()):
            expected = f"true exactly at the {size} ids of d2t"
            yield fault(expected, f"{wrong} entries differ", "rebuild t2d from d2t", "t2d")


def _is_kept(ids: Tensor, vocab: int, t2d: Tensor | None) -> bool:
    """True where `ids` are strictly increasing target ids and `t2d`, if known, is true exactly there."""
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or not bool((ids[1:] > ids[:-1]).all()):
        return False
    return t2d is None or torch.equal(t2d.bool().nonzero().squeeze(-1), ids)


def _value_differences(
    draft: DraftConfig, tensors: Mapping[str, Tensor], target_embed: Tensor | None
) -> Iterator[Difference]:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            count = int((~torch.isfinite(tensor)).sum())
            yield Difference(f"tensor {name}", "finite values", f"{count} not finite", "use an earlier checkpoint")
    embed = tensors.get("embed_tokens.weight")
    shared = draft.hidden_size == draft.target_hidden_size
    if embed is None or target_embed is None or not shared or embed.shape != target_embed.shape:
        return
    wanted = target_embed.to(embed.dtype)
    if not torch.equal(embed, wanted):
        found = f"{int((embed != wanted).any(-1).sum())} of {len(embed)} rows differ"
        fix = "copy the target's embedding or leave the tensor out"
        yield Difference("tensor embed_tokens.weight", "the target's, bit for bit", found, fix)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
