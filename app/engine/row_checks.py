"""Is a row's capture plausible? Cheap tests on hidden states, each naming the layer (FIELD_CASES.md F51)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.codecs import decoded
from app.packed import Captured, PackedStates

ZERO_SHARE = 0.5  # exact zeros among the values of a layer; real residual streams have almost none
NORM_BAND = 1e4  # a position's norm against the layer's median, either way
GROWTH_BAND = 1e4  # a layer's median norm against that of the layer before, either way
_SAMPLE = 32  # positions whose single values are looked at


def check_states(states: Captured, layer_ids: Sequence[int]) -> str | None:
    """The fault of one request's states, in words that name the layer, or None.

    The bands are wide on purpose: first tokens carry massive activations (hundreds of times the median norm)
    and norms grow with depth. They catch memory nobody wrote and cache blocks of something else.
    A request of one token repeated throughout has constant states and is reported as such.
    Costs one pass for the norms and a look at 32 positions: about 2 microseconds per token at H = 4,096; packed states
    bring their norms along.

    Args:
        states: [N, K, H], any float type or packed; K states of N positions.
        layer_ids: the K ids k (state after k layers), ascending, for the message.
    """
    if len(states.shape) != 3 or states.shape[1] != len(layer_ids):
        return f"states have shape {tuple(states.shape)}, expected [positions, {len(layer_ids)}, hidden]"
    count = states.shape[0]
    if count == 0:
        return "there are no positions"
    norms, zero_share = _norms_and_zeros(states)
    middle = (count - 1) // 2
    median = np.partition(norms, middle, 0)[middle]  # [K]
    if _plausible(norms, median, zero_share):
        return None
    medians = median.tolist()
    for k, layer in enumerate(layer_ids):
        fault = _layer_fault(_layer(states, k), norms[:, k], medians[k], zero_share[k])
        if fault is None and k > 0 and not 1 / GROWTH_BAND < medians[k] / medians[k - 1] < GROWTH_BAND:
            fault = f"median norm {medians[k] / medians[k - 1]:.2g} times that of layer {layer_ids[k - 1]}"
        if fault is not None:
            return f"layer {layer}: {fault}"
    return None


def _plausible(norms: NDArray[np.float32], median: NDArray[np.float32], zero_share: list[float]) -> bool:
    """Whether no layer can have a fault, all of them at once: norms [N, K], medians [K]."""
    low, high = norms.min(0), norms.max(0)  # [K]; NaN fails every comparison
    if max(zero_share) >= ZERO_SHARE or not bool(((low > 0) & (low < high)).all()):
        return False
    growth = median[1:] / median[:-1]  # [K-1]
    within = (high <= NORM_BAND * median) & (low * NORM_BAND >= median)  # [K]
    return bool(within.all() and ((growth > 1 / GROWTH_BAND) & (growth < GROWTH_BAND)).all())


def _norms_and_zeros(states: Captured) -> tuple[NDArray[np.float32], list[float]]:
    """Norms [N, K], NaN where a value is, and the share of exact zeros of each of the K states."""
    # NumPy from here on: hundreds of rows may end at once, and PyTorch's small operations cost ten times as much.
    if isinstance(states, PackedStates):
        count, kinds, hidden = states.shape
        seen = states.norms_and_zeros()  # [2 K, N]
        return seen[:kinds].T, (seen[kinds:].sum(1) / (count * hidden)).tolist()
    step = max(1, len(states) // _SAMPLE)
    norms = torch.linalg.vector_norm(states, dim=-1).float()
    return norms.numpy(), (states[::step] == 0).float().mean((0, 2)).tolist()


def _layer(states: Captured, k: int) -> Callable[[], Tensor]:
    """The values of the k-th state [N, H], as they are stored, made when they are asked for."""
    if isinstance(states, PackedStates):
        return lambda: decoded(states.stored(k, k + 1))
    return lambda: states[:, k]


def _layer_fault(
    states: Callable[[], Tensor], norms: NDArray[np.float32], median: float, zero_share: float
) -> str | None:
    """The fault of one layer: states gives [N, H], norms [N] fp32."""
    count = len(norms)
    finite = np.isfinite(norms)  # [N]
    if not finite.all():
        first = int((~finite).argmax())
        return f"not finite at {int((~finite).sum())} of {count} positions, first at position {first}"
    low, high = float(norms.min()), float(norms.max())
    if high == 0:
        return "all zero"
    if low == 0:
        zero = norms == 0  # [N]
        first = int(zero.argmax())
        return f"all zero at {int(zero.sum())} of {count} positions, first at position {first}"
    if zero_share >= ZERO_SHARE:
        return f"{100 * zero_share:.0f} % of the values are zero"
    if count > 2 and low == high and bool(((values := states()) == values[0]).all()):
        return f"the same at all {count} positions"
    if high > NORM_BAND * median or low * NORM_BAND < median:
        return f"norms from {low / median:.2g} to {high / median:.2g} times the median over positions"
    return None
