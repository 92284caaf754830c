"""AdamW whose two moments take a byte each: for drafts whose optimiser state does not fit otherwise.

A moment is kept in blocks of 256 values: the largest magnitude of a block in fp32, and for each value its place on a
fixed grid from 0 to 1 whose steps are a constant share of the value, so that small values keep their digits too.
Rounding goes up or down by chance, in proportion: a decay smaller than half a step of the grid would otherwise never
happen. The chances depend on the step's number alone, so that a resumed training goes on to the bit. A square that is
not 0 never becomes 0, since a step divides by its root.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from app.train.sharding import like, local, relaid

BLOCK = 256  # values that share a scale
SMALLEST = 4096  # values; smaller parameters, norms say, keep fp32 moments
_SLICE = BLOCK << 14  # values worked on at once, which bounds the fp32 copies
_LOW = {"exp_avg": 1e-5, "exp_avg_sq": 1e-9}  # the smallest share of a block's largest that is not 0
MOMENTS = tuple(_LOW)


def grid(moment: str) -> Tensor:
    """The ascending fp32 values, at most 256 within -1 .. 1, that a byte stands for."""
    signed = moment == "exp_avg"
    count = 127 if signed else 255
    steps = torch.logspace(math.log10(_LOW[moment]), 0, count, dtype=torch.float64)
    steps[-1] = 1.0
    values = torch.cat([torch.zeros(1), steps.float()])
    return torch.cat([-values[1:].flip(0), values]) if signed else values


class Packed:
    """N values of a moment in bytes."""

    def __init__(self, moment: str, count: int, device: torch.device) -> None:
        self.grid = grid(moment).to(device)  # [at most 256]
        self.signed = bool(self.grid[0] < 0)
        zero = int((self.grid == 0).nonzero())
        self.codes = torch.full((count,), zero, dtype=torch.uint8, device=device)  # [N]
        self.scale = torch.zeros(-(-count // BLOCK), device=device)  # [blocks] fp32

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def read(self, low: int, high: int) -> Tensor:
        """Values low .. high-1 in fp32; low is a multiple of BLOCK."""
        return self.grid[self.codes[low:high].int()] * self._spread(low, high)

    def write(self, low: int, values: Tensor, chance: torch.Generator | None) -> None:
        """Values [n] fp32 from `low` on, a multiple of BLOCK; without `chance` to the nearest of the grid."""
        high = low + len(values)
        padded = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
        self.scale[low // BLOCK : -(-high // BLOCK)] = padded.abs().amax(-1)
        x = values / self._spread(low, high).clamp(min=torch.finfo(torch.float32).tiny)  # [n] in -1 .. 1
        below = (torch.bucketize(x, self.grid, right=True) - 1).clamp(0, len(self.grid) - 2)  # [n]
        share = (x - self.grid[below]) / (self.grid[below + 1] - self.grid[below])  # [n] of the way to the next
        draw = 0.5 if chance is None else torch.rand(len(x), generator=chance, device=x.device)
        codes = below + (share > draw)  # [n]
        if not self.signed:
            codes = torch.where(values > 0, codes.clamp(min=1), codes)
        self.codes[low:high] = codes.to(torch.uint8)

    def _spread(self, low: int, high: int) -> Tensor:
        scale = self.scale[low // BLOCK : -(-high // BLOCK)]
        return scale.repeat_interleave(BLOCK)[: high - low]


class EightBitAdamW(torch.optim.Optimizer):
    """AdamW as torch.optim.AdamW computes it, but for the rounding of its moments."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float = 1e-8
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step for every parameter that has a gradient."""
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                if p.grad is not None:
                    self._update(p, number, group)

    def _update(self, p: Tensor, number: int, group: dict[str, Any]) -> None:
        state = self._state(p)
        state["step"] += 1
        step, (b1, b2) = int(state["step"]), group["betas"]
        weight, grad = local(p).view(-1), local(p.grad).reshape(-1)  # type: ignore[arg-type]
        chance = torch.Generator(weight.device).manual_seed(step * 1_000_003 + number)
        correction = math.sqrt(1 - b2**step)
        for low in range(0, len(weight), _SLICE):
            high = min(low + _SLICE, len(weight))
            w, g = weight[low:high], grad[low:high].float()  # [n]
            mean, square = (_read(state[name], low, high) for name in MOMENTS)  # [n]
            mean = mean.lerp(g, 1 - b1)
            square = (square * b2).addcmul(g, g, value=1 - b2)
            w.mul_(1 - group["lr"] * group["weight_decay"])
            w.addcdiv_(mean, (square.sqrt() / correction).add_(group["eps"]), value=-group["lr"] / (1 - b1**step))
            for name, values in zip(MOMENTS, (mean, square), strict=True):
                _write(state[name], low, values, chance)

    def _state(self, p: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if not state:
            part = local(p)
            state["step"] = torch.zeros(())
            for name in MOMENTS:
                packs = p.numel() >= SMALLEST
                state[name] = Packed(name, part.numel(), part.device) if packs else torch.zeros_like(part).view(-1)
        return state

    def tensors(self, p: Tensor) -> dict[str, Tensor]:
        """The state of `p` as AdamW would hold it, in fp32 and laid out as `p` is; empty before the first step."""
        state = self.state.get(p)
        if not state:
            return {}
        part = local(p)
        moments = {name: _read(state[name], 0, part.numel()).view_as(part) for name in MOMENTS}
        return {**{name: relaid(value, p) for name, value in moments.items()}, "step": state["step"]}

    def load(self, p: Tensor, tensors: dict[str, Tensor]) -> None:
        """Put back what `tensors` gave, whole."""
        state = self._state(p)
        state["step"] = tensors["step"].clone().cpu()
        for name in MOMENTS:
            _write(state[name], 0, local(like(tensors[name], p)).reshape(-1), None)


def _read(moment: Packed | Tensor, low: int, high: int) -> Tensor:
    return moment.read(low, high) if isinstance(moment, Packed) else moment[low:high]


def _write(moment: Packed | Tensor, low: int, values: Tensor, chance: torch.Generator | None) -> None:
    if isinstance(moment, Packed):
        moment.write(low, values, chance)
    else:
        moment[low : low + len(values)] = values
