"""What ingest costs: rows a second, memory, and that the number of workers changes nothing.

    python benchmarks/ingest.py [--rows 1000000] [--workers 1,2] [--profile FILE]
    python benchmarks/ingest.py --stream 4          one JSON list and one JSONL file of 4 GB, read row by row

Rows are prompts of about 100 tokens after the template of SmolLM2 (the packaged target), 2 % of them exact repeats,
the same ones each time. Every measurement is a process of its own; memory is sampled over it and its children.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.config import Config, SourceConfig, parse_config

_PAGE = os.sysconf("SC_PAGE_SIZE")
_WORDS = 62  # of a prompt: about 70 tokens; the template adds its default system prompt
_TEXT = (
    "the miller counts sacks of grain in morning grinds them through day and evening writes number flour book when"
    " one gives three quarters how many are needed for twelve let us think step by draft model proposes several tokens"
    " target checks keeps those that agree longer accepted run fewer steps large takes faster answer arrives please"
    " explain why river freezes first at its edges summarise following paragraph translate sentence into French return"
    " list sorted names python function which merges two dictionaries without changing either of them"
)
_VOCABULARY = _TEXT.split()


def rows(count: int) -> Iterator[dict[str, Any]]:
    """Conversations of one user turn; every 50th repeats an earlier one."""
    for number in range(count):
        source = number // 2 if number % 50 == 49 else number
        draw = random.Random(source)
        text = " ".join(draw.choices(_VOCABULARY, k=_WORDS))
        yield {"messages": [{"role": "user", "content": f"{source}: {text}?"}]}


def write_source(path: Path, count: int) -> None:
    with path.open("w") as file:
        for row in rows(count):
            file.write(json.dumps(row) + "\n")


class Memory:
    """Peak resident bytes of this process and of it with all its children, sampled."""

    def __init__(self) -> None:
        self.own = self.tree = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.25):
            tree = _tree(os.getpid())
            self.own = max(self.own, _resident(os.getpid()))
            self.tree = max(self.tree, sum(map(_resident, tree)))


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _tree(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        children += [c for t in os.listdir(f"/proc/{pid}/task") if t != str(pid) for c in _children_of(pid, t)]
    except OSError:
        return [pid]
    return [pid, *(p for child in set(children) for p in _tree(int(child)))]


def _children_of(pid: int, thread: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
    except OSError:
        return []


def config_of(source: Path, run: Path, workers: int) -> Config:
    data = {
        "run_dir": str(run),
        "sources": [{"name": "rows", "path": str(source)}],
        "ingest": {"workers": workers},
    }
    return parse_config(data, "benchmark")


def measure(source: Path, run: Path, workers: int, profile: str | None, answer: Any) -> None:
    """One ingest; sends its numbers."""
    from app.pipeline import StageContext
    from app.pipelines import ingest
    from app.runfolder import RunFolder

    config = config_of(source, run, workers)
    ctx = StageContext(config, RunFolder(config.run_dir))
    _ = ctx.target
    with Memory() as memory:
        started = time.perf_counter()
        if profile is not None:
            import cProfile

            profiler = cProfile.Profile()
            result = profiler.runcall(ingest.run, ctx)
            profiler.dump_stats(profile)
        else:
            result = ingest.run(ctx)
        seconds = time.perf_counter() - started
    answer.send({"seconds": seconds, "driver": memory.own, "tree": memory.tree, "counts": result.counts})


def digests(run: Path) -> dict[str, str]:
    """Of the ids in their order, and of the bytes of the parts."""
    import pyarrow.parquet as pq

    ids, parts = hashlib.sha256(), hashlib.sha256()
    for path in sorted((run / "ingest" / "parts").iterdir()):
        parts.update(path.read_bytes())
        ids.update("\n".join(pq.read_table(path, columns=["id"])["id"].to_pylist()).encode())
    return {"ids": ids.hexdigest()[:16], "parts": parts.hexdigest()[:16]}


def ingest_rows(count: int, numbers: list[int], profile: str | None) -> bool:
    """Print a line per number of workers; returns whether all agree."""
    found: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="draftmill-bench-") as folder:
        source = Path(folder) / "rows.jsonl"
        started = time.perf_counter()
        write_source(source, count)
        size = source.stat().st_size
        print(f"{count:,} rows, {size / 1e6:,.0f} MB, written in {time.perf_counter() - started:.0f} s")
        print(f"{'workers':>7} {'seconds':>8} {'rows/s':>8} {'driver':>9} {'all':>9}  load  ids, parts")
        spawn = multiprocessing.get_context("spawn")
        for workers in numbers:
            run = Path(folder) / f"run-{workers}"
            mine, theirs = spawn.Pipe()
            process = spawn.Process(target=measure, args=(source, run, workers, profile, theirs))
            process.start()
            theirs.close()
            got = mine.recv()
            process.join()
            counts = got["counts"]
            assert counts["rows_in"] == count == counts["kept"] + sum(counts["rejected"].values())
            found.append(digests(run))
            mib = {k: f"{got[k] / 2**20:,.0f} MiB" for k in ("driver", "tree")}
            print(
                f"{workers:>7} {got['seconds']:>8.1f} {count / got['seconds']:>8,.0f} {mib['driver']:>9}"
                f" {mib['tree']:>9}  {os.getloadavg()[0]:.1f}   {found[-1]['ids']}, {found[-1]['parts']};"
                f" kept {counts['kept']:,}, repeats {counts['rejected'].get('duplicate', 0):,}"
            )
    same = all(f == found[0] for f in found)
    print("ids, their order and every part's bytes agree" if same else "THE NUMBER OF WORKERS CHANGED THE OUTPUT")
    return same


def stream(gigabytes: float) -> None:
    """Read one file of that size as a list and as lines; print speed and memory."""
    from app.sources.readers import read_rows

    block = [json.dumps(row) for row in rows(2000)]
    with tempfile.TemporaryDirectory(prefix="draftmill-bench-") as folder:
        for name, opening, between, end in (("list.json", "[\n", ",\n", "\n]\n"), ("lines.jsonl", "", "\n", "\n")):
            path = Path(folder) / name
            text = between.join(block)
            blocks = max(1, round(gigabytes * 1e9 / len(text)))
            with path.open("w") as file:
                file.write(opening)
                for number in range(blocks):
                    file.write((between if number else "") + text)
                file.write(end)
            size = path.stat().st_size
            before = _resident(os.getpid())
            with Memory() as memory:
                started = time.perf_counter()
                count = sum(1 for _ in read_rows(SourceConfig(path=str(path))))
                seconds = time.perf_counter() - started
            path.unlink()
            assert count == blocks * len(block)
            print(
                f"{name}: {size / 1e9:.1f} GB, {count:,} rows in {seconds:.0f} s ({size / 1e6 / seconds:.0f} MB/s),"
                f" peak {memory.own / 2**20:.0f} MiB ({(memory.own - before) / 2**20:+.0f} by reading)"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--profile", help="write the driver's cProfile here")
    parser.add_argument("--stream", type=float, metavar="GB")
    args = parser.parse_args()
    if args.stream is not None:
        stream(args.stream)
        return 0
    return 0 if ingest_rows(args.rows, [int(n) for n in args.workers.split(",")], args.profile) else 1


if __name__ == "__main__":
    sys.exit(main())
