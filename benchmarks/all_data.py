"""One pass over a folder of prompts: every file regenerated and captured in one go, with the GPUs watched.

    python -m benchmarks.all_data ../shared/data --run-dir /scratch/all [section.key=value ...]

Each file directly in the folder is a source. Prints what ingest kept, answer tokens a second over the whole generate
stage and over its steady part (from the first committed part to the last), bytes a token, and how busy the GPUs were,
by `nvidia-smi` twice a second. The run folder stays, so that the later stages can go on with it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import yaml


class GpuWatch:
    """Samples utilisation and memory of every GPU until it is stopped; nothing where there is no nvidia-smi."""

    QUERY = (
        "nvidia-smi",
        "--query-gpu=index,utilization.gpu,memory.used",
        "--format=csv,noheader,nounits",
        "-lms",
        "500",
    )

    def __init__(self) -> None:
        self.samples: list[tuple[float, int, float, float]] = []  # time, GPU, per cent, MiB
        self._process: subprocess.Popen[str] | None = None
        if shutil.which("nvidia-smi"):
            self._process = subprocess.Popen(self.QUERY, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            index, busy, used = (float(v) for v in line.split(","))
            self.samples.append((time.time(), int(index), busy, used))

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def words(self, start: float, end: float) -> str:
        """Mean use between two times, by GPU."""
        if not self.samples:
            return "no GPU"
        by_gpu: dict[int, list[tuple[float, float]]] = {}
        for at, index, busy, used in self.samples:
            if start <= at <= end:
                by_gpu.setdefault(index, []).append((busy, used))
        return "; ".join(
            f"GPU {i}: {sum(b for b, _ in s) / len(s):.0f} % busy, {max(u for _, u in s) / 1024:.1f} GiB"
            for i, s in sorted(by_gpu.items())
        )


def config_of(data: Path, run_dir: str) -> dict[str, Any]:
    """A configuration with every file of `data` as a source."""
    files = sorted(p for p in data.iterdir() if p.suffix in (".json", ".jsonl"))
    return {
        "run_dir": run_dir,
        "target": {"model": "smollm2-135m"},
        "sources": [{"name": p.stem, "path": str(p.absolute())} for p in files],
        "generate": {"max_length": 2048, "max_new_tokens": 512, "max_num_seqs": 512},
        "storage": {"rows_per_part": 256},
    }


def draftmill(verb: str, config: Path, overrides: list[str]) -> None:
    """Run a verb of the product; its log goes to standard error."""
    done = subprocess.run([sys.executable, "-m", "app", verb, str(config), *overrides], stdout=sys.stderr)
    if done.returncode:
        sys.exit(f"draftmill {verb} ended with {done.returncode}")


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("data", type=Path)
    made.add_argument("--run-dir", required=True)
    args, overrides = made.parse_known_args()
    Path(args.run_dir).parent.mkdir(parents=True, exist_ok=True)
    config = Path(args.run_dir).with_suffix(".yaml")
    config.write_text(yaml.safe_dump(config_of(args.data, args.run_dir)))
    draftmill("ingest", config, overrides)
    watch = GpuWatch()
    started = time.time()
    draftmill("generate", config, overrides)
    ended = time.time()
    watch.stop()
    report(Path(args.run_dir), watch, started, ended)


def report(run_dir: Path, watch: GpuWatch, started: float, ended: float) -> None:
    ingest, generate = (json.loads((run_dir / s / "manifest.json").read_text()) for s in ("ingest", "generate"))
    commits = sorted(p.stat().st_mtime for p in (run_dir / "generate/parts").glob("part-*.json"))
    counts, tokens = generate["counts"], generate["counts"]["tokens"]
    for name, source in ingest["counts"]["sources"].items():
        print(f"{name}: {source['rows_in']} rows, {source['kept']} kept, {sum(source['rejected'].values())} rejected")
    print(f"{counts['samples']} samples of {counts['kept']} conversations, {sum(counts['rejected'].values())} rejected")
    print(f"{tokens['prompt']} prompt and {tokens['answer']} answer tokens, {counts['bytes'] / 1e9:.2f} GB written,")
    print(f"{counts['bytes'] / (tokens['prompt'] + tokens['answer']):.0f} bytes a token")
    rate = tokens["answer"] / (ended - started)
    print(
        f"generate took {ended - started:.1f} s with its start: {rate:.0f} answer tok/s; {watch.words(started, ended)}"
    )
    if len(commits) > 2:
        steady = commits[-1] - commits[0]
        share = (len(commits) - 1) / len(commits)
        print(
            f"from the first commit to the last, {steady:.1f} s: about {share * tokens['answer'] / steady:.0f} answer"
            f" tok/s; {watch.words(commits[0], commits[-1])}"
        )


if __name__ == "__main__":
    main()
