"""What can be seen of a run while it goes on: status, metrics, names on the dashboard; and what ends where it hangs."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from app import status
from app.captured import load_entries
from app.cluster import connect, disconnect
from app.config import Config, RayConfig
from app.engine.board import RESTS, STARTS, STORES, WORKS, Load, Member
from app.engine.progress import RowCounter, Standing
from app.engine.watch import SLOWER, Limit, Watch, stuck
from app.errors import UserError
from app.live import Live, forget, live_path, read_live, tell
from app.metrics import METRICS, Meter
from app.parts import PartEntry
from app.pipeline import run_pipeline
from app.pipelines.generate import stall_limit
from app.stages import stages_up_to
from app.status import status_lines, watch
from app.storage import Store
from app.train.pulse import FAULT, Pulse
from tests.runs import ROOT, Command, context, prompts, save_config, tiny_config, write_rows
from tests.simulated import outcome_of
from tools import grafana_dashboard

LIMIT = Limit(600, 1800)
HALF = Standing((2, 4), (24, 40), 120.0, 60.0, "2/4 parts, 24/40 rows")
BUSY = Member("gpu1", 7, doing=WORKS, says_steps=True, parts=((3, 700.0),))


# When an engine is stuck


@pytest.mark.parametrize(
    ("member", "silent_s", "said"),
    [
        (replace(BUSY, idle_s=599), 0, None),
        (replace(BUSY, idle_s=590), 11, "has made no step and ended no row for 10.0 min"),
        (replace(BUSY, idle_s=700, says_steps=False), 0, None),  # a row may take half an hour there
        (replace(BUSY, idle_s=1800, says_steps=False), 0, "has ended no row for 30.0 min"),
        (replace(BUSY, idle_s=700, doing=STORES), 0, None),
        (replace(BUSY, idle_s=SLOWER * 600, doing=STORES), 0, "has neither read nor written a part"),
        (replace(BUSY, idle_s=9000, doing=RESTS, parts=()), 900, None),  # it has nothing to do
        (replace(BUSY, idle_s=700, doing=STARTS, parts=()), 0, None),
        (replace(BUSY, idle_s=SLOWER * 600, doing=STARTS, parts=()), 0, "has not started within 40.0 min"),
        (replace(BUSY, idle_s=0), 601, "has told nothing for 10.0 min"),
    ],
)
def test_an_engine_with_work_and_no_sign_of_life_is_stuck(member: Member, silent_s: float, said: str | None) -> None:
    found = stuck(member, silent_s, LIMIT)
    assert found is None if said is None else found is not None and found.startswith(said)
    assert stuck(member, silent_s, Limit(0, 1800)) is None


def test_servers_may_be_silent_as_long_as_they_are_endured(tiny: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny, tmp_path / "run", tmp_path / "r.jsonl", generate__stall_minutes=10)
    assert stall_limit(config).seconds == 600
    served = {"generate__endpoints": ["http://h:1/v1"], "generate__endpoint_patience_s": 900}
    assert stall_limit(tiny_config(tiny, tmp_path, tmp_path, generate__stall_minutes=10, **served)).seconds == 1500
    assert stall_limit(tiny_config(tiny, tmp_path, tmp_path, generate__stall_minutes=0, **served)).seconds == 0


def test_rows_parts_and_steps_are_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("app.engine.progress.time.monotonic", lambda: now[0])
    rows, blank = RowCounter(), Member("h", 1)
    acts: list[Callable[[], None]] = [
        lambda: rows.began(4), lambda: rows.started("a"), lambda: rows.finished(4, "a", 9),
        rows.moved, lambda: rows.settled(4),
    ]  # fmt: skip
    seen = []
    for act in acts:
        now[0] += 10
        assert rows.stands(blank).idle_s >= 10
        act()
        seen.append(rows.stands(blank))
    assert {m.idle_s for m in seen} == {0.0}
    assert [m.doing for m in seen] == [STORES, WORKS, STORES, STORES, RESTS]
    assert seen[3].parts == ((4, 30.0),) and (seen[-1].rows, seen[-1].tokens, seen[-1].works_s) == (1, 9, 30.0)


# What the driver makes of it


@dataclass
class Driver:
    """A watch over engines that are made up."""

    watch: Watch
    store: Store
    reports: list[tuple[float, Member]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def look(self, standing: Standing = HALF) -> Live:
        self.watch.look(standing)
        live = read_live(self.store, "generate")
        assert live is not None
        return live


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    def end(member: Member) -> bool:
        made.ended.append(member.name)
        return member.pid != 404  # a process that is not there any more

    store = Store(str(tmp_path))
    made = Driver(Watch(store, None, 3, LIMIT, end), store)
    monkeypatch.setattr(made.watch, "_ask", lambda: made.reports)
    return made


def committed(part: int, seconds: float, **changes: Any) -> PartEntry:
    return PartEntry(**{**outcome_of(part, "k", 10), "seconds": seconds, **changes})


def test_a_stuck_engine_is_ended_and_named_in_one_sentence(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    driver.reports = [
        (1.0, replace(BUSY, idle_s=665, parts=((3, 700.0), (5, 10.0)))),
        (1.0, replace(BUSY, pid=8, idle_s=5)),
        (2000.0, replace(BUSY, pid=404)),  # ended by itself
    ]
    live = driver.look()
    assert driver.ended == ["gpu1:7", "gpu1:404"]
    (said,) = [r.getMessage() for r in caplog.records if "stuck" in r.getMessage()]
    assert re.fullmatch(
        r"generate: stuck: engine gpu1:7 \(process 7 on node gpu1\) has made no step and ended no row for 11.1 min,"
        r" since \d\d:\d\d:\d\d UTC, with parts 3, 5 under way; its process is ended and another engine makes what it"
        r" held",
        said,
    )
    assert live.failures[0] in said
    assert "1 engine process(es) ended or fell silent: gpu1:404" in live.failures
    assert [m.split(" ")[1] for m in live.members] == ["gpu1:8"]


def test_an_engine_that_cannot_be_ended_does_not_end_the_watch(
    driver: Driver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(member: Member) -> bool:
        raise ConnectionError("the node is gone")

    monkeypatch.setattr(driver.watch, "_end", fail)
    driver.reports = [(1.0, replace(BUSY, idle_s=650))]
    assert driver.look().words == HALF.words
    assert "cannot be ended (the node is gone)" in caplog.text


def test_what_the_stage_waits_for(driver: Driver) -> None:
    assert driver.look().waiting_for == "3 of 3 engines have no place yet: Ray starts them where there is room"
    driver.reports = [(1.0, replace(BUSY, doing=STARTS, idle_s=90)), (1.0, replace(BUSY, pid=8))]
    waits = driver.look().waiting_for
    assert waits is not None and waits.startswith("1 of 3 engines have no place yet")
    assert waits.endswith("1 of 3 engines start (for 90.0 s)")
    driver.reports = [(1.0, replace(BUSY, pid=pid)) for pid in (1, 2, 3)]
    assert driver.look().waiting_for is None
    driver.reports[0] = (1.0, replace(BUSY, pid=1, load=Load(1, 0, 4, None, "servers: none has answered for 40 s (x)")))
    assert driver.look().waiting_for == "servers: none has answered for 40 s (x)"


def test_stragglers_rejects_and_room_are_told(driver: Driver) -> None:
    for part, seconds in enumerate((60.0, 62.0, 70.0)):
        rejects = [{"id": "x", "where": "f:1", "reason": "timeout", "detail": "secret text of a row"}] * (part == 1)
        driver.watch.committed(committed(part, seconds, rejects=rejects))
    fast = replace(BUSY, works_s=200, tokens=20_000, parts=((7, 30.0),), load=Load(9, 3, 12, 0.5))
    driver.reports = [
        (1.0, fast), (1.0, replace(fast, pid=8)), (1.0, replace(fast, pid=9, tokens=4_000, parts=((9, 300.0),))),
    ]  # fmt: skip
    live = driver.look()
    assert live.stragglers == [
        "engine gpu1:9: 20 tokens/s, the median is 100",
        "part 9 on gpu1:9: 300.0 s, the median is 62.0 s",
    ]
    assert live.failures == ["1 rows rejected (timeout 1)"]
    assert live.members[0] == "engine gpu1:7 works: 0 rows under way, 0 ended, 100 tokens/s, queue 12, KV cache 50%"
    assert live.disk is not None and "free (the run folder), about 0.0 kB still to be written" in live.disk
    assert "secret" not in Path(driver.store.full(live_path("generate"))).read_text()


def test_what_is_told_holds_no_password(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    tell(store, "generate", Live("w", "servers: http://me:pass@h/v1", failures=["?token=abc"] * 20))
    live = read_live(store, "generate")
    assert live is not None and live.waiting_for == "servers: http://***@h/v1"
    assert live.failures[0] == "?token=***" and live.failures[-1] == "and 4 more" and len(live.failures) == 17
    for garbage in (b"[1]", b"{}", b'{"words": 1}', b"x", b'{"words": "w", "at": "now"}'):
        store.write_bytes(live_path("generate"), garbage)
        assert read_live(store, "generate") is None
    forget(store, "generate")
    assert not store.exists(live_path("generate"))


# Status


@pytest.fixture
def begun(tiny: Path, tmp_path: Path) -> Path:
    """A run folder with ingest done."""
    config = tiny_config(tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(25)))
    run_pipeline(config, stages_up_to("ingest"))
    return tmp_path / "run"


def hold(run: Path, stage: str) -> None:
    """As a driver elsewhere would."""
    (run / "lease.json").write_text(json.dumps(holder(stage)))


def holder(stage: str) -> dict[str, Any]:
    return {"pid": 5, "host": "head:boot", "heartbeat": time.time(), "timeout_s": 60, "stage": stage, "token": "t"}


def test_status_says_how_a_running_stage_stands(begun: Path) -> None:
    store = Store(str(begun))
    hold(begun, "generate")
    assert not any(" now " in line for line in status_lines(str(begun), []))
    assert any(line.startswith("  disk left ") for line in status_lines(str(begun), []))
    tell(
        store,
        "generate",
        Live("1/3 parts", "2 engines start", ["part 1 is slow"], ["3 rows"], ["engine a"], "9 GB free"),
    )
    tail = status_lines(str(begun), [])[-6:]
    assert [re.sub(r"\(\d+ s ago\)", "(now)", line) for line in tail] == [
        "  now       generate: 1/3 parts (now)", "  waits for 2 engines start", "  straggler part 1 is slow",
        "  failure   3 rows", "  disk left 9 GB free", "    engine a",
    ]  # fmt: skip
    tell(store, "generate", Live("1/3 parts", at=time.time() - 600))
    assert any("silent    generate has told nothing for 10.0 min" in line for line in status_lines(str(begun), []))
    hold(begun, "vocab")  # what generate left says nothing of vocab
    assert not any("1/3 parts" in line for line in status_lines(str(begun), []))


def test_status_of_a_stopped_run_says_how_far_it_came_and_why_it_stopped(begun: Path) -> None:
    tell(Store(str(begun)), "generate", Live("2/3 parts", at=1e9))
    (begun / "logs" / "driver-99999999T000000-1.log").write_text("x\n2026 ERROR stopped: the disk is full\n")
    lines = status_lines(str(begun), [])
    assert "  stopped   the disk is full" in lines
    assert "  came to   generate: 2/3 parts (2001-09-09 01:46 UTC)" in lines


def test_status_works_where_target_and_sources_are_not(begun: Path, tmp_path: Path) -> None:
    text = (begun / "config.yaml").read_text()
    (begun / "config.yaml").write_text(re.sub(r"model: .*", "model: /nowhere/target", text))
    (tmp_path / "r.jsonl").unlink()
    lines = status_lines(str(begun), [])
    assert re.search(r"ingest +done .* not compared with what lies outside the run folder", lines[1])
    assert lines[2].split()[:2] == ["generate", "missing"] and "0 of 3 parts are committed" in lines[2]


def test_watching_ends_with_the_driver(begun: Path) -> None:
    hold(begun, "generate")
    tell(Store(str(begun)), "generate", Live("1/3 parts"))
    shown: list[str] = []

    def wait(seconds: float) -> None:
        if len(shown) == 2:
            (begun / "lease.json").unlink()
        elif shown:
            tell(Store(str(begun)), "generate", Live("2/3 parts"))

    watch(str(begun), [], shown.append, True, wait)
    assert "1/3 parts" in shown[0] and "2/3 parts" in shown[1] and shown[0].startswith("\x1b[H")
    assert len(shown) == 3 and "running" not in shown[2]


# A run folder in an object store


@dataclass(frozen=True)
class Bucket:
    """A run in it, and the driver's hand elsewhere: what it writes is unknown to this process's file system."""

    url: str

    def write(self, path: str, data: dict[str, Any] | None) -> None:
        """None: delete it."""
        import boto3

        bucket, _, root = self.url.removeprefix("s3://").partition("/")
        client, key = boto3.client("s3"), f"{root}/{path}"
        if data is None:
            client.delete_object(Bucket=bucket, Key=key)
        else:
            client.put_object(Bucket=bucket, Key=key, Body=json.dumps(data).encode())

    def hold(self, stage: str) -> None:
        self.write("lease.json", holder(stage))

    def tell(self, stage: str, live: Live) -> None:
        self.write(live_path(stage), asdict(live))


@pytest.fixture
def far(tiny: Path, tmp_path: Path, s3: str) -> Bucket:
    """A run folder with ingest done, of a driver that was interrupted once."""
    config = tiny_config(tiny, f"{s3}/folder/run", write_rows(tmp_path / "r.jsonl", prompts(25)))
    run_pipeline(config, stages_up_to("ingest"))
    return Bucket(config.run_dir)


def test_status_of_a_run_in_a_bucket(far: Bucket, draftmill_here: Command) -> None:
    idle = draftmill_here("status", far.url)
    assert idle.returncode == 0, idle.stderr
    lines = idle.stdout.splitlines()
    assert lines[0] == f"run {far.url}" and re.match(r"  ingest +done ", lines[1])
    assert "disk left" not in idle.stdout  # there is none
    far.hold("generate")
    far.tell("generate", Live("1/3 parts", "2 engines start", ["part 1 is slow"], ["3 rows"], ["engine a"]))
    said = draftmill_here("status", f"{far.url}/").stdout  # as people write a folder
    assert re.search(r"running: pid 5 on head, last heartbeat \d+ s ago\n", said)
    assert "0 of 3 parts are committed" in said and re.search(r"  generate +running", said)
    assert re.search(r"  now +generate: 1/3 parts \(\d+ s ago\)\n  waits for 2 engines start\n", said)
    far.write("lease.json", None)
    far.write("logs/driver-99999999T000000-1.log", {"any": "thing"})
    assert "  came to   generate: 1/3 parts" in draftmill_here("status", far.url).stdout


def test_watching_a_run_in_a_bucket_sees_what_others_write(far: Bucket) -> None:
    far.hold("generate")
    far.tell("generate", Live("1/3 parts"))
    shown: list[str] = []

    def wait(seconds: float) -> None:
        if len(shown) == 1:
            far.tell("generate", Live("2/3 parts"))
        elif len(shown) == 2:
            far.hold("vocab")
            far.write(live_path("generate"), None)
        else:
            far.write("lease.json", None)

    watch(far.url, [], shown.append, False, wait)
    assert ["1/3 parts" in shown[0], "2/3 parts" in shown[1]] == [True, True]
    assert "vocab     running" in shown[2] and " now " not in shown[2]
    assert len(shown) == 4 and "running" not in shown[3]


def test_watching_endures_a_store_that_fails_for_a_while(far: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    far.hold("generate")
    shown: list[str] = []
    read = Store.read_bytes

    def fails(store: Store, path: str) -> bytes:
        raise UserError("the store cannot be reached")

    def wait(seconds: float) -> None:
        monkeypatch.setattr(Store, "read_bytes", fails if len(shown) == 1 else read)
        if len(shown) == 3:
            far.write("lease.json", None)

    watch(far.url, [], shown.append, False, wait)
    assert shown[1] == f"{far.url} cannot be read for the moment: the store cannot be reached"
    assert "running: pid 5" in shown[0] and "running" not in shown[-1]
    monkeypatch.setattr(Store, "read_bytes", fails)
    with pytest.raises(UserError, match="cannot be reached"):
        watch(far.url, [], shown.append, False, wait)


def test_a_place_in_a_bucket_without_a_run_is_a_sentence(s3: str, draftmill_here: Command) -> None:
    for flags in ((), ("--watch",)):
        done = draftmill_here("status", f"{s3}/nothing", *flags)
        assert done.returncode == 1 and f"{s3}/nothing is no run folder: it has no config.yaml" in done.stderr
        done = draftmill_here("status", "s3://elsewhere/run", *flags)
        assert done.returncode == 1 and "Traceback" not in done.stderr and "s3://elsewhere/run" in done.stderr


# Training that stands still

STANDING_WORKER = """
import sys, threading
from app.storage import Store
from app.train.pulse import Pulse

def collective(): threading.Event().wait()
def read_part(): threading.Event().wait()

rank = int(sys.argv[2])
with Pulse(Store(sys.argv[1]), "train", 1.0, rank, ["gpu1", "gpu2", "gpu3"], settle_s=4.0) as pulse:
    pulse.beat(11, 90, "trains")
    pulse.beat(12, 90, "trains")
    (collective, read_part)[rank]()
"""


def test_workers_that_stand_say_where_and_end_the_stage(tmp_path: Path) -> None:
    Store(str(tmp_path)).write_json("train/inputs.json", {})
    workers = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(STANDING_WORKER), str(tmp_path), str(rank)], cwd=ROOT)
        for rank in (0, 1)
    ]
    assert [worker.wait(60) for worker in workers] == [1, 1]
    said = json.loads((tmp_path / "train" / FAULT).read_text())["message"]
    assert re.search(
        r"stuck: no step has ended for \d\.\d s \(train.stall_minutes\), after step 12 of 90 \(trains\)", said
    )
    assert "worker 0 (gpu1) stands in wait (threading.py:" in said
    assert "worker 1 (gpu2) stands in wait" in said and "worker 2 (gpu3) says nothing" in said
    for rank, name in enumerate(("collective", "read_part")):
        assert f"in {name}" in (tmp_path / "train" / "stall" / f"worker-{rank}.txt").read_text()


def test_a_worker_that_moves_is_left_alone_and_tells_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.train.pulse.EVERY_S", 0.0)
    ended: list[int] = []
    with Pulse(Store(str(tmp_path)), "train", 2.0, 0, ["gpu1"], end=ended.append) as pulse:
        for step in range(30):
            pulse.beat(step, 100, "trains")
            pulse.log({"loss": 2.5, "data_wait_share": 0.8}, step)
            time.sleep(0.1)
        live = pulse.live()
    assert not ended and not (tmp_path / "train" / FAULT).exists()
    assert re.fullmatch(r"step 29 of 100, loss 2\.500, .* left", live.words)
    assert live.waiting_for == "data, 80 % of the time"
    assert read_live(Store(str(tmp_path)), "train") is not None


# A whole run, in a Ray of its own


def test_the_dashboard_is_the_one_of_our_metrics() -> None:
    file = ROOT / "deploy" / "grafana" / "draftmill.json"
    assert json.loads(file.read_text()) == grafana_dashboard.dashboard()
    drawn = {name for panel in grafana_dashboard.dashboard()["panels"] for name in names_in(json.dumps(panel))}
    assert drawn == {metric.exported for metric in METRICS.values()}
    assert not any(
        "<" in target["expr"] for panel in grafana_dashboard.dashboard()["panels"] for target in panel["targets"]
    )


def test_a_metric_that_cannot_be_told_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.util.metrics", None)
    meter = Meter("s3://b/run", "generate", "driver")
    meter.add("parts", 1)
    meter.set("engines", 2)


def names_in(text: str) -> set[str]:
    return set(re.findall(r"ray_draftmill_\w+", text))


@dataclass
class Seen:
    """What was seen of a run from outside while it went on."""

    config: Config
    scraped: str = ""  # every answer of Ray's metrics endpoint
    shown: list[str] = field(default_factory=list)  # by `draftmill status --watch`
    log: list[str] = field(default_factory=list)
    actors: list[dict[str, Any]] = field(default_factory=list)  # as Ray lists them


@pytest.fixture(scope="module")
def seen(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """Generate with an engine that hangs once, then training."""
    folder = tmp_path_factory.mktemp("watched")
    config = tiny_config(
        tiny, folder / "run", write_rows(folder / "r.jsonl", prompts(24)),
        storage__rows_per_part=6, generate__engine="tests.simulated:SimulatedEngine", generate__stall_minutes=0.15,
        generate__engine_args={
            "SIM_PART_S": 1.2, "SIM_ROWS": 6, "SIM_LOG": str(folder / "log"), "SIM_REFUSES": "day 7",
            "SIM_HANGS_ONCE": str(folder / "hung"),
        },
    )  # fmt: skip
    found = Seen(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_metrics_report_interval_ms", "500")
        patch.setattr("app.engine.progress.LINE_S", 1.0)
        patch.setattr("app.engine.progress.log.propagate", True)
        connect(RayConfig(num_cpus=2, dashboard=False, object_store_gib=0.1))
        try:
            _run_watched(found)
        finally:
            disconnect()
    yield found


def _run_watched(found: Seen) -> None:
    import ray

    handler = logging.Handler()
    handler.emit = lambda record: found.log.append(record.getMessage())  # type: ignore[method-assign]
    node = ray.nodes()[0]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(0.5):
            with urllib.request.urlopen(url, timeout=10) as answer:
                found.scraped += "".join(f"{x}\n" for x in answer.read().decode().splitlines() if "draftmill" in x)

    def look() -> None:
        while not (Path(found.config.run_dir) / "config.yaml").exists():
            time.sleep(0.1)
        watch(found.config.run_dir, [], found.shown.append, False, lambda seconds: time.sleep(0.5))

    threads = [threading.Thread(target=target, daemon=True) for target in (scrape, look)]
    logging.getLogger("draftmill").addHandler(handler)
    for thread in threads:
        thread.start()
    try:
        run_pipeline(found.config, stages_up_to("train"))
        found.actors = list(ray._private.state.actors().values())
        time.sleep(1.5)  # for the last values to be exported
    finally:
        over.set()
        logging.getLogger("draftmill").removeHandler(handler)
    for thread in threads:
        thread.join(60)


@pytest.mark.cluster
def test_an_engine_that_hangs_is_ended_and_its_part_made_again(seen: Seen) -> None:
    hung = int((Path(seen.config.run_dir).parent / "hung").read_text())
    (said,) = [m for m in seen.log if "stuck" in m]
    assert f"process {hung} on node" in said and "has made no step and ended no row for" in said and "with part" in said
    entries = load_entries(context(seen.config))
    assert [e.part for e in entries] == [0, 1, 2, 3] and sum(e.rows_in for e in entries) == 24
    assert [r["reason"] for e in entries for r in e.rejects] == ["simulated"]
    pids = {line.split()[0] for line in (Path(seen.config.run_dir).parent / "log").read_text().splitlines()}
    assert len(pids) == 2 and str(hung) in pids


@pytest.mark.cluster
def test_every_metric_of_the_dashboard_is_scraped_from_ray(seen: Seen) -> None:
    file = (ROOT / "deploy" / "grafana" / "draftmill.json").read_text()
    scraped = names_in("".join(x for x in seen.scraped.splitlines(keepends=True) if not x.startswith("#")))
    queried = {name for panel in json.loads(file)["panels"] for name in names_in(json.dumps(panel))}
    assert len(queried) == len(METRICS) and queried - scraped == set()
    for label in ("run", "source", "reason", "SessionName"):  # that the queries filter and group by
        assert re.search(rf'ray_draftmill_rejects_total{{[^}}]*\b{label}="', seen.scraped)
    last = dict(re.findall(r'(ray_draftmill_\w+){[^}]*source="driver"[^}]*} (\S+)', seen.scraped))
    assert last["ray_draftmill_parts_total"] == "4.0" and last["ray_draftmill_stalls"] == "1.0"
    assert float(last["ray_draftmill_bytes_written_total"]) == sum(e.bytes for e in load_entries(context(seen.config)))


@pytest.mark.cluster
def test_ray_shows_actors_by_the_stages_name(seen: Seen) -> None:
    names = {str(actor.get("ActorClassName")) for actor in seen.actors}
    assert "generate_board" in names
    assert any("generate" in name and "Map" in name for name in names), names


@pytest.mark.cluster
def test_the_run_was_seen_from_its_folder_alone(seen: Seen) -> None:
    shown = "\n".join(seen.shown)
    assert re.search(r"now +generate: [0-4]/4 parts, \d+/24 rows", shown)
    assert re.search(r"waits for 1 of 1 engines (have no place yet|start)", shown)
    assert re.search(r"failure +engine \S+ \(process \d+ on node", shown)
    assert re.search(r"now +train: (step \d+ of \d+|no worker has begun yet)", shown)
    assert "running" not in seen.shown[-1] and re.search(r"train +done", seen.shown[-1])
    run = Path(seen.config.run_dir)
    assert not list(run.rglob("live.json"))
    assert save_config(seen.config, run.parent / "c.yaml").exists() and status.status_lines(
        str(run.parent / "c.yaml"), []
    )
