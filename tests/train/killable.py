"""A training on debug tensors in a process of its own, to kill: `python -m tests.train.killable FOLDER [SECONDS]`."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch

from app.train.trainer import Trainer, TrainJob
from tests.train.debug import ListSource
from tests.train.test_trainer import make_job


class Slow(ListSource):
    """Every sample takes a moment to read."""

    def __init__(self, source: Any, seconds: float) -> None:
        super().__init__(source.samples)
        self.seconds = seconds

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return super().__getitem__(index)


def killable_job(folder: Path, seconds: float = 0.0, **changes: Any) -> TrainJob:
    """30 steps with a validation every fifth and a checkpoint whenever `checkpoint_every_s` is over."""
    settings = {"validate_every_epochs": 0.5, "checkpoint_every_s": 0.05, **changes}
    job = make_job(folder, **settings)
    return make_job(folder, **settings, train=Slow(job.train, seconds), valid=Slow(job.valid, seconds))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    torch.set_num_threads(1)
    trainer = Trainer(killable_job(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0))
    summary = trainer.run()
    print(f"{'stopped' if trainer.stopped else 'done'} at step {summary['steps']}")
