"""A published folder can be loaded and uploaded as it is, says where its numbers are from, and tells no secrets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from app import cli
from app.checkpoint import read_checkpoint
from app.errors import UserError
from app.report.publish import publish
from app.runfolder import RunFolder
from app.storage import Store
from tests.drafts import edit_tensors
from tests.report.made import EVALUATE, change, copy_of


def card_of(folder: Path) -> tuple[dict[str, Any], str]:
    """Front matter as the hub's own reader has it, and the text."""
    card = ModelCard((folder / "README.md").read_text(encoding="utf-8"))
    return card.data.to_dict(), card.text


def test_the_folder_holds_what_is_uploaded(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "my-draft"
    lines = publish(str(finished), str(out), "Apache-2.0", "org/Target-1B")
    assert sorted(p.name for p in out.iterdir()) == [
        "README.md", "config.json", "model.safetensors", "provenance.json", "serve.json",
    ]  # fmt: skip
    config, tensors = read_checkpoint(out)
    theirs = read_checkpoint(finished / "export/draft")
    assert config == theirs[0] and all(torch.equal(t, theirs[1][n]) for n, t in tensors.items())
    front, text = card_of(out)
    assert front["license"] == "apache-2.0" and front["base_model"] == "org/Target-1B"
    assert front["library_name"] == "vllm" and "eagle3" in front["tags"]
    assert "vllm serve org/Target-1B --speculative-config" in text and '"model": "my-draft"' in text
    assert "--speculative-algorithm EAGLE3" in text
    for words in ("| acceptance length | 2.190 (1.990 to 2.390) | 2.200 (2.000 to 2.400) |", "| 3 | 8 | 1.55 |",
                  "| accepted at position 1 | 69.0 % (59.0 to 79.0) | 70.0 % (60.0 to 80.0) |", "&lt;b>code",
                  "1 of 9 outputs differ", "400 tokens/s without the draft, 620 with it", "revision abc",
                  "train.seed 5"):  # fmt: skip
        assert words in text, words
    serve = json.loads((out / "serve.json").read_text())
    assert serve["vLLM"]["speculative_config"]["model"] == "my-draft" and serve["target"] == "org/Target-1B"
    told = json.loads((out / "provenance.json").read_text())
    assert told["results"]["bench"]["acceptance_length"] == 2.19 and told["stages"]["bench"]["digest"]
    assert len(lines) == 2 and "hf upload" in lines[-1]
    assert publish(str(finished), str(out), "mit", "org/x")  # again, over its own


def test_a_run_on_s3_is_published_alike_and_leaves_no_copy(
    finished: Path, tmp_path: Path, s3: str, temporary: Path
) -> None:
    far = Store(f"{s3}/demo")
    far.fs.put(str(finished), far.root, recursive=True)
    for run, name in ((str(finished), "here"), (far.url, "there")):
        publish(run, str(tmp_path / name / "my-draft"), "mit", "org/Target-1B")
    files = [{p.name: p.read_bytes() for p in (tmp_path / name / "my-draft").iterdir()} for name in ("here", "there")]
    assert files[0].keys() == files[1].keys() and len(files[0]) == 5
    assert [name for name in files[0] if files[0][name] != files[1][name]] == []
    assert not any(b"s3://" in text for text in files[1].values())
    assert [p.name for p in temporary.iterdir() if p.name != "draftmill-cache"] == []

    RunFolder(far.url).store.delete("export/draft/model.safetensors")
    with pytest.raises(UserError, match=r"^s3://runs/demo/export/draft holds no"):
        publish(far.url, str(tmp_path / "broken"))
    assert [p.name for p in temporary.iterdir() if p.name != "draftmill-cache"] == []
    assert not (tmp_path / "broken").exists()


def test_nothing_private_and_no_place_of_this_machine_is_told(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "d"
    publish(str(finished), str(out))
    for name in ("README.md", "provenance.json", "serve.json"):
        text = (out / name).read_text()
        assert str(tmp_path.parent.parent) not in text and str(finished.parent) not in text, name
        assert "/home/me" not in text, name
        assert "secret" not in text and "hospital" not in text and "sacks" not in text and "<script>" not in text, name
    _, text = card_of(out)
    assert "| private | private | 3 | 3 |" in text and "| &lt;i>rows | chat | 3 | 3 |" in text


def test_what_is_not_known_is_left_out_and_said(finished: Path, tmp_path: Path) -> None:
    lines = publish(str(finished), str(tmp_path / "d"))
    front, _ = card_of(tmp_path / "d")
    assert "license" not in front and "base_model" not in front
    assert any("--base-model" in line for line in lines) and any("--license" in line for line in lines)
    publish(str(finished), str(tmp_path / "e"), "My-Own-1.0")
    front, _ = card_of(tmp_path / "e")
    assert (front["license"], front["license_name"]) == ("other", "My-Own-1.0")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("weights", "lint: "),
        ("deaf", "vLLM accepts 1.0 % of the first draft tokens"),
        ("short", "far below the 2.20 that walking the same answers predicts"),
        ("no bench", "bench: not run"),
        ("doctor", "doctor: A1, layers off by one"),
    ],
)
def test_a_broken_draft_is_published_only_by_force(finished: Path, tmp_path: Path, fault: str, words: str) -> None:
    _, run = copy_of(finished, tmp_path / "run")
    if fault == "weights":
        edit_tensors(tmp_path / "run/export/draft", lambda t: t.pop("fc.weight"))
    elif fault == "deaf":
        change(run, "bench", acceptance_length=1.01, acceptance_per_position=[0.01, 0.0, 0.0])
    elif fault == "short":
        change(run, "bench", acceptance_length=1.4, acceptance_per_position=[0.3, 0.1, 0.0])
    elif fault == "no bench":
        run.store.delete("bench")
    else:
        line = {"id": "A1", "title": "layers", "state": "failed", "cause": "layers off by one",
                "evidence": f"{run.url}/generate says so", "next_step": "x"}  # fmt: skip
        run.store.write_json("doctor.json", {"lines": [line]})
    out = tmp_path / "out"
    with pytest.raises(UserError, match="not published") as refused:
        publish(run.url, str(out))
    assert words in str(refused.value) and "--force" in str(refused.value) and not out.exists()
    lines = publish(run.url, str(out), force=True)
    assert any(line.startswith("WARNING: ") and words in line for line in lines)
    card = (out / "README.md").read_text()
    assert "**Known faults.**" in card and str(tmp_path) not in card


def test_other_peoples_files_are_left_alone(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        publish(str(finished), str(tmp_path), force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["README.md"] and (tmp_path / "README.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["RUN", "s3://b/x"], "is not on this machine"),
        (["RUN", "OUT", "--base-model", "no id"], "no id is no id of the hub"),
        (["/nowhere", "OUT"], "/nowhere is no run folder"),
        (["HALF", "OUT"], "no exported draft"),
    ],
)
def test_a_fault_is_one_sentence(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet_log: None, words: list[str], said: str
) -> None:
    _, run = copy_of(finished, tmp_path / "half")
    run.store.delete("export")
    places = {"RUN": str(finished), "OUT": str(tmp_path / "out"), "HALF": run.url}
    assert cli.run(["publish", *(places.get(w, w) for w in words)]) == 1
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_the_command_line(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet_log: None) -> None:
    words = ["publish", str(finished), str(tmp_path / "out"), "--license", "mit", "--base-model", "o/t"]
    assert cli.run(words) == 0
    assert capsys.readouterr().out.startswith(f"published {tmp_path / 'out'}: README.md, config.json")


def test_domains_of_private_data_alone_are_told_at_no_depth(finished: Path, tmp_path: Path) -> None:
    _, run = copy_of(finished, tmp_path / "run")
    change(run, "evaluate", sampled=[{"temperature": 0.8, "greedy": EVALUATE, "probabilistic": EVALUATE}])
    publish(run.url, str(tmp_path / "out"))
    text = (tmp_path / "out/provenance.json").read_text()
    (sampled,) = json.loads(text)["results"]["evaluate"]["sampled"]
    assert "chat" in sampled["probabilistic"]["domains"] and "hospital" not in text


def test_servers_and_sets_of_the_bench_are_not_told(finished: Path, tmp_path: Path) -> None:
    _, run = copy_of(finished, tmp_path / "run")
    manifest = run.manifest("bench")
    assert manifest is not None
    places = {"server": "http://gpu-1.inside:8000/v1", "baseline_server": "http://gpu-2.inside:8000/v1",
              "sets": ["patients/questions.jsonl"], "repeats": 2}  # fmt: skip
    run.write_manifest(replace(manifest, config={**manifest.config, **{f"bench.{k}": v for k, v in places.items()}}))
    publish(run.url, str(tmp_path / "out"))
    text = (tmp_path / "out/provenance.json").read_text()
    assert json.loads(text)["settings"]["bench.repeats"] == 2
    assert "inside" not in text and "patients" not in text


def test_sampled_acceptance_is_not_held_against_the_greedy_walk(finished: Path, tmp_path: Path) -> None:
    _, run = copy_of(finished, tmp_path / "run")
    change(run, "bench", acceptance_length=1.4, acceptance_per_position=[0.3, 0.1, 0.0], temperature=0.8)
    publish(run.url, str(tmp_path / "out"))
    assert "served at temperature 0.8, predicted for temperature 0," in (tmp_path / "out/README.md").read_text()


def test_weights_of_an_earlier_publishing_go(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    publish(str(finished), str(out))
    names = {p.name for p in out.iterdir()}
    for name in ("model.safetensors.index.json", "model-00001-of-00002.safetensors", "pytorch_model.bin",
                 "pytorch_model.bin.index.json", "notes.txt"):  # fmt: skip
        (out / name).write_text("{}")
    publish(str(finished), str(out))
    assert {p.name for p in out.iterdir()} == names | {"notes.txt"}


def test_the_card_names_the_engine_that_served(finished: Path, tmp_path: Path) -> None:
    _, run = copy_of(finished, tmp_path / "run")
    change(run, "bench", gauges={"readings": 3}, drafts=0, acceptance_per_position=[])
    publish(run.url, str(tmp_path / "out"))
    _, text = card_of(tmp_path / "out")
    assert "| | SGLang | predicted offline |" in text
