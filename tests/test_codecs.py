"""Codecs: error bounds on states with outlier channels, the same values on every device, compression without loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from app.codecs import (
    CODECS,
    Encoded,
    States,
    cat_rows,
    compress,
    decoded,
    decompress,
    encode,
    group_size,
    state_bytes,
)
from app.config import parse_config
from app.errors import UserError

LOSSY = [c for c in CODECS if c != "bf16"]
HIDDEN = 576
OUTLIERS = (7, 200, 201)


def residual_stream(tokens: int = 200, hidden: int = HIDDEN, times: float = 300, seed: int = 0) -> Tensor:
    """States [T, 4, H] bf16 as residual streams are: sizes that differ by token, state and channel, and a few channels
    `times` the median."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 4, hidden, generator=g)
    x *= torch.exp(0.5 * torch.randn(tokens, 4, 1, generator=g)) * torch.exp(0.4 * torch.randn(4, hidden, generator=g))
    x *= torch.tensor([1.0, 3.0, 9.0, 20.0]).view(1, 4, 1)
    x[..., [c for c in OUTLIERS if c < hidden]] *= times
    return x.bfloat16()


def error(got: Tensor, wanted: Tensor, channels: Tensor) -> float:
    """Relative error of a token's state over `channels`, the mean over tokens and states."""
    difference = (got.float() - wanted.float())[..., channels]
    return float((difference.norm(dim=-1) / wanted.float()[..., channels].norm(dim=-1)).mean())


def ordinary(hidden: int = HIDDEN) -> Tensor:
    keep = torch.ones(hidden, dtype=torch.bool)
    keep[[c for c in OUTLIERS if c < hidden]] = False
    return keep


# Of the ordinary channels: with outliers 300 times the median, and without any.
BOUNDS = {"fp8": (0.03, 0.03), "int8": (0.29, 0.010), "int4": (0.50, 0.13)}


@pytest.mark.parametrize("codec", LOSSY)
def test_the_error_of_ordinary_channels_is_bounded_beside_outliers(codec: str) -> None:
    for times, bound in zip((300, 1), BOUNDS[codec], strict=True):
        x = residual_stream(times=times)
        got = decoded(encode(x, codec)).view(x.shape)
        assert error(got, x, ordinary()) < bound
        assert got.dtype == torch.bfloat16
        assert error(got, x, torch.ones(HIDDEN, dtype=torch.bool)) < {"fp8": 0.035, "int8": 0.03, "int4": 0.16}[codec]


def test_one_scale_per_token_would_not_do_for_int8() -> None:
    """What the groups are for: with one scale the ordinary channels of such a state are nearly all zero."""
    x = residual_stream()
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    whole = (x.float() / scale).round() * scale
    assert error(whole, x, ordinary()) > 0.65
    assert error(decoded(encode(x, "int8")).view(x.shape), x, ordinary()) < 0.29


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bf16_keeps_every_bit_of_what_was_captured(dtype: torch.dtype) -> None:
    x = residual_stream(times=20).to(dtype)
    kept = encode(x, "bf16")
    assert isinstance(kept, Tensor) and kept.dtype == dtype
    assert torch.equal(kept.view(x.shape), x)


@pytest.mark.parametrize("codec", LOSSY)
def test_zeros_tiny_and_huge_states(codec: str) -> None:
    x = torch.zeros(4, 3, 64)
    x[1] = 1e-20
    x[2, :, :9] = torch.linspace(-1e30, 1e30, 9)
    x[3] = -5.0  # one sign only
    got = decoded(encode(x.bfloat16(), codec)).view(x.shape).float()
    assert torch.isfinite(got).all()
    assert bool((got[0] == 0).all())
    assert torch.allclose(got[1:], x[1:].bfloat16().float(), rtol=0.07, atol=0) or codec == "int4"
    assert torch.allclose(got[3], x[3], rtol=0.01)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_captured_types_are_encoded_alike(codec: str, dtype: torch.dtype) -> None:
    x = residual_stream(times=20)
    for a, b in zip(tensors(encode(x, codec)), tensors(encode(x.to(dtype), codec)), strict=True):
        assert float((a.float() != b.float()).float().mean()) < 0.05  # a division rounded in bf16 or in fp32


@pytest.mark.parametrize("codec", CODECS)
def test_rows_are_independent(codec: str) -> None:
    """A sample's bytes do not depend on its neighbours: parts can be cut and joined without decoding."""
    x = residual_stream(600)
    whole = encode(x, codec)
    parts = [encode(x[:13], codec), encode(x[13:400], codec), encode(x[400:], codec)]
    assert same(cat_rows(parts), whole)
    assert same(whole[13:400], parts[1])
    picked = torch.tensor([5, 500, 77])
    assert torch.equal(decoded(whole[picked]), decoded(whole)[picked])
    assert same(whole[torch.arange(600) < 13], parts[0])


def test_rows_of_several_codecs_join_as_values() -> None:
    x = residual_stream(20)
    mixed = cat_rows([encode(x, "bf16"), encode(x, "fp8"), encode(x, "int8")])
    assert isinstance(mixed, Tensor)
    assert torch.equal(mixed[20:40], decoded(encode(x, "fp8")))


def test_the_fast_way_to_read_fp8_is_torchs_own() -> None:
    bits = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8).unsqueeze(0)
    rows = Encoded("fp8", 254, bits, torch.ones(1, 1, dtype=torch.bfloat16))
    assert torch.equal(rows.decode(), bits.view(torch.float8_e4m3fn).bfloat16())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("codec", LOSSY)
def test_a_gpu_decodes_to_the_same_bits(codec: str) -> None:
    rows = encode(residual_stream(3000), codec)
    assert isinstance(rows, Encoded)
    assert torch.equal(rows.map(lambda t: t.cuda()).decode().cpu(), rows.decode())


@pytest.mark.parametrize("codec", LOSSY)
def test_values_are_one_product_rounded_once(codec: str) -> None:
    """The rule that makes devices agree, written plainly."""
    x = residual_stream(50)
    rows = encode(x, codec)
    assert isinstance(rows, Encoded)
    if codec == "fp8":
        values = rows.data.view(torch.float8_e4m3fn).float()
    elif codec == "int8":
        values = rows.data.float()
    else:
        values = torch.stack((rows.data & 15, rows.data >> 4), -1).flatten(1).float()
    wide = rows.width // rows.scale.shape[1]
    if rows.zero is not None:
        values = values - rows.zero.float().repeat_interleave(wide, 1)
    assert torch.equal(rows.decode(), (values * rows.scale.float().repeat_interleave(wide, 1)).bfloat16())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("hidden", [64, 576, 90])
def test_bytes_of_a_state_are_as_planned(codec: str, hidden: int) -> None:
    rows = encode(residual_stream(10, hidden), codec)
    assert rows.nbytes == 10 * 4 * state_bytes(hidden, codec)


def test_groups_never_span_states() -> None:
    assert [group_size(h) for h in (7168, 4096, 2880, 576, 100, 90, 7)] == [64, 64, 64, 64, 50, 45, 7]


@pytest.mark.parametrize("planes", [1, 2, 4])
def test_compression_loses_nothing_and_notices_damage(planes: int) -> None:
    rows = residual_stream(30).view(30, -1).view(torch.uint8)
    frame = compress(rows, planes)
    assert torch.equal(decompress(frame, rows.numel(), planes), rows.flatten())
    with pytest.raises(OSError):
        decompress(frame[: len(frame) // 2], rows.numel(), planes)


def test_planes_pay_for_bf16_and_zstd_for_fp8() -> None:
    x = residual_stream(300)
    plain = x.view(300, -1).view(torch.uint8)
    assert len(compress(plain, 2)) < 0.75 * plain.numel() < len(compress(plain, 1))
    fp8 = encode(x, "fp8")
    assert isinstance(fp8, Encoded)
    assert len(compress(fp8.data, 1)) < 0.9 * fp8.data.numel()


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(UserError, match="int4 keeps two channels in a byte and the hidden size is 7"):
        encode(torch.zeros(2, 3, 7), "int4")
    with pytest.raises(UserError, match=r"capture\.codec fp4 is none of bf16, fp8, int8, int4"):
        encode(torch.zeros(2, 3, 8), "fp4")
    with pytest.raises(UserError, match="planes splits the bytes of a value and codec fp8 has one"):
        parse_config({"sources": [{"path": "x"}], "capture": {"codec": "fp8", "compression": "planes"}}, "test")


def tensors(rows: States) -> list[Tensor]:
    return list(rows.tensors().values()) if isinstance(rows, Encoded) else [rows]


def same(a: States, b: States) -> bool:
    return type(a) is type(b) and all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))
