"""The interface between the generate stage and an engine, and nothing of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from app.packed import Captured, plain_states


@dataclass(frozen=True)
class EngineSpec:
    """What an engine needs to start: plain, picklable values."""

    model: str  # local folder of the target
    aux_layer_ids: tuple[int, ...]  # three ids k, ascending: state after k layers (CONTRACTS.md section 1)
    num_layers: int  # n; s_n is captured as the teacher state
    capture_mode: str = "auxiliary"  # auxiliary | extract
    dtype: str = "bfloat16"
    codec: str | None = None  # a GPU packs the states in it; None: they come as they are (app/packed.py)
    max_model_len: int = 2048  # tokens, prompt and answer
    max_num_seqs: int = 64  # requests decoded at once
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    trust_remote_code: bool = False
    seed: int = 0
    kv_cache_gib: float | None = None  # CPU only: GiB of KV cache
    cpu_threads: int | None = None  # CPU only: compute threads; None: every core the process may use
    gpu_memory_utilization: float = 0.9
    engine_process: bool | None = False  # its loop in a process of its own; None: on a GPU where /dev/shm has room
    engine_args: dict[str, Any] = field(default_factory=dict)  # passed through to vLLM
    endpoints: EndpointSpec | None = None  # servers that make the answers; the engine then only captures


@dataclass(frozen=True)
class EndpointSpec:
    """Servers of the target, and how they are asked. The key comes from the environment, never from here."""

    urls: tuple[str, ...]  # base URLs that end in /v1
    model: str | None = None  # name the servers know the target by; None: the only one they list
    api: str = "completions"  # completions | chat
    concurrency: int = 64  # most requests at once per server
    timeout_s: float = 600.0  # seconds one request may take
    patience_s: float = 600.0  # seconds without an answer from any server before the engine gives up
    prefill_timeout_s: float = 1800.0  # seconds the capture of one answer may take
    chat_template: str | None = None  # file that replaces the tokenizer's template
    template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """One engine request. With `answer_ids` the answer was made elsewhere: states come by prefill."""

    request_id: str
    prompt_ids: list[int]
    max_new_tokens: int
    sampling: dict[str, Any] = field(default_factory=dict)  # vLLM SamplingParams names
    answer_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None  # what prompt_ids was rendered from; for servers asked by chat alone
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # of that render, `tools` among them
    urgent: bool = False  # goes before every request that waits


@dataclass(frozen=True)
class Completion:
    """What the target emitted and saw. T = prompt + answer tokens."""

    answer_ids: list[int]  # token ids from the engine, the end token included when it was emitted
    finish_reason: str  # "stop" | "length" | "prefill"
    states: Captured  # [T-1, 4, H] target dtype, or packed, CPU: s_a, s_b, s_c, s_n for positions 0..T-2

    def plain(self) -> Tensor:
        """The states as plain values [T-1, 4, H]."""
        return plain_states(self.states)


class Engine(Protocol):
    """A started target engine. `complete` may be awaited by many callers at once."""

    async def complete(self, request: Request) -> Completion:
        """Run one request.

        Raises:
            RowError: this request alone is at fault; the engine goes on.
            EngineError: the engine is dead; every later call fails too.
        """
        ...

    def close(self) -> None:
        """Stop the engine and release its processes and memory."""
        ...


class EngineError(Exception):
    """The engine itself failed; the actor that holds it must end and be replaced."""
