"""The whole product on a few rows: real vLLM, real Ray Data and Ray Train, real S3 protocol, a real submitted job."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.runfolder import RunFolder
from app.stages import STAGES
from tests.ray_head import RAY, running_head
from tests.runs import ROOT, Command, draftmill, prompts, save_config, tiny_config, write_rows

pytestmark = [pytest.mark.cluster, pytest.mark.engine, pytest.mark.timeout(1500)]
NAMES = [s.name for s in STAGES]


def real_config(tiny: Path, tmp_path: Path, run_dir: str | Path, **changes: Any) -> Path:
    """A run on the tiny target with real vLLM, saved as YAML."""
    source = write_rows(tmp_path / "rows.jsonl", prompts(16))
    config = tiny_config(
        tiny, run_dir, source, generate__engine="vllm", generate__max_new_tokens=24, generate__kv_cache_gib=0.25,
        train__epochs=4, train__validation_share=0.1, train__min_teacher_agreement=0.8, evaluate__holdout=6, **changes,
    )  # fmt: skip
    return save_config(config, tmp_path / "run.yaml")


def check_results(results: dict[str, Any]) -> None:
    """results.json has every figure the README promises."""
    assert results["rows"] == {"in": 16, "kept": 16, "rejected": 0, "not_drawn": 0}
    assert results["tokens"] > 0 and results["bytes"] > 0
    assert 1 <= results["evaluate"]["acceptance_length"] <= 4
    bench = results["bench"]
    assert 1 <= bench["acceptance_length"] <= 4
    assert len(bench["acceptance_per_position"]) == bench["num_draft_tokens"] == 3
    assert bench["acceptance_length"] == pytest.approx(1 + sum(bench["acceptance_per_position"]))
    assert bench["tokens_per_second"]["baseline"] > 0 and bench["tokens_per_second"]["draft"] > 0
    assert 0 <= bench["output_mismatches"] <= bench["prompts"]
    assert set(results["stages"]) == set(NAMES)


def test_one_command_then_reuse_then_what_depends_on_a_change(
    tiny: Path, tmp_path: Path, draftmill_here: Command
) -> None:
    path, run = real_config(tiny, tmp_path, tmp_path / "run"), tmp_path / "run"
    result = draftmill("run", str(path), timeout=900)
    assert result.returncode == 0, result.stderr[-3000:]
    check_results(json.loads((run / "results.json").read_text()))
    for words in ("rows", "tokens", "acceptance length", "tokens/s", "by position", "report.html"):
        assert words in result.stdout
    manifest = RunFolder(str(run)).manifest("generate")
    assert manifest is not None
    assert manifest.inputs.keys() >= {"ingest", "target weights"} and manifest.versions["ray"]
    assert manifest.seeds and manifest.git_revision is not None and manifest.counts["samples"] == 16
    assert "<svg" in (run / "report" / "report.html").read_text()
    serve = json.loads((run / "export" / "serve.json").read_text())
    assert "--speculative-config" in serve["vLLM"] and "--speculative-algorithm EAGLE3" in serve["SGLang"]

    again = draftmill_here("run", str(path))
    assert again.returncode == 0, again.stderr[-3000:]
    stages = json.loads((run / "results.json").read_text())["stages"]
    assert all(s["reused"] for s in stages.values())
    assert "started a local Ray cluster" not in again.stderr

    status = draftmill_here("status", str(path), "export.embed_tokens=false")
    assert status.returncode == 0, status.stderr
    lines = {line.split()[0]: line for line in status.stdout.splitlines()[1:]}
    assert "done" in lines["train"]
    assert "stale" in lines["export"] and "export.embed_tokens changed: True -> False" in lines["export"]
    assert "stale" in lines["bench"] and "export is to be redone" in lines["bench"]

    changed = draftmill("evaluate", str(path), "export.embed_tokens=false", timeout=300)
    assert changed.returncode == 0, changed.stderr[-3000:]
    stages = json.loads((run / "results.json").read_text())["stages"]
    assert [n for n, s in stages.items() if not s["reused"]] == ["export", "evaluate"]


def test_a_run_folder_on_s3(tiny: Path, tmp_path: Path, s3: str, draftmill_here: Command) -> None:
    path = real_config(tiny, tmp_path, f"{s3}/demo")
    result = draftmill("run", str(path), timeout=900)
    assert result.returncode == 0, result.stderr[-3000:]
    run = RunFolder(f"{s3}/demo")
    check_results(run.store.read_json("results.json"))
    everything = run.store.fs.find(run.store.root)
    assert any(name.endswith("report.html") for name in everything)
    assert any("/logs/driver-" in name for name in everything)
    for name in everything:
        if name.endswith((".json", ".yaml", ".log", ".html")):
            assert b"a-secret-of-this-test" not in run.store.fs.cat_file(name), name
    again = draftmill_here("run", str(path))
    assert again.returncode == 0, again.stderr[-3000:]
    assert all(s["reused"] for s in run.store.read_json("results.json")["stages"].values())

    missing = draftmill_here("run", str(path), "run_dir=s3://no-such-bucket/demo")
    assert missing.returncode == 1
    assert "Traceback" not in missing.stderr and "bucket" in missing.stderr


@pytest.fixture
def ray_head() -> Iterator[dict[str, str]]:
    with running_head() as env:
        yield env


def test_a_submitted_job(tiny: Path, tmp_path: Path, ray_head: dict[str, str]) -> None:
    """The README's line, and `draftmill submit`: the same run folder, reused the second time."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "app", folder / "app", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "configs").mkdir()
    shutil.copy(real_config(tiny, tmp_path, "runs/job"), folder / "configs" / "demo.yaml")
    line = [RAY, "job", "submit", "--working-dir", ".", "--", "python", "-m", "app", "run", "configs/demo.yaml"]
    submitted = subprocess.run(line, cwd=folder, env=ray_head, capture_output=True, text=True, timeout=900)
    assert submitted.returncode == 0, submitted.stdout[-3000:] + submitted.stderr[-2000:]
    run = Path(ray_head["HOME"]) / "draftmill" / "runs" / "job"  # Ray throws the job's own folder away
    check_results(json.loads((run / "results.json").read_text()))

    command = [sys.executable, "-m", "app", "submit", "configs/demo.yaml", f"run_dir={run}", "--follow"]
    again = subprocess.run(command, cwd=folder, env=ray_head, capture_output=True, text=True, timeout=600)
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-2000:]
    assert "SUCCEEDED" in again.stdout
    assert all(s["reused"] for s in json.loads((run / "results.json").read_text())["stages"].values())
