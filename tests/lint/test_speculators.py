"""The speculators layout: what export writes passes, and each way to break it is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.checkpoint import Verifier, check_checkpoint, format_differences, read_checkpoint, write_checkpoint
from app.draft_config import NORM_FLAGS
from app.target import TargetInfo
from tests.drafts import IDS, draft_config, edit_config, edit_tensors, random_tensors

VERIFIER = Verifier("some/target", "LlamaForCausalLM", 4)


@pytest.fixture
def folder(tiny_target: TargetInfo, tiny_embed: Tensor, tmp_path: Path) -> Path:
    """A right draft for TINY in this layout."""
    config = draft_config(tiny_target)
    return write_checkpoint(tmp_path / "draft", config, random_tensors(config), tiny_embed, tiny_target, VERIFIER)


def test_it_passes_and_reads_back(folder: Path, tiny_target: TargetInfo, tiny_embed: Tensor) -> None:
    config = draft_config(tiny_target)
    assert check_checkpoint(folder, tiny_target, tiny_embed, config.aux_layer_ids) == []
    read, tensors = read_checkpoint(folder)
    assert read == config and torch.equal(tensors["embed_tokens.weight"], tiny_embed)
    written = json.loads((folder / "config.json").read_text())
    assert "model_type" not in written  # with one, vLLM would not look for this layout
    proposal = written["speculators_config"]["proposal_methods"][0]
    assert (proposal["proposal_type"], proposal["speculative_tokens"]) == ("greedy", 4)
    assert written["speculators_config"]["verifier"]["name_or_path"] == "some/target"


def test_every_combination_of_flags_passes(tiny_target: TargetInfo, tmp_path: Path) -> None:
    for number in range(len(NORM_FLAGS) + 1):
        for flags in combinations(NORM_FLAGS, number):
            config = draft_config(tiny_target, **dict.fromkeys(flags, True))
            path = tmp_path / ("_".join(flags) or "none")
            write_checkpoint(path, config, random_tensors(config), None, tiny_target, VERIFIER)
            assert read_checkpoint(path)[0] == config
            both = {"norm_before_fc", "fc_norm"} <= set(flags)  # the library takes one of them
            assert [d.severity for d in check_checkpoint(path, tiny_target)] == ["warning"] * both


def layer(c: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = c["transformer_layer_config"]
    return found


def settings(c: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = c["speculators_config"]
    return found


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], object], str, str]] = {
    "a model_type": (lambda c: c.update(model_type="llama"), "config model_type", "absent"),
    "another kind": (lambda c: c.update(speculators_model_type="eagle"), "config speculators_model_type", "eagle3"),
    "no number of tokens": (
        lambda c: settings(c)["proposal_methods"].clear(),
        "config speculators_config.proposal_methods[0].speculative_tokens",
        "a number of draft tokens",
    ),
    "no target": (
        lambda c: settings(c).pop("verifier"),
        "config speculators_config.verifier.name_or_path",
        "the target",
    ),
    "norm flag not written": (
        lambda c: c.pop("norm_before_residual"),
        "config norm_before_residual",
        "true or false",
    ),
    "ids removed": (lambda c: c.pop(IDS), f"config {IDS}", "the ids trained with"),
    "head_dim dropped": (
        lambda c: layer(c).pop("head_dim"),
        "config transformer_layer_config.head_dim",
        "32",
    ),
    "no rotary base": (
        lambda c: [layer(c).pop(name) for name in ("rope_theta", "rope_parameters", "rope_scaling")],
        "config transformer_layer_config.rope_theta",
        "1e+06",
    ),
    "shorter context": (
        lambda c: layer(c).update(max_position_embeddings=64),
        "config transformer_layer_config.max_position_embeddings",
        ">= 512",
    ),
    "draft vocabulary dropped": (lambda c: c.pop("draft_vocab_size"), "config draft_vocab_size", "320"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_config_is_flagged_for_its_reason_alone(case: str, folder: Path, tiny_target: TargetInfo) -> None:
    break_it, what, expected = BROKEN[case]
    edit_config(folder, break_it)
    found = check_checkpoint(folder, tiny_target)
    assert [d.what for d in found] == [what], format_differences(found)
    assert expected in found[0].expected and found[0].severity == "error"


def test_the_layer_must_be_there(folder: Path) -> None:
    edit_config(folder, lambda c: c.pop("transformer_layer_config"))
    assert "config transformer_layer_config" in [d.what for d in check_checkpoint(folder)]


def test_names_of_the_flat_form_are_a_warning(folder: Path, tiny_target: TargetInfo) -> None:
    """vLLM takes both, the library knows its own."""
    edit_tensors(folder, lambda t: t.update({"midlayer.hidden_norm.weight": t.pop("layers.0.hidden_norm.weight")}))
    (found,) = check_checkpoint(folder, tiny_target)
    assert (found.expected, found.severity) == ("layers.0.hidden_norm.weight", "warning")
    edit_tensors(folder, lambda t: t.pop("midlayer.hidden_norm.weight"))
    (found,) = check_checkpoint(folder, tiny_target)
    assert (found.what, found.severity) == ("tensor layers.0.hidden_norm.weight", "error")


def test_sglang_is_left_out_unless_asked_for(folder: Path, tiny_target: TargetInfo) -> None:
    assert check_checkpoint(folder, tiny_target) == []
    found = check_checkpoint(folder, tiny_target, engines=["SGLang"])
    assert [(d.what, d.severity) for d in found] == [("SGLang", "error")]
    assert "does not read the speculators layout" in found[0].found
