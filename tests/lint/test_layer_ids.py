"""What SGLang's target classes make of the nested ids, and what export writes for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from app.checkpoint import check_checkpoint, write_checkpoint
from app.lint.check import left_out
from app.lint.layer_ids import nested_ids, sglang_captures, why_not_sglang
from app.target import TargetInfo
from tests.drafts import IDS, draft_config, edit_config, random_tensors

DEEPSEEK, KIMI, GLM, GPT_OSS, LLAMA = (
    "DeepseekV3ForCausalLM",
    "KimiK25ForConditionalGeneration",
    "Glm4MoeLiteForCausalLM",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
)


@pytest.mark.parametrize(
    ("architecture", "nested", "captured"),
    [
        (LLAMA, [1, 3, 4], (2, 4, 5)),
        (LLAMA, [2, 4, 5], (3, 5, 6)),
        (DEEPSEEK, [1, 3, 4], (2, 4, 5)),
        (DEEPSEEK, [2, 4, 5], (2, 4, 5)),  # as they are: the first is not 1
        (KIMI, [3, 5, 6], (3, 5, 6)),
        (GLM, [2, 4, 5], (2, 4, 5)),
        (GPT_OSS, [1, 3, 4], (2, 4, 5)),
        (GPT_OSS, [2, 4, 8], (2, 4, 8)),  # as they are: the last is the number of layers
    ],
)
def test_shifts_of_classes(
    architecture: str, nested: list[int], captured: tuple[int, ...], tiny_target: TargetInfo
) -> None:
    assert sglang_captures(nested, replace(tiny_target, architecture=architecture)) == captured


@pytest.mark.parametrize("architecture", [LLAMA, DEEPSEEK, KIMI, GLM, GPT_OSS])
@pytest.mark.parametrize("ids", [(1, 4, 5), (2, 4, 5), (3, 4, 7)])
def test_ids_written_are_those_captured(architecture: str, ids: tuple[int, ...], tiny_target: TargetInfo) -> None:
    target = replace(tiny_target, architecture=architecture)
    written = nested_ids(ids, target)
    if written is None:  # 0 would not be shifted, and 1 would
        assert ids[0] == 1 and architecture in (DEEPSEEK, KIMI, GLM)
        assert "cannot capture layers [1, 4, 5]" in str(why_not_sglang(False, ids, target))
    else:
        assert sglang_captures(written, target) == ids and why_not_sglang(False, ids, target) is None


def test_export_writes_what_the_targets_class_needs(tiny_target: TargetInfo, tmp_path: Path) -> None:
    target = replace(tiny_target, architecture=DEEPSEEK)
    config = draft_config(target, aux_layer_ids=(3, 4, 7))
    folder = write_checkpoint(tmp_path / "draft", config, random_tensors(config), None, target)
    written = json.loads((folder / "config.json").read_text())
    assert written[IDS] == written["eagle_config"][IDS] == [3, 4, 7]
    assert check_checkpoint(folder, target) == []
    edit_config(folder, lambda c: c["eagle_config"].update({IDS: [2, 3, 6]}))
    (found,) = check_checkpoint(folder, target)
    assert found.engines == ("SGLang",) and "takes these as they are for this target's class" in found.fix
    assert "would capture [2, 3, 6]: write [3, 4, 7]" in found.fix
    assert check_checkpoint(folder, tiny_target) == []  # Llama's class adds 1


def test_ids_that_sglang_cannot_be_told_leave_it_out(tiny_target: TargetInfo, tmp_path: Path) -> None:
    target = replace(tiny_target, architecture=KIMI)
    config = draft_config(target, aux_layer_ids=(1, 4, 5))
    folder = write_checkpoint(tmp_path / "draft", config, random_tensors(config), None, target)
    assert check_checkpoint(folder, target) == []
    keys = json.loads((folder / "config.json").read_text())
    assert left_out(keys, {}, target).keys() == {"SGLang"} and left_out(keys, {}) == {}
    (asked,) = check_checkpoint(folder, target, engines=["SGLang"])
    assert asked.what == "SGLang" and asked.severity == "error"
