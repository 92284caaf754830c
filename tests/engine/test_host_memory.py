"""Memory of dropped tensors serves the next, and never while something still refers to it."""

from __future__ import annotations

import pickle

import torch

from app.engine.host_memory import HostMemory, block_size

SHAPE = (300, 4, 1024)  # 2.4 MB in bf16


def test_dropped_memory_is_used_again() -> None:
    memory = HostMemory(2**30)
    first = memory.empty(SHAPE, torch.bfloat16)
    where = first.data_ptr()
    assert first.shape == SHAPE and first.dtype == torch.bfloat16
    assert first.untyped_storage().nbytes() == 300 * 4 * 1024 * 2
    second = memory.empty(SHAPE, torch.bfloat16)
    assert second.data_ptr() != where
    del first
    assert memory.empty((299, 4, 1024), torch.bfloat16).data_ptr() == where


def test_a_part_of_a_tensor_keeps_its_memory() -> None:
    memory = HostMemory(2**30)
    whole = memory.empty(SHAPE, torch.bfloat16)
    whole.fill_(3)
    part, array = whole[7:9], whole.view(torch.int16).numpy()[5:6]
    del whole
    memory.empty(SHAPE, torch.bfloat16).fill_(4)
    assert bool((part == 3).all())
    del part
    memory.empty(SHAPE, torch.bfloat16).fill_(4)
    assert len(set(array.flatten().tolist())) == 1
    assert torch.from_numpy(array.copy()).view(torch.bfloat16).flatten()[0] == 3


def test_no_more_than_allowed_is_kept_idle() -> None:
    memory = HostMemory(3 * 2**20)
    tensors = [memory.empty(SHAPE, torch.bfloat16) for _ in range(4)]
    tensors.clear()
    assert sum(len(blocks) for blocks in memory._free.values()) == 1
    assert memory._idle == block_size(300 * 4 * 1024 * 2)


def test_tensors_are_ordinary_ones() -> None:
    memory = HostMemory(2**30)
    made = memory.empty(SHAPE, torch.float32).fill_(2)
    assert not made.is_inference()
    assert torch.equal(pickle.loads(pickle.dumps(made)), made)
    assert memory.empty((3, 2), torch.bfloat16).shape == (3, 2)


def test_blocks_waste_little() -> None:
    for size in (2**20, 2**20 + 1, 25_133_056, 2**25 - 1):
        assert size <= block_size(size) <= size * 9 / 8 + 1
