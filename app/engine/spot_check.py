"""Do captured states belong to their row? One sample of a part is computed again alone, by prefill, and compared."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from app.codecs import States, decoded
from app.parts import teacher_positions

# Relative error of a position between two ways to compute it. bf16 in another batch: 0.02 at most. States of another
# row, or of the position beside: 0.5 to 1.2 at all but the positions of a prompt they share.
TOLERANCE = 0.25
SHARE = 0.1  # of positions that may exceed it


def sample_to_check(samples: Sequence[dict[str, Any]], key: str) -> int:
    """Index of the sample of a part to compute again: by hash of the part's key and the sample's id."""

    def rank(index: int) -> str:
        return hashlib.sha256(f"{key}:{samples[index]['sample_id']}".encode()).hexdigest()

    return min(range(len(samples)), key=rank)


def stored_differ(
    stored: tuple[States, States], alone: Tensor, sample: dict[str, Any], layer_ids: Sequence[int]
) -> str | None:
    """How what is stored of a sample differs from its states made alone [T-1, 4, H], or None."""
    aux, teacher = (decoded(s) for s in stored)
    positions = teacher_positions(torch.tensor(sample["loss_mask"], dtype=torch.bool))  # [S]
    return states_differ(
        aux.view(len(aux), 3, -1), alone[:, :3], len(sample["prompt_ids"]), layer_ids[:3]
    ) or states_differ(teacher.unsqueeze(1), alone[positions, 3:], 1, layer_ids[3:])


def states_differ(captured: Tensor, alone: Tensor, prompt: int, layer_ids: Sequence[int]) -> str | None:
    """How the states [T-1, K, H] of a sample with `prompt` prompt tokens differ from those made alone, or None.

    The answer's positions are also looked at by themselves: a long prompt that rows share must not hide theirs.
    """
    if captured.shape != alone.shape:
        return f"{tuple(captured.shape)} states instead of {tuple(alone.shape)}"
    difference = torch.linalg.vector_norm(captured.float() - alone.float(), dim=-1)  # [T-1, K]
    wrong = difference > TOLERANCE * torch.linalg.vector_norm(alone.float(), dim=-1)  # [T-1, K]
    for name, part in (("", wrong), (" of the answer", wrong[prompt - 1 :])):
        for k, layer in enumerate(layer_ids):
            if len(part) and float(part[:, k].float().mean()) > SHARE:
                count = int(part[:, k].sum())
                return f"layer {layer} differs at {count} of {len(part)} positions{name}"
    return None
