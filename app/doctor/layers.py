"""Which layer of the target a stored state is, by comparison with the target's own states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from app.codecs import decoded
from app.doctor.finding import LAYERS_OFF, SWAPPED, WRONG_LAYERS
from app.engine.spot_check import TOLERANCE
from app.samples import Sample
from app.target import TargetHead

_CLOSE = 1.2  # times the smallest error, within which two layers are not told apart
NORMED = -1  # in place of a layer: s_n with the final norm applied


@dataclass(frozen=True)
class Match:
    """A stored state against the target's: the layer it is recorded as, the nearest one, median relative errors."""

    recorded: int
    nearest: int  # NORMED: the final norm was applied before it was stored
    recorded_error: float
    nearest_error: float

    @property
    def fits(self) -> bool:
        """Whether it is a state of this row at all, at these positions."""
        return self.nearest_error <= TOLERANCE

    @property
    def is_right(self) -> bool:
        return self.fits and (self.nearest == self.recorded or self.recorded_error < _CLOSE * self.nearest_error)


def match_layers(
    recomputed: Sequence[tuple[Sample, list[Tensor]]], recorded: Sequence[int], head: TargetHead
) -> list[Match]:
    """One Match for each of the three auxiliary states and the teacher's; `recorded` are their layers."""
    stored: list[list[Tensor]] = [[], [], [], []]
    for sample, _ in recomputed:
        aux = decoded(sample.aux).float().chunk(3, -1)  # 3 x [T-1, H]
        for kept, state in zip(stored, (*aux, decoded(sample.teacher).float()), strict=True):
            kept.append(state)
    found = []
    for number, layer in enumerate(recorded):
        mine = torch.cat(stored[number])  # [N, H]
        errors = {}
        for k in range(len(recomputed[0][1])):
            errors[k] = median_error(mine, _truth(recomputed, k, number == 3))
        if number == 3:
            errors[NORMED] = median_error(mine, head.normed(_truth(recomputed, layer, True)))
        nearest = min(errors, key=lambda k: errors[k])
        found.append(Match(layer, nearest, errors[layer], errors[nearest]))
    return found


def median_error(stored: Tensor, truth: Tensor) -> float:
    """Median over rows of |stored - truth| / |truth|: [N, H] both, fp32."""
    distance = torch.linalg.vector_norm(stored - truth, dim=-1)  # [N]
    return float((distance / torch.linalg.vector_norm(truth, dim=-1).clamp(min=1e-12)).nanmedian())


def _truth(recomputed: Sequence[tuple[Sample, list[Tensor]]], layer: int, at_teacher: bool) -> Tensor:
    """s_layer of all samples, at every position or where the teacher is read: [N, H]."""
    return torch.cat([s[layer][x.teacher_pos] if at_teacher else s[layer] for x, s in recomputed])


def cause_of(found: Sequence[int], wanted: Sequence[int]) -> str:
    """What kind of mistake layers `found` are in place of `wanted`."""
    if sorted(found) == sorted(wanted):
        return SWAPPED
    shifts = {a - b for a, b in zip(found, wanted, strict=True)}
    return LAYERS_OFF if shifts in ({1}, {-1}) else WRONG_LAYERS
