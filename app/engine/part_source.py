"""The parts to make as a Ray Data dataset whose blocks, one part each, come into being as they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask


class PartSource(Datasource):
    """Yields a block of `part` and `key` for every part: one lazy task instead of an object per part.

    156,250 blocks made beforehand cost the driver a gigabyte and twenty seconds, and every part several times as long.
    """

    def __init__(self, items: list[tuple[int, str]]) -> None:
        super().__init__()
        self._count = len(items)
        self._items = ray.put(items)

    def get_name(self) -> str:
        """What Ray calls the operator, after `Read`."""
        return "GenerateParts"

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """One task, however many are asked for: its blocks are taken up in the order of the parts."""
        items = self._items

        def blocks() -> Iterator[pa.Table]:
            for part, key in ray.get(items):
                yield pa.table({"part": [part], "key": [key]})

        about = BlockMetadata(num_rows=self._count, size_bytes=64 * self._count, input_files=None, exec_stats=None)
        return [ReadTask(blocks, about)]


def parts_dataset(items: list[tuple[int, str]]) -> ray.data.Dataset:
    """A dataset of one row per block, `part` and `key`, in the order of `items`."""
    # No CPU: engines may hold them all, and the task must not be fused with theirs.
    dataset = ray.data.read_datasource(PartSource(items), override_num_blocks=1, num_cpus=0)
    dataset.context.target_max_block_size = 1  # bytes: a block is cut after its first row
    return dataset
