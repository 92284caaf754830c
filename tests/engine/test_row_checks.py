"""Planted faults are named with their layer; states of real and random targets raise no alarm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.engine.row_checks import check_states
from app.packaged import packaged_target
from tests.engine.helpers import reference, smol_prompts, tiny_prompts

LAYERS = (2, 15, 27, 30)


def clean(count: int = 60, hidden: int = 64) -> Tensor:
    """[count, 4, hidden] bf16: norms that grow with depth, a first position of 300 times the median."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(count, 4, hidden, generator=generator) * torch.tensor([1.0, 5.0, 20.0, 30.0])[:, None]
    states[0] *= 300
    return states.to(torch.bfloat16)


def zero_values(states: Tensor, share: float) -> None:
    generator = torch.Generator().manual_seed(1)
    drop = torch.rand(states.shape[0], states.shape[2], generator=generator) < share
    states[:, 1][drop] = 0


PLANTED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "one NaN": (
        lambda s: s[7, 2, 5].fill_(float("nan")),
        "layer 27: not finite at 1 of 60 positions, first at position 7",
    ),
    "one infinity": (lambda s: s[59, 3, 0].fill_(float("inf")), "layer 30: not finite at 1 of 60 positions"),
    "a zero layer": (lambda s: s[:, 0].zero_(), "layer 2: all zero"),
    "a zero row": (lambda s: s[9].zero_(), "layer 2: all zero at 1 of 60 positions, first at position 9"),
    "unwritten rows": (
        lambda s: s[18:, 3].zero_(),
        "layer 30: all zero at 42 of 60 positions, first at position 18",
    ),
    "70 % zero values": (lambda s: zero_values(s, 0.7), "layer 15: 7"),
    "constant": (lambda s: s[:, 2].copy_(s[3, 2].expand(60, -1)), "layer 27: the same at all 60 positions"),
    "a huge row": (lambda s: s[5, 1].mul_(1e6), "layer 15: norms from"),
    "a vanishing row": (lambda s: s[5, 1].mul_(1e-6), "layer 15: norms from"),
    "a layer of another scale": (lambda s: s[:, 2].mul_(1e6), "layer 27: median norm"),
}


def test_clean_states_pass() -> None:
    assert check_states(clean(), LAYERS) is None
    assert check_states(clean(1), LAYERS) is None
    assert check_states(clean().float(), LAYERS) is None
    assert check_states(clean().half() / 1000, LAYERS) is None


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_named_with_its_layer(fault: str) -> None:
    plant, words = PLANTED[fault]
    states = clean()
    plant(states)
    said = check_states(states, LAYERS)
    assert said is not None
    assert said.startswith(words), said


def test_wrong_shapes_are_faults() -> None:
    assert "expected [positions, 4, hidden]" in str(check_states(clean()[:, :3], LAYERS))
    assert "no positions" in str(check_states(clean()[:0], LAYERS))


def test_states_of_smollm2_pass() -> None:
    """Its first tokens carry activations of a hundred times the median."""
    model = str(packaged_target("smollm2-135m"))
    for states in reference(model, [*smol_prompts(model), [2], [5, 5, 6]], torch.bfloat16):
        assert check_states(states[:, LAYERS].to(torch.bfloat16), LAYERS) is None


def test_states_of_random_targets_pass(tiny: Path, tiny_tied: Path, tiny_5l: Path) -> None:
    for model, ids in ((tiny, (2, 4, 6, 8)), (tiny_tied, (1, 2, 3, 8)), (tiny_5l, (1, 2, 3, 5))):
        for states in reference(str(model), tiny_prompts(1, 2, 40), torch.bfloat16):
            assert check_states(states[:, ids].to(torch.bfloat16), ids) is None
