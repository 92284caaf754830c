"""Every family of targets in the real engine: its captured states are Hugging Face's, prompt and answer."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.helpers import Scenarios
from tests.families import LAYERS, make_family

pytestmark = pytest.mark.engine

EXACT = 2e-4  # fp32 against fp32; two implementations differ by rounding alone
FAMILIES = ["qwen2", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3", "granite", "gemma4"]
HYBRID = ["qwen3_next", "qwen3_5_moe"]
MISSING = [f for f in HYBRID if f == "qwen3_5_moe" and importlib.util.find_spec("torchvision") is None]


@pytest.fixture(scope="module")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], dict[str, Any]]]:
    """What scenarios.py measures on a target of a family."""
    folder = tmp_path_factory.mktemp("families")

    def scenario(family: str) -> tuple[str, Path]:
        return f"family_{'bfloat16' if family in HYBRID else 'float32'}", make_family(folder / family, family)

    scenarios = Scenarios([f for f in FAMILIES + HYBRID if f not in MISSING], scenario, folder)
    yield scenarios
    scenarios.close()


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


@pytest.mark.parametrize("family", FAMILIES)
def test_the_states_are_hugging_faces(family: str, measure: Callable[[str], dict[str, Any]]) -> None:
    got = measure(family)
    judge(got)
    assert max(got["errors"]) < EXACT
    assert got["greedy"] == 1.0
    # vLLM's DeepSeek class adds the residual before the first layer has made one.
    assert (got["embedding_errors"] is None) == (family == "deepseek_v3")


@pytest.mark.parametrize("family", HYBRID)
def test_the_states_of_hybrid_layers_are_as_near_as_hugging_faces_own_bf16(
    family: str, measure: Callable[[str], dict[str, Any]]
) -> None:
    """vLLM's CPU kernels of linear attention take bf16 alone."""
    if family in MISSING:
        pytest.skip("vLLM's Qwen3.5 module imports torchvision, which the CPU lock file does not hold")
    got = measure(family)
    judge(got)
    for k, noise in enumerate(got["noise"], 1):
        assert got["medians"][k - 1][k] < max(0.02, 1.5 * noise)
    assert got["greedy"] >= 0.9
    assert got["embedding_errors"] is not None
