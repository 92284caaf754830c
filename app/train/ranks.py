"""The workers of one training run, seen from one of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")


class Ranks:
    """Sums and gathers over the process group, or nothing at all where there is none."""

    def __init__(self) -> None:
        self.active = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.active else 0
        self.world = dist.get_world_size() if self.active else 1

    @property
    def leads(self) -> bool:
        """True on the one rank that writes."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """`tensor` summed over the ranks, in place."""
        if self.active:
            dist.all_reduce(tensor)
        return tensor

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum (not average) every gradient; a parameter without one counts as zero."""
        held = list(parameters)
        for p in held:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        if not self.active:
            return
        flat = torch.cat([p.grad.flatten() for p in held if p.grad is not None])  # [all parameters]
        dist.all_reduce(flat)
        for p, part in zip(held, flat.split([p.numel() for p in held]), strict=True):
            p.grad = part.view_as(p)

    def gather(self, value: T) -> list[T]:
        """`value` of every rank, on every rank."""
        if not self.active:
            return [value]
        values: list[T | None] = [None] * self.world
        dist.all_gather_object(values, value)
        return [v for v in values if v is not None]

    def same_start(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give every rank the first one's parameters."""
        if self.active:
            for p in parameters:
                dist.broadcast(p.data, 0)
