"""The draft's checkpoint on disk: read any layout, write the one both engines load."""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from app.checkpoint_files import CONFIG_FILE, WEIGHTS_FILE, read_config, read_tensors
from app.draft_config import DraftConfig
from app.errors import UserError
from app.lint import Difference, canonical_name, check_draft, errors_of, format_differences
from app.lint.layer_ids import nested_ids
from app.lint.names import IDS
from app.speculators import Verifier, speculators_config, speculators_tensors
from app.target import TargetInfo

__all__ = [
    "CONFIG_FILE",
    "Difference",
    "DraftConfig",
    "Verifier",
    "check_checkpoint",
    "format_differences",
    "read_checkpoint",
    "write_checkpoint",
]

log = logging.getLogger("draftmill")

_DERIVED = "rotary_emb.inv_freq"  # some trainers save it along


def write_checkpoint(
    folder: Path,
    config: DraftConfig,
    tensors: Mapping[str, Tensor],
    embed_tokens: Tensor | None = None,
    target: TargetInfo | None = None,
    verifier: Verifier | None = None,
) -> Path:
    """Write a draft in the full form of CONTRACTS section 5, or nothing at all.

    Args:
        folder: made anew; an older one is replaced once the new one is complete.
        tensors: root names (`DraftConfig.tensor_shapes`), any float dtype: stored as `config.dtype`.
        embed_tokens: [V, H] the target's embedding as stored, or None to let engines share the target's.
        target: where given, the config is checked against it too, and the nested layer ids are those that
            SGLang's class for it needs.
        verifier: where given, the folder gets the speculators layout for that target instead.

    Raises:
        UserError: `check_checkpoint` finds errors; the message holds the table.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    weight_dtype: torch.dtype = getattr(torch, config.dtype)
    given = dict(tensors)
    if embed_tokens is not None:
        given["embed_tokens.weight"] = embed_tokens
    stored = {
        name: (t.detach().to(weight_dtype) if t.is_floating_point() else t.detach()).cpu().contiguous().clone()
        for name, t in given.items()
    }
    temp = folder.with_name(f".{folder.name}.tmp-{uuid.uuid4().hex[:8]}")
    temp.mkdir()
    try:
        named = stored if verifier is None else speculators_tensors(stored)
        save_file(named, temp / WEIGHTS_FILE, {"format": "pt"})
        keys = _flat_config(config, target) if verifier is None else speculators_config(config, verifier)
        (temp / CONFIG_FILE).write_text(json.dumps(keys, indent=2) + "\n")
        differences = check_checkpoint(temp, target, embed_tokens, config.aux_layer_ids)
        if errors_of(differences):
            raise UserError(f"the draft for {folder} would not serve:\n{format_differences(differences)}")
        for difference in differences:
            log.warning("%s: %s", folder.name, difference)
        _replace(temp, folder)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return folder


def read_checkpoint(folder: Path, target_num_layers: int | None = None) -> tuple[DraftConfig, dict[str, Tensor]]:
    """Read a draft in any layout of `DraftConfig.from_hf_config`: its config and its tensors by root name.

    Accepts one safetensors file or several with an index, pickled tensors, the `model.` prefix, `layers.0.` for
    `midlayer.` and `draft_id_to_target_id` for `d2t`. A missing `t2d` is made from `d2t`; an all-zero map between equal
    vocabularies is dropped. `embed_tokens.weight` is among the tensors only where the file has it.

    Raises:
        UserError: no such checkpoint, or names, shapes or the map do not fit its config.
    """
    folder = Path(folder)
    raw_config = read_config(folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in read_tensors(folder).items():
        root = canonical_name(name)
        if root in tensors:
            raise UserError(f"{folder}: {root} is there twice, once as {name}; remove one")
        if not root.endswith(_DERIVED):
            tensors[root] = tensor
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    try:
        config = DraftConfig.from_hf_config(raw_config, shapes, target_num_layers)
    except UserError as error:
        raise UserError(f"{folder}/{CONFIG_FILE}: {error}") from error
    _settle_map(folder, config, tensors)
    expected = config.tensor_shapes(embed_tokens="embed_tokens.weight" in tensors)
    faults = [f"{name} is missing" for name in expected if name not in tensors]
    faults += [f"{name} is unknown" for name in tensors if name not in expected]
    faults += [
        f"{name} has shape {list(tensors[name].shape)} instead of {list(shape)}"
        for name, (shape, _) in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if faults:
        raise UserError(f"{folder}: tensors and config.json do not agree: {'; '.join(faults)}")
    return config, tensors


def check_checkpoint(
    folder: Path,
    target: TargetInfo | None = None,
    target_embed: Tensor | None = None,
    aux_layer_ids: Sequence[int] | None = None,
    engines: Sequence[str] | None = None,
) -> list[Difference]:
    """Every difference between the checkpoint in `folder` and the form engines load; see `check_draft`.

    Raises:
        UserError: there is no readable checkpoint in `folder`.
    """
    folder = Path(folder)
    return check_draft(read_config(folder), read_tensors(folder), target, target_embed, aux_layer_ids, engines)


def _flat_config(config: DraftConfig, target: TargetInfo | None) -> dict[str, Any]:
    """The full form, with the nested ids of the target's class in SGLang where its shift differs."""
    keys = config.to_hf_config()
    if nested := nested_ids(config.aux_layer_ids, target):
        keys["eagle_config"][IDS] = nested
    return keys


def _settle_map(folder: Path, config: DraftConfig, tensors: dict[str, Tensor]) -> None:
    """Bring `d2t` and `t2d` into our form, or refuse."""
    d2t = tensors.get("d2t")
    if not config.has_vocab_map:
        if d2t is not None and d2t.any():
            raise UserError(f"{folder}: d2t is not zero although both vocabularies have {config.vocab_size} ids")
        tensors.pop("d2t", None)
        tensors.pop("t2d", None)
        return
    if d2t is None:
        raise UserError(
            f"{folder}: d2t is missing although the draft speaks {config.draft_vocab_size} of "
            f"{config.vocab_size} ids; the meaning of its output rows is lost"
        )
    if d2t.is_floating_point() or tuple(d2t.shape) != (config.draft_vocab_size,):
        raise UserError(f"{folder}: d2t must be whole numbers [{config.draft_vocab_size}], not {list(d2t.shape)}")
    tensors["d2t"] = d2t.long()
    kept = torch.arange(config.draft_vocab_size) + tensors["d2t"]  # [Vd]
    if int(kept.min()) < 0 or int(kept.max()) >= config.vocab_size:
        raise UserError(
            f"{folder}: d2t leads outside the target's {config.vocab_size} ids; it must hold offsets "
            "(target id = i + d2t[i]), not ids"
        )
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[kept] = True
    if "t2d" in tensors and not torch.equal(tensors["t2d"].bool(), t2d):
        raise UserError(f"{folder}: t2d is not true exactly at the ids of d2t; run a check and rebuild the map")
    tensors["t2d"] = t2d


def _replace(temp: Path, folder: Path) -> None:
    """Put the finished `temp` in the place of `folder`."""
    if not folder.exists():
        os.replace(temp, folder)
        return
    old = folder.with_name(f".{folder.name}.tmp-old-{uuid.uuid4().hex[:8]}")
    os.replace(folder, old)
    os.replace(temp, folder)
    shutil.rmtree(old)
