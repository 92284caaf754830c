"""The end of a training step: clip the gradient and move the weights, unless something is not a number.

PyTorch's fused AdamW takes a factor for the gradients and a flag that makes it leave everything as it is, both on its
device (they were made for mixed precision). So clipping costs no pass of its own, and the processor asks once, after
the weights are on their way, how the step went.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from app.train import sharding
from app.train.draft import Eagle3Draft
from app.train.ranks import Ranks


def move(
    optimizer: torch.optim.Optimizer, draft: Eagle3Draft, clip: float, finite: Tensor, ranks: Ranks
) -> tuple[float, bool]:
    """Move the weights along gradients that are cut to norm `clip`; forget the gradients.

    finite: whether this rank's losses are numbers, a scalar bool on the draft's device. Returns the gradient's norm
    before the cut, and whether the weights moved: on no rank where any rank has a loss or norm that is not a number.
    """
    gradients = [p.grad for p in draft.parameters() if p.grad is not None]
    norm = sharding.full(torch.nn.utils.get_total_norm(gradients))
    broken = ranks.sum((~(finite & norm.isfinite())).float()).clamp(max=1.0)
    if isinstance(optimizer, torch.optim.AdamW) and not sharding.is_sharded(draft):
        fused: Any = optimizer
        fused.grad_scale, fused.found_inf = (norm.float() / clip).clamp(min=1.0), broken
        optimizer.step()
    elif not float(broken):
        torch.nn.utils.clip_grads_with_norm_(draft.parameters(), clip, norm)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    value, skipped = torch.stack([norm.float(), broken]).tolist()
    return value, not skipped
