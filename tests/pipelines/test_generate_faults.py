"""Generate under faults: whatever dies, nothing is lost, nothing is made twice, nothing is left behind."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import pytest
import torch

from app.captured import load_entries
from app.config import Config
from app.engine import warden
from app.engine.board import Board, Member, UnderWay, start_board
from app.engine.crash_search import ATTEMPTS, AttemptRecord, Gate
from app.engine.part_worker import PartWorker
from app.engine.patience import persistently
from app.engine.progress import REPORT_S, RowCounter, Ticker
from app.engine.spot_check import in_checking_order, states_differ
from app.errors import UserError
from app.parts import PARTS, read_entry
from app.pipeline import run_pipeline
from app.pipelines.generate import _worker_config
from app.sizing import Engines
from app.stages import stages_up_to
from app.storage import Store
from tests.runs import ROOT, context, prompts, save_config, tiny_config, write_rows
from tests.stubs import states_of

REPLICAS_2 = {"generate__replicas": 2, "ray__num_cpus": 2}


def ids_of(config: Config) -> list[str]:
    """Conversation ids of every committed row."""
    ids: list[str] = []
    store = context(config).run.store
    for entry in load_entries(context(config)):
        ids += pq.read_table(store.local(f"{PARTS}/{entry.files['rows']['name']}"))["conversation_id"].to_pylist()
    return ids


def check_sums(config: Config, rows: int, rejected: dict[str, int] | None = None) -> None:
    """Every row of ingest is kept once or rejected once, and nothing of the making is left."""
    rejected = rejected or {}
    run = Path(config.run_dir)
    counts = context(config).input("generate").counts
    ids = ids_of(config)
    rejects = [r["id"] for e in load_entries(context(config)) for r in e.rejects]
    ingested = {r for p in (run / "ingest" / "parts").glob("*.parquet") for r in pq.read_table(p)["id"].to_pylist()}
    assert counts["rejected"] == rejected
    assert counts["rows_in"] == rows == len(ids) + len(rejects)
    assert {*ids, *rejects} == ingested and len(ingested) == rows
    assert not list(run.rglob("*.tmp-*"))
    assert not (run / ATTEMPTS).exists()
    entries = load_entries(context(config))
    named = {f["name"] for e in entries for f in e.files.values()} | {f"part-{e.part:05d}.json" for e in entries}
    assert {p.name for p in (run / PARTS).iterdir()} == named


def wait_until(what: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def worker_of(config: Config) -> PartWorker:
    """The actor's class in this process, after ingest."""
    run_pipeline(config, stages_up_to("ingest"))
    return PartWorker(_worker_config(context(config), False, Engines(1, 1, "a test")))


def made_by(worker: PartWorker, part: int = 0) -> dict[str, Any]:
    outcome: dict[str, Any] = json.loads(worker({"part": [part], "key": ["k"]})["outcome"][0])
    return outcome


# The row that ends the engine


class Process:
    """Runs a part's groups as the worker does, and ends when a row of `deadly` is among them."""

    def __init__(self, store: Store, rows: list[str], deadly: set[str]) -> None:
        self.store, self.rows, self.deadly = store, rows, deadly
        self.ended = 0

    def run(self, max_attempts: int = 4) -> AttemptRecord:
        """Until the part is whole; each round is a process of its own."""
        while True:
            record = AttemptRecord(self.store, 0, self.rows, max_attempts)
            for group in list(record.now.groups):
                record.begin(group)
                if self.deadly & set(group):
                    self.ended += 1
                    break
                record.passed(group)
            else:
                return record


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 100])
@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_the_deadly_row_is_found_by_halving_and_no_other_is_blamed(tmp_path: Path, rows: int, at: float) -> None:
    ids = [f"r{i}" for i in range(rows)]
    deadly = ids[round(at * (rows - 1))]
    process = Process(Store(str(tmp_path)), ids, {deadly})
    record = process.run()
    assert record.now.blamed == [deadly]
    assert sorted(i for g in record.now.groups for i in g) == sorted(set(ids) - {deadly})
    assert process.ended <= 1 + (rows - 1).bit_length()
    record.forget()
    assert Store(str(tmp_path)).read_json(f"{ATTEMPTS}/0.json") is None


def test_two_deadly_rows_are_both_found(tmp_path: Path) -> None:
    ids = [f"r{i}" for i in range(64)]
    process = Process(Store(str(tmp_path)), ids, {"r3", "r4"})
    assert sorted(process.run().now.blamed) == ["r3", "r4"]
    assert process.ended <= 2 * 7


def test_a_part_with_more_deadly_rows_than_attempts_is_given_up(tmp_path: Path) -> None:
    ids = [f"r{i}" for i in range(64)]
    process = Process(Store(str(tmp_path)), ids, {f"r{i}" for i in range(0, 64, 10)})
    with pytest.raises(UserError, match="while making part 0"):
        process.run(max_attempts=2)
    assert process.ended <= 3 * 7


def test_a_part_on_which_every_row_ends_the_process_is_given_up(tmp_path: Path) -> None:
    ids = [f"r{i}" for i in range(64)]
    process = Process(Store(str(tmp_path)), ids, set(ids))
    with pytest.raises(UserError, match="process ended 10 times while making part 0"):
        process.run(max_attempts=4)
    assert process.ended == 10  # the limit and log2 of 64


def test_an_accident_blames_nobody(tmp_path: Path) -> None:
    store, ids = Store(str(tmp_path)), ["a", "b", "c", "d"]
    first = AttemptRecord(store, 0, ids, 4)
    assert not first.now.searching
    first.begin(ids)
    assert store.read_json(f"{ATTEMPTS}/0.json")["under_way"] == ids
    again = Process(store, ids, set()).run()
    assert again.now.searching and again.now.blamed == []
    assert sorted(i for g in again.now.groups for i in g) == ids


def test_a_part_under_suspicion_is_alone_in_its_process() -> None:
    events: list[str] = []

    late: list[asyncio.Task[None]] = []

    async def part(gate: Gate, name: str, alone: bool) -> None:
        async with gate.enter(alone):
            events.append(f"{name} in")
            if name == "suspect":
                late.append(asyncio.create_task(part(gate, "late", False)))
            await asyncio.sleep(0.01)
            events.append(f"{name} out")

    async def all_of_them() -> None:
        gate = Gate()
        names = [("a", False), ("b", False), ("suspect", True), ("c", False), ("other", True), ("d", False)]
        await asyncio.wait_for(asyncio.gather(*(part(gate, n, alone) for n, alone in names)), 30)
        await asyncio.wait_for(late[0], 30)

    asyncio.run(all_of_them())
    assert events[:2] == ["a in", "b in"]  # together
    for name in ("suspect", "other"):
        at = events.index(f"{name} in")
        assert events[at + 1] == f"{name} out"
        inside = [e.split()[0] for e in events[:at] if e.endswith("in")]
        assert all(f"{n} out" in events[:at] for n in inside)
    assert len(events) == 14


@pytest.mark.cluster
def test_a_row_that_crashes_every_engine_is_quarantined_and_the_others_are_kept(
    tiny: Path, tmp_path: Path, cluster: None
) -> None:
    source = write_rows(tmp_path / "r.jsonl", prompts(8, prefix="Count the sacks of hay number"))
    config = tiny_config(
        tiny, tmp_path / "run", source, generate__engine_args={"STUB_CRASH_ON": "number 5"},
        generate__max_error_share=0.2, storage__rows_per_part=4,
    )  # fmt: skip
    run_pipeline(config, stages_up_to("generate"))
    check_sums(config, 8, {"engine_crash": 1})
    [reject] = [r for e in load_entries(context(config)) for r in e.rejects]
    assert reject["where"] == "r.jsonl:6"
    assert "while this row alone was under way" in reject["detail"]


@pytest.mark.cluster
def test_an_engine_that_ends_as_it_starts_stops_the_run(
    tiny: Path, tmp_path: Path, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []  # a handle, as Ray Data may keep one

    def start() -> Any:
        kept.append(start_board())
        return kept[-1]

    monkeypatch.setattr("app.pipelines.generate.start_board", start)
    config = tiny_config(
        tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(6)), generate__max_attempts=2,
        generate__engine_args={"STUB_DIE_AT_START": 1},
    )  # fmt: skip
    with pytest.raises(UserError, match="process ended 2 times while it started for part 0"):
        run_pipeline(config, stages_up_to("generate"))
    assert not (tmp_path / "run" / ATTEMPTS).exists()
    wait_until(lambda: not boards(), 20)  # the driver goes on, and the small actor has nobody to hear
    assert len(kept) == 1


def boards() -> list[dict[str, Any]]:
    """Small actors of generate that live."""
    import ray

    actors = ray._private.state.actors().values()
    return [a for a in actors if a["ActorClassName"] == "generate_board" and a["State"] != "DEAD"]


# F30: an engine or a node dies


@pytest.mark.cluster
def test_f30_the_death_of_an_engines_core_ends_its_actor_and_loses_no_row(
    tiny: Path, tmp_path: Path, cluster: None
) -> None:
    core = tmp_path / "core"
    config = tiny_config(
        tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(40)),
        generate__engine_args={"STUB_CORE": str(core), "STUB_DELAY": 0.5},
        generate__parts_in_flight=1,
    )  # fmt: skip
    parts = tmp_path / "run" / PARTS

    def kill_the_core() -> None:
        wait_until(lambda: len(list(parts.glob("*.json"))) >= 1)
        kept.update({p.name: p.stat().st_mtime_ns for p in parts.glob("*.json")})
        os.kill(int(core.read_text().split()[0]), signal.SIGKILL)

    kept: dict[str, int] = {}
    with_thread(kill_the_core, lambda: run_pipeline(config, stages_up_to("generate")))
    check_sums(config, 40)
    assert len(core.read_text().split()) == 2  # one restart
    assert kept and all((parts / name).stat().st_mtime_ns == at for name, at in kept.items())
    assert not any(lives(int(pid)) for pid in core.read_text().split()[:1])


def with_thread(beside: Callable[[], None], run: Callable[[], Any]) -> Any:
    """Run `run` with `beside` in a thread; what goes wrong in the thread is raised here."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        side = pool.submit(beside)
        result = run()
        side.result(timeout=10)
    return result


NODE_LOSS = """
import json, sys, threading, time
from pathlib import Path
from ray.cluster_utils import Cluster
from app.cli import main

config, parts = sys.argv[1], Path(sys.argv[2])
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
second = cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()

def lose_it():
    while len(list(parts.glob("*.json"))) < 2:
        time.sleep(0.05)
    cluster.remove_node(second, allow_graceful=False)
    print("lost a node", flush=True)
    cluster.add_node(num_cpus=1)

threading.Thread(target=lose_it, daemon=True).start()
main(["generate", config, f"ray.address={cluster.address}"])
"""


@pytest.mark.cluster
def test_f30_the_loss_of_a_node_loses_no_row(tiny: Path, tmp_path: Path) -> None:
    config = tiny_config(
        tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(80)),
        generate__engine_args={"STUB_DELAY": 1.0, "STUB_LOG": str(tmp_path / "log")},
        generate__replicas=2, ray__engine_cpus=1, generate__parts_in_flight=1,
    )  # fmt: skip
    path = save_config(config, tmp_path / "c.yaml")
    result = subprocess.run(
        [sys.executable, "-c", NODE_LOSS, str(path), str(tmp_path / "run" / PARTS)],
        capture_output=True, text=True, timeout=400, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert "lost a node" in result.stdout
    check_sums(config, 80)
    workers = {line.split()[1] for line in (tmp_path / "log").read_text().splitlines()}
    assert len(workers) >= 3  # two engines, and the one in place of the lost


# F31, F32, F36, F37


@pytest.mark.cluster
def test_f31_f32_one_slow_row_holds_up_neither_the_others_nor_the_order(
    tiny: Path, tmp_path: Path, cluster: None
) -> None:
    log = tmp_path / "log"
    rows = prompts(40)
    rows[3] = {"prompt": "Count the slow sacks"}
    config = tiny_config(
        tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", rows),
        generate__engine_args={"STUB_SLOW_ON": "slow", "STUB_SLOW_LINES": 39, "STUB_LOG": str(log)},
        generate__row_timeout_s=240,
    )  # fmt: skip
    run_pipeline(config, stages_up_to("generate"))
    check_sums(config, 40)
    finished = [line.split()[0].rpartition("-")[0] for line in log.read_text().splitlines()]
    first_part = [r["id"] for r in pq.read_table(tmp_path / "run/ingest/parts/part-00000.parquet").to_pylist()]
    assert finished.index(first_part[3]) == 39  # every other part went on meanwhile
    assert ids_of(config)[:10] == first_part  # and the file is in the order of ingest


class Dropping:
    """An engine that loses two requests: it never answers them."""

    def __init__(self, spec: Any) -> None:
        from tests.stubs import StubEngine

        self.inner = StubEngine(spec)
        self.count = 0

    async def complete(self, request: Any) -> Any:
        if not request.request_id.endswith("-check"):
            self.count += 1
            if self.count in (3, 8):
                await asyncio.Event().wait()
        return await self.inner.complete(request)

    def close(self) -> None:
        pass


def test_f32_f36_requests_an_engine_drops_are_rows_rejected_by_name(tiny: Path, tmp_path: Path) -> None:
    config = tiny_config(
        tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(10)),
        generate__engine="tests.pipelines.test_generate_faults:Dropping", generate__row_timeout_s=1,
    )  # fmt: skip
    entry = made_by(worker_of(config))
    ids = pq.read_table(tmp_path / "run/ingest/parts/part-00000.parquet")["id"].to_pylist()
    assert [r["id"] for r in entry["rejects"]] == [ids[2], ids[7]]
    assert {r["reason"] for r in entry["rejects"]} == {"timeout"}
    assert (entry["rows_in"], entry["conversations"]) == (10, 8)


def test_f36_f37_lines_tell_of_rows_while_no_part_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("app.engine.progress.LINE_S", 0.1)
    monkeypatch.setattr("app.engine.progress.QUIET_S", 0.3)
    monkeypatch.setattr("app.engine.progress.log.propagate", True)
    caplog.set_level(logging.INFO)
    ticker = Ticker((1, 4), (10, 40), board=None)
    said = [UnderWay(), UnderWay(5, 50, 5, (2.0, "abc")), UnderWay(5, 50, 5, (70.0, "abc"))]
    monkeypatch.setattr(ticker, "_ask", lambda: said.pop(0) if len(said) > 1 else said[0])
    with ticker:
        wait_until(lambda: any("none has ended for" in m for m in caplog.messages), 30)
    assert caplog.messages[0].startswith("generate: 1/4 parts, 10/40 rows; no row has begun yet, engines start")
    assert caplog.messages[1].startswith("generate: 1/4 parts, 15/40 rows, 50 answer tokens, 25 tokens/s, 10.0 s left")
    assert caplog.messages[-1].endswith("the longest is abc (70 s)")


def test_f37_the_counter_of_rows_forgets_what_the_driver_counts() -> None:
    counter = RowCounter()
    for row in ("a", "b", "c"):
        counter.started(row)
    counter.finished(7, "a", 12)
    now = counter.now()
    assert (now.finished, now.tokens, now.running) == (1, 12, 2)
    assert now.longest[1] in ("b", "c")
    counter.finished(7, "b", 1)
    counter.settled(7)
    assert counter.now().finished == 0
    board = Board()
    board.report(Member("one", 1, under_way=UnderWay(1, 2, 3, (4.0, "x"))))
    board.report(Member("two", 1, under_way=UnderWay(1, 2, 3, (5.0, "y"))))
    board.report(Member("two", 1, under_way=UnderWay(2, 4, 6, (6.0, "y"))))
    assert board.read() == UnderWay(3, 6, 9, (6.0, "y"))


def test_f37_a_silent_engine_no_longer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board()
    board.report(Member("dead", 1, under_way=UnderWay(9, 9, 9, (9.0, "x"))))
    monkeypatch.setattr("app.engine.board.FORGET_S", -1.0)
    assert board.read() == UnderWay()


# The command line with a line every two seconds instead of fifteen.
TALKATIVE = """
import sys
from app.cli import run
from app.engine import progress
progress.LINE_S = 2.0
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.cluster
def test_f37_a_run_without_a_terminal_says_how_far_it_is(tiny: Path, tmp_path: Path) -> None:
    """The slow row ends some seconds after the engine's first report."""
    config = tiny_config(
        tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(10)),
        generate__engine_args={"STUB_SLOW_ON": "day 7", "STUB_SLOW_S": REPORT_S + 5, "STUB_LOG": str(tmp_path / "log")},
    )  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-c", TALKATIVE, "generate", str(save_config(config, tmp_path / "c.yaml"))],
        capture_output=True, text=True, timeout=300, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "generate: 1 engine(s) of 1 CPU engine (no GPU: engines on CPUs)" in result.stderr  # what was chosen and why
    lines = [line for line in result.stderr.splitlines() if "rows under way" in line]
    assert lines and "generate: 0/1 parts, 9/10 rows" in lines[-1] and "s left; 1 rows under way" in lines[-1]


# F33, F38, F39, F42


@pytest.mark.cluster
def test_f33_a_run_goes_on_with_another_number_of_engines(
    tiny: Path, tmp_path: Path, cluster: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, run = tmp_path / "log", tmp_path / "run"
    source = write_rows(tmp_path / "r.jsonl", prompts(120))
    options = {"STUB_LOG": str(log), "STUB_RAISE_UNTIL": str(tmp_path / "passed"), "STUB_RAISE": 61, "STUB_DELAY": 0.2}
    first = tiny_config(
        tiny, run, source, generate__engine_args=options, generate__max_error_share=0, generate__replicas=1,
        ray__engine_cpus=1, generate__parts_in_flight=2,
    )  # fmt: skip
    with pytest.raises(UserError, match="max_error_share"):
        run_pipeline(first, stages_up_to("generate"))
    engines = {int(line.split()[1]) for line in log.read_text().splitlines()}
    wait_until(lambda: not any(lives(pid) for pid in engines))
    kept = {p.name: p.stat().st_mtime_ns for p in (run / PARTS).glob("*.json")}
    assert 1 <= len(kept) < 12
    done = len(log.read_text().splitlines())
    (tmp_path / "passed").touch()
    monkeypatch.setattr("app.pipeline.log.propagate", True)
    caplog.set_level(logging.INFO, "draftmill")
    second = tiny_config(
        tiny, run, source, generate__engine_args=options, generate__max_error_share=0.1, generate__replicas=2,
        ray__engine_cpus=1, generate__parts_in_flight=2,
    )  # fmt: skip
    run_pipeline(second, stages_up_to("generate"))
    assert f"generate: resumed, {len(kept)} of 12 parts are committed" in caplog.text
    assert all((run / PARTS / name).stat().st_mtime_ns == at for name, at in kept.items())
    assert len(log.read_text().splitlines()) - done == 120 - 10 * len(kept)
    check_sums(second, 120, {"bad_request": 1})


@pytest.mark.cluster
def test_f38_f39_engines_that_do_not_fit_are_a_sentence_and_resources_come_back(
    tiny: Path, tmp_path: Path, cluster: None
) -> None:
    import ray

    source = write_rows(tmp_path / "r.jsonl", prompts(30))
    too_many = tiny_config(tiny, tmp_path / "run", source, generate__replicas=3, ray__engine_cpus=1)
    with pytest.raises(UserError, match=r"3 .*generate\.replicas"):
        run_pipeline(too_many, stages_up_to("generate"))
    for name in ("one", "two"):  # each needs every CPU there is
        whole = tiny_config(tiny, tmp_path / name, source, generate__replicas=2, ray__engine_cpus=1)
        run_pipeline(whole, stages_up_to("generate"))
        wait_until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])
    from ray.util import placement_group_table

    assert [g for g in placement_group_table().values() if g["state"] != "REMOVED"] == []


@pytest.mark.cluster
def test_f42_states_do_not_pass_through_the_object_store(tiny: Path, tmp_path: Path, cluster: None) -> None:
    import ray

    def object_store() -> float:
        total, free = ray.cluster_resources(), ray.available_resources()
        return total["object_store_memory"] - free.get("object_store_memory", 0.0)

    config = tiny_config(
        tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(50)),
        generate__engine_args={"STUB_LENGTH": 200}, generate__max_length=512, generate__max_new_tokens=256,
        capture__codec="bf16",
    )  # fmt: skip
    most: list[float] = []
    done = []

    def look() -> None:
        while not done:
            most.append(object_store())
            time.sleep(0.05)

    def make() -> None:
        try:
            run_pipeline(config, stages_up_to("generate"))
        finally:
            done.append(True)

    before = object_store()
    with_thread(look, make)
    states = sum(p.stat().st_size for p in (tmp_path / "run" / PARTS).glob("*.safetensors"))
    assert states > 4 << 20
    assert max(most) - before < 1 << 20


# F40: what an engine leaves

OWNER = """
import os, signal, sys, time
from app.engine import warden
warden.sweep()
warden.guard()
from app.engine.base import EngineSpec
from tests.stubs import StubEngine
StubEngine(EngineSpec(sys.argv[1], (2, 4, 5), 8, engine_args={"STUB_CHILD": sys.argv[2], "STUB_LEFT": sys.argv[3]}))
print("up", flush=True)
time.sleep(600)
"""


def left_by(path: Path) -> tuple[int, int, Path]:
    """Pid of the engine's process, of its child, and the folder, of the last engine that wrote to `path`."""
    owner, child, folder = path.read_text().splitlines()[-1].split()
    return int(owner), int(child), Path(folder)


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_f40_children_and_folders_of_a_killed_engine_go_with_it(tiny: Path, tmp_path: Path, how: str) -> None:
    left = tmp_path / "left"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tiny), how, str(left)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "up\n"
        _, child, folder = left_by(left)
        assert lives(child) and folder.is_dir()
        time.sleep(0.5)
        assert lives(child)  # while its engine lives nobody touches it
    finally:
        owner.kill()
        owner.wait()
    wait_until(lambda: not lives(child) and not folder.exists(), 10)


def test_f40_what_a_guard_missed_goes_with_the_next_engine_and_nothing_else(tmp_path: Path) -> None:
    gone = subprocess.Popen(["sleep", "0"])
    tag = warden.owner_tag(gone.pid)
    gone.wait()
    ours = {**os.environ, warden.OWNER: warden.owner_tag()}
    orphan = subprocess.Popen(["sleep", "60"], env={**os.environ, warden.OWNER: tag})
    child = subprocess.Popen(["sleep", "60"], env=ours)
    folders = [Path("/dev/shm", f"{warden.STATES_FOLDER}{t}-abc") for t in (tag, warden.owner_tag(), "1-2-3")]
    try:
        for folder in folders:
            folder.mkdir()
        wait_until(lambda: warden.OWNER.encode() in Path(f"/proc/{orphan.pid}/environ").read_bytes())
        assert warden.sweep() >= 2
        assert orphan.wait(10) == -signal.SIGKILL
        assert child.poll() is None
        assert [f.exists() for f in folders] == [False, True, True]  # the last is of another namespace
    finally:
        for process in (orphan, child):
            process.kill()
            process.wait()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.cluster
def test_f40_a_killed_actor_leaves_no_process_and_no_shared_memory(tiny: Path, tmp_path: Path, cluster: None) -> None:
    left, before = tmp_path / "left", set(os.listdir("/dev/shm"))
    config = tiny_config(
        tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(30)),
        generate__engine_args={"STUB_CHILD": "spawn", "STUB_LEFT": str(left), "STUB_DIE_ONCE": str(tmp_path / "died")},
    )  # fmt: skip
    run_pipeline(config, stages_up_to("generate"))
    check_sums(config, 30)
    engines = [line.split() for line in left.read_text().splitlines()]
    assert len(engines) == 2  # killed once, replaced once
    wait_until(lambda: not any(lives(int(pid)) for e in engines for pid in e[:2]), 30)
    wait_until(lambda: not {n for n in set(os.listdir("/dev/shm")) - before if n.startswith("draftmill")}, 30)


# F45: states of another row


def test_f45_states_of_another_row_are_refused(tiny: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"Count the sacks of day {i}"} for i in range(10, 14)]
    source = write_rows(tmp_path / "r.jsonl", rows)
    swapped = {"generate__engine_args": {"STUB_SWAP": 1}}
    worker = worker_of(tiny_config(tiny, tmp_path / "run", source, **swapped))
    fault = made_by(worker)["fault"]
    assert fault.startswith("part 0: the states captured for ") and "layer 2 differs at" in fault
    assert read_entry(Store(str(tmp_path / "run")), 0) is None
    off = tiny_config(tiny, tmp_path / "run", source, capture__spot_check=False, **swapped)
    assert made_by(worker_of(off))["conversations"] == 4  # nothing else would have told
    healthy = tiny_config(tiny, tmp_path / "run", source)
    assert made_by(worker_of(healthy))["conversations"] == 4


def test_f45_noise_passes_and_a_shift_or_another_row_does_not() -> None:
    tokens = list(range(300, 340))
    states = states_of(tokens)
    noisy = states + 0.05 * states.norm(dim=-1, keepdim=True) / 8 * torch.randn(states.shape)
    assert states_differ(noisy.bfloat16(), states, 20, (2, 4, 5, 8)) is None
    shifted = torch.roll(states, 1, 0)
    assert "layer 2 differs" in str(states_differ(shifted, states, 20, (2, 4, 5, 8)))
    other = states_of([*tokens[:38], 7, 8])
    assert states_differ(states, states, 20, (2, 4, 5, 8)) is None
    tail = states.clone()
    tail[36:] = states_of(list(range(400, 440)))[36:]  # three positions of the answer of four: under a tenth of all
    assert "of 4 positions of the answer" in str(states_differ(tail, states, 36, (2, 4, 5, 8)))
    assert states_differ(states[:-1], states, 20, (2, 4, 5, 8)) == "(38, 4, 64) states instead of (39, 4, 64)"
    one_layer = states.clone()
    one_layer[:, 2] = other[:, 1]
    assert "layer 5 differs" in str(states_differ(one_layer, states, 20, (2, 4, 5, 8)))


def test_f45_the_row_that_is_checked_depends_on_the_part_and_not_on_the_order() -> None:
    rows = [f"r{i}" for i in range(64)]
    order = in_checking_order(rows, "key")
    assert sorted(order) == sorted(rows)
    assert in_checking_order(rows[::-1], "key") == order
    assert len({in_checking_order(rows, f"key {k}")[0] for k in range(50)}) > 20


# Stores that fail


def test_a_disk_that_fills_under_a_part_is_one_sentence_and_the_part_is_made_later(tiny: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(10)))
    worker = worker_of(config)
    full = OSError(errno.ENOSPC, "No space left on device")
    real, seen = os.replace, []

    def until_full(source: Any, target: Any) -> None:
        if "safetensors" in str(target):
            seen.append(target)
            raise full
        real(source, target)

    with mock.patch("os.replace", until_full):
        outcome = made_by(worker)
    assert seen and "no space left on the device" in outcome["fault"] and len(outcome) == 1
    assert not list((tmp_path / "run" / PARTS).glob("*.json"))
    assert not list((tmp_path / "run").rglob("*.tmp-*"))
    assert made_by(worker)["conversations"] == 10


def test_f52_a_store_that_fails_for_a_while_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("app.engine.patience.time.sleep", waits.append)
    faults: list[BaseException] = [OSError("Please reduce your request rate"), TimeoutError()]

    def answers() -> str:
        if faults:
            raise faults.pop(0)
        return "read"

    assert persistently(answers, "s3://b/run") == "read"
    assert waits == [1.0, 4.0]

    def never() -> str:
        raise OSError("503")

    with pytest.raises(UserError, match=r"s3://b/run does not answer \(503\); the same command resumes"):
        persistently(never, "s3://b/run")
    for at_once in (FileNotFoundError("gone"), UserError("no space")):
        waits.clear()
        with pytest.raises(type(at_once)):
            persistently(mock.Mock(side_effect=at_once), "s3://b/run")
        assert waits == []


# A stopped driver


@pytest.mark.cluster
def test_a_terminated_driver_leaves_whole_parts_and_no_process(tiny: Path, tmp_path: Path, cluster: None) -> None:
    run, left = tmp_path / "run", tmp_path / "left"
    config = tiny_config(
        tiny, run, write_rows(tmp_path / "r.jsonl", prompts(60)),
        generate__engine_args={"STUB_CHILD": "spawn", "STUB_LEFT": str(left)}, generate__parts_in_flight=1,
    )  # fmt: skip
    command = [sys.executable, "-m", "app", "generate", str(save_config(config, tmp_path / "c.yaml"))]
    slow = {**os.environ, "STUB_DELAY": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=slow, stderr=subprocess.PIPE, text=True) as driver:
        try:
            wait_until(lambda: len(list((run / PARTS).glob("*.json"))) >= 1)
            driver.send_signal(signal.SIGTERM)
            _, said = driver.communicate(timeout=30)
        finally:
            driver.kill()
    assert driver.returncode == 130
    assert "Traceback" not in said and said.splitlines()[-1].startswith("draftmill: stopped")
    owner, child, folder = left_by(left)
    wait_until(lambda: not lives(owner) and not lives(child) and not folder.exists(), 30)
    assert not (run / "lease.json").exists()
    kept = {p.name: p.stat().st_mtime_ns for p in (run / PARTS).glob("*.json")}
    assert 1 <= len(kept) < 6
    run_pipeline(config, stages_up_to("generate"))
    assert all((run / PARTS / name).stat().st_mtime_ns == at for name, at in kept.items())
    check_sums(config, 60)
