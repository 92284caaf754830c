"""What the cut of the vocabulary costs: the teacher's probability outside the draft's (CONTRACTS section 4)."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from app.codecs import decoded
from app.train.alignment import TrainingSample
from app.train.data import SampleSource
from app.train.loss import Teacher

log = logging.getLogger("draftmill")

SAMPLES = 64  # answers looked at, spread over the source
ROWS = 64  # positions of one of them, spread over it


@torch.no_grad()
def outside_vocabulary(teacher: Teacher, source: SampleSource, temperature: float = 1.0) -> dict[str, Any]:
    """Measured with the target's whole head on a sample of `source`.

    mass: mean share of the softmax at `temperature` that no draft token can have, the most that is ever lost of the
    acceptance; first: share of rows whose first choice is outside, which greedy answers never accept.
    """
    rows, mass, first = 0, 0.0, 0
    for index in range(0, len(source), max(1, len(source) // SAMPLES)):
        states = _spread(source[index]).to(teacher.device)  # [n, Ht]
        for part in states.split(teacher.rows_at_once):
            mass += float((1.0 - teacher.distribution(part, temperature, measure_inside=True).inside).double().sum())
            first += int((~teacher.keep(part)).sum())
        rows += len(states)
    result = {"rows": rows, "mass": mass / max(rows, 1), "first": first / max(rows, 1), "temperature": temperature}
    log.info(
        "training: %.2f %% of the teacher's probability is outside the draft vocabulary, and the first choice of"
        " %.2f %% of %d rows", 100 * result["mass"], 100 * result["first"], rows,
    )  # fmt: skip
    return result


def _spread(sample: TrainingSample) -> Tensor:
    """The teacher's states at up to about `ROWS` positions of a sample: [n, Ht]."""
    at = torch.arange(0, len(sample.teacher_pos), max(1, len(sample.teacher_pos) // ROWS))
    return decoded(sample.teacher[at])
