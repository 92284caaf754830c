"""`draftmill lint`: exit status, JSON, verdicts by engine, and folders in every form people publish."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.checkpoint import Verifier, write_checkpoint
from app.cli import run
from app.lint.command import lint
from app.target import TargetInfo
from tests.drafts import draft_config, edit_config, edit_tensors, random_tensors

pytestmark = pytest.mark.usefixtures("quiet_log")


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = run(["lint", *words, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, found


def test_a_right_draft_passes_with_its_commands(
    tiny_draft: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["lint", str(tiny_draft), "--target", str(tiny), "--draft-tokens", "5"]) == 0
    said = capsys.readouterr().out
    assert "no differences" in said and "vLLM: passes: 0 errors, 0 warnings" in said and "SGLang: passes" in said
    assert f"vllm serve {tiny} --speculative-config" in said and '"num_speculative_tokens": 5' in said
    assert "--speculative-algorithm EAGLE3 " in said and "--speculative-num-draft-tokens 6" in said


def test_an_error_of_one_engine_fails_and_leaves_the_other_its_command(
    tiny_draft: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_tensors(tiny_draft, lambda t: t.update({"layers.0.hidden_norm.weight": t.pop("midlayer.hidden_norm.weight")}))
    assert run(["lint", str(tiny_draft), "--target", str(tiny)]) == 1
    said = capsys.readouterr().out
    assert "SGLang: would not serve it as trained: 1 error, 0 warnings" in said and "vLLM: passes" in said
    assert "vllm serve" in said and "sglang.launch_server" not in said
    assert run(["lint", str(tiny_draft), "--target", str(tiny), "--engine", "vLLM"]) == 0
    assert run(["lint", str(tiny_draft), "--target", str(tiny), "--engine", "sglang"]) == 1


def test_warnings_alone_pass(tiny_draft: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_tensors(tiny_draft, lambda t: t.pop("t2d"))
    status, found = as_json(capsys, str(tiny_draft), "--target", str(tiny))
    assert status == 0 and found["passes"] and found["engines"] == {"vLLM": True, "SGLang": True}
    (difference,) = found["differences"]
    assert (difference["what"], difference["severity"], difference["engines"]) == (
        "tensor t2d",
        "warning",
        ["vLLM", "SGLang"],
    )
    assert found["num_draft_tokens"] == 3 and found["serve"].keys() == {"vLLM", "SGLang"}


def test_without_a_target_less_is_compared_and_said(tiny_draft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_config(tiny_draft, lambda c: c.update(max_position_embeddings=64))
    status, found = as_json(capsys, str(tiny_draft))
    assert status == 0 and found["differences"] == [] and "without --target" in found["notes"][0]
    assert "vllm serve TARGET" in found["serve"]["vLLM"]


def test_a_draft_that_sglang_cannot_serve(tiny: Path, tiny_target: TargetInfo, tmp_path: Path) -> None:
    config = draft_config(tiny_target, norm_before_residual=True)
    folder = write_checkpoint(tmp_path / "draft", config, random_tensors(config), None, tiny_target)
    report = lint(str(folder), str(tiny))
    assert report.passes and report.engines == ("vLLM",) and report.commands.keys() == {"vLLM"}
    assert "no switch for norm_before_residual" in "\n".join(report.lines(140))
    assert not lint(str(folder), str(tiny), engine="SGLang").passes


def test_the_speculators_layout_names_its_target_and_tokens(tiny_target: TargetInfo, tmp_path: Path) -> None:
    config = draft_config(tiny_target)
    verifier = Verifier("some/target", "LlamaForCausalLM", 4)
    folder = write_checkpoint(tmp_path / "draft", config, random_tensors(config), None, tiny_target, verifier)
    report = lint(str(folder))
    assert report.passes and report.num_draft_tokens == 4 and report.left_out.keys() == {"SGLang"}
    assert "vllm serve some/target" in report.commands["vLLM"]


def test_every_form_of_weights_is_read(tiny_draft: Path, tiny: Path) -> None:
    tensors = load_file(tiny_draft / "model.safetensors")
    (tiny_draft / "model.safetensors").unlink()
    torch.save(tensors, tiny_draft / "pytorch_model.bin")
    report = lint(str(tiny_draft), str(tiny))
    assert report.differences == [] and "pickled" in report.notes[0]

    (tiny_draft / "pytorch_model.bin").unlink()
    halves = sorted(tensors)[:7], sorted(tensors)[7:]
    for stem, save in (("pytorch_model.bin", torch.save), ("model.safetensors", save_file)):
        shards = [f"{i}-{stem}" for i in range(2)]
        for shard, names in zip(shards, halves, strict=True):
            save({name: tensors[name] for name in names}, tiny_draft / shard)
        index = {name: shard for shard, names in zip(shards, halves, strict=True) for name in names}
        (tiny_draft / f"{stem}.index.json").write_text(json.dumps({"weight_map": index}))
        assert lint(str(tiny_draft), str(tiny)).differences == []


class Opened:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("content", ["code", "a list", "cut"])
def test_pickled_files_hold_tensors_or_are_refused(
    content: str, tiny_draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of the file is executed."""
    (tiny_draft / "model.safetensors").unlink()
    path, trace = tiny_draft / "pytorch_model.bin", tiny_draft / "executed"
    torch.save({"code": {"x": Opened(trace)}, "a list": [torch.ones(2)], "cut": {}}[content], path)
    if content == "cut":
        path.write_bytes(path.read_bytes()[:20])
    assert run(["lint", str(tiny_draft)]) == 1
    said = capsys.readouterr().err
    assert "pytorch_model.bin" in said and "safetensors" in said and said.count("\n") == 1
    assert not trace.exists()


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda d: (d / "config.json").unlink(), "has no config.json"),
        (lambda d: (d / "model.safetensors").unlink(), "there are no weights"),
        (lambda d: (d / "model.safetensors.index.json").write_text("[]"), "weight_map"),
        (lambda d: (d / "config.json").write_text("[1]"), "JSON object"),
    ],
)
def test_what_is_no_checkpoint_is_one_sentence(
    break_it: Any, words: str, tiny_draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    break_it(tiny_draft)
    assert run(["lint", str(tiny_draft)]) == 1
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_a_target_without_its_weights_is_compared_by_its_config(tiny_draft: Path, tiny: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    report = lint(str(tiny_draft), str(bare))
    assert report.differences == [] and "the embedding is not compared" in report.notes[0]
    edit_config(tiny_draft, lambda c: c.update(max_position_embeddings=64))
    assert [d.what for d in lint(str(tiny_draft), str(bare)).differences] == ["config max_position_embeddings"]


def test_the_embedding_is_compared_with_the_targets(tiny_draft: Path, tiny: Path) -> None:
    edit_tensors(tiny_draft, lambda t: t["embed_tokens.weight"].normal_())
    report = lint(str(tiny_draft), str(tiny))
    assert [d.what for d in report.differences] == ["tensor embed_tokens.weight"] and not report.passes
    assert lint(str(tiny_draft)).passes  # nothing to compare it with


ODD: dict[str, Any] = {
    "numbers as text": {"hidden_size": "64", "num_attention_heads": "4"},
    "lists for objects": {"eagle_config": [1], "rope_parameters": [1], "rope_scaling": "yarn"},
    "nulls": dict.fromkeys(("architectures", "head_dim", "rope_theta", "hidden_size", "vocab_size")),
    "objects for numbers": {"vocab_size": {}, "draft_vocab_size": [], "max_position_embeddings": {}},
    "negative": {"draft_vocab_size": -1, "head_dim": 0},
    "odd speculators": {"transformer_layer_config": 7, "speculators_config": [], "speculators_model_type": 1},
}


@pytest.mark.parametrize("case", ODD)
def test_odd_values_are_rows_not_tracebacks(case: str, tiny_draft: Path, tiny: Path) -> None:
    edit_config(tiny_draft, lambda c: c.update(ODD[case]))
    report = lint(str(tiny_draft), str(tiny))
    assert not report.passes and report.lines(120)


def test_odd_tensors_are_rows_not_tracebacks(tiny_draft: Path, tiny: Path) -> None:
    odd: dict[str, Tensor] = {
        "fc.weight": torch.tensor(1.0),
        "d2t": torch.empty(0, dtype=torch.int64),
        "t2d": torch.ones(3, 4),
        "lm_head.weight": torch.ones(2, 2, 2),
        "norm.weight": torch.empty(0),
    }
    edit_tensors(tiny_draft, lambda t: t.update(odd))
    report = lint(str(tiny_draft), str(tiny))
    assert {f"tensor {name}" for name in odd} <= {d.what for d in report.differences}
