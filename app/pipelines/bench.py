"""Bench: the held-out prompts through vLLM with and without the draft, at temperature 0.

Acceptance comes from vLLM's own counters, by difference; outputs are compared token by token.
"""

from __future__ import annotations

import io
import json
import logging
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.captured import load_entries
from app.cluster import cause_of, connect, gpu_count, log_in_worker
from app.errors import UserError
from app.pipeline import StageContext, StageResult
from app.samples import SampleReader, load_split
from app.sizing import serving_gpus
from app.target import load_tokenizer

log = logging.getLogger("draftmill")
_COUNTERS = "vllm:spec_decode_num_"
_LINE_EVERY_S = 15
_FOREIGN_SHARE = 0.15  # of the cores, above which a measured speed is not this program's


@dataclass(frozen=True)
class ServeSpec:
    """One measured vLLM, picklable."""

    target: str  # local folder
    draft: str | None  # local folder, None: no draft
    num_draft_tokens: int
    dtype: str
    max_model_len: int
    max_new_tokens: int
    concurrency: int
    repeats: int
    on_gpu: bool
    tensor_parallel: int
    kv_cache_gib: float
    trust_remote_code: bool
    enforce_eager: bool
    engine_args: dict[str, Any] = field(default_factory=dict)


@dataclass
class Served:
    """What one vLLM did with the prompts."""

    outputs: list[list[int]]  # token ids, in prompt order
    seconds: list[float]  # of each measured pass
    tokens: int  # output tokens of one pass
    cpu_share: float | None = None  # of the machine's cores, what this process got; CPU engines only
    foreign_share: float | None = None  # what other programs (and a hypervisor) took of them meanwhile
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / statistics.median(self.seconds)


def run(ctx: StageContext) -> StageResult:
    """Serve, count, compare; writes `bench/bench.json` and `bench/outputs.jsonl`.

    Raises:
        UserError: there is no held-out prompt, or vLLM cannot serve the pair.
    """
    config = ctx.config
    entries = load_entries(ctx)
    split = load_split(ctx.run.store, entries, config)
    reader = SampleReader(ctx.run.store, entries, split, ("holdout",))
    rows = [r for r in (reader.row(i) for i in range(len(reader))) if r["use"] == "regenerate"]
    if not rows:
        raise UserError("bench: no prompt is held out; set evaluate.holdout above 0")
    prompts = [r["prompt_ids"] for r in rows]
    connect(config.ray)
    on_gpu = gpu_count() > 0
    draft = str(ctx.run.store.local_folder("export/draft"))
    limit = config.bench.max_new_tokens or config.generate.max_new_tokens
    common: dict[str, Any] = {
        "target": ctx.target.model,
        "num_draft_tokens": config.evaluate.num_draft_tokens,
        "dtype": config.target.dtype,
        "max_model_len": min(config.generate.max_length + 32, ctx.target.max_position_embeddings),
        "max_new_tokens": limit,
        "concurrency": config.bench.concurrency,
        "repeats": config.bench.repeats,
        "on_gpu": on_gpu,
        "tensor_parallel": serving_gpus(ctx.target, config),
        "kv_cache_gib": config.generate.kv_cache_gib,
        "trust_remote_code": config.target.trust_remote_code,
        "enforce_eager": config.generate.enforce_eager or not on_gpu,
        "engine_args": config.bench.engine_args,
    }
    # The engine must not outgrow what the answers were captured under: lengths are cut the same way.
    lengths = [min(limit, config.generate.max_length - len(p)) for p in prompts]
    conversations = len({r["conversation_id"] for r in rows})
    log.info(
        "bench: %d prompts (every turn of %d held-out conversations), first without the draft",
        len(prompts),
        conversations,
    )
    baseline = _serve_elsewhere(ServeSpec(draft=None, **common), prompts, lengths, config.ray.engine_cpus)
    log.info("bench: %.0f tokens/s; now with the draft", baseline.tokens_per_second)
    served = _serve_elsewhere(ServeSpec(draft=draft, **common), prompts, lengths, config.ray.engine_cpus)
    result = compare(baseline, served, config.evaluate.num_draft_tokens)
    private = {number for number, row in enumerate(rows) if row["private"]}
    result["mismatch_examples"] = _in_words(ctx, result["mismatch_examples"], private)
    result |= {
        "prompts": len(prompts),
        "conversations": conversations,
        "concurrency": config.bench.concurrency,
        "max_new_tokens": limit,
    }
    lines = [
        {"sample_id": r["sample_id"], "domain": r["domain"], "baseline": a, "draft": b}
        for r, a, b in zip(rows, baseline.outputs, served.outputs, strict=True)
    ]
    ctx.run.store.write_json("bench/bench.json", result)
    ctx.run.store.write_bytes("bench/outputs.jsonl", "".join(json.dumps(x) + "\n" for x in lines).encode())
    log.info(
        "bench: acceptance length %.3f, %.0f tokens/s with the draft, %d of %d outputs differ",
        result["acceptance_length"],
        result["tokens_per_second"]["draft"],
        result["output_mismatches"],
        len(prompts),
    )
    if not result["comparable"]:
        log.warning("bench: other programs took the processor meanwhile; the two speeds cannot be compared")
    for case in result["mismatch_examples"][:3]:
        log.info(
            "bench: prompt %d differs from token %d on: %r without the draft, %r with it",
            case["prompt"],
            case["first_difference"],
            case["baseline"],
            case["draft"],
        )
    return StageResult(outputs=["bench/bench.json", "bench/outputs.jsonl"], counts=result)


def _in_words(ctx: StageContext, examples: list[dict[str, Any]], private: set[int]) -> list[dict[str, Any]]:
    """The examples with their tokens as text, which for private prompts stays hidden."""
    if not examples:
        return []

    def words(example: dict[str, Any], side: str) -> str:
        return "(private)" if example["prompt"] in private else str(tokenizer.decode(example[side]))

    target = ctx.config.target
    tokenizer = load_tokenizer(ctx.target.model, target.trust_remote_code, target.chat_template)
    return [{**e, **{side: words(e, side) for side in ("baseline", "draft")}} for e in examples]


def compare(baseline: Served, served: Served, num_draft_tokens: int) -> dict[str, Any]:
    """Acceptance by the one definition (CONTRACTS.md section 6), speed, and output differences."""
    if served.drafts == 0:
        raise UserError("bench: vLLM drafted nothing; the answers are too short to measure, or the draft is not used")
    examples = []
    mismatches = 0
    for number, (a, b) in enumerate(zip(baseline.outputs, served.outputs, strict=True)):
        if a == b:
            continue
        mismatches += 1
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        examples.append(
            {
                "prompt": number,
                "first_difference": first,
                "baseline": a[first : first + 5],
                "draft": b[first : first + 5],
            }
        )
    return {
        "acceptance_length": 1 + served.accepted / served.drafts,
        "acceptance_rate": served.accepted / served.draft_tokens,
        "acceptance_per_position": [n / served.drafts for n in served.accepted_per_position],
        "drafts": served.drafts,
        "draft_tokens": served.draft_tokens,
        "accepted": served.accepted,
        "num_draft_tokens": num_draft_tokens,
        "tokens_per_second": {"baseline": baseline.tokens_per_second, "draft": served.tokens_per_second},
        "speedup": served.tokens_per_second / baseline.tokens_per_second,
        "seconds": {"baseline": baseline.seconds, "draft": served.seconds},
        "comparable": _comparable(baseline, served),
        "output_mismatches": mismatches,
        "mismatch_examples": examples[:20],
    }


def _comparable(baseline: Served, served: Served) -> bool:
    """Whether both runs had the processor alike; other programs' work would read as the draft's gain or loss.

    No draft gains more than its acceptance length.
    """
    if served.tokens_per_second / baseline.tokens_per_second > 1.05 * (1 + served.accepted / served.drafts):
        return False
    if not baseline.cpu_share or not served.cpu_share:
        return True
    if max(baseline.foreign_share or 0, served.foreign_share or 0) > _FOREIGN_SHARE:
        return False
    return max(baseline.cpu_share, served.cpu_share) < 1.3 * min(baseline.cpu_share, served.cpu_share)


def _serve_elsewhere(spec: ServeSpec, prompts: list[list[int]], lengths: list[int], cpus: float) -> Served:
    """Run `serve` in a process of its own, so that the engine's memory is given back."""
    import ray

    resources: dict[str, Any] = {"num_gpus": spec.tensor_parallel} if spec.on_gpu else {"num_cpus": cpus}
    task = ray.remote(max_calls=1, max_retries=1, **resources)(serve)
    try:
        served: Served = ray.get(task.remote(spec, prompts, lengths))
    except Exception as error:
        cause = cause_of(error)
        if isinstance(cause, UserError):
            raise cause from error
        raise
    return served


def serve(spec: ServeSpec, prompts: list[list[int]], lengths: list[int]) -> Served:
    """Answer all prompts greedily and read the counters before and after.

    Raises:
        UserError: vLLM cannot start so.
    """
    from app.engine.process import prepare_process

    prepare_process()
    log_in_worker()
    from vllm import LLM, SamplingParams, TokensPrompt

    kwargs: dict[str, Any] = {
        "model": spec.target,
        "dtype": spec.dtype,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.concurrency,
        "tensor_parallel_size": spec.tensor_parallel,
        "trust_remote_code": spec.trust_remote_code,
        "enforce_eager": spec.enforce_eager,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "use_tqdm_on_load": False,
        **spec.engine_args,
    }
    if not spec.on_gpu:
        kwargs["kv_cache_memory_bytes"] = int(spec.kv_cache_gib * 2**30)
    if spec.draft is not None:
        kwargs["speculative_config"] = {
            "method": "eagle3",
            "model": spec.draft,
            "num_speculative_tokens": spec.num_draft_tokens,
        }
    try:
        llm = LLM(**kwargs)
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise UserError(f"bench: vLLM could not start ({lines[-1] if lines else type(error).__name__})") from error
    inputs = [TokensPrompt(prompt_token_ids=p) for p in prompts]
    params = [SamplingParams(temperature=0.0, max_tokens=n, detokenize=False) for n in lengths]
    llm.generate(inputs[:1], params[:1], use_tqdm=False)  # warm-up
    before = _counters(llm)
    cpu, machine = time.process_time(), _machine_seconds()
    seconds: list[float] = []
    outputs: list[list[int]] = []
    for _ in range(spec.repeats):
        started = time.perf_counter()
        done = llm.generate(inputs, params, use_tqdm=_progress_lines())
        seconds.append(time.perf_counter() - started)
        outputs = [list(o.outputs[0].token_ids) for o in done]
    cpu, machine = time.process_time() - cpu, _machine_seconds() - machine
    after = _counters(llm)
    result = Served(outputs=outputs, seconds=seconds, tokens=sum(map(len, outputs)))
    if not spec.on_gpu:
        result.cpu_share = cpu / sum(seconds) / len(os.sched_getaffinity(0))
        result.foreign_share = max(0.0, machine - cpu) / sum(seconds) / (os.cpu_count() or 1)
    if spec.draft is not None:
        delta = {k: [a - b for a, b in zip(after[k], before[k], strict=True)] for k in after}
        result.drafts = delta["drafts"][0]
        result.draft_tokens = delta["draft_tokens"][0]
        result.accepted = delta["accepted_tokens"][0]
        result.accepted_per_position = delta["accepted_tokens_per_pos"]
    return result


def _machine_seconds() -> float:
    """CPU seconds that all programs of this machine used since it started, and that a hypervisor took from it."""
    try:
        user, nice, system, _idle, _io, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _progress_lines() -> Any:
    """A tqdm class whose progress is log lines: no terminal is needed, and several processes do not mix."""
    from tqdm import tqdm

    class Lines(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO()})
            self._last_line = time.monotonic()

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if time.monotonic() - self._last_line > _LINE_EVERY_S:
                self._last_line = time.monotonic()
                log.info("bench: %d of %d prompts answered", self.n, self.total)
            return shown

    return Lines


def _counters(llm: Any) -> dict[str, list[int]]:
    """vLLM's acceptance counters: name -> values (one, or one per position)."""
    found: dict[str, list[int]] = {}
    for metric in llm.get_metrics():
        name = metric.name
        if name.startswith(_COUNTERS):
            values = getattr(metric, "values", None)
            found[name.removeprefix(_COUNTERS)] = list(values) if values is not None else [int(metric.value)]
    return found
