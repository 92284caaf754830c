"""A run on a real cluster of several nodes: submitted, watched, let alone while nodes join, go and die, and resumed."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray

from app import job_server
from app.captured import load_entries
from app.config import Config
from app.lease import process_start, read_holder
from app.parts import PARTS
from app.status import status_lines
from app.storage import Store
from tests.pipelines.test_generate_faults import check_sums, wait_until
from tests.ray_head import RAY
from tests.ray_nodes import Node, Nodes, running_nodes
from tests.runs import ROOT, context, prompts, save_config, tiny_config, write_rows

JOINED_S = 60.0  # in which a node that joined must be working
FLIGHT, ROWS = 2, 10  # parts an engine works on at once, rows of a part
PARTS_IN_ALL, PARTS_OF_SECOND = 100, 12
WORK = '--resources={"WORK": 1}'  # a node of the kind that engines ask for
QUICK = '--system-config={"health_check_period_ms": 500}'  # a node that does not answer five times is dead to Ray
EVENT = re.compile(r"^(\S+ \S+) \w+ generate: node \S+ \((\w{8})\) (joined|left|is told to go)", re.MULTILINE)


@dataclass
class Run:
    """A run folder, and what its simulated engines have written of themselves."""

    config: Config
    log: Path
    homes: dict[int, str] = field(default_factory=dict)  # engine -> node, as seen while it lived

    @property
    def folder(self) -> Path:
        return Path(self.config.run_dir)

    def engines(self) -> set[int]:
        return {pid for pid, _ in self._lines()}

    def answers(self, **nodes: Node) -> Counter[str]:
        """Requests answered by the engines of each node; those of engines that were not seen on one of `nodes`, in
        this call or earlier, by ``."""
        counts: Counter[str] = Counter()
        for pid, _ in self._lines():
            if pid not in self.homes and (home := [name for name, node in nodes.items() if node.holds(pid)]):
                self.homes[pid] = home[0]
            counts[self.homes.get(pid, "")] += 1
        return counts

    def settled(self, node: str) -> int:
        """The node's answers, once two and a half seconds have brought no further one."""
        before = -1
        while before != (now := self.answers()[node]):
            before = now
            time.sleep(2.5)
        return now

    def first_answer(self, node: str) -> float:
        """When the first request was taken up on `node`, as time.time()."""
        return min(begun for pid, begun in self._lines() if self.homes.get(pid) == node)

    def _lines(self) -> list[tuple[int, float]]:
        words = [line.split() for line in self.log.read_text().splitlines()] if self.log.exists() else []
        return [(int(pid), float(begun)) for pid, begun, _ in words]

    def commits(self) -> dict[str, int]:
        """Committed parts, with the time each was written."""
        return {p.name: p.stat().st_mtime_ns for p in (self.folder / PARTS).glob("part-?????.json")}

    def said(self) -> str:
        """What its drivers logged into the folder."""
        return "".join(p.read_text() for p in sorted((self.folder / "logs").glob("driver-*.log")))

    def until(self, what: Callable[[], Any]) -> None:
        """Wait for it; the run must be under way then."""
        wait_until(lambda: bool(what()) or not self._driven())
        assert self._driven(), self.said()[-3000:]

    def _driven(self) -> bool:
        return read_holder(Store(str(self.folder))) is not None

    def events(self) -> list[tuple[float, str, str]]:
        """Nodes that came and went, by the driver's log: time.time(), the first of its id, what it did."""
        form = "%Y-%m-%d %H:%M:%S,%f"
        found = EVENT.findall(self.said())
        return [(datetime.datetime.strptime(at, form).timestamp(), node, what) for at, node, what in found]

    def written(self) -> dict[str, list[tuple[float, int]]]:
        """By Ray's id of a node: when each of its parts was committed, as time.time(), and by which process."""
        parts: dict[str, list[tuple[float, int]]] = {}
        for entry in load_entries(context(self.config)):
            at = datetime.datetime.fromisoformat(entry.writer["at"]).timestamp()
            parts.setdefault(entry.writer["node"], []).append((at, entry.writer["pid"]))
        return parts


@dataclass(frozen=True)
class Desk:
    """Where people sit who submit: a checkout, the cluster's token, and the address of its dashboard."""

    checkout: Path
    nodes: Nodes

    @property
    def address(self) -> str:
        return self.nodes.env["RAY_ADDRESS"]

    def draftmill(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.finished([sys.executable, "-m", "app", *words], self.nodes.env_without_address)

    def finished(self, line: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(line, cwd=self.checkout, env=env, capture_output=True, text=True, timeout=300)

    @contextmanager
    def looking(self, log: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
        """The command line in a process of its own, which Ctrl-C reaches."""
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "app", *words], cwd=self.checkout, env=self.nodes.env_without_address,
                stdout=out, stderr=subprocess.STDOUT, text=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a shell's background
            )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def interrupted(process: subprocess.Popen[str], log: Path) -> str:
    """What it printed until Ctrl-C, which it takes for no fault."""
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0, log.read_text()
    return log.read_text()


def a_run(tiny: Path, folder: Path, name: str, parts: int) -> Run:
    """A run whose engines, one a GPU, take two seconds for a part until there is a file `NAME.fast`."""
    log = folder / f"{name}.log"
    config = tiny_config(
        tiny, folder / name, write_rows(folder / f"{name}.jsonl", prompts(ROWS * parts)),
        generate__engine="tests.simulated:SimulatedEngine",
        generate__engine_args={
            "SIM_PART_S": 2.0, "SIM_ROWS": ROWS, "SIM_LOG": str(log), "SIM_FAST": str(folder / f"{name}.fast"),
            "SIM_REFUSES": "of day 17",
        },
        generate__parts_in_flight=FLIGHT, generate__resources={"WORK": 1}, generate__max_error_share=0.2,
    )  # fmt: skip
    return Run(config, log)


def added(nodes: Nodes, *kinds: str) -> list[Node]:
    """Nodes of one GPU that start at the same time."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda kind: nodes.add(1, 1, *([kind] if kind else [])), kinds))


def go_fast(run: Run) -> None:
    run.folder.with_suffix(".fast").touch()


def told_to_go(nodes: Nodes, node: Node) -> None:
    """The notice that a spot instance gets, with 30 seconds to leave, by Ray's own command on that node."""
    line = [
        RAY, "drain-node", f"--address={nodes.address}", f"--node-id={node.name}",
        "--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot", "--deadline-remaining-seconds=30",
    ]  # fmt: skip
    subprocess.run(line, env=nodes.env_without_address, check=True, capture_output=True, timeout=60)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    root = tmp_path / "checkout"
    for folder in ("app", "tests", "deploy"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    with running_nodes("--num-cpus=1", QUICK) as nodes:
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", os.path.join(nodes.env["HOME"], ".ray", "auth_token"))
        yield Desk(root, nodes)


@pytest.mark.cluster
@pytest.mark.timeout(500)
def test_a_submitted_run_outlives_nodes_and_followers_and_one_that_is_stopped_goes_on(
    tiny: Path, tmp_path: Path, desk: Desk
) -> None:
    run = a_run(tiny, tmp_path, "run", PARTS_IN_ALL)
    save_config(run.config, desk.checkout / "run.yaml")
    first, spot = added(desk.nodes, WORK, WORK)
    job = watched_and_let_alone(desk, run, tmp_path, first, spot)
    kept, finished, late = through_all_that_happens_to_nodes(desk, run, first, spot)
    cluster = job_server.find(desk.address)
    client = job_server.client(cluster)
    wait_until(lambda: client.get_job_status(job).is_terminal())
    assert str(client.get_job_status(job)) == "SUCCEEDED", run.said()[-3000:]

    refused = sum("of day 17" in row["prompt"] for row in prompts(ROWS * PARTS_IN_ALL))
    check_sums(run.config, ROWS * PARTS_IN_ALL, {"simulated": refused})
    assert kept.items() <= run.commits().items()
    answers = run.answers(first=first)
    assert answers["spot"] == finished and not answers["other"]
    assert 0 <= answers.total() - ROWS * PARTS_IN_ALL <= FLIGHT * ROWS  # made again: what the killed node had in flight
    check_timeline(run, {"first": first, "spot": spot, "late": late}, finished)
    assert any(re.match(r" +generate +done", line) for line in status_lines(str(run.folder), []))
    stopped_and_resumed(desk, a_run(tiny, tmp_path, "second", PARTS_OF_SECOND))


def watched_and_let_alone(desk: Desk, run: Run, folder: Path, first: Node, spot: Node) -> str:
    """The job's id; who followed it has gone."""
    submit = ("submit", "run.yaml", "--stage", "generate", "--address", desk.address, "--follow")
    log, shown = folder / "followed", folder / "shown"
    with desk.looking(log, *submit) as follower:
        wait_until(lambda: "Running entrypoint" in log.read_text() or follower.poll() is not None)
        job = next(w for w in log.read_text().split() if w.startswith("raysubmit_"))
        wait_until(lambda: run.folder.joinpath("config.yaml").exists())
        with desk.looking(shown, "status", str(run.folder), "--watch") as watcher:
            second = desk.draftmill(*submit)  # meanwhile the engines start
            assert second.returncode == 1 and f"{job} works on {run.folder} already (RUNNING)" in second.stderr
            run.until(lambda: min(run.answers(first=first)["first"], run.answers(spot=spot)["spot"]) > ROWS)
            wait_until(lambda: job_server.find(desk.address).gpus == (2.0, 2.0), 30)  # Ray's report comes seconds late
            cluster = job_server.find(desk.address)
            assert (cluster.ray, cluster.python) == (ray.__version__, platform.python_version())
            assert re.search(r"running: pid \d+ on .*\n(.*\n)*  generate +running", interrupted(watcher, shown))
        said = interrupted(follower, log)
    assert f"generate: {PARTS_IN_ALL} parts to make on 2 engine(s)" in said  # as it was logged on the cluster
    assert f"{job} goes on; follow it again with: RAY_AUTH_MODE=token ray job logs" in said
    return job


def through_all_that_happens_to_nodes(
    desk: Desk, run: Run, first: Node, spot: Node
) -> tuple[dict[str, int], int, Node]:
    """What was committed when a node died, the answers of the one that was told to go, and the one that died."""
    seen = run.commits()
    other, late = added(desk.nodes, "", WORK)  # the GPU of `other` is of another kind
    run.until(lambda: run.answers(late=late, other=other)["late"] > ROWS)
    assert run.first_answer("late") - late.started < JOINED_S
    assert seen.items() < run.commits().items()  # the job went on without its follower
    shown = "\n".join(status_lines(str(run.folder), []))
    assert re.search(rf"now +generate: \d+/{PARTS_IN_ALL} parts, \d+/{ROWS * PARTS_IN_ALL} rows, .* s ago", shown)

    told_to_go(desk.nodes, spot)  # its parts in flight are finished, and it gets no more
    run.until(lambda: "is told to go" in run.said())
    kept = run.commits()
    late.kill()
    finished = run.settled("spot")
    assert finished % ROWS == 0
    spot.terminate()
    run.until(lambda: run.said().count(" left; its parts in flight are made again") == 2)
    said = run.said()
    assert "joined with 1 GPUs and 1 CPUs" in said and "has not what an engine asks for, and gets none" in said
    events = [(node, what) for _, node, what in run.events()]
    assert sorted(events[:2]) == sorted((node.name[:8], "joined") for node in (other, late))
    assert events[2] == (spot.name[:8], "is told to go")
    assert sorted(events[3:]) == sorted((node.name[:8], "left") for node in (spot, late))
    go_fast(run)
    return kept, finished, late


def check_timeline(run: Run, nodes: dict[str, Node], of_spot: int) -> None:
    """The parts' entries and the log say together who was there when, and who wrote what."""
    written, at = run.written(), {(node, what): at for at, node, what in run.events()}
    assert written.keys() == {node.name for node in nodes.values()}
    for name, node in nodes.items():
        assert {run.homes.get(pid, name) for _, pid in written[node.name]} == {name}
    late, spot = nodes["late"], nodes["spot"]
    assert len(written[spot.name]) == of_spot / ROWS
    assert max(at for at, _ in written[spot.name]) < at[spot.name[:8], "left"]
    joined, left = at[late.name[:8], "joined"], at[late.name[:8], "left"]
    assert late.started < joined < late.started + JOINED_S
    assert all(late.started < made < left for made, _ in written[late.name])
    assert max(at for at, _ in written[nodes["first"].name]) > left  # it made what the others no longer could


def stopped_and_resumed(desk: Desk, run: Run) -> None:
    """A second run: ended by `draftmill stop`, and taken up again by Ray's own line."""
    save_config(run.config, desk.checkout / "second.yaml")
    sent = desk.draftmill("submit", "second.yaml", "--stage", "generate", "--address", desk.address)
    assert sent.returncode == 0, sent.stderr
    job = re.findall(r"submitted (raysubmit_\w+)", sent.stdout)[0]
    wait_until(lambda: len(run.commits()) >= 2)
    seen = run.commits()
    stopped = desk.draftmill("stop", "second.yaml", "--address", desk.address)
    assert stopped.returncode == 0, stopped.stderr
    assert f"{job}: STOPPED" in stopped.stdout
    assert not (run.folder / "lease.json").exists()  # it let the folder go, and was not just killed
    engines = run.engines()
    assert len(engines) == 1
    wait_until(lambda: not any(process_start(pid) for pid in engines), 30)
    kept = run.commits()
    assert seen.items() <= kept.items() and len(kept) < PARTS_OF_SECOND

    go_fast(run)
    plain = [
        RAY, "job", "submit", "--runtime-env", "deploy/runtime-env.yaml", "--", "python", "-m", "app", "generate",
        "second.yaml",
    ]  # fmt: skip
    again = desk.finished(plain, desk.nodes.env)
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-2000:]
    assert f"generate: resumed, {len(kept)} of {PARTS_OF_SECOND} parts are committed" in again.stdout
    assert kept.items() <= run.commits().items()
    refused = sum("of day 17" in row["prompt"] for row in prompts(ROWS * PARTS_OF_SECOND))
    check_sums(run.config, ROWS * PARTS_OF_SECOND, {"simulated": refused})
