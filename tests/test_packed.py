"""States packed where they were made are the states that are encoded later."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from app.codecs import CODECS, Encoded, decoded, encode
from app.engine.row_checks import check_states
from app.engine.spot_check import stored_differ
from app.packed import PackedStates, Packing, plain_states
from app.parts import stored_states

LAYERS = (2, 4, 5, 8)
SIZES = (64, 66, 192)  # 66: groups of 33 channels


def states_of(count: int, hidden: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """[N, 4, H] with a channel far beyond the rest."""
    made = torch.randn(count, 4, hidden, generator=torch.Generator().manual_seed(seed))
    made[..., 3] *= 100
    return made.to(dtype)


def same(a: Tensor | Encoded, b: Tensor | Encoded) -> bool:
    if isinstance(a, Encoded):
        assert isinstance(b, Encoded)
        return all(torch.equal(x, y) for x, y in zip(a.tensors().values(), b.tensors().values(), strict=True))
    return isinstance(b, Tensor) and torch.equal(a, b)


def check_packing(codec: str, hidden: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """What is stored of packed states is what the codec makes of them."""
    states = states_of(40, hidden, dtype)
    packing = Packing(codec, hidden, dtype)
    packed = PackedStates(packing.pack(states.to(device)).cpu(), packing)
    assert packed.shape == tuple(states.shape)
    mask = [False] * 11 + [True] * 30
    for ours, wanted in zip(stored_states(packed, mask, codec), stored_states(states, mask, codec), strict=True):
        assert same(ours, wanted)
        assert torch.equal(decoded(ours), decoded(wanted))
    assert torch.equal(plain_states(packed), decoded(encode(states, codec)).view_as(states))
    assert torch.allclose(packed.norms(), states.float().norm(dim=-1), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden", SIZES)
@pytest.mark.parametrize("codec", CODECS)
def test_what_is_stored_is_what_the_codec_makes(codec: str, hidden: int, dtype: torch.dtype) -> None:
    check_packing(codec, hidden, dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_packs_the_same_bytes() -> None:
    for codec in CODECS:
        check_packing(codec, 192, torch.bfloat16, "cuda")


@pytest.mark.parametrize("codec", CODECS)
def test_states_that_lie_otherwise_in_memory_are_packed_alike(codec: str) -> None:
    states, packing = states_of(40, 64), Packing(codec, 64, torch.bfloat16)
    other = packing.pack(states.transpose(0, 1).contiguous().transpose(0, 1))
    end = packing.fields[3]  # what follows is padding
    assert torch.equal(other[:, :end], packing.pack(states)[:, :end])


def test_another_codec_than_the_configured_one_is_refused() -> None:
    packing = Packing("fp8", 64, torch.bfloat16)
    packed = PackedStates(packing.pack(states_of(5, 64)), packing)
    with pytest.raises(ValueError, match="packed as fp8 are to be stored as int8"):
        stored_states(packed, [True] * 6, "int8")


@pytest.mark.parametrize("codec", CODECS)
def test_the_row_checks_see_through_the_packing(codec: str) -> None:
    packing = Packing(codec, 64, torch.bfloat16)

    def said(states: Tensor) -> str | None:
        return check_states(PackedStates(packing.pack(states), packing), LAYERS)

    assert said(states_of(40, 64)) is None
    bad = states_of(40, 64)
    bad[7, 1, 5] = torch.nan
    assert said(bad) == "layer 4: not finite at 1 of 40 positions, first at position 7"
    bad = states_of(40, 64)
    bad[9, 2] = 0
    assert said(bad) == "layer 5: all zero at 1 of 40 positions, first at position 9"
    bad = states_of(40, 64)
    bad[:, 0, :45] = 0
    assert said(bad) == "layer 2: 70 % of the values are zero"
    bad = states_of(40, 64)
    bad[:, 3] = bad[0, 3].clone()
    assert said(bad) == "layer 8: the same at all 40 positions"


@pytest.mark.parametrize("codec", CODECS)
def test_the_spot_check_compares_packed_states(codec: str) -> None:
    packing = Packing(codec, 64, torch.bfloat16)
    states = states_of(40, 64)
    mask = [False] * 11 + [True] * 30
    sample = {"loss_mask": mask, "prompt_ids": [0] * 11}
    packed = PackedStates(packing.pack(states), packing)
    stored = stored_states(packed, mask, codec)
    assert stored_differ(stored, packed, sample, LAYERS) is None
    other = PackedStates(packing.pack(states_of(40, 64, seed=1)), packing)
    assert stored_differ(stored, other, sample, LAYERS) == "layer 2 differs at 40 of 40 positions"
