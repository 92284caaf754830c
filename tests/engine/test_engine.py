"""The vLLM engine against Hugging Face, plain vLLM and planted faults; each engine in its own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.packaged import packaged_target
from tests.engine.helpers import Scenarios
from tests.tiny import LAYERS

pytestmark = pytest.mark.engine

EXACT = 1e-4  # fp32 against fp32; two implementations differ by rounding alone

Run = Callable[[str], dict[str, Any]]
SCENARIOS = (
    "tiny", "preempt", "planted", "other_worker", "other_extract", "mla", "auxiliary", "extract", "plain", "smol_bf16",
)  # fmt: skip
SMOL = ("auxiliary", "extract", "plain", "smol_bf16")


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("scenarios")

    def scenario(name: str) -> tuple[str, Path]:
        if name == "mla":
            return name, folder / name
        return name, packaged_target("smollm2-135m") if name in SMOL else tiny

    scenarios = Scenarios(SCENARIOS, scenario, folder)
    yield scenarios
    scenarios.close()


def test_every_layer_of_prompt_and_answer_equals_hugging_face(run: Run) -> None:
    """Chunked prefill (32 tokens a step) and four requests of very different length at once."""
    got = run("tiny")
    for prompt, answer, shape in got["shapes"]:
        assert shape[:2] == (prompt + answer - 1, LAYERS)
    assert max(max(e) for e in got["embedding_errors"]) == 0.0
    assert max(max(e) for e in got["errors"]) < EXACT
    assert got["greedy"] == 1.0


def test_prefill_gives_the_same_states(run: Run) -> None:
    got = run("tiny")
    assert got["prefill_reasons"] == ["prefill"] * len(got["shapes"])
    assert max(max(e) for e in got["prefill_errors"]) < EXACT


def test_a_faulty_request_is_a_row_error_and_the_others_finish(run: Run) -> None:
    assert run("tiny")["row_faults"] == {
        "good 0": "Completion",
        "too long": "prompt_too_long",
        "answer too long": "answer_too_long",
        "temperature": "bad_sampling",
        "unknown name": "bad_sampling",
        "bad words": "bad_sampling",
        "negative id": "bad_token",
        "id beyond": "bad_token",
        "empty": "empty_prompt",
        "good 1": "Completion",
    }


def test_an_urgent_request_goes_before_those_that_wait_and_these_keep_their_order(run: Run) -> None:
    got = run("tiny")["order"]
    assert got[0] == "urgent"
    assert sorted(got[1:5]) == [f"row {i}" for i in range(4)]
    assert sorted(got[5:]) == [f"row {i}" for i in range(4, 8)]


def test_packed_states_are_the_same_states(run: Run) -> None:
    got = run("tiny")
    assert all(got["packed"])
    assert 0 < max(max(e) for e in got["packed_errors"]) < 0.02  # int8's own
    assert got["packed_checks"] == [None] * 4


def test_a_cancelled_request_is_aborted_and_its_states_freed(run: Run) -> None:
    got = run("tiny")
    assert got["cancelled"] == "cancelled, then length"
    assert got["held"] == 0


def test_a_dying_engine_fails_every_request_and_leaves_no_thread(run: Run) -> None:
    got = run("tiny")
    assert got["death"]["kinds"] == ["EngineError"] * 3
    assert "planted" in got["death"]["said"]
    assert "planted" in got["death"]["later"]
    assert got["threads"] == []


def test_preempted_requests_keep_the_right_states(run: Run) -> None:
    got = run("preempt")
    assert got["preempted"] > 0
    assert len(got["sizes"]) == 6
    assert max(max(e) for e in got["errors"]) < EXACT
    assert got["held"] == 0
    assert got["threads"] == []


def test_the_self_check_names_planted_faults(run: Run) -> None:
    said = run("planted")
    assert said["healthy"] == said["healthy again"] == "passed"
    for fault, words in {
        "shifted by one": "s_0 is not the token's embedding",
        "last layer is n-1": "s_n through the final norm",
        "final norm applied": "s_n through the final norm",
        "requests swapped": "s_0 is not the token's embedding",
        "layer 4 zero": "layer 4: all zero",
        "layer 6 not finite": "layer 6: not finite",
    }.items():
        assert words in said[fault], (fault, said[fault])
        assert "capture.mode=extract" in said[fault]


@pytest.mark.parametrize("form", ["other_worker", "other_extract"])
def test_an_engine_in_another_process_gives_the_same_states(form: str, run: Run) -> None:
    got = run(form)
    assert got["children"] > 0
    assert got["cancelled"] == "cancelled, then length"
    assert max(max(e) for e in got["errors"]) < EXACT
    assert 0 < max(max(e) for e in got["packed_errors"]) < 0.02  # int8's own
    assert got["files"] == []
    assert got["after"] == ["EngineError"]  # the process was killed
    assert not got["folder_left"]


def test_a_class_without_s_0_counts_its_layers_alike(run: Run) -> None:
    """DeepSeek-V3's shape: each state is nearest, and equal, to the s_k of its id."""
    for request in run("mla")["distances"]:
        for k, distances in zip((2, 3, 4, 6), request, strict=True):
            assert distances[k] < EXACT
            assert all(d > 0.1 for j, d in enumerate(distances) if j != k)


def test_smollm2_states_equal_hugging_face(run: Run) -> None:
    got = run("auxiliary")
    assert max(max(e) for e in got["errors"]) < EXACT
    assert got["held"] == 0
    assert got["threads"] == []


def test_auxiliary_extract_and_prefill_agree(run: Run) -> None:
    auxiliary, extract = run("auxiliary"), run("extract")
    assert auxiliary["answers"] == extract["answers"]
    for states in (auxiliary["prefill"], extract["states"], extract["prefill"]):
        for got, wanted in zip(states, auxiliary["states"], strict=True):
            assert got.shape == wanted.shape
            assert float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max()) < EXACT
    assert extract["held"] == 0
    assert extract["threads"] == []


def test_answers_are_those_of_plain_generation(run: Run) -> None:
    plain, auxiliary = run("plain"), run("auxiliary")
    assert auxiliary["answers"] == plain["answers"]
    assert auxiliary["reasons"] == plain["reasons"]
    assert {"stop", "length"} == set(plain["reasons"])
    for answer, reason in zip(auxiliary["answers"], auxiliary["reasons"], strict=True):
        assert (answer[-1] == 2) == (reason == "stop")


def test_bf16_states_are_as_near_as_hugging_faces_own_bf16(run: Run) -> None:
    got = run("smol_bf16")
    assert got["dtype"] == "torch.bfloat16"
    for ours, theirs in zip(got["ours"], got["hugging_face"], strict=True):
        assert ours < 0.02 or ours < 1.2 * theirs
    assert got["agreement"] >= 0.97
    assert got["row_checks"] == [None] * len(got["row_checks"])
