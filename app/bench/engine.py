"""An engine of our own that the bench measures: vLLM in this process, stepped by hand, so every token has its time."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.bench.measure import Answer, Ask, Done, Job, Served, do
from app.cluster import log_in_worker
from app.errors import UserError, first_line
from app.serving import speculative_config
from app.storage import Store

log = logging.getLogger("draftmill")
_COUNTERS = "vllm:spec_decode_num_"
_LINE_EVERY_S = 15
# Arguments of the engine that would have the bench measure something else.
_OWNED_ARGS = {
    "model": "set target.model",
    "tokenizer": "it is the target's own",
    "max_model_len": "set generate.max_length",
    "max_num_seqs": "set bench.concurrency",
    "tensor_parallel_size": "set generate.tensor_parallel",
    "enable_prefix_caching": "it stays off, since each pass asks the same prompts",
    "disable_log_stats": "acceptance is read from vLLM's counters",
    "speculative_config": "it is method eagle3 with the exported draft; set bench.draft_tokens",
}


@dataclass(frozen=True)
class ServeSpec:
    """One measured vLLM, picklable."""

    target: str  # local folder
    draft: Store | None  # the exported folder, None: no draft
    num_draft_tokens: int
    dtype: str
    max_model_len: int
    max_num_seqs: int
    on_gpu: bool
    tensor_parallel: int
    kv_cache_gib: float
    trust_remote_code: bool
    enforce_eager: bool
    engine_args: dict[str, Any] = field(default_factory=dict)


def refuse_owned_args(args: Mapping[str, Any]) -> None:
    """Raises UserError where `args`, the bench.engine_args, hold arguments of ours: what to set instead."""
    owned = [f"{name} ({_OWNED_ARGS[name]})" for name in sorted(args) if name in _OWNED_ARGS]
    if owned:
        raise UserError(f"bench.engine_args may not hold {', '.join(owned)}")


def serve(spec: ServeSpec, job: Job) -> Done:
    """Start vLLM and do the job with it; a draft of an object store is copied to this machine meanwhile.

    Raises:
        UserError: vLLM cannot start so.
    """
    with contextlib.nullcontext() if spec.draft is None else spec.draft.open_folder() as draft:
        return do(OwnEngine(spec, draft), job)


class OwnEngine:
    """vLLM as a Service; `draft` is the local folder of `spec.draft`."""

    def __init__(self, spec: ServeSpec, draft: Path | None) -> None:
        from app.engine.process import prepare_process

        prepare_process()
        log_in_worker()
        from vllm import LLM

        self.on_cpu = not spec.on_gpu
        self._drafts = draft is not None
        self._count = 0
        self._before: dict[str, list[int]] = {}
        try:
            self._llm = LLM(**_arguments(spec, draft))
        except Exception as error:
            lines = str(error).strip().splitlines()
            raise UserError(f"bench: vLLM could not start ({lines[-1] if lines else first_line(error)})") from error

    def answer(self, asks: Sequence[Ask], concurrency: int) -> list[Answer]:
        """Answers in the order of the prompts; a next one is begun when one has ended."""
        engine: Any = self._llm.llm_engine
        coming = list(enumerate(asks))[::-1]
        answers: list[Answer] = [Answer([], 0.0, [], [], 0) for _ in asks]
        open_: dict[str, Answer] = {}
        said = time.monotonic()
        while coming or open_:
            while coming and len(open_) < concurrency:
                number, ask = coming.pop()
                name = self._begin_request(engine, ask)
                open_[name] = answers[number]
                answers[number].started = time.perf_counter()
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                answer, ids = open_[output.request_id], list(output.outputs[0].token_ids)
                if ids:
                    answer.ids += ids
                    answer.tokens += len(ids)
                    answer.arrivals.append(now)
                    answer.sizes.append(len(ids))
                if output.finished:
                    del open_[output.request_id]
            if time.monotonic() - said > _LINE_EVERY_S:
                said = time.monotonic()
                log.info("bench: %d of %d prompts answered", len(asks) - len(coming) - len(open_), len(asks))
        return answers

    def _begin_request(self, engine: Any, ask: Ask) -> str:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=ask.temperature,
            seed=ask.seed,
            max_tokens=ask.max_tokens,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._count += 1
        name = f"bench-{self._count}"
        engine.add_request(name, TokensPrompt(prompt_token_ids=ask.prompt_ids), params)
        return name

    def begin(self) -> None:
        self._before = self._counters()

    def end(self, into: Served) -> None:
        if not self._drafts:
            return
        after = self._counters()
        delta = {k: [a - b for a, b in zip(after[k], self._before[k], strict=True)] for k in after}
        into.drafts = delta["drafts"][0]
        into.draft_tokens = delta["draft_tokens"][0]
        into.accepted = delta["accepted_tokens"][0]
        into.accepted_per_position = delta["accepted_tokens_per_pos"]

    def _counters(self) -> dict[str, list[int]]:
        """vLLM's acceptance counters: name -> values (one, or one per position)."""
        found: dict[str, list[int]] = {}
        metrics: list[Any] = self._llm.get_metrics()
        for metric in metrics:
            name = metric.name
            if name.startswith(_COUNTERS):
                values = getattr(metric, "values", None)
                found[name.removeprefix(_COUNTERS)] = list(values) if values is not None else [int(metric.value)]
        return found


def _arguments(spec: ServeSpec, draft: Path | None) -> dict[str, Any]:
    """Keyword arguments of LLM."""
    arguments: dict[str, Any] = {
        "model": spec.target,
        "dtype": spec.dtype,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "tensor_parallel_size": spec.tensor_parallel,
        "trust_remote_code": spec.trust_remote_code,
        "enforce_eager": spec.enforce_eager,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "use_tqdm_on_load": False,
        **spec.engine_args,
    }
    if not spec.on_gpu:
        arguments["kv_cache_memory_bytes"] = int(spec.kv_cache_gib * 2**30)
    if draft is not None:
        arguments["speculative_config"] = speculative_config(draft, spec.num_draft_tokens)
    return arguments
