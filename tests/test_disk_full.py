"""A disk that is really full: a run folder on a small file system, in a mount namespace of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runs import ROOT, prompts, save_config, tiny_config, write_rows

pytestmark = pytest.mark.cluster
FULL = "no space left on the device; free some or move run_dir, then run the same command again"

# Runs generate on a file system of its own that is too small, then makes it larger.
SCRIPT = """
import json, subprocess, sys
from pathlib import Path
from app.parts import committed_parts, read_entry
from app.storage import Store

config, folder = sys.argv[1], Path(sys.argv[2])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=True)
run = folder / "run"
parts = run / "generate/parts"

def generate():
    done = subprocess.run([sys.executable, "-m", "app", "generate", config], capture_output=True, text=True)
    return {"status": done.returncode, "said": done.stderr}

def committed():
    store = Store(str(run))
    entries = {int(p.stem.split("-")[1]): read_entry(store, int(p.stem.split("-")[1])) for p in parts.glob("*.json")}
    valid, bad = committed_parts(store, {n: e.key for n, e in entries.items() if e is not None}, "checksum")
    assert not bad and valid.keys() == entries.keys(), (bad, entries)
    return {n: (parts / f"part-{n:05d}.json").stat().st_mtime_ns for n in valid}

first = generate()
left = committed() if parts.is_dir() else {}
temporary = [str(p) for p in run.rglob("*.tmp-*")]
subprocess.run(["mount", "-o", "remount,size=256m", str(folder)], check=True)
second = generate()
print(json.dumps({"first": first, "left": left, "temporary": temporary, "second": second,
                  "whole": committed(), "names": sorted(p.name for p in parts.iterdir()),
                  "counts": json.loads((run / "generate/manifest.json").read_text())["counts"]}))
"""


def on_own_disk(config: Path, disk: Path) -> dict[str, Any]:
    """What the script above says."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this host does not let users mount in a namespace of their own")
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", SCRIPT, str(config), str(disk)],
        cwd=ROOT, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_a_disk_that_fills_is_one_sentence_and_the_run_goes_on_when_there_is_room(tiny: Path, tmp_path: Path) -> None:
    """Filled by answers longer than the estimate took them to be."""
    disk = tmp_path / "disk"
    disk.mkdir()
    config = tiny_config(
        tiny, disk / "run", write_rows(tmp_path / "r.jsonl", prompts(80)), generate__parts_in_flight=1,
        generate__engine_args={"STUB_LENGTH": 400, "STUB_DELAY": 0.1}, generate__max_length=512,
        generate__max_new_tokens=8,
    )  # fmt: skip
    result = on_own_disk(save_config(config, tmp_path / "c.yaml"), disk)
    first, second = result["first"], result["second"]
    assert first["status"] == 1 and "Traceback" not in first["said"]
    told = [line for line in first["said"].splitlines() if line.startswith("draftmill: error: ")]
    assert told == [f"draftmill: error: {disk}/run: {FULL}"] and first["said"].splitlines()[-1] == told[0]
    assert 1 <= len(result["left"]) < 8
    assert result["temporary"] == []
    assert second["status"] == 0, second["said"]
    assert f"generate: resumed, {len(result['left'])} of 8 parts are committed" in second["said"]
    assert result["left"].items() <= result["whole"].items()  # not written again
    assert len(result["whole"]) == 8 and len(result["names"]) == 24  # an entry, rows and states for each
    assert (result["counts"]["kept"], result["counts"]["rejected"]) == (80, {})
