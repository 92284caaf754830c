"""Do captured states belong to their row? One sample of a part is computed again alone, by prefill, and compared."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from app.codecs import States, decoded
from app.packed import Captured, PackedStates
from app.parts import as_mask, teacher_positions

# Relative error of a position between two ways to compute it. bf16 in another batch: 0.02 at most. States of another
# row, or of the position beside: 0.5 to 1.2 at all but the positions of a prompt they share.
TOLERANCE = 0.25
SHARE = 0.1  # of positions that may exceed it
LOOKED_AT = 64


def in_checking_order(rows: Sequence[str], key: str) -> list[str]:
    """The row ids of a part in the order in which one to check is looked for: by hash of the part's key and the id."""
    return sorted(rows, key=lambda row: hashlib.sha256(f"{key}:{row}".encode()).hexdigest())


def stored_differ(
    stored: tuple[States, States], alone: Captured, sample: dict[str, Any], layer_ids: Sequence[int]
) -> str | None:
    """How what is stored of a sample differs from its states made alone [T-1, 4, H], or None.

    A wrong row or position shows everywhere: up to LOOKED_AT positions of the prompt, of the answer and of the teacher
    are compared.
    """
    aux, teacher = stored
    prompt = len(sample["prompt_ids"])
    if len(aux) != len(alone):
        return f"{len(aux)} states instead of {len(alone)}"
    taught = teacher_positions(as_mask(sample["loss_mask"]))  # [S]
    before, after = _spread(0, prompt - 1), _spread(prompt - 1, len(aux))
    looked, chosen = torch.cat([before, after]), _spread(0, len(taught))
    return states_differ(
        decoded(aux[looked]).view(len(looked), 3, -1), _values(alone, looked)[:, :3], len(before) + 1, layer_ids[:3]
    ) or states_differ(decoded(teacher[chosen]).unsqueeze(1), _values(alone, taught[chosen])[:, 3:], 1, layer_ids[3:])


def _spread(first: int, last: int) -> Tensor:
    """Up to LOOKED_AT positions of first .. last-1, evenly apart [n] int64."""
    count = max(0, last - first)
    return first + torch.linspace(0, count - 1, min(count, LOOKED_AT)).round().long()


def _values(states: Captured, positions: Tensor) -> Tensor:
    """The states of some positions [n, 4, H]."""
    if isinstance(states, PackedStates):
        return PackedStates(states.rows[positions], states.packing).values()
    return states[positions]


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
