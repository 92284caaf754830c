"""The fall-back's KV connector: reads finished requests' states out of vLLM's hidden-state cache blocks.

vLLM's method `extract_hidden_states` writes the states of every position into cache blocks of a layer of
their own (`cache_only_layers`). When a request finishes, this connector keeps its blocks for one more step,
copies the rows synchronously into the worker's store, and lets the blocks go.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from app.engine.capture_store import current_stores, external_key, reset_stores

_LAYER = "cache_only_layers"


@dataclass(frozen=True)
class Finished:
    """A request whose rows are ready: positions 0..count-1 lie in `block_ids`, in order."""

    request_id: str
    block_ids: list[int]
    count: int


@dataclass
class FinishedRequests(KVConnectorMetadata):
    """What the scheduler tells the workers with a step."""

    requests: list[Finished] = field(default_factory=list)


class ExtractConnector(KVConnectorBase_V1, SupportsHMA):
    """Store-only connector; loads nothing. Signatures are vLLM's."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        config = vllm_config.speculative_config.draft_model_config.hf_config
        self._num_states = len(config.eagle_aux_hidden_state_layer_ids)
        groups = kv_cache_config.kv_cache_groups if kv_cache_config is not None else []
        ours = [i for i, group in enumerate(groups) if any(_LAYER in name for name in group.layer_names)]
        if len(groups) > 1 and len(ours) != 1:
            raise ValueError("vLLM's extract method gives this target's states no cache group of their own")
        self._group = ours[0] if ours else 0
        self._finished: list[Finished] = []  # scheduler side, until the next step
        # Worker side: [blocks, K, block size, H], or [blocks, block size, K, H] in older versions.
        self._cache: Tensor | None = None

    # Scheduler side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Keep the blocks of a request that ended by itself, not of an aborted one."""
        if not block_ids or "ABORT" in request.status.name:
            return False, None
        # The last emitted token was never fed, so it has no state.
        self._finished.append(Finished(request.request_id, list(block_ids), request.num_tokens - 1))
        return True, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        return self.request_finished(request, block_ids[self._group] if block_ids else [])

    def build_connector_meta(self, scheduler_output: Any) -> FinishedRequests:
        requests, self._finished = self._finished, []
        return FinishedRequests(requests)

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._cache = next(cache for name, cache in kv_caches.items() if _LAYER in name)
        reset_stores(late_rows=False)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, None]:
        """Copy what the scheduler reported, and report every copied request, so that its blocks are freed."""
        if not self.has_connector_metadata():
            return None, None
        metadata = self._get_connector_metadata()
        requests = metadata.requests if isinstance(metadata, FinishedRequests) else []
        if get_tensor_model_parallel_rank() == 0:
            for request in requests:
                stores = current_stores()
                rows = self._rows(request)
                rows = (rows if stores.packing is None else stores.packing.pack(rows)).cpu()
                key = external_key(request.request_id)
                stores.states.write(key, 0, rows, rows.shape[0])
                if stores.states.folder is not None:
                    stores.states.forget(key)  # which hands them over
        return {request.request_id for request in requests} or None, None

    def _rows(self, request: Finished) -> Tensor:
        """States of one request, [count, K, H] on the device."""
        assert self._cache is not None
        blocks = self._cache[torch.tensor(request.block_ids, device=self._cache.device)]
        if blocks.shape[1] == self._num_states:
            blocks = blocks.transpose(1, 2)  # [blocks, block size, K, H]
        return blocks.flatten(0, 1)[: request.count]

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Let vLLM keep its own connector's choice: it knows its name in this version."""
        from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
            ExampleHiddenStatesConnector,
        )

        layout: str | None = ExampleHiddenStatesConnector.get_required_kvcache_layout(vllm_config)
        return layout
