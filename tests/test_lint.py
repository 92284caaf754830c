"""Broken checkpoints: each is flagged for its own reason and for nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.checkpoint import check_checkpoint, format_differences, write_checkpoint
from app.errors import UserError
from app.target import TargetInfo, default_aux_layers
from tests.drafts import DRAFT_VOCAB, IDS, draft_config, edit_config, edit_tensors, random_tensors
from tests.tiny import LAYERS, VOCAB


def rename_layer(t: dict[str, Tensor]) -> None:
    t["layers.0.hidden_norm.weight"] = t.pop("midlayer.hidden_norm.weight")


def halve_inputs(t: dict[str, Tensor]) -> None:
    name = "midlayer.self_attn.k_proj.weight"
    t[name] = t[name][:, :64]


def swap_two_ids(t: dict[str, Tensor]) -> None:
    kept = t["d2t"] + torch.arange(DRAFT_VOCAB)
    kept[[10, 11]] = kept[[11, 10]]
    t["d2t"] = kept - torch.arange(DRAFT_VOCAB)


def shift_ids(c: dict[str, Any]) -> None:
    c[IDS] = [k + 1 for k in c[IDS]]


BROKEN: dict[str, tuple[Callable[[Path], object], list[tuple[str, str]]]] = {
    "ids removed (F48)": (
        lambda d: edit_config(d, lambda c: c.pop(IDS)),
        [(f"config {IDS}", "[2, 4, 5]")],
    ),
    "ids shifted by one (F48)": (
        lambda d: edit_config(d, shift_ids),
        [(f"config {IDS}", "[2, 4, 5]")],
    ),
    "nested ids not shifted down": (
        lambda d: edit_config(d, lambda c: c["eagle_config"].update({IDS: c[IDS]})),
        [(f"config eagle_config.{IDS}", "[1, 3, 4]")],
    ),
    "nested ids absent": (
        lambda d: edit_config(d, lambda c: c.pop("eagle_config")),
        [(f"config eagle_config.{IDS}", "[1, 3, 4]")],
    ),
    "draft_vocab_size dropped (F70)": (
        lambda d: edit_config(d, lambda c: c.pop("draft_vocab_size")),
        [("config draft_vocab_size", "320")],
    ),
    "head_dim dropped (F70)": (
        lambda d: edit_config(d, lambda c: c.pop("head_dim")),
        [("config head_dim", "32")],
    ),
    "norm flag not written (F50)": (
        lambda d: edit_config(d, lambda c: c.pop("norm_before_residual")),
        [("config norm_before_residual", "true or false")],
    ),
    "shorter context than the target": (
        lambda d: edit_config(d, lambda c: c.update(max_position_embeddings=256)),
        [("config max_position_embeddings", ">= 512")],
    ),
    "rotary forms disagree (F67)": (
        lambda d: edit_config(d, lambda c: c.update(rope_theta=10000.0)),
        [("config rope", "known keys that agree")],
    ),
    "new rotary form absent (F67)": (
        lambda d: edit_config(d, lambda c: c.pop("rope_parameters")),
        [("config rope_parameters", "the values trained with")],
    ),
    "plain causal-LM class (F70)": (
        lambda d: edit_config(d, lambda c: c.update(architectures=["LlamaForCausalLM"])),
        [("config architectures", "LlamaForCausalLMEagle3")],
    ),
    "another target's vocabulary": (
        lambda d: edit_config(d, lambda c: c.update(vocab_size=VOCAB + 8)),
        [
            ("config vocab_size", "640"),
            ("tensor embed_tokens.weight", "[648, 64]"),
            ("tensor t2d", "[648]"),
        ],
    ),
    "renamed layer (F71)": (
        lambda d: edit_tensors(d, rename_layer),
        [("tensor layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight")],
    ),
    "missing tensor": (
        lambda d: edit_tensors(d, lambda t: t.pop("fc.weight")),
        [("tensor fc.weight", "[64, 192] bfloat16")],
    ),
    "extra tensor": (
        lambda d: edit_tensors(d, lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(32)})),
        [("tensor midlayer.self_attn.q_norm.weight", "absent")],
    ),
    "first projections not doubled (F70)": (
        lambda d: edit_tensors(d, halve_inputs),
        [("tensor midlayer.self_attn.k_proj.weight", "[64, 128]")],
    ),
    "d2t removed (F55)": (
        lambda d: edit_tensors(d, lambda t: t.pop("d2t")),
        [("tensor d2t", "[320] int64")],
    ),
    "first N ids (F55)": (
        lambda d: edit_tensors(
            d, lambda t: t.update(d2t=torch.zeros_like(t["d2t"]), t2d=torch.arange(VOCAB) < DRAFT_VOCAB)
        ),
        [("tensor d2t", "a choice among 600 usable ids")],
    ),
    "ids in place of offsets (F56)": (
        lambda d: edit_tensors(d, lambda t: t.update(d2t=t["d2t"] + torch.arange(DRAFT_VOCAB))),
        [("tensor d2t", "offsets: target id = i + d2t[i]")],
    ),
    "offsets out of range (F56)": (
        lambda d: edit_tensors(d, lambda t: t["d2t"].__setitem__(7, VOCAB)),
        [("tensor d2t", "0 <= i + d2t[i] < 640")],
    ),
    "ids not increasing (F56)": (
        lambda d: edit_tensors(d, swap_two_ids),
        [("tensor d2t", "target ids strictly increasing")],
    ),
    "t2d elsewhere (F56)": (
        lambda d: edit_tensors(d, lambda t: t.update(t2d=t["t2d"].roll(1))),
        [("tensor t2d", "true exactly at the 320 ids of d2t")],
    ),
    "d2t as int32 (F56)": (
        lambda d: edit_tensors(d, lambda t: t.update(d2t=t["d2t"].int())),
        [("tensor d2t", "int64")],
    ),
    "embedding not the target's (F69)": (
        lambda d: edit_tensors(d, lambda t: t["embed_tokens.weight"][5].mul_(1.01)),
        [("tensor embed_tokens.weight", "the target's, bit for bit")],
    ),
    "weights not finite": (
        lambda d: edit_tensors(d, lambda t: t["lm_head.weight"][0].fill_(float("inf"))),
        [("tensor lm_head.weight", "finite values")],
    ),
    "weights in fp32": (
        lambda d: edit_tensors(d, lambda t: t.update({"fc.weight": t["fc.weight"].float()})),
        [("tensor fc.weight", "bfloat16")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_is_flagged_for_its_reason_alone(
    case: str, tiny_draft: Path, tiny_target: TargetInfo, tiny_embed: Tensor
) -> None:
    break_it, expected = BROKEN[case]
    break_it(tiny_draft)
    differences = check_checkpoint(tiny_draft, tiny_target, tiny_embed, default_aux_layers(LAYERS))
    assert [d.what for d in differences] == [what for what, _ in expected], format_differences(differences)
    for difference, (what, words) in zip(differences, expected, strict=True):
        assert words in difference.expected, difference
        assert what in format_differences(differences, width=400) and difference.fix


def test_ids_never_emitted_are_flagged(tiny_draft: Path, tiny_target: TargetInfo, tiny_embed: Tensor) -> None:
    shorter = replace(tiny_target, tokenizer_len=400)
    assert [d.what for d in check_checkpoint(tiny_draft, shorter, tiny_embed)] == ["tensor d2t"]


def test_a_draft_of_another_width_needs_an_embedding(tiny_target: TargetInfo, tmp_path: Path) -> None:
    config = draft_config(tiny_target, hidden_size=48)
    with pytest.raises(UserError, match=r"embed_tokens\.weight"):
        write_checkpoint(tmp_path / "draft", config, random_tensors(config))


def test_speculators_folder_is_told_to_be_rewritten(tiny_draft: Path) -> None:
    edit_config(tiny_draft, lambda c: c.update(transformer_layer_config={}))
    assert [d.found for d in check_checkpoint(tiny_draft)] == ["the speculators layout"]


def test_format_of_nothing() -> None:
    assert format_differences([]) == "no differences"
