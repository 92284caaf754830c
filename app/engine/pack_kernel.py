"""One kernel that packs a step's states (app/packed.py): instead of twenty launches, which the engine would wait for.

`packer` proves it on a few rows against `Packing.pack` before it is used; where it differs or cannot be compiled (an
older GPU has no fp8) the twenty launches do the work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from app.codecs import GROUP, group_size
from app.packed import Packing

log = logging.getLogger(__name__)

Packer = Callable[[Sequence[Tensor]], Tensor]  # S states, each [N, H], on a device -> rows [N, nbytes] uint8

_STATES = 4
_PROOF_ROWS = 5


def pack_plainly(packing: Packing | None) -> Packer:
    """By plain PyTorch; without a packing the rows are the states as they are, [N, S, H]."""
    if packing is None:
        return lambda states: torch.stack(list(states), dim=1)
    return lambda states: packing.pack(torch.stack(list(states), dim=1))


def packer(packing: Packing | None, device: torch.device) -> Packer:
    """The fastest way to pack on `device`."""
    plain = pack_plainly(packing)
    if packing is None or device.type != "cuda" or not _has_kernel(packing):
        return plain
    try:
        fast = _kernel_packer(packing)
        generator = torch.Generator(device).manual_seed(0)
        rows = torch.randn(_PROOF_ROWS, _STATES, packing.hidden, generator=generator, device=device)
        rows[..., 1] *= 300
        rows[0, 1, ::3] = 0
        states = list(rows.to(packing.dtype).unbind(1))
        difference = proof_difference(fast(states), plain(states), packing)
    except Exception as error:  # a compiler's faults have no common kind
        difference = f"{type(error).__name__}: {error}"
    if difference is not None:
        log.warning("states are packed by plain PyTorch, a little slower: the kernel's result differs (%s)", difference)
        return plain
    return fast


def proof_difference(ours: Tensor, wanted: Tensor, packing: Packing) -> str | None:
    """How rows of the kernel differ from those of `Packing.pack`, or None; sums may round otherwise."""
    from app.packed import PackedStates

    a, b = PackedStates(ours, packing), PackedStates(wanted, packing)
    if not torch.allclose(a.norms(), b.norms(), rtol=1e-3):
        return "norms"
    if not torch.equal(a.zeros(), b.zeros()):
        return "zeros"
    apart = (a.values().float() - b.values().float()).abs()
    # A step of the codec at most, where a value lies between two: relative, and that of the smallest values.
    step, least = {"bf16": (0.0, 0.0), "fp8": (2.0**-3, 2.0**-9 / 448), "int8": (2.0**-6, 1 / 127)}[packing.codec]
    wanted_values = b.values().float().abs()
    limit = step * wanted_values + 1.01 * least * wanted_values.amax(-1, keepdim=True)
    share = float((apart > limit).float().mean())
    rounded = float((apart > 0).float().mean())
    return f"values, {share:.2g} of them, {rounded:.2g} at all" if share > 0 or rounded > 0.01 else None


def _has_kernel(packing: Packing) -> bool:
    if packing.states != _STATES or packing.codec not in ("bf16", "fp8", "int8"):
        return False
    if packing.codec == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        return False
    return packing.codec != "int8" or group_size(packing.hidden) == GROUP


def _kernel_packer(packing: Packing) -> Packer:
    import triton

    from app.engine.pack_triton import pack_rows

    scale_at, _, values_at, _ = packing.fields
    block = triton.next_power_of_2(packing.hidden)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[packing.dtype.itemsize]

    def pack(states: Sequence[Tensor]) -> Tensor:
        count = len(states[0])
        out = torch.empty(count, packing.nbytes, dtype=torch.uint8, device=states[0].device)
        pack_rows[(count, _STATES)](
            *states,
            *(s.view(bits) for s in states),
            out,
            out.view(torch.float32),
            out.view(torch.int16),
            out.view(bits),
            *(s.stride(0) for s in states),
            packing.hidden,
            packing.nbytes,
            scale_at,
            values_at,
            CODEC=packing.codec,
            NARROW=packing.dtype == torch.bfloat16,
            ITEM=packing.dtype.itemsize,
            GROUP=GROUP,
            BLOCK=block,
            num_warps=8 if block >= 4096 else 4,
        )
        return out

    return pack
