"""How hidden states are stored: codecs that keep fewer bits, and lossless compression of the bytes.

A codec turns rows of states into smaller values with scales (`Encoded`), and `decode` turns them back on whatever
device they lie: the same bits on a CPU and on a GPU, since each value is one product in fp32, rounded once to bfloat16.

| codec | a value | scale | why |
| --- | --- | --- | --- |
| bf16 | as the engine gave it (`target.dtype`) | none | exact |
| fp8 | float8 e4m3 | one per token and state | a few channels are hundreds of times the median: exponents bear it |
| int8 | -127..127 | one per group of 64 channels | only the groups with such a channel get coarse |
| int4 | 0..15, two in a byte | scale and zero point per group of 64 | asymmetric: a third less error than symmetric |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from app.errors import UserError

CODECS = ("bf16", "fp8", "int8", "int4")
COMPRESSIONS = ("none", "zstd", "planes")  # planes: with bf16 only

GROUP = 64  # most channels that share a scale in int8 and int4
_LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 15.0}
_BF16_PLACES = -0x7810  # sign, four exponent and three mantissa bits of e4m3 in bfloat16
_TINY = 1e-30  # scale of a group of zeros
_CHUNK = 256  # rows worked on at once, so that they stay in the cache
_CHUNK_ON_GPU = 2048  # bounds the fp32 copies
_THREADS = 8  # that compress or decompress one sample
_ZSTD_LEVEL = (
    1  # residual streams are noise to anything but the entropy coder: higher levels cost time and save nothing
)

# Bytes after compression over bytes before, of values (not scales); residual streams of SmolLM2-135M.
_RATIO: dict[tuple[str, str], float] = {
    ("bf16", "zstd"): 0.80,
    ("bf16", "planes"): 0.69,
    ("fp8", "zstd"): 0.85,
    ("int8", "zstd"): 0.85,
    ("int4", "zstd"): 0.85,
}


@dataclass(frozen=True)
class Encoded:
    """N rows of `width` values in a codec other than bf16, on any device."""

    codec: str
    width: int
    data: (
        Tensor  # [N, width] uint8 (fp8: its bits) or int8; int4: [N, width / 2] uint8, the even channel in the low half
    )
    scale: Tensor  # [N, G] bfloat16; each is of width / G neighbouring values
    zero: Tensor | None = None  # [N, G] uint8, int4: what stands for 0, so that small values do not all move one way

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, rows: slice | Tensor) -> Encoded:
        """Some of the rows: a slice, or a tensor of indices or of bools."""
        return self.map(lambda tensor: tensor[rows])

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """What is stored, by the ending of its name."""
        found = {"": self.data, ".scale": self.scale, ".zero": self.zero}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def map(self, function: Callable[[Tensor], Tensor]) -> Encoded:
        """The same with `function` of every tensor."""
        zero = None if self.zero is None else function(self.zero)
        return replace(self, data=function(self.data), scale=function(self.scale), zero=zero)

    def decode(self) -> Tensor:
        """The values again [N, width] bfloat16, on the device they lie on."""
        out = torch.empty(len(self.data), self.width, dtype=torch.bfloat16, device=self.data.device)
        step = _CHUNK if self.data.device.type == "cpu" else _CHUNK_ON_GPU
        for start in range(0, len(self.data), step):
            out[start : start + step] = _decode(self[start : start + step])
        return out


States = Tensor | Encoded  # N rows of states: plain values, or encoded ones


def _decode(rows: Encoded) -> Tensor:
    groups = rows.scale.shape[1]
    if rows.codec == "fp8":
        values = _fp8_values(rows.data)
    elif rows.codec == "int8":
        values = rows.data.float()
    else:
        values = torch.stack((rows.data & 15, rows.data >> 4), -1).float()  # [N, width/2, 2]
    values = values.view(len(rows), groups, -1)  # [N, G, width/G]
    if rows.zero is not None:
        values = values - rows.zero.float().unsqueeze(-1)
    return (values * rows.scale.float().unsqueeze(-1)).view(len(rows), rows.width).bfloat16()


def _fp8_values(data: Tensor) -> Tensor:
    """Bits of float8 e4m3 as fp32, exact. On a CPU a shift puts them where bfloat16 has its own, ten times as fast."""
    if data.is_cuda:
        return data.view(torch.float8_e4m3fn).float()
    bits = (data.view(torch.int8).to(torch.int16) << 4) & _BF16_PLACES
    return bits.view(torch.bfloat16).float() * 2.0**120  # the difference of the two exponent biases


def decoded(states: States) -> Tensor:
    """`states` as plain values [N, width]."""
    return states.decode() if isinstance(states, Encoded) else states


def encode(states: Tensor, codec: str) -> States:
    """States of N tokens in `codec`: states [N, S, H] -> N rows of S * H values, on their device.

    Raises:
        UserError: an unknown codec, or int4 with an odd hidden size.
    """
    count, side, hidden = states.shape
    if codec == "bf16":
        return states.reshape(count, side * hidden)
    if codec not in CODECS:
        raise UserError(f"capture.codec {codec} is none of {', '.join(CODECS)}")
    if codec == "int4" and hidden % 2:
        raise UserError(f"capture.codec int4 keeps two channels in a byte and the hidden size is {hidden}; use int8")
    width = side * hidden
    groups = side if codec == "fp8" else width // group_size(hidden)
    device = states.device
    kind = torch.int8 if codec == "int8" else torch.uint8
    out = Encoded(
        codec,
        width,
        torch.empty(count, width // 2 if codec == "int4" else width, dtype=kind, device=device),
        torch.empty(count, groups, dtype=torch.bfloat16, device=device),
        torch.empty(count, groups, dtype=torch.uint8, device=device) if codec == "int4" else None,
    )
    quantise = {"fp8": _to_fp8, "int8": _to_int8, "int4": _to_int4}[codec]
    step = _CHUNK if device.type == "cpu" else _CHUNK_ON_GPU
    for start in range(0, count, step):
        part = states[start : start + step].reshape(-1, groups, width // groups).contiguous()
        quantise(part, out[start : start + step])
    return out


@cache
def group_size(hidden: int) -> int:
    """Channels that share a scale: the largest divisor of the hidden size up to GROUP; no group spans two states."""
    return max(g for g in range(1, min(GROUP, hidden) + 1) if hidden % g == 0)


def _to_fp8(x: Tensor, out: Encoded) -> None:
    """x [n, G, H] in the captured dtype; fills `out`."""
    scale = _scale(_largest(x), "fp8")  # [n, G, 1]
    values = (x / scale.to(x.dtype) if x.dtype == torch.bfloat16 else x.float() / scale.float()).to(torch.float8_e4m3fn)
    out.data.copy_(values.view(torch.uint8).view(len(x), -1))
    out.scale.copy_(scale.squeeze(-1))


def _to_int8(x: Tensor, out: Encoded) -> None:
    scale = _scale(_largest(x), "int8")  # [n, G, 1]
    out.data.copy_((x.float() * (1 / scale.float())).round_().view(len(x), -1))
    out.scale.copy_(scale.squeeze(-1))


def _to_int4(x: Tensor, out: Encoded) -> None:
    assert out.zero is not None
    wide = x.float()
    low = wide.amin(-1, keepdim=True).clamp_(max=0)  # [n, G, 1]
    high = wide.amax(-1, keepdim=True).clamp_(min=0)
    scale = _scale(high - low, "int4")
    factor = 1 / scale.float()
    zero = (low * -factor).round_().clamp_(0, 15)
    values = (wide * factor + zero).round_().clamp_(0, 15).to(torch.uint8).view(len(x), -1)
    out.data.copy_(values[:, 0::2] | (values[:, 1::2] << 4))
    out.scale.copy_(scale.squeeze(-1))
    out.zero.copy_(zero.squeeze(-1))


def _largest(x: Tensor) -> Tensor:
    """The largest absolute value of each group [n, G, g] -> [n, G, 1]; bits of floats without sign sort as they do."""
    kind, mask = (torch.int32, 0x7FFFFFFF) if x.dtype == torch.float32 else (torch.int16, 0x7FFF)
    return (x.contiguous().view(kind) & mask).amax(-1, keepdim=True).view(x.dtype)


def _scale(span: Tensor, codec: str) -> Tensor:
    # Times the inverse: a GPU divides by a constant so, and both must give the same bits.
    return (span.float() * (1 / _LARGEST[codec])).clamp_(min=_TINY).bfloat16()


def cat_rows(parts: Sequence[States]) -> States:
    """Rows one after another; of several codecs: as plain values."""
    first = parts[0]
    if isinstance(first, Encoded) and all(isinstance(p, Encoded) and p.codec == first.codec for p in parts):
        stored: list[Encoded] = [p for p in parts if isinstance(p, Encoded)]
        zeros = [p.zero for p in stored if p.zero is not None]
        return replace(
            first,
            data=torch.cat([p.data for p in stored]),
            scale=torch.cat([p.scale for p in stored]),
            zero=torch.cat(zeros) if zeros else None,
        )
    return torch.cat([decoded(p) for p in parts])


def state_bytes(hidden: int, codec: str, compression: str = "none", value_bytes: int = 2) -> float:
    """Bytes that one stored state of one token takes; compressed ones by what SmolLM2's measure."""
    groups = hidden // group_size(hidden) if hidden else 0
    values, scales = {
        "bf16": (hidden * value_bytes, 0),
        "fp8": (hidden, 2),
        "int8": (hidden, 2 * groups),
        "int4": (hidden / 2, 3 * groups),
    }[codec]
    ratio = 1.0 if compression == "none" else _RATIO.get((codec, compression), _RATIO[codec, "zstd"])
    return values * ratio + scales


def compress(rows: Tensor, planes: int) -> bytes:
    """One frame: the bytes of rows [n, bytes] uint8 in zstd.

    With `planes` of 2 or 4 the first bytes of all values come first, then the second ones, and so on, each plane a
    zstd frame of its own: exponents compress, mantissas do not, and one table fits each.
    """
    values = np.ascontiguousarray(rows.numpy()).reshape(-1, planes)
    coder = pa.Codec("zstd", compression_level=_ZSTD_LEVEL)
    # zstd reads frames that follow each other as one.
    return b"".join(coder.compress(np.ascontiguousarray(values[:, p]), asbytes=True) for p in range(planes))


def decompress(frame: Any, count: int, planes: int) -> Tensor:
    """What `compress` was given, flat: [count] uint8.

    Raises:
        OSError: the frame is damaged.
    """
    plain = pa.Codec("zstd").decompress(frame, decompressed_size=count)
    values = np.frombuffer(plain, np.uint8)
    if planes > 1:
        values = np.ascontiguousarray(values.reshape(planes, -1).T).reshape(-1)
    return torch.from_numpy(values)


def in_threads(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """`function` of each item, in order; zstd lets other threads work."""
    threads = min(_THREADS, os.cpu_count() or 1, len(items))
    if threads < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, items))
