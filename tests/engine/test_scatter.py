"""Pieces of memory arrive where each belongs, by the system's one call and without it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from app.engine import scatter


def _refuse(*_: Any) -> int:
    return -1


def _half_done(real: Any) -> Any:
    """A system that copies the first pieces and then stops, as one may."""

    def call(pid: int, source: int, count: int, to: int, _: int, flags: int) -> int:
        return int(real(pid, source, count // 2, to, count // 2, flags))

    return call


@pytest.mark.parametrize("system", ["as it is", "refuses", "does half", "has none"])
def test_every_piece_arrives_and_nothing_else_changes(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = scatter._writev
    if system != "as it is":
        monkeypatch.setattr(
            scatter, "_writev", {"refuses": _refuse, "does half": _half_done(real), "has none": None}[system]
        )
    sizes = [1, 16448, 7, scatter._LARGE, 300] * 3 + [5] * (scatter._MOST + 10)  # more than one call takes
    starts = list(itertools.accumulate(sizes, initial=0))
    source = torch.randint(1, 256, (starts[-1],), dtype=torch.uint8)
    to = torch.zeros(starts[-1] + 2 * len(sizes), dtype=torch.uint8)
    wanted, moves, place = to.clone(), [], 0
    for start, size in reversed(list(zip(starts, sizes, strict=False))):  # in another order, two bytes apart
        moves.append((to.data_ptr() + place, source.data_ptr() + start, size))
        wanted[place : place + size] = source[start : start + size]
        place += size + 2
    scatter.scatter(moves)
    assert torch.equal(to, wanted)
