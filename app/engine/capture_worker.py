"""vLLM workers that keep the target's auxiliary hidden states while it generates.

The only module that touches the inside of vLLM's workers and model runners (0.26 to 0.33). What it relies on:
`model.set_aux_hidden_state_layers`, `model_runner.use_aux_hidden_state_outputs` and, between `execute_model`
and `sample_tokens`, `model_runner.execute_model_state` with `aux_hidden_states`, one tensor [tokens, H] per
layer id in ascending order. Both model runners have these; they differ in where the batch order lies.
The engine's self-check proves all of it on every start.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform

from app.engine.capture_store import CaptureStore, Piece, StoreAccess, external_key, reset_stores
from app.engine.pack_kernel import Packer, packer
from app.packed import Packing

CONFIG_KEY = "draftmill_layer_ids"  # in additional_config, and so in the key of vLLM's compile cache
_CHUNK = 1024  # tokens per pinned buffer
_CHUNKS = 40  # two prefill steps of vLLM's usual 16,384 tokens, and some

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker  # type: ignore[assignment]


class HostCopier:
    """Device to host through a ring of pinned buffers on a side stream; a thread files the rows.

    The forward pass never waits, unless every buffer of the ring is still on its way.

    Args:
        shape, dtype: of a token's row, [K, H] or packed.
    """

    def __init__(self, store: CaptureStore, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._store = store
        self.shape = shape
        self._stream = torch.cuda.Stream()
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(_CHUNKS):
            self._free.put(torch.empty((_CHUNK, *shape), dtype=dtype, pin_memory=True))
        self._jobs: queue.SimpleQueue[tuple[Tensor, Any, list[Piece]] | str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._file, name="draftmill-capture", daemon=True)
        self._thread.start()

    def copy(self, rows: Tensor, pieces: list[Piece]) -> None:
        """Start the copy of rows [tokens, *shape] (device) that `pieces` describe."""
        self._stream.wait_stream(torch.cuda.current_stream())
        rows.record_stream(self._stream)
        for low in range(0, rows.shape[0], _CHUNK):
            high = min(low + _CHUNK, rows.shape[0])
            here = pieces
            if rows.shape[0] > _CHUNK:
                here = [_cut(p, low, high) for p in pieces if p.first < high and p.first + p.count > low]
            buffer = self._free.get()
            event = torch.cuda.Event(blocking=True)  # the thread sleeps meanwhile: the host's cores have work
            with torch.cuda.stream(self._stream):
                buffer[: high - low].copy_(rows[low:high], non_blocking=True)
                event.record()
            self._store.announce()
            self._jobs.put((buffer, event, here))

    def forget(self, key: str) -> None:
        """Forget a request once the copies under way, perhaps of its own rows, are filed."""
        self._jobs.put(key)

    def close(self) -> None:
        """End the thread after the copies under way."""
        self._jobs.put(None)
        self._thread.join()

    def _file(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, str):
                try:
                    self._store.forget(job)
                except OSError as error:  # their memory is full: the thread must live, or the engine would wait for it
                    self._store.fail(error)
                continue
            buffer, event, pieces = job
            fault: BaseException | None = None
            try:
                event.synchronize()
                self._store.write_batch(buffer, pieces)
            except BaseException as error:
                fault = error
            self._free.put(buffer)
            self._store.settle(fault)


def _cut(piece: Piece, low: int, high: int) -> Piece:
    """The part of `piece` that lies in batch rows low..high-1, its rows counted from `low`."""
    first, last = max(piece.first, low), min(piece.first + piece.count, high)
    return Piece(piece.key, piece.start + first - piece.first, first - low, last - first, piece.capacity)


class CaptureWorker(StoreAccess, PlatformWorker):
    """vLLM's worker of this platform, keeping the configured states of every request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stores = reset_stores()
        self._copier: HostCopier | None = None
        self._capacity: dict[str, int] = {}
        self._pack: Packer | None = None
        self._packing: Packing | None = None  # of `_pack`
        self._num_states = 0  # without s_0

    def _layer_ids(self) -> tuple[int, ...]:
        """The configured ids, s_n last."""
        config: Any = self.vllm_config.additional_config
        return tuple(config[CONFIG_KEY])

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        model: Any = self.model_runner.model
        if not getattr(model, "supports_eagle3", False):
            raise ValueError(
                f"{type(model).__name__} of this vLLM version gives no auxiliary hidden states; "
                "EAGLE-3 cannot be trained for it with this version"
            )
        ids = self._layer_ids()
        self._num_states = len(ids)
        self._stores.gives_embedding = _prepare_embedding(model)
        model.set_aux_hidden_state_layers((0, *ids) if self._stores.gives_embedding else ids)
        self.model_runner.use_aux_hidden_state_outputs = True

    def execute_model(self, scheduler_output: Any) -> Any:
        output = super().execute_model(scheduler_output)
        # After the all-reduce every tensor-parallel rank holds the same states.
        if self.rank == 0 and self._stores.started:
            with torch.inference_mode():
                self._capture(scheduler_output)
        return output

    def _capture(self, scheduler_output: Any) -> None:
        for request_id in scheduler_output.finished_req_ids:
            key = external_key(request_id)
            self._capacity.pop(key, None)
            if self._copier is None:
                self._stores.states.forget(key)
            else:
                self._copier.forget(key)
        state = self.model_runner.execute_model_state
        if state is None or scheduler_output.total_num_scheduled_tokens == 0:
            return
        aux = state.aux_hidden_states
        expected = self._num_states + int(self._stores.gives_embedding)
        if aux is None or len(aux) != expected:
            raise RuntimeError(f"the model gave {len(aux or [])} auxiliary states, {expected} were asked for")
        pieces = self._pieces(scheduler_output, state)
        tokens = pieces[-1].first + pieces[-1].count
        states = [a[:tokens] for a in aux]  # each [tokens, H]; the rest is padding
        if self._stores.gives_embedding:
            s_0 = states.pop(0)
            if self._stores.embeddings is not None:
                self._stores.embeddings.write_batch(s_0.unsqueeze(1).cpu(), pieces)
        packing = self._stores.packing
        if self._pack is None or self._packing != packing:
            self._pack, self._packing = packer(packing, states[0].device), packing
        # A copy of its own: the tensors may be buffers that the next graph replay overwrites.
        rows = self._pack(states)  # [tokens, K, H] or [tokens, bytes]
        if rows.device.type == "cpu":
            self._stores.states.write_batch(rows, pieces)
            return
        shape = tuple(rows.shape[1:])
        if self._copier is not None and self._copier.shape != shape:
            self._copier.close()
            self._copier = None
        if self._copier is None:
            self._copier = HostCopier(self._stores.states, shape, rows.dtype)
        self._copier.copy(rows, pieces)

    def _pieces(self, scheduler_output: Any, state: Any) -> list[Piece]:
        """Who owns which rows of the batch, in batch order, by request id and absolute position."""
        starts: dict[str, int] = {}
        for new in scheduler_output.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
            prompt, sampling = new.prompt_token_ids or [], new.sampling_params
            limit = sampling.max_tokens if sampling is not None else None
            # The last token is never fed. Exact, so that an answer of full length is handed over without a copy.
            self._capacity.setdefault(external_key(new.req_id), len(prompt) + (limit or 1) - 1)
        cached = scheduler_output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        batch = getattr(state, "input_batch", None)  # the V2 runner's state carries its batch
        order = self.model_runner.input_batch.req_ids if batch is None else batch.req_ids
        pieces, first = [], 0
        for request_id in order:
            count = scheduler_output.num_scheduled_tokens[request_id]
            key = external_key(request_id)
            pieces.append(Piece(key, starts[request_id], first, count, self._capacity.get(key, 0)))
            first += count
        return pieces

    def shutdown(self) -> None:
        if self._copier is not None:
            self._copier.close()
            self._copier = None
        super().shutdown()


def _prepare_embedding(model: Any) -> bool:
    """Make layer id 0 yield the embeddings; False where the model class cannot.

    Classes with a loop of their own instead of vLLM's helper (deepseek_v2, and kimi_k25 on it) add the
    residual, which is None at layer 0.
    """
    inner = model.get_language_model() if hasattr(model, "get_language_model") else model
    holder = type(getattr(inner, "model", inner))
    if "_maybe_add_hidden_state" not in getattr(getattr(holder.forward, "__code__", None), "co_names", ()):
        return False
    holder._maybe_add_hidden_state = _add_state
    return True


def _add_state(
    holder: Any, states: list[Tensor], layer_id: int, hidden: Tensor, residual: Tensor | None
) -> list[Tensor]:
    """vLLM's `_maybe_add_hidden_state`, with a copy where there is no residual yet.

    The embedding tensor becomes the residual, which the fused norm of layer 1 updates in place.
    """
    if layer_id in holder.aux_hidden_state_layers:
        states.append(hidden.clone() if residual is None else hidden + residual)
    return states
