"""States as a GPU hands them over: encoded where they were made, with what the row checks need to know.

A token is one row of bytes, so that it crosses to the host in one copy and no processor touches it again before the
disk does:

    norm [S] fp32 | zeros [S] fp32 | scale [S * G] bf16 | zero point [S * G] uint8 | values | padding

S states of G groups each, values in the codec (app/codecs.py); bf16 has no scale, and the engine's own dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.codecs import Encoded, States, encode, group_size

_ALIGN = 16  # bytes: of a row, so that every field can be viewed in its own dtype
_BY_CODEC = {"fp8": torch.uint8, "int8": torch.int8, "int4": torch.uint8}


@dataclass(frozen=True)
class Packing:
    """How the S states of a token are packed."""

    codec: str
    hidden: int  # H
    dtype: torch.dtype  # of the states as the engine gives them
    states: int = 4  # S

    @property
    def _groups(self) -> int:
        """Scales of one state."""
        return {"bf16": 0, "fp8": 1}.get(self.codec, self.hidden // group_size(self.hidden))

    @property
    def _value_bytes(self) -> int:
        """Bytes of the values of one state."""
        return {"bf16": self.hidden * self.dtype.itemsize, "int4": self.hidden // 2}.get(self.codec, self.hidden)

    @property
    def fields(self) -> tuple[int, int, int, int]:
        """Where scale, zero point and values of a token start, and where they end, in bytes."""
        scale = self.states * 8
        zero = scale + self.states * self._groups * 2
        values = zero + (self.states * self._groups if self.codec == "int4" else 0)
        values += values % 2  # 16-bit values lie at even places
        return scale, zero, values, values + self.states * self._value_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of a token."""
        return -(-self.fields[3] // _ALIGN) * _ALIGN

    def pack(self, states: Tensor) -> Tensor:
        """States [N, S, H], on any device -> rows [N, nbytes] uint8 on that device."""
        scale, zero, values, end = self.fields
        count = len(states)
        out = torch.empty(count, self.nbytes, dtype=torch.uint8, device=states.device)
        seen = out[:, :scale].view(torch.float32)  # [N, 2 S]
        seen[:, : self.states] = torch.linalg.vector_norm(states, dim=-1, dtype=torch.float32)
        seen[:, self.states :] = (states == 0).sum(-1)
        stored = encode(states, self.codec)
        if isinstance(stored, Encoded):
            out[:, scale : scale + 2 * stored.scale.shape[1]].view(torch.bfloat16).copy_(stored.scale)
            if stored.zero is not None:
                out[:, zero : zero + stored.zero.shape[1]] = stored.zero
            out[:, values:end] = stored.data.view(torch.uint8)
        else:
            out[:, values:end] = stored.view(torch.uint8)
        return out


@dataclass(frozen=True)
class PackedStates:
    """States of N positions: rows [N, packing.nbytes] uint8, CPU."""

    rows: Tensor
    packing: Packing

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the states: (N, S, H)."""
        return len(self.rows), self.packing.states, self.packing.hidden

    def norms(self) -> Tensor:
        """[N, S] fp32, taken before encoding; NaN or infinite where a value is."""
        return self.rows[:, : 4 * self.packing.states].view(torch.float32)

    def zeros(self) -> Tensor:
        """Values that were exactly zero before encoding [N, S] fp32."""
        return self.rows[:, 4 * self.packing.states : 8 * self.packing.states].view(torch.float32)

    def norms_and_zeros(self) -> NDArray[np.float32]:
        """Both at once [2 S, N], the positions of a state side by side: rows lie kilobytes apart, so once over them is
        all that it takes."""
        seen = self.rows.numpy()[:, : 8 * self.packing.states].view(np.float32)  # [N, 2 S]
        return np.ascontiguousarray(seen.T)

    def stored(self, first: int, last: int, positions: slice | Tensor | None = None) -> States:
        """States first .. last-1 of all positions, or of `positions`: rows of (last - first) * H values; views, but of
        positions given one by one."""
        p = self.packing
        scale_at, zero_at, values_at, _ = p.fields
        count = last - first

        def field(start: int, width: int) -> Tensor:
            cut = self.rows[:, start + first * width : start + last * width]
            return cut if positions is None else cut[positions]

        values = field(values_at, p._value_bytes)
        if p.codec == "bf16":
            return values.view(p.dtype)
        scale = field(scale_at, 2 * p._groups).view(torch.bfloat16)
        zero = field(zero_at, p._groups) if p.codec == "int4" else None
        return Encoded(p.codec, count * p.hidden, values.view(_BY_CODEC[p.codec]), scale, zero)

    def values(self) -> Tensor:
        """The states again [N, S, H]."""
        stored = self.stored(0, self.packing.states)
        plain = stored.decode() if isinstance(stored, Encoded) else stored
        return plain.reshape(self.shape)


Captured = Tensor | PackedStates  # states [N, S, H] of a request, plain or packed


def plain_states(states: Captured) -> Tensor:
    """`states` as plain values [N, S, H]."""
    return states.values() if isinstance(states, PackedStates) else states
