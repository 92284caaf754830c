"""Every family of targets in the real engine: its captured states are Hugging Face's, prompt and answer."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import LAYERS, make_family

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
EXACT = 2e-4  # fp32 against fp32; two implementations differ by rounding alone


def measure(scenario: str, family: str, folder: Path) -> dict[str, Any]:
    """What scenarios.py measures on a target of `family`, in a process of its own."""
    model, out = make_family(folder / family, family), folder / "out.pt"
    command = [sys.executable, "-m", "tests.engine.scenarios", scenario, str(model), str(out)]
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}  # spinning threads starve on a busy machine
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{family}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    measured: dict[str, Any] = torch.load(out, weights_only=False)
    return measured


def judge(got: dict[str, Any]) -> None:
    """What holds for every family and dtype."""
    for tokens, shape in got["shapes"]:
        assert shape[:2] == (tokens - 1, LAYERS)
    assert got["self_check"] == "passed"
    if got["embedding_errors"] is not None:
        assert max(got["embedding_errors"]) == 0.0
    for k, distances in enumerate(got["medians"], 1):
        assert min(range(LAYERS + 1), key=distances.__getitem__) == k
        others = [d for j, d in enumerate(distances) if j != k]
        assert min(others) > 2 * distances[k], (k, distances)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3", "granite", "gemma4"])
def test_the_states_are_hugging_faces(family: str, tmp_path: Path) -> None:
    got = measure("family_float32", family, tmp_path)
    judge(got)
    assert max(got["errors"]) < EXACT
    assert got["greedy"] == 1.0
    # vLLM's DeepSeek class adds the residual before the first layer has made one.
    assert (got["embedding_errors"] is None) == (family == "deepseek_v3")


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_the_states_of_hybrid_layers_are_as_near_as_hugging_faces_own_bf16(family: str, tmp_path: Path) -> None:
    """vLLM's CPU kernels of linear attention take bf16 alone."""
    if family == "qwen3_5_moe" and importlib.util.find_spec("torchvision") is None:
        pytest.skip("vLLM's Qwen3.5 module imports torchvision, which the CPU lock file does not hold")
    got = measure("family_bfloat16", family, tmp_path)
    judge(got)
    for k, noise in enumerate(got["noise"], 1):
        assert got["medians"][k - 1][k] < max(0.02, 1.5 * noise)
    assert got["greedy"] >= 0.9
    assert got["embedding_errors"] is not None
