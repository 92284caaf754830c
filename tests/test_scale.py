"""What stands around the engines at a scale no test machine has: parts by the 100,000, actors by the hundred."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.cluster import connect, disconnect
from app.config import RayConfig
from app.engine.part_source import PartSource, parts_dataset
from app.parts import PartEntry, committed_parts
from app.pipelines import generate
from app.storage import Store
from benchmarks.scale import FakeActors, _write_entries, light_actors, make_parts, steady
from tests.runs import context, prompts, tiny_config, write_rows
from tests.simulated import outcome_of


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One local cluster for the tests that run in this process."""
    connect(RayConfig(num_cpus=4, dashboard=False, object_store_gib=0.1))
    yield
    disconnect()


def run_context(tiny: Path, tmp_path: Path, **changes: Any) -> Any:
    source = write_rows(tmp_path / "r.jsonl", prompts(4))
    return context(tiny_config(tiny, tmp_path / "run", source, evaluate__holdout=0, ray__engine_cpus=1, **changes))


@pytest.mark.parametrize("actors", [1, 256, 1024])
def test_the_drivers_loop_takes_every_part_once_from_any_number_of_actors(
    tiny: Path, tmp_path: Path, actors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "connect", lambda config: None)
    monkeypatch.setattr(generate, "_quiet_ray_data", lambda: None)
    monkeypatch.setattr(generate, "start_board", lambda: None)
    monkeypatch.setattr(generate, "wait_until_free", lambda *engines: None)
    monkeypatch.setattr(generate, "_actors", lambda items, *others: FakeActors(items, actors))
    with light_actors(actors, 0, tmp_path / "log"):
        valid, _ = make_parts(run_context(tiny, tmp_path), 3000, 64)
    assert sorted(valid) == list(range(3000))


def test_what_the_driver_keeps_of_a_part_is_small() -> None:
    """Ten million rows are 156,250 parts; what is kept of them must leave room in 2 GiB."""
    text = [json.dumps(outcome_of(part, f"{part:024d}")) for part in range(500)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    valid = {part: PartEntry(**json.loads(entry)) for part, entry in enumerate(text)}
    each = (tracemalloc.get_traced_memory()[0] - before) / len(valid)
    tracemalloc.stop()
    assert each * 156_250 < 1 << 30


def test_every_committed_part_is_found_again(tmp_path: Path) -> None:
    store, keys = Store(str(tmp_path)), {part: f"{part:024d}" for part in range(1000)}
    _write_entries(store, keys)
    valid, bad = committed_parts(store, {**keys, 1000: "k"}, "size")
    assert valid.keys() == keys.keys() and not bad


@pytest.mark.cluster
def test_parts_come_into_being_as_they_are_asked_for(tiny: Path, tmp_path: Path, cluster: None) -> None:
    """A block per part, each once, out of one lazy task however many there are."""
    generate._quiet_ray_data()
    few = parts_dataset([(part, f"k{part}") for part in range(300)]).map_batches(lambda batch: batch, batch_size=1)
    rows = [(int(b["part"][0]), str(b["key"][0])) for b in few.iter_batches(batch_size=1, prefetch_batches=0)]
    assert sorted(rows) == [(part, f"k{part}") for part in range(300)]
    [task] = PartSource([(part, "k") for part in range(100_000)]).get_read_tasks(64)
    blocks = iter(task.read_fn())
    assert [next(blocks).to_pylist() for _ in range(2)] == [[{"part": 0, "key": "k"}], [{"part": 1, "key": "k"}]]


@pytest.mark.cluster
def test_engines_on_every_cpu_leave_room_for_the_source_of_parts(tiny: Path, tmp_path: Path, cluster: None) -> None:
    log = tmp_path / "log"
    with light_actors(4, 0.2, log):
        valid, _ = make_parts(run_context(tiny, tmp_path), 40, 64)
    assert sorted(valid) == list(range(40))
    found = steady(log, 1)
    assert found.engines == 4
    lines = [line.split() for line in log.read_text().splitlines()]
    assert len(lines) == 40  # nothing was made twice


def test_the_steady_state_leaves_out_start_and_tail(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("1 0 10\n1 10 20\n1 20 30\n2 5 15\n2 17 27\n")
    found = steady(log, 1)
    assert (found.engines, found.seconds, found.parts) == (2, 22, 4)
    assert found.efficiency == pytest.approx((22 + 20) / 44)
    assert found.overhead_ms == pytest.approx(1000 * 2 / 4)
