"""Tiny runs: configurations, prompt files, and the command line as a user calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.config import Config, parse_config
from app.pipeline import StageContext
from app.runfolder import RunFolder

ROOT = Path(__file__).resolve().parent.parent
Command = Callable[..., subprocess.CompletedProcess[str]]  # the command line; its words are the arguments


def write_rows(path: Path, rows: list[Any]) -> Path:
    """JSONL; a string is written as it is, to make broken lines."""
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r, ensure_ascii=False)) + "\n" for r in rows))
    return path


def prompts(count: int, prefix: str = "Please count the sacks of day") -> list[dict[str, Any]]:
    return [{"prompt": f"{prefix} {i}"} for i in range(count)]


def tiny_config(target: Path, run_dir: Path | str, source: Path, **changes: Any) -> Config:
    """A run on the tiny target with the stub engine; `changes` are dotted keys with `__` for the dot."""
    data: dict[str, Any] = {
        "run_dir": str(run_dir),
        "target": {"model": str(target)},
        "sources": [{"name": "rows", "path": str(source)}],
        "generate": {"engine": "tests.stubs:StubEngine", "max_length": 256, "max_new_tokens": 16},
        "vocab": {"size": 320},
        # A stub's states have nothing to do with its answers.
        "train": {
            "epochs": 1,
            "unroll_steps": 2,
            "tokens_per_step": 256,
            "learning_rate": 1e-3,
            "min_teacher_agreement": 0,
        },
        "evaluate": {"holdout": 2},
        "doctor": {"before": []},  # nor with those that the target would give
        "ray": {"num_cpus": 2, "dashboard": False, "object_store_gib": 0.1},
        "storage": {"rows_per_part": 10},
    }
    for key, value in changes.items():
        node = data
        *sections, last = key.split("__")
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return parse_config(data, "test")


def context(config: Config) -> StageContext:
    return StageContext(config, RunFolder(config.run_dir, config.storage.options))


def draftmill(*args: str, env: dict[str, str] | None = None, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "app", *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
    )


def save_config(config: Config, path: Path) -> Path:
    path.write_text(config.to_yaml())
    return path
