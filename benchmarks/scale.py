"""What stands around the engines: driver, Ray Data and the bookkeeping of parts, measured without a model.

    python benchmarks/scale.py actors --actors 64 --part-seconds 30 --parts 4    real actors on a local Ray
    python benchmarks/scale.py driver --actors 1024 --parts 20000               the driver's loop, actors simulated
    python benchmarks/scale.py plan --parts 156250                             ten million rows: memory, resume, start

Engines sleep for a part's time, one part at a time, with two parts in flight. Up to 8 actors are the real PartWorker
around an engine that sleeps; more are actors of the same kind without torch, which would not fit a small machine.
Efficiency is the engines' busy share of the steady state: from the last engine's first part to the first engine's last.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import os
import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from app.budget import Budget
from app.cluster import connect, disconnect
from app.config import Config, RayConfig
from app.parts import PARTS, PartEntry, committed_parts, write_entry
from app.pipeline import StageContext, run_pipeline
from app.pipelines import generate
from app.sizing import Engines
from app.stages import stages_up_to
from app.storage import Store
from tests.runs import context, prompts, tiny_config, write_rows
from tests.simulated import LightConfig, LightWorker, outcome_of
from tests.tiny import make_tiny

ROWS = 8  # of a part made by the real PartWorker
LIGHT_ABOVE = 8  # actors


def resident() -> float:
    """MiB this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


@dataclass(frozen=True)
class Steady:
    """The engines' time in the steady state."""

    engines: int
    seconds: float
    parts: float  # ended in it
    efficiency: float

    @property
    def overhead_ms(self) -> float:
        """Milliseconds per part that an engine did not work."""
        return 1000 * self.seconds * self.engines * (1 - self.efficiency) / max(self.parts, 1)


def steady(log: Path, per_part: int) -> Steady:
    """Of a log of stretches of work, `per_part` of them to a part."""
    work: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for line in log.read_text().splitlines():
        pid, begun, ended = line.split()
        work[pid].append((float(begun), float(ended)))
    start = max(min(b for b, _ in stretches) for stretches in work.values())
    end = min(max(e for _, e in stretches) for stretches in work.values())
    inside = [(max(b, start), min(e, end)) for w in work.values() for b, e in w if e > start and b < end]
    busy = sum(e - b for b, e in inside)
    ended = sum(start < e <= end for w in work.values() for _, e in w) / per_part
    return Steady(len(work), end - start, ended, busy / (len(work) * (end - start)))


def make_parts(ctx: StageContext, parts: int, rows: int) -> tuple[dict[int, PartEntry], float]:
    """Run the driver of the generate stage over `parts` parts; the entries and the seconds."""
    keys = {part: f"{part:024d}" for part in range(parts)}
    valid: dict[int, PartEntry] = {}
    begun = time.monotonic()
    budget = Budget.of(ctx.config.generate, 0, None)
    generate._generate_parts(ctx, list(keys), keys, valid, parts * rows, budget)
    return valid, time.monotonic() - begun


@contextlib.contextmanager
def light_actors(actors: int, part_s: float, log: Path) -> Iterator[None]:
    """The generate stage with actors that hold no torch."""
    engines = Engines(actors, 1, "a measurement")

    def config(ctx: StageContext, *others: Any) -> LightConfig:
        return LightConfig(ctx.run.url, part_s, str(log))

    with (
        mock.patch.object(generate, "PartWorker", LightWorker),
        mock.patch.object(generate, "_worker_config", config),
        # These parts have no rows to look at.
        mock.patch.object(generate, "_preflight", lambda *others: contextlib.nullcontext()),
        mock.patch.object(generate, "_engines", lambda ctx, parts: (engines, False)),
    ):
        yield


def folder_config(folder: Path, rows: int, **changes: Any) -> Config:
    target = make_tiny(folder / "tiny")
    source = write_rows(folder / "rows.jsonl", prompts(rows))
    return tiny_config(target, folder / "run", source, evaluate__holdout=0, storage__rows_per_part=ROWS, **changes)


def measure_actors(actors: int, part_s: float, parts_each: int) -> None:
    light, parts = actors > LIGHT_ABOVE, actors * parts_each
    os.environ.setdefault("RAY_worker_register_timeout_seconds", "600")  # dozens of processes start on two cores
    os.environ.setdefault("RAY_worker_maximum_startup_concurrency", "8")
    with tempfile.TemporaryDirectory(prefix="draftmill-scale-") as name:
        folder, log = Path(name), Path(name, "work.log")
        simulated = {"SIM_PART_S": part_s, "SIM_ROWS": ROWS, "SIM_LOG": str(log)}
        config = folder_config(
            folder, 8 if light else parts * ROWS, ray__num_cpus=actors, ray__engine_cpus=1,
            generate__replicas=actors, generate__engine="tests.simulated:SimulatedEngine",
            generate__engine_args=simulated,
        )  # fmt: skip
        connect(RayConfig(num_cpus=actors, dashboard=False, object_store_gib=0.2))
        try:
            if light:
                with light_actors(actors, part_s, log):
                    make_parts(context(config), parts, ROWS)
            else:
                run_pipeline(config, stages_up_to("generate"))
        finally:
            disconnect()
        found = steady(log, 1 if light else ROWS)
    print(
        f"| {found.engines} {'light' if light else 'real'} | {part_s:g} s | {found.parts:.0f} | {found.seconds:.0f} s |"
        f" {found.efficiency:.3f} | {found.overhead_ms:.0f} ms | {peak():.0f} MiB |",
        flush=True,
    )


class FakeActors:
    """A dataset of outcomes as `actors` engines would end them, two parts in flight each; time passes at once."""

    def __init__(self, items: list[tuple[int, str]], actors: int) -> None:
        self._items, self._actors = items, actors

    def iter_batches(self, **how: Any) -> Iterator[dict[str, list[str]]]:
        under_way = [
            (30.0 + actor / self._actors, part, key)
            for actor, (part, key) in enumerate(self._items[: 2 * self._actors])
        ]
        heapq.heapify(under_way)
        for part, key in [*self._items[2 * self._actors :], *[(-1, "")] * len(under_way)]:
            at, done, done_key = heapq.heappop(under_way)
            yield {"outcome": [json.dumps(outcome_of(done, done_key))]}
            if part >= 0:
                heapq.heappush(under_way, (at + 30.0, part, key))


def measure_driver(actors: int, parts: int) -> None:
    with tempfile.TemporaryDirectory(prefix="draftmill-scale-") as name, light_actors(actors, 0, Path(name, "log")):
        ctx = context(folder_config(Path(name), 8))
        _ = ctx.target
        before = resident()
        with (
            mock.patch.object(generate, "connect", lambda config: None),
            mock.patch.object(generate, "_quiet_ray_data", lambda: None),
            mock.patch.object(generate, "start_board", lambda: None),
            mock.patch.object(generate, "wait_until_free", lambda *engines: None),
            mock.patch.object(generate, "_actors", lambda items, *others: FakeActors(items, actors)),
        ):
            valid, seconds = make_parts(ctx, parts, 64)
        assert len(valid) == parts
    print(
        f"| {actors} | {parts} | {1e6 * seconds / parts:.0f} us | {actors / 30 * seconds / parts:.4f} |"
        f" {resident() - before:.0f} MiB |",
        flush=True,
    )


def measure_plan(parts: int) -> None:
    """A run of `parts` parts that were all committed, and one whose first part comes back."""
    with tempfile.TemporaryDirectory(prefix="draftmill-scale-") as name:
        store = Store(str(Path(name, "run")))
        begun = time.monotonic()
        keys = {part: f"{part:024d}" for part in range(parts)}
        _write_entries(store, keys)
        print(f"{parts} parts written in {time.monotonic() - begun:.0f} s; {resident():.0f} MiB", flush=True)
        before, begun = resident(), time.monotonic()
        valid, bad = committed_parts(store, keys, "size")
        assert len(valid) == parts and not bad
        print(f"resume: {time.monotonic() - begun:.1f} s, {resident() - before:.0f} MiB more", flush=True)
        del valid
    measure_first(parts)


def _write_entries(store: Store, keys: dict[int, str]) -> None:
    folder = Path(store.full(PARTS))
    folder.mkdir(parents=True)
    with mock.patch("os.fsync"):  # the files of a test need not survive a power cut
        for part, key in keys.items():
            entry = PartEntry(**outcome_of(part, key))
            for file in entry.files.values():
                (folder / file["name"]).touch()
            write_entry(store, entry)


def measure_first(parts: int) -> None:
    """Ray Data over `parts` parts: until the first comes back, then milliseconds a part."""
    with tempfile.TemporaryDirectory(prefix="draftmill-scale-") as name:
        ctx = context(folder_config(Path(name), 8, ray__engine_cpus=1))
        connect(RayConfig(num_cpus=2, dashboard=False, object_store_gib=0.2))
        before, begun = resident(), time.monotonic()
        stamps: list[float] = []
        add = generate.Ticker.add

        class Enough(Exception):
            pass

        def stamp(self: Any, entry: PartEntry) -> None:
            add(self, entry)
            stamps.append(time.monotonic())
            if len(stamps) == 2000:
                raise Enough

        try:
            with (
                light_actors(2, 0, Path(name, "log")),
                mock.patch.object(generate.Ticker, "add", stamp),
                contextlib.suppress(Enough),
            ):
                make_parts(ctx, parts, 64)
            each = 1000 * (stamps[-1] - stamps[99]) / (len(stamps) - 100)
            print(
                f"Ray Data over {parts} parts: first after {stamps[0] - begun:.1f} s, then {each:.1f} ms a part,"
                f" {resident() - before:.0f} MiB more; peak {peak():.0f} MiB",
                flush=True,
            )
        finally:
            disconnect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("actors", "driver", "plan"))
    parser.add_argument("--actors", type=int, default=8)
    parser.add_argument("--part-seconds", type=float, default=2.0)
    parser.add_argument("--parts", type=int, default=10, help="of each actor; driver and plan: of all")
    args = parser.parse_args()
    if args.what == "actors":
        measure_actors(args.actors, args.part_seconds, args.parts)
    elif args.what == "driver":
        measure_driver(args.actors, args.parts)
    else:
        measure_plan(args.parts)


if __name__ == "__main__":
    main()
