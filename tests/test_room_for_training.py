"""Training beside generate: the GPUs and CPUs it leaves to engines, what is refused, what plan and status say of it."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.cluster import disconnect
from app.config import Config, parse_config
from app.errors import UserError
from app.live import Live, tell
from app.pipeline import run_pipeline
from app.plan.estimate import Plan, make_plan
from app.plan.hardware import GIB, Hardware, rough_rates
from app.plan.text import plan_lines
from app.plan.tokens import Length, SourceTokens, TokenStats
from app.sizing import Cluster, Need, beside_training, choose, described, engine_cpus, settled
from app.stages import stages_up_to
from app.status import status_lines
from app.storage import Store
from app.train.progress import WAITS
from app.train.pulse import Pulse
from tests.runs import prompts, tiny_config, write_rows
from tests.test_plan import KIMI

SMALL = Need(weights=16 * GIB, kv_bytes=128 * 1024, kv_heads=8, heads=32, max_length=4096)
WIDE = Need(weights=600 * GIB, kv_bytes=128 * 1024, kv_heads=8, heads=32, max_length=4096)


def gpus(*nodes: int, cpus: float = 64) -> Cluster:
    return Cluster(tuple(nodes), 141 * GIB, cpus, "H200")


def a_config(generate: dict[str, Any] | None = None, **train: object) -> Config:
    both = {"train": {"start_after": 0.25, **train}, "generate": generate or {}}
    return parse_config({"sources": [{"path": "x.jsonl"}], **both}, "test")


@pytest.mark.parametrize(
    ("cluster", "workers", "left"),
    [
        (gpus(8), 2, (6,)),
        (gpus(8, 8), 8, (8,)),  # a whole node, so that a wide engine keeps one
        (gpus(8, 4), 2, (8, 2)),
        (gpus(8, 4), 6, (6,)),
    ],
)
def test_training_takes_the_smallest_nodes_first(cluster: Cluster, workers: int, left: tuple[int, ...]) -> None:
    room = beside_training(a_config(workers=workers), cluster)
    assert room.gpus == left and room.cpus == cluster.cpus


def test_engines_by_auto_are_those_that_fit_beside_it() -> None:
    config = a_config(workers=2)
    assert choose(config, SMALL, beside_training(config, gpus(8))).replicas == 6
    assert choose(config, WIDE, beside_training(a_config(workers=8), gpus(8, 8))).tensor_parallel == 8
    hardware, shape = Hardware(1, 8, "H200", 141, 64, 2000, None, "test"), replace(KIMI, target_bytes=16 * GIB)
    assert settled(config, shape, hardware).generate.replicas == 6
    assert settled(a_plain(config), shape, hardware).generate.replicas == 8


def a_plain(config: Config) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"start_after": None})})


def test_gpus_of_other_nodes_are_taken_before_those_of_engines() -> None:
    assert beside_training(a_config(workers=4), gpus(8), elsewhere=4).gpus == (8,)
    assert beside_training(a_config(workers=6), gpus(8), elsewhere=4).gpus == (6,)


def test_no_room_is_one_sentence_with_the_numbers() -> None:
    with pytest.raises(UserError, match=r"train\.workers, 8, leaves none of 8 GPUs for an engine; lower it"):
        beside_training(a_config(workers=8), gpus(8))


def test_without_gpus_each_worker_keeps_a_core() -> None:
    assert beside_training(a_config(workers=1), Cluster((), None, 2)).cpus == 1
    assert engine_cpus(a_config(), Cluster((), None, 2)) == 1 and engine_cpus(a_config(), gpus(8)) == 0
    assert beside_training(a_config(workers=8, use_gpu=False), gpus(8)).gpus == (8,)


@pytest.mark.cluster
def test_a_cluster_without_room_for_both_is_refused_before_anything_starts(tiny: Path, tmp_path: Path) -> None:
    import ray

    source = write_rows(tmp_path / "r.jsonl", prompts(25))
    ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, object_store_memory=10**8)
    try:
        for number, (given, words) in enumerate(
            (
                ({"train__workers": 2}, r"train\.workers, 2, leaves none of 2 GPUs for an engine"),
                (
                    {"generate__replicas": 2},
                    r"2 x 1 = 2 GPUs and the cluster has 1; .*; training has 1 GPUs beside them",
                ),
            )
        ):
            config = tiny_config(tiny, tmp_path / f"run{number}", source, train__start_after=0.25, **given)
            with pytest.raises(UserError, match=words):
                run_pipeline(config, stages_up_to("train"))
            assert not (tmp_path / f"run{number}" / "ingest").exists()
    finally:
        disconnect()


# Plan


def a_plan(config: Config, hardware: Hardware) -> Plan:
    lengths = (Length(100, 400),)
    stats = TokenStats((SourceTokens("s", "regenerate", 100_000, 100_000.0, lengths, lengths),), "test")
    return make_plan(config, KIMI, stats, hardware, rough_rates(KIMI, config, hardware, 0.7))


def test_the_plan_counts_the_time_in_which_both_run_once() -> None:
    hardware = Hardware(1, 16, "H200", 141, 64, 2000, None, "test")
    config = a_config({"replicas": 1, "tensor_parallel": 8}, workers=8, epochs=2)
    both, plain = a_plan(config, hardware), a_plan(a_plain(config), hardware)
    seconds = {s.name: s.seconds for s in both.stages}
    assert both.fits and plain.overlap_s == 0 and plain.seconds == sum(seconds.values())
    assert 0 < both.overlap_s <= 0.75 * min(seconds["generate"], seconds["train"])
    assert both.seconds == pytest.approx(plain.seconds - both.overlap_s) and both.gpu_hours == plain.gpu_hours
    assert any("training begins beside generate" in line for line in plan_lines(both, "run", True))
    assert not any("training begins beside generate" in line for line in plan_lines(plain, "run", True))


def test_the_plan_refuses_what_has_no_room_for_both() -> None:
    hardware = Hardware(1, 8, "H200", 141, 64, 2000, None, "test")
    config = a_config({"replicas": 1, "tensor_parallel": 8}, workers=4)
    a_plan(a_plain(config), hardware).require_fit()
    with pytest.raises(UserError, match=r"generate and training need 8 \+ 4 GPUs of 8; lower train\.workers"):
        a_plan(config, hardware).require_fit()
    assert described(hardware).total == 8


def test_the_plan_does_not_advise_the_gpus_of_training_to_engines() -> None:
    hardware = Hardware(1, 8, "H200", 141, 64, 2000, None, "test")
    config = a_config({"replicas": 1, "tensor_parallel": 4}, workers=4)
    assert not any("would take 1/" in line for line in a_plan(config, hardware).advice)
    assert any("would take 1/2" in line for line in a_plan(a_plain(config), hardware).advice)


# Status


def test_status_shows_both_and_says_what_training_waits_for(tiny: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(25)), train__start_after=0.25)
    run_pipeline(config, stages_up_to("ingest"))
    store = Store(config.run_dir)
    lease = {"pid": 5, "host": "head:boot", "heartbeat": time.time(), "timeout_s": 60, "token": "t"}
    (tmp_path / "run" / "lease.json").write_text(json.dumps({**lease, "stage": "generate"}))
    tell(store, "generate", Live("1/3 parts"))
    pulse = Pulse(store, "train", 60.0, 0, ["here, process 7"])
    pulse.beat(7, 40, WAITS)
    tell(store, "train", pulse.live())
    lines = [re.sub(r"\(\d+ s ago\)", "(now)", line) for line in status_lines(str(tmp_path / "run"), [])]
    states = {line.split()[0]: line.split()[1] for line in lines[2:11]}
    assert (states["generate"], states["train"], states["vocab"]) == ("running", "running", "missing")
    assert "  now       generate: 1/3 parts (now)" in lines
    assert any(line.startswith(f"  now       train: step 7 of 40, {WAITS}") for line in lines)
    assert "  waits for parts that generate has under way: all that is sealed was learnt" in lines
    (tmp_path / "run" / "lease.json").unlink()
    lines = status_lines(str(tmp_path / "run"), [])
    assert sum(line.startswith(("  came to   generate: 1/3", "  came to   train: step 7 of 40")) for line in lines) == 2
    (tmp_path / "run" / "lease.json").write_text(json.dumps({**lease, "stage": "generate"}))
    tell(store, "train", Live("step 7 of 40", at=time.time() - 600))  # left by another driver
    assert not any("step 7 of 40" in line for line in status_lines(str(tmp_path / "run"), []))
