"""Datasets through the real huggingface_hub: a hub served here, read by a process that is told its address."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs import ROOT, draftmill, save_config, tiny_config
from tests.sources.hub_server import CONVERTED, Hub, Repo, commit, jsonl, parquet, serving

ROWS = [{"prompt": f"Please count the sacks of day {i}"} for i in range(600)]


def repo(own: dict[str, bytes], converted: dict[str, bytes] | None = None, **more: Any) -> Repo:
    refs, files = {"main": commit("own"), "v1": commit("first")}, {commit("own"): own, commit("first"): {}}
    files[commit("first")] = {"data.jsonl": jsonl(ROWS[:2])}
    if converted is not None:
        refs[CONVERTED], files[commit("converted")] = commit("converted"), converted
    return Repo(refs, files, **more)


def hub_of_all() -> dict[str, Repo]:
    conversion = {
        "default/train/0000.parquet": parquet(ROWS[:400]),
        "default/train/0001.parquet": parquet(ROWS[400:]),
        "default/test/0000.parquet": parquet(ROWS[:3]),
        "README.md": b"x",
    }
    own = {"README.md": b"x", "data/train.jsonl": jsonl(ROWS[:5]), "data/test.jsonl": jsonl(ROWS[:1])}
    return {
        "o/converted": repo(own, conversion),
        "o/own": repo(own),
        "o/parts": repo({f"data/{s}-00000.jsonl": jsonl(ROWS[:n]) for s, n in (("train_sft", 4), ("train_gen", 6))}),
        "o/old": repo({}, moved_to="new/name"),
        "new/name": repo(own),
        "o/gated-page": repo(own, status=401, code="GatedRepo"),
        "o/gated-files": repo(own, conversion, files_status=403, code="GatedRepo"),
        "o/private-files": repo(own, files_status=401, code="RepoNotFound"),
        "o/broken": repo({"train.parquet": conversion["default/train/0000.parquet"][:-20]}),
        "o/refusing": repo(own, files_status=403),
    }


def environment(hub: Hub, folder: Path) -> dict[str, str]:
    """Of a process that knows this hub alone and no token."""
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))},
        "HF_ENDPOINT": hub.url, "HF_HOME": str(folder), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0",
        "no_proxy": "127.0.0.1",
    }  # fmt: skip


CASES: dict[str, dict[str, Any]] = {
    "conversion": {"dataset": "o/converted"},
    "split of the conversion": {"dataset": "o/converted", "split": "test"},
    "own": {"dataset": "o/own"},
    "split of two words": {"dataset": "o/parts", "split": "train_sft"},
    "tag": {"dataset": "o/converted", "revision": "v1"},
    "commit": {"dataset": "o/own", "revision": commit("own")},
    "renamed": {"dataset": "o/old"},
    "limit": {"dataset": "o/converted", "limit": 7},
    "missing": {"dataset": "o/nothing"},
    "gated page": {"dataset": "o/gated-page"},
    "gated files": {"dataset": "o/gated-files"},
    "private files": {"dataset": "o/private-files"},
    "refusing": {"dataset": "o/refusing"},
    "broken": {"dataset": "o/broken"},
    "missing split": {"dataset": "o/converted", "split": "validation"},
    "missing split of files": {"dataset": "o/own", "split": "dev"},
    "missing subset": {"dataset": "o/converted", "subset": "fr"},
    "unknown revision": {"dataset": "o/own", "revision": "v9"},
    "no such id": {"dataset": "a/b/c"},
}


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """What each case gave, all read by one process."""
    with serving(hub_of_all()) as hub:
        done = subprocess.run(
            [sys.executable, "-m", "tests.sources.read_hub"],
            input=json.dumps([{"name": "s", **case} for case in CASES.values()]),
            capture_output=True, text=True, timeout=120, cwd=ROOT,
            env=environment(hub, tmp_path_factory.mktemp("hf")),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        yield dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize(
    ("case", "rows", "first"),
    [
        ("conversion", ROWS, "0000.parquet#1"),
        ("split of the conversion", ROWS[:3], "0000.parquet#1"),
        ("own", ROWS[:5], "train.jsonl:1"),
        ("split of two words", ROWS[:4], "train_sft-00000.jsonl:1"),
        ("tag", ROWS[:2], "data.jsonl:1"),
        ("commit", ROWS[:5], "train.jsonl:1"),
        ("renamed", ROWS[:5], "train.jsonl:1"),
        ("limit", ROWS[:7], "0000.parquet#1"),
    ],
)
def test_rows_come_as_they_are_on_the_hub(read: Any, case: str, rows: list[Any], first: str) -> None:
    found = read[case]
    assert "error" not in found, found["error"]
    assert [row for _, row in found["rows"]] == rows
    assert found["rows"][0][0] == first


def test_the_digest_names_the_commit_and_a_new_name_is_told(read: Any) -> None:
    assert read["own"]["digest"] == read["commit"]["digest"] != read["conversion"]["digest"]
    assert read["renamed"]["said"] == ["source s: the dataset o/old is now called new/name"]


GATED = "the dataset {} is gated: accept its terms on its page, then set HF_TOKEN"
PRIVATE = "there is no dataset {} on the hub, or it is private; check the id, or set HF_TOKEN"


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("missing", PRIVATE.format("o/nothing")),
        ("gated page", GATED.format("o/gated-page")),
        ("gated files", GATED.format("o/gated-files")),
        ("private files", PRIVATE.format("o/private-files")),
        ("missing split", "the subset default of o/converted has no split 'validation'; it has test, train"),
        ("missing split of files", "the dataset o/own has no split 'dev'; its files name test, train"),
        ("missing subset", "the dataset o/converted has the subsets default; name one in `subset`"),
        ("unknown revision", "the dataset o/own has no revision 'v9'"),
    ],
)
def test_a_fault_is_the_sentence_users_get(read: Any, case: str, sentence: str) -> None:
    assert read[case]["error"] == f"source s: {sentence}"
    assert not read[case]["rows"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("refusing", "source s: the dataset o/refusing cannot be reached (403 Forbidden"),
        ("broken", "source s: train.parquet is no Parquet file or is cut"),
        ("no such id", "source s: the dataset a/b/c cannot be reached (Repo id must be"),
    ],
)
def test_other_faults_are_one_line_too(read: Any, case: str, words: str) -> None:
    assert read[case]["error"].startswith(words)
    assert "\n" not in read[case]["error"]


def test_an_ingest_asks_for_the_files_of_a_source_once(tiny: Path, tmp_path: Path) -> None:
    """For its digest, the draw and the rows."""
    with serving(hub_of_all()) as hub:
        env = environment(hub, tmp_path / "hf")
        config = tiny_config(
            tiny, tmp_path / "run", tmp_path, sources=[{"name": "s", "dataset": "o/converted", "count": 30}]
        )
        done = draftmill("ingest", str(save_config(config, tmp_path / "c.yaml")), env=env)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "600 rows, 30 asked, 30 kept" in done.stderr
        assert hub.count(f"/revision/{CONVERTED}") == 1, hub.asked
        before = len(hub.asked)
        again = draftmill("ingest", str(save_config(config, tmp_path / "c.yaml")), env=env)
        assert again.returncode == 0 and "ingest: unchanged, reused" in again.stderr
        assert hub.count("resolve") and not any("resolve" in line for line in hub.asked[before:])


def test_a_plan_leaves_the_targets_weights_at_the_hub_and_counts_them(tiny: Path, tmp_path: Path) -> None:
    files = {p.name: p.read_bytes() for p in tiny.iterdir() if p.is_file()}
    weights = sum(len(data) for name, data in files.items() if name.endswith(".safetensors"))
    model = Repo({"main": commit("m")}, {commit("m"): files})
    source = tmp_path / "rows.jsonl"
    source.write_bytes(jsonl(ROWS[:80]))
    config = tiny_config(tiny, tmp_path / "run", source).model_dump(mode="json")
    config["target"]["model"] = "acme/tiny"
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))
    with serving({"models/acme/tiny": model}) as hub:
        env = environment(hub, tmp_path / "hf")
        done = draftmill("plan", str(path), env=env)
        assert done.returncode == 0, done.stderr[-2000:]
        assert hub.count("config.json") and not hub.count("safetensors")
        code = (
            "from app.target import inspect_target, weight_bytes\n"
            "from pathlib import Path\n"
            "print(inspect_target('acme/tiny', weights=False).extra['weight_bytes'])\n"
            "print(weight_bytes(Path(inspect_target('acme/tiny').model), 'acme/tiny'))"
        )
        told = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True)
        assert told.stdout.split() == [str(weights)] * 2, told.stderr[-2000:]
        assert hub.count("GET /acme/tiny/resolve") and hub.count("safetensors")
