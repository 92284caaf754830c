"""Broken checkpoints: each is flagged for its own reason and for nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.checkpoint import check_checkpoint, format_differences, write_checkpoint
from app.errors import UserError
from app.lint import errors_of
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


def repeat_an_id(t: dict[str, Tensor]) -> None:
    kept = t["d2t"] + torch.arange(DRAFT_VOCAB)
    kept[11] = kept[10]
    t["d2t"] = kept - torch.arange(DRAFT_VOCAB)


def add_state_norms(t: dict[str, Tensor]) -> None:
    t.update({f"fc_norm.{i}.weight": t["norm.weight"].clone() for i in range(3)})


def unmove_norms(t: dict[str, Tensor]) -> None:
    for name, tensor in t.items():
        if "norm" in name:
            tensor.fill_(1)


def shift_ids(c: dict[str, Any]) -> None:
    c[IDS] = [k + 1 for k in c[IDS]]


def write_rope(c: dict[str, Any], theta: float) -> None:
    c.update(rope_theta=theta, rope_parameters={"rope_type": "default", "rope_theta": theta})


def keep_no_rope(c: dict[str, Any]) -> None:
    for name in ("rope_theta", "rope_scaling", "rope_parameters"):
        del c[name]


BROKEN: dict[str, tuple[Callable[[Path], object], list[tuple[str, str]]]] = {
    "ids removed (F48)": (
        lambda d: edit_config(d, lambda c: c.pop(IDS)),
        [(f"config {IDS}", "[2, 4, 5]")],
    ),
    "ids shifted by one (F48)": (
        lambda d: edit_config(d, shift_ids),
        [(f"config {IDS}", "[2, 4, 5]")],
    ),
    "ids in another order": (
        lambda d: edit_config(d, lambda c: c[IDS].reverse()),
        [(f"config {IDS}", "[2, 4, 5]")],
    ),
    "two ids": (
        lambda d: edit_config(d, lambda c: c[IDS].pop()),
        [(f"config {IDS}", "three whole numbers")],
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
    "hidden_size dropped": (
        lambda d: edit_config(d, lambda c: c.pop("hidden_size")),
        [("config hidden_size", "64")],
    ),
    "key-value heads dropped": (
        lambda d: edit_config(d, lambda c: c.pop("num_key_value_heads")),
        [("config num_key_value_heads", "2")],
    ),
    "model_type dropped": (
        lambda d: edit_config(d, lambda c: c.pop("model_type")),
        [("config model_type", "llama")],
    ),
    "the target's depth": (
        lambda d: edit_config(d, lambda c: c.update(num_hidden_layers=LAYERS)),
        [("config num_hidden_layers", "1")],
    ),
    "tied head": (
        lambda d: edit_config(d, lambda c: c.update(tie_word_embeddings=True)),
        [("config tie_word_embeddings", "false")],
    ),
    "biases": (
        lambda d: edit_config(d, lambda c: c.update(attention_bias=True)),
        [("config attention_bias", "false")],
    ),
    "another activation": (
        lambda d: edit_config(d, lambda c: c.update(hidden_act="gelu")),
        [("config hidden_act", "silu")],
    ),
    "one state in place of three": (
        lambda d: edit_config(d, lambda c: c["eagle_config"].update(use_aux_hidden_state=False)),
        [("config eagle_config.use_aux_hidden_state", "true")],
    ),
    "norm_before_fc said twice, differently": (
        lambda d: edit_config(d, lambda c: c["eagle_config"].update(norm_before_fc=True)),
        [("config eagle_config.norm_before_fc", "False"), ("tensor input_norm.weight", "[192] bfloat16")],
    ),
    "norms without their flag (F50)": (
        lambda d: edit_tensors(d, add_state_norms),
        [("config fc_norm", "true")],
    ),
    "flag without its norms (F50)": (
        lambda d: edit_config(d, lambda c: c.update(fc_norm=True)),
        [(f"tensor fc_norm.{i}.weight", "[64] bfloat16") for i in range(3)],
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
    "no rotary base (F67)": (
        lambda d: edit_config(d, keep_no_rope),
        [("config rope_theta", "1e+06 as the target's")],
    ),
    "another rotary base than the target's (F67)": (
        lambda d: edit_config(d, lambda c: write_rope(c, 5e5)),
        [("config rope", "base 1e+06")],
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
    "name with model. before it": (
        lambda d: edit_tensors(d, lambda t: t.update({"model.fc.weight": t.pop("fc.weight")})),
        [("tensor model.fc.weight", "fc.weight")],
    ),
    "map by the engine's own name": (
        lambda d: edit_tensors(d, lambda t: t.update(draft_id_to_target_id=t.pop("d2t"))),
        [("tensor draft_id_to_target_id", "d2t")],
    ),
    "head of another vocabulary": (
        lambda d: edit_tensors(d, lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:300]})),
        [("tensor lm_head.weight", "[320, 64]")],
    ),
    "fusion of EAGLE-1": (
        lambda d: edit_tensors(d, lambda t: t.update({"fc.weight": t["fc.weight"][:, :128]})),
        [("tensor fc.weight", "[64, 192]")],
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
    "t2d removed": (
        lambda d: edit_tensors(d, lambda t: t.pop("t2d")),
        [("tensor t2d", "[640] bool")],
    ),
    "an id twice (F56)": (
        lambda d: edit_tensors(d, repeat_an_id),
        [("tensor d2t", "every target id once"), ("tensor t2d", "true exactly at the 320 ids of d2t")],
    ),
    "d2t as float": (
        lambda d: edit_tensors(d, lambda t: t.update(d2t=t["d2t"].float())),
        [("tensor d2t", "int64")],
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
    "random embedding (F69)": (
        lambda d: edit_tensors(d, lambda t: t["embed_tokens.weight"].normal_()),
        [("tensor embed_tokens.weight", "the target's, bit for bit")],
    ),
    "a matrix nobody loaded": (
        lambda d: edit_tensors(d, lambda t: t["midlayer.mlp.up_proj.weight"].zero_()),
        [("tensor midlayer.mlp.up_proj.weight", "trained values")],
    ),
    "norms that never moved (F60)": (
        lambda d: edit_tensors(d, unmove_norms),
        [("norm weights", "moved by training")],
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


def test_f71_every_tensor_under_another_name_is_named(
    tiny_draft: Path, tiny_target: TargetInfo, tiny_embed: Tensor
) -> None:
    """By the names that vLLM's and SGLang's classes look for; that vLLM loads these is tested with vLLM itself."""
    whole = load_file(tiny_draft / "model.safetensors")
    needed = [name for name in whole if name not in ("t2d", "embed_tokens.weight")]
    assert len(needed) == 14
    for name in needed:
        for other in (f"draft_model.{name}", name.replace("midlayer.", "layer."), f"{name}_"):
            if other == name:
                continue
            save_file({other if n == name else n: t for n, t in whole.items()}, tiny_draft / "model.safetensors")
            found = {d.what: d for d in errors_of(check_checkpoint(tiny_draft, tiny_target, tiny_embed))}
            assert f"tensor {name}" in found or f"tensor {other}" in found, (name, other, found)
            assert all(d.fix for d in found.values())


# Whom a fault concerns, how much, and what its row must say.
REASONS: dict[str, tuple[str, str, str]] = {
    "nested ids not shifted down": ("SGLang", "error", "adds 1 to these and would capture [3, 5, 6]"),
    "nested ids absent": ("SGLang", "warning", "SGLang reads only these"),
    "ids removed (F48)": ("vLLM SGLang", "error", "vLLM would capture [1, 3, 4] as they stand"),
    "plain causal-LM class (F70)": ("SGLang", "error", "engines choose their class by it"),
    "head_dim dropped (F70)": ("vLLM SGLang", "error", "hidden_size / num_attention_heads"),
    "tied head": ("vLLM SGLang", "error", "SGLang would use the embedding"),
    "norm flag not written (F50)": ("vLLM SGLang", "warning", "true to vLLM in a speculators one"),
    "new rotary form absent (F67)": ("vLLM SGLang", "warning", "write both rotary forms"),
    "no rotary base (F67)": ("vLLM SGLang", "error", "engines would take 10000"),
    "another rotary base than the target's (F67)": ("vLLM SGLang", "warning", "only if the draft was trained so"),
    "renamed layer (F71)": ("SGLang", "error", "SGLang drops the tensor without a word"),
    "name with model. before it": ("vLLM", "error", "vLLM refuses this name"),
    "map by the engine's own name": ("vLLM SGLang", "error", "take draft ids for target ids"),
    "first projections not doubled (F70)": ("vLLM SGLang", "error", "2 x hidden_size"),
    "fusion of EAGLE-1": ("vLLM SGLang", "error", "EAGLE-1"),
    "head of another vocabulary": ("vLLM SGLang", "error", "write draft_vocab_size 300"),
    "norms without their flag (F50)": ("vLLM SGLang", "error", "vLLM refuses and SGLang drops"),
    "ids in place of offsets (F56)": ("vLLM SGLang", "error", "absolute target ids"),
    "first N ids (F55)": ("vLLM SGLang", "error", "just the ids below 320"),
    "t2d removed": ("vLLM SGLang", "warning", "engines do not"),
    "d2t as int32 (F56)": ("vLLM SGLang", "warning", "convert it"),
    "d2t as float": ("vLLM SGLang", "error", "misread"),
    "embedding not the target's (F69)": ("vLLM", "error", "1 of 640 rows differ"),
    "random embedding (F69)": ("vLLM", "error", "unrelated to the target's"),
    "a matrix nobody loaded": ("vLLM SGLang", "error", "all zero"),
    "norms that never moved (F60)": ("vLLM SGLang", "warning", "4 of 4 exactly 1"),
    "weights in fp32": ("vLLM SGLang", "warning", "convert it"),
    "shorter context than the target": ("vLLM SGLang", "error", "clamp the context"),
}


@pytest.mark.parametrize("case", REASONS)
def test_the_reason_the_engines_and_the_weight_of_a_fault(
    case: str, tiny_draft: Path, tiny_target: TargetInfo, tiny_embed: Tensor
) -> None:
    engines, severity, words = REASONS[case]
    BROKEN[case][0](tiny_draft)
    found = check_checkpoint(tiny_draft, tiny_target, tiny_embed)
    assert len(found) == 1 and (" ".join(found[0].engines), found[0].severity) == (engines, severity)
    assert words in str(found[0])
    for engine in ("vLLM", "SGLang"):
        alone = check_checkpoint(tiny_draft, tiny_target, tiny_embed, engines=[engine])
        assert alone == (found if engine in engines.split() else [])


@pytest.mark.parametrize(
    ("ids", "words"),
    [([5, 4, 2], "three ascending ids"), ([2, 4, 8], "ids in 1..7"), ([0, 3, 4], "ids in 1..7")],
)
def test_ids_are_judged_where_nobody_says_what_was_trained(
    ids: list[int], words: str, tiny_draft: Path, tiny_target: TargetInfo
) -> None:
    edit_config(tiny_draft, lambda c: c.update({IDS: ids}))
    edit_config(tiny_draft, lambda c: c["eagle_config"].update({IDS: [k - 1 for k in ids]}))
    found = check_checkpoint(tiny_draft, tiny_target)
    assert [d.what for d in found] == [f"config {IDS}"] and words in found[0].expected


def test_several_faults_are_told_together_errors_first(tiny_draft: Path, tiny_target: TargetInfo) -> None:
    for case in ("head_dim dropped (F70)", "tied head", "t2d removed", "renamed layer (F71)", "weights in fp32"):
        BROKEN[case][0](tiny_draft)
    found = check_checkpoint(tiny_draft, tiny_target)
    assert len(found) == 5 and len(errors_of(found)) == 3 and len(errors_of(found, "vLLM")) == 2
    table = format_differences(found, width=300).splitlines()
    levels = [line.split()[0] for line in table if line.split()[:1] and line.split()[0] in ("error", "warning")]
    assert levels == ["error"] * 3 + ["warning"] * 2


def test_a_config_that_is_no_draft_is_told_in_rows(tiny: Path) -> None:
    """The target's own folder in place of the draft's."""
    found = check_checkpoint(tiny)
    said = {d.what: d for d in found}
    assert {"config architectures", "tensor fc.weight", "config num_hidden_layers"} <= said.keys()
    assert "is this the target's config.json?" in said["config num_hidden_layers"].fix


def test_ids_never_emitted_are_flagged(tiny_draft: Path, tiny_target: TargetInfo, tiny_embed: Tensor) -> None:
    shorter = replace(tiny_target, tokenizer_len=400)
    assert [d.what for d in check_checkpoint(tiny_draft, shorter, tiny_embed)] == ["tensor d2t"]


def test_a_draft_of_another_width_needs_an_embedding(tiny_target: TargetInfo, tmp_path: Path) -> None:
    config = draft_config(tiny_target, hidden_size=48)
    with pytest.raises(UserError, match=r"embed_tokens\.weight"):
        write_checkpoint(tmp_path / "draft", config, random_tensors(config))


def test_format_of_nothing() -> None:
    assert format_differences([]) == "no differences"
