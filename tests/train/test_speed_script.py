"""The benchmark of the training step makes the trainer's own step: it must not fall behind the trainer."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from benchmarks.train_speed import Cell, our_job, parser


def test_its_step_trains(tmp_path: Path) -> None:
    args = parser().parse_args(["--tiny", "--steps", "2", "--warmup", "1"])
    job = our_job(Cell("ours", 2, 50), args, torch.device("cpu"), str(tmp_path))
    losses = []
    for _ in range(6):
        job.step()
        losses.append(job.loss())
    assert job.rows > 0 and all(math.isfinite(x) for x in losses)
    assert losses[-1] < losses[0]
