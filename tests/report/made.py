"""A finished tiny run in seconds: real rows, parts and checkpoint, and the numbers of the later stages written down."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from app.checkpoint import write_checkpoint
from app.pipeline import StageContext, run_stage
from app.pipelines.export import DRAFT
from app.runfolder import Manifest, RunFolder
from app.status import config_of
from app.target import TargetInfo
from tests.drafts import draft_config, random_tensors
from tests.pipelines.finished import stage
from tests.pipelines.test_quality import GOOD, LOOP, PROMPT, finish
from tests.runs import tiny_config, write_rows

EVALUATE: dict[str, Any] = {
    "drafting": "greedy", "acceptance_length": 2.2, "interval": [2.0, 2.4], "acceptance_rate": 0.4,
    "acceptance_per_position": [0.7, 0.4, 0.1], "interval_per_position": [[0.6, 0.8], [0.3, 0.5], [0.05, 0.15]],
    "num_draft_tokens": 3, "conversations": 9, "drafts": 90, "accepted": 108,
    "domains": {
        "chat": {"acceptance_length": 2.3, "interval": [2.1, 2.6], "conversations": 8, "drafts": 80},
        "<b>code": {"acceptance_length": 1.8, "interval": [1.8, 1.8], "conversations": 1, "drafts": 10},
        "hospital": {"acceptance_length": 1.5, "interval": [1.3, 1.7], "conversations": 3, "drafts": 10},
    },
    "sampled": [],
}  # fmt: skip
BENCH: dict[str, Any] = {
    "acceptance_length": 2.19, "acceptance_rate": 0.39, "acceptance_per_position": [0.69, 0.4, 0.1],
    "drafts": 100, "draft_tokens": 300, "accepted": 119, "num_draft_tokens": 3, "concurrency": 8,
    "tokens_per_second": {"baseline": 400.0, "draft": 620.0}, "speedup": 1.55,
    "seconds": {"baseline": [4.0], "draft": [2.6]}, "comparable": True, "output_mismatches": 1,
    "mismatch_examples": [{"prompt": 1, "first_difference": 4, "baseline": "<script>", "draft": "b"}],
    "prompts": 9, "conversations": 9, "max_new_tokens": 16,
}  # fmt: skip
VOCAB = {
    "target_vocab_size": 512, "draft_vocab_size": 320, "supervised_tokens": {"train": 60, "valid": 10, "holdout": 20},
    "coverage": {"train": 1.0, "valid": 0.9, "holdout": 0.95},
}  # fmt: skip
TRAIN = {"steps": 20, "epochs": 2.0, "samples": 3, "loss": 3.5, "seconds": 2.0, "best_acceptance_length": 1.9}


def make_run(tiny: Path, folder: Path, target: TargetInfo, embed: Tensor) -> Path:
    """The run folder: sources `rows` and `secret`, the second private."""
    files = [
        write_rows(folder / f"{name}.jsonl", [{"prompt": f"{PROMPT} {i}"} for i in numbers])
        for name, numbers in (("rows", range(3)), ("secret", range(3, 6)))
    ]
    sources = [
        {"name": "<i>rows", "path": str(files[0]), "domain": "chat"},
        {"name": "secret", "path": str(files[1]), "domain": "hospital", "private": True},
    ]
    config = tiny_config(tiny, folder / "run", files[0], sources=sources, quality__max_loop=1)
    answers = {f"{PROMPT} {i}": GOOD if i < 5 else LOOP for i in range(6)}
    ctx = finish(config, answers)
    run_stage(stage("quality"), ctx)
    draft = draft_config(target)
    write_checkpoint(Path(ctx.run.store.full(DRAFT)), draft, random_tensors(draft), embed, target)
    ctx.run.store.write_json("export/serve.json", {"vLLM": "vllm serve x --speculative-config '{\"a\": 1}'"})
    log: list[dict[str, Any]] = [{"step": s, "epoch": 1, "loss": 20.0 / s} for s in range(1, 21)]
    log += [{"step": s, "validation": {"step": s, "acceptance_length": s / 10, "interval": [1, 2.2], "loss": 5.0}}
            for s in (10, 20)]  # fmt: skip
    ctx.run.store.write_bytes("train/metrics.jsonl", "".join(json.dumps(x) + "\n" for x in log).encode())
    put(ctx.run, "vocab", ("generate",), VOCAB)
    put(ctx.run, "train", ("generate", "vocab"), TRAIN)
    put(
        ctx.run, "export", ("vocab", "train"), {"step": 20, "bytes": 1}, {"draft_config": draft.model_dump(mode="json")}
    )
    put(ctx.run, "evaluate", ("generate", "export"), EVALUATE)
    put(ctx.run, "bench", ("generate", "export"), BENCH)
    ctx.run.store.write_bytes("bench/outputs.jsonl", b"{}\n")
    return folder / "run"


def put(run: RunFolder, name: str, inputs: tuple[str, ...], counts: dict[str, Any], extra: Any = None) -> None:
    """A stage's manifest, and its numbers in its own file as the stage writes them."""
    run.store.write_json(f"{name}/{name}.json", counts)
    found = {i: run.manifest(i) for i in inputs}
    run.write_manifest(
        Manifest(
            stage=name, code_version=1, inputs={i: m.digest for i, m in found.items() if m is not None}, outputs={},
            config={f"{name}.seed": 5, "evaluate.num_draft_tokens": 3, f"{name}.file": "/home/me/file.txt"},
            digest=f"digest of {name}", counts=counts,
            seeds={}, versions={"vllm": "0.33"}, git_revision="abc", started="2026-01-01T00:00:00+00:00", seconds=7.0,
            extra=extra or {},
        )
    )  # fmt: skip


def change(run: RunFolder, name: str, **counts: Any) -> None:
    """Other numbers of a finished stage."""
    manifest = run.manifest(name)
    assert manifest is not None
    run.write_manifest(replace(manifest, counts=json.loads(json.dumps({**manifest.counts, **counts}))))


def copy_of(run: Path, to: Path) -> tuple[StageContext, RunFolder]:
    """A copy of the run to change."""
    shutil.copytree(run, to)
    folder = RunFolder(str(to))
    return StageContext(config_of(str(to), []), folder), folder
