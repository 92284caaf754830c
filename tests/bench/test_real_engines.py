"""Our own vLLM and a real vLLM server, with a random target and a random draft: outputs, counters, distributions."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.bench.measure import Ask, Done, Job, Templates, do
from app.bench.outputs import differences, same_distribution
from app.bench.server import RunningServer
from app.bench.settings import compare, cost, intervals
from app.checkpoint import write_checkpoint
from app.serving import speculative_config
from app.target import inspect_target, load_target_head
from tests.bench.engine_scenario import ASKS, TOKENS
from tests.drafts import draft_config, random_tensors
from tests.engine.vllm_server import vllm_server
from tests.runs import ROOT

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine
K = 3


@pytest.fixture(scope="module")
def draft(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    info = inspect_target(str(tiny))
    config = draft_config(info)
    embed = load_target_head(info).embed_tokens
    return write_checkpoint(tmp_path_factory.mktemp("draft"), config, random_tensors(config), embed, info)


@pytest.fixture(scope="module")
def own(tiny: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Done]:
    """What our engines did, by draft tokens."""
    out = tmp_path_factory.mktemp("own") / "done"
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.engine_scenario", str(tiny), str(draft), str(out)],
        cwd=ROOT, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    results: dict[int, Done] = pickle.loads(out.read_bytes())
    return results


@pytest.fixture(scope="module")
def server(tiny: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a vLLM that serves TINY with the draft."""
    options = ["--max-model-len", "256", "--max-num-seqs", "4", "--no-enable-prefix-caching"]
    options += ["--speculative-config", json.dumps(speculative_config(draft, K))]
    with vllm_server(tiny, tmp_path_factory.mktemp("vllm") / "log", *options) as url:
        yield url


def test_our_engine_counts_and_times_every_request(own: dict[int, Done]) -> None:
    for k, done in own.items():
        for served in done.cells:
            passes = len(served.seconds)
            assert len(served.outputs) == len(ASKS) and all(1 <= len(o) <= TOKENS for o in served.outputs)
            assert served.pass_tokens == [sum(map(len, served.outputs))] * passes
            assert len(served.ttft) == passes * len(ASKS) and min(served.ttft) > 0
            outputs = sum(counts[0] for counts in served.streamed)
            assert outputs == len(served.gaps) > 0
            if not k:
                assert served.drafts == 0 and outputs == sum(served.pass_tokens) - len(served.ttft)
                continue
            assert served.draft_tokens == k * served.drafts > 0 and len(served.accepted_per_position) == k
            assert served.accepted == sum(served.accepted_per_position)
            assert abs(outputs / served.drafts - 1) < 0.05
            assert intervals(served, [str(i) for i in range(len(ASKS))], 100, 0)["interval"] is not None
    assert [c.concurrency for c in own[0].cells] == [3, 1]


def test_greedy_outputs_are_the_same_with_and_without_the_draft(own: dict[int, Done]) -> None:
    base = own[0].cells[0].outputs
    for k in (2, 3):
        for served in own[k].cells:
            assert differences(base, served.outputs) == []
    cells = [compare(own[0].cells[i], s, k) | {"concurrency": s.concurrency} for k in (2, 3) for i, s in
             enumerate(own[k].cells)]  # fmt: skip
    found = cost(cells)
    assert found is not None and {p["draft_tokens"] for p in found["points"]} == {1, 2, 3}


def test_sampled_outputs_have_one_distribution(own: dict[int, Done]) -> None:
    sides = [[d.draws[i : i + 24] for i in range(0, len(d.draws), 24)] for d in (own[0], own[3])]
    assert sides[0] != sides[1]
    assert same_distribution(sides[0], sides[1], 6)["p_value"] > 0.001


def test_groups_and_turns_of_a_set(own: dict[int, Done]) -> None:
    assert own[3].groups["few"].drafts < own[3].cells[0].drafts
    asks = own[0].sets["talk"]
    assert len(asks) == 2 and len(asks[1].prompt_ids) > len(asks[0].prompt_ids)
    assert asks[1].prompt_ids[: len(asks[0].prompt_ids)] == asks[0].prompt_ids  # then its answer, and the next turn
    assert len(own[0].groups["talk"].outputs) == 2


def test_a_real_server_counts_what_our_engine_counts(own: dict[int, Done], server: str) -> None:
    service = RunningServer(server, "bench.server", None, lambda text: [])
    done = do(service, Job(ASKS, (3,), 1, Templates("", False, None, {}, 200, TOKENS, 0.0, 0)))
    served = done.cells[0]
    assert service.model == "tiny"
    assert served.outputs == own[3].cells[0].outputs
    assert served.draft_tokens == K * served.drafts > 0 and len(served.accepted_per_position) == K
    assert served.foreign_tokens == 0 and served.prefix_hits == 0 and served.gauges is None
    ours = compare(None, own[3].cells[0], K)
    theirs = compare(None, served, K)
    assert theirs["acceptance_length"] == pytest.approx(ours["acceptance_length"], abs=0.05)
    assert served.tokens == sum(map(len, served.outputs)) and len(served.ttft) == len(ASKS)
    first = [a.ids for a in service.answer([Ask(ASKS[3].prompt_ids, 1, 1.0, n // 2) for n in range(20)], 3)]
    assert first[::2] == first[1::2] and len({ids[0] for ids in first}) > 1  # the seed is passed on
