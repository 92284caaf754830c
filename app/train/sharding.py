"""A draft whose weights, gradients and moments are spread over the workers (PyTorch's FSDP2), or whole on each.

Sharded, the weights come together for the passes of a step and the gradients are summed into shards at its end, once
each, however many passes a worker makes of the step. Both forms compute the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from app.train.draft import Eagle3Draft
from app.train.ranks import Ranks

T = TypeVar("T")


def shard(draft: Eagle3Draft, device: torch.device, embedding_device: torch.device) -> None:
    """Spread the parameters of `draft`, alike on every rank, over all ranks; it stays one unit.

    The frozen embedding, of which a step reads a few rows, stays whole on `embedding_device`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks = Ranks()
    mesh = init_device_mesh(device.type, (ranks.world,))
    embedding, draft.embed_tokens.weight = draft.embed_tokens.weight, torch.empty(0)  # it would be moved too
    fully_shard(draft, mesh=mesh, reshard_after_forward=False)
    draft.embed_tokens.weight = embedding.to(embedding_device)
    unit: Any = draft
    unit.set_gradient_divide_factor(1.0)  # the losses of all ranks add up
    unit.set_force_sum_reduction_for_comms(True)  # gloo has no other


def is_sharded(draft: nn.Module) -> bool:
    return hasattr(draft, "unshard")


def passes(draft: Eagle3Draft, functions: Sequence[Callable[[], tuple[Tensor, T]]]) -> list[T]:
    """Run each function, which gives a loss and something else, and its backward pass; returns what else they give.

    The functions read the draft's parameters. Sharded, every rank must come here with at least one function: the
    weights are gathered before the first and the gradients summed after the last.
    """
    unit: Any = draft
    results = []
    for number, function in enumerate(functions, 1):
        if is_sharded(draft):
            last = number == len(functions)
            unit.set_requires_gradient_sync(last)
            unit.set_reshard_after_backward(last)
            loss, more = draft(lambda function=function: _touching(draft, function))
        else:
            loss, more = function()
        if loss.requires_grad:
            loss.backward()
        results.append(more)
    return results


def _touching(draft: nn.Module, function: Callable[[], tuple[Tensor, T]]) -> tuple[Tensor, T]:
    """`function`; a loss that depends on nothing, as of a rank that has nothing to learn, is made to sum along."""
    loss, more = function()
    if not loss.requires_grad:
        loss = loss + sum(p.flatten()[0] * 0.0 for p in draft.parameters())
    return loss, more


@contextlib.contextmanager
def whole(draft: Eagle3Draft) -> Iterator[None]:
    """The parameters whole on every rank, for reading; all ranks enter together."""
    if not is_sharded(draft):
        yield
        return
    unit: Any = draft
    unit.unshard()
    try:
        yield
    finally:
        unit.reshard()


def full(tensor: Tensor) -> Tensor:
    """A tensor of a parameter, whole; of a sharded one all ranks ask together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor of a parameter."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def relaid(part: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a tensor that is laid out as `parameter` is."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return part
    mesh, placements = parameter.device_mesh, parameter.placements
    whole: Tensor = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return whole


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, on every rank the same, laid out as `parameter` is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor):
        return value.to(parameter.device)
    placed: Tensor = distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return placed
