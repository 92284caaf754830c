"""What test_real_engines.py measures: `python -m tests.bench.engine_scenario TARGET DRAFT OUT`, a job for each of our
engines in a process of its own."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
from pathlib import Path
from typing import Any

from app.bench.engine import ServeSpec, serve
from app.bench.measure import Ask, Job, Templates
from app.engine.process import prepare_process
from app.storage import Store
from tests.engine.helpers import tiny_prompts

TOKENS = 24
PROMPTS = tiny_prompts(5, 9, 17, 33, 12, 20, 7, 28)
ASKS = [Ask(p, TOKENS) for p in PROMPTS]
DRAWS = [Ask(p, 6, 1.0, 1000 * n + i) for n, p in enumerate(PROMPTS[:4]) for i in range(24)]
CHAT = [{"role": "user", "content": "How many sacks?"}, {"role": "user", "content": "Are you sure?"}]


def spec(target: str, draft: str | None, k: int) -> ServeSpec:
    return ServeSpec(
        target=target, draft=Store(draft) if draft else None, num_draft_tokens=k, dtype="float32",
        max_model_len=256, max_num_seqs=4, on_gpu=False, tensor_parallel=1, kv_cache_gib=0.25,
        trust_remote_code=False, enforce_eager=True,
    )  # fmt: skip


def job(target: str, seed: int, full: bool) -> Job:
    templates = Templates(target, False, None, {}, 200, TOKENS, 0.0, 0)
    draws = [Ask(a.prompt_ids, a.max_tokens, a.temperature, (a.seed or 0) + seed) for a in DRAWS]
    if not full:
        return Job(ASKS, (3,), 1, templates)
    return Job(ASKS, (3, 1), 2, templates, groups={"few": ASKS[:2]}, chats={"talk": [CHAT]}, draws=draws)


def expanded(x: Any, ends: Any, count: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    """A value for each token of values for each request; `ends` are the running sums of their tokens."""
    each = ends.diff(prepend=ends.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(each, output_size=count)


def mend_sampling() -> None:
    """vLLM's CPU build leaves the temperatures of drafted tokens unset (vllm-project/vllm#55005)."""
    from vllm.v1.sample import rejection_sampler

    setattr(rejection_sampler, "expand_batch_to_tokens", expanded)  # noqa: B010


def one(target: str, draft: str | None, k: int, seed: int, full: bool, out: str) -> None:
    prepare_process()
    mend_sampling()
    Path(out).write_bytes(pickle.dumps(serve(spec(target, draft, k), job(target, seed, full))))


def main(target: str, draft: str, out: str) -> None:
    results: dict[int, Any] = {}
    processes = multiprocessing.get_context("spawn")
    for k in (0, 3, 2):
        path = f"{out}.{k}"
        process = processes.Process(target=one, args=(target, draft if k else None, k, 10**6 * k, k != 2, path))
        process.start()
        process.join()
        assert process.exitcode == 0
        results[k] = pickle.loads(Path(path).read_bytes())
    Path(out).write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
