"""What the engine tests run in processes of their own: `python -m tests.engine.scenarios NAME MODEL OUT`.

An engine in the process keeps memory and patches torch, so each scenario starts one engine, measures, and
writes a dictionary to OUT for test_engine.py to judge.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.engine.base import Completion, EngineError, Request
from app.engine.process import prepare_process
from app.engine.row_checks import check_states
from app.engine.self_check import run_self_check
from app.engine.vllm_engine import VllmEngine
from app.errors import RowError, UserError
from app.packed import PackedStates, plain_states
from app.target import inspect_target, load_target_head
from tests.engine.helpers import (
    NEW_TOKENS,
    SMOL_LAYERS,
    all_of,
    answers,
    errors,
    leftovers,
    make_mla,
    prefills,
    reference,
    smol_prompts,
    spec_for,
    tiny_prompts,
)
from tests.tiny import LAYERS, MAX_POSITIONS


def tiny(model: str) -> dict[str, Any]:
    """Every layer id, chunked prefill, requests of very different length, row faults, at last the death."""
    every = tuple(range(1, LAYERS))
    engine = VllmEngine(spec_for(model, every, LAYERS, engine_args={"max_num_batched_tokens": 32}, max_num_seqs=4))
    prompts = tiny_prompts(5, 150, 61, 33)
    engine.check_embeddings(True)
    jobs = [engine.submit(Request(f"row {i}", p, NEW_TOKENS)) for i, p in enumerate(prompts)]
    done = [job.future.result() for job in jobs]
    first = [engine.take_embeddings(j, d.states.shape[0]) for j, d in zip(jobs, done, strict=True)]
    engine.check_embeddings(False)
    again = prefills(engine, prompts, done)
    wanted = reference(model, [p + d.answer_ids for p, d in zip(prompts, done, strict=True)])
    out: dict[str, Any] = {
        "shapes": [(len(p), len(d.answer_ids), tuple(d.states.shape)) for p, d in zip(prompts, done, strict=True)],
        "embedding_errors": [errors(e[:, None], w[:-1, :1]) for e, w in zip(first, wanted, strict=True)],
        "errors": [errors(d.states, w[:-1, 1:]) for d, w in zip(done, wanted, strict=True)],
        "prefill_errors": [errors(d.states, w[:-1, 1:]) for d, w in zip(again, wanted, strict=True)],
        "prefill_reasons": [d.finish_reason for d in again],
        "greedy": _greedy(model, done, wanted, prompts),
        "row_faults": _row_faults(engine),
        "cancelled": _cancel(engine),
        "order": _order(engine),
    }
    assert engine._stores is not None
    answers(engine, [[5, 6, 7]], 2)
    out["held"] = len(engine._stores.states)
    engine.pack("int8")
    packed = answers(engine, prompts, NEW_TOKENS)
    out["packed"] = [isinstance(d.states, PackedStates) for d in packed]
    out["packed_errors"] = [errors(plain_states(d.states), w[:-1, 1:]) for d, w in zip(packed, wanted, strict=True)]
    out["packed_checks"] = [check_states(d.states, [*every, LAYERS]) for d in packed]
    out["death"] = _death(engine)
    engine.close()
    out["threads"] = [t.name for t in threading.enumerate() if t.name.startswith("draftmill")]
    return out


def _greedy(model: str, done: list[Completion], wanted: list[Tensor], prompts: list[list[int]]) -> float:
    """Share of emitted tokens that Hugging Face's own states give."""
    head = load_target_head(inspect_target(model))
    hits = [
        (head.logits(w[len(p) - 1 : -1, -1]).argmax(-1) == torch.tensor(d.answer_ids)).float()
        for d, w, p in zip(done, wanted, prompts, strict=True)
    ]
    return float(torch.cat(hits).mean())


def _row_faults(engine: VllmEngine) -> dict[str, str]:
    good = tiny_prompts(9, 12)
    faulty = {
        "too long": Request("too long", [5] * MAX_POSITIONS, 4),
        "answer too long": Request("answer too long", [5] * 500, 4, answer_ids=[6] * 20),
        "temperature": Request("temperature", [5, 6], 4, {"temperature": -1.0}),
        "unknown name": Request("unknown name", [5, 6], 4, {"temprature": 1.0}),
        "bad words": Request("bad words", [5, 6], 4, {"logit_bias": {10**9: 1.0}}),
        "negative id": Request("negative id", [5, -6], 4),
        "id beyond": Request("id beyond", [5, 10**6], 4),
        "empty": Request("empty", [], 4),
    }
    requests = [Request("good 0", good[0], 8), *faulty.values(), Request("good 1", good[1], 8)]
    done = asyncio.run(all_of(engine, requests))
    names = ["good 0", *faulty, "good 1"]
    return {
        name: d.reason if isinstance(d, RowError) else type(d).__name__ for name, d in zip(names, done, strict=True)
    }


def _cancel(engine: VllmEngine) -> str:
    async def main() -> str:
        request = Request("slow", tiny_prompts(20)[0], 490, {"ignore_eos": True})
        try:
            await asyncio.wait_for(engine.complete(request), 0.2)
        except TimeoutError:
            done = await engine.complete(Request("next", [5, 6, 7], 3))
            return f"cancelled, then {done.finish_reason}"
        return "finished"

    return asyncio.run(main())


def _order(engine: VllmEngine) -> list[str]:
    """Names in the order in which they ended: four rows find a place, four wait, and an urgent one comes last."""
    ended: list[str] = []
    rows = [Request(f"row {i}", [5 + i, 6, 7], 30, {"ignore_eos": True}) for i in range(8)]
    urgent = Request("urgent", [9, 8, 7], 1, {}, [5, 6], urgent=True)
    jobs = [engine.submit(request) for request in [*rows, urgent]]
    for job in jobs:
        job.future.add_done_callback(lambda _, name=job.request.request_id: ended.append(name))
    gone = engine.submit(Request("cancelled as it waits", [5], 30))
    engine._inbox.put(gone.key)
    for job in jobs:
        job.future.result()
    return ended


def _death(engine: VllmEngine) -> dict[str, Any]:
    runner = engine._engine.model_executor.driver_worker.worker.model_runner
    steps, healthy = 0, runner.execute_model

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > 5:
            raise RuntimeError("planted: the device is gone")
        return healthy(*args, **kwargs)

    runner.execute_model = dying
    requests = [Request(f"row {i}", p, 100, {"ignore_eos": True}) for i, p in enumerate(tiny_prompts(9, 12, 7))]
    done = asyncio.run(all_of(engine, requests))
    try:
        engine.submit(requests[0])
        later = "accepted"
    except EngineError as error:
        later = str(error)
    return {"kinds": [type(d).__name__ for d in done], "said": str(done[0]), "later": later}


def preempt(model: str) -> dict[str, Any]:
    """A cache too small for the batch: requests are preempted and start over, also while chunked."""
    prepare_process()
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted: list[str] = []
    original: Callable[..., Any] = Scheduler._preempt_request

    def counting(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return original(self, request, *args, **kwargs)

    Scheduler._preempt_request = counting  # type: ignore[method-assign]
    args = {"block_size": 32, "max_num_batched_tokens": 64}
    # 4 KiB a token in fp32: 17 blocks of 32 tokens, for 6 requests that start with 1 or 2 blocks and grow to 5 each.
    engine = VllmEngine(spec_for(model, (2, 4, 6), LAYERS, kv_cache_gib=17 * 32 * 4096 / 2**30, engine_args=args))
    prompts = tiny_prompts(30, 45, 60, 20, 50, 33)
    requests = [Request(f"row {i}", p, 110, {"ignore_eos": True}) for i, p in enumerate(prompts)]
    holds, posted = threading.Event(), threading.Event()

    def hold() -> None:
        holds.set()
        posted.wait(300)

    holding = threading.Thread(target=engine._call, args=(hold,))  # no step until all six are posted
    holding.start()
    holds.wait(300)
    jobs = [engine.submit(request) for request in requests]
    posted.set()
    holding.join()
    done = [job.future.result(timeout=300) for job in jobs]
    sequences = [p + d.answer_ids for p, d in zip(prompts, done, strict=True)]
    wanted = reference(model, sequences)
    ids = [2, 4, 6, LAYERS]
    out = {
        "preempted": len(preempted),
        "errors": [errors(d.states, w[:-1, ids]) for d, w in zip(done, wanted, strict=True)],
        "sizes": [len(s) for s in sequences],
    }
    out["held"], out["threads"] = leftovers(engine)
    return out


def planted(model: str) -> dict[str, str]:
    """The self-check against a healthy engine and against planted faults. Returns what it says, by fault."""
    engine = VllmEngine(spec_for(model, (2, 4, 6), LAYERS, dtype="bfloat16"), self_check=False)
    worker = engine._engine.model_executor.driver_worker.worker
    target = worker.model_runner.model
    head = load_target_head(inspect_target(model))
    said: dict[str, str] = {}

    def check(fault: str) -> None:
        try:
            run_self_check(engine)
            said[fault] = "passed"
        except UserError as error:
            said[fault] = str(error)

    check("healthy")
    target.set_aux_hidden_state_layers((1, 3, 5, 7, 8))
    check("shifted by one")
    target.set_aux_hidden_state_layers((0, 2, 4, 6, 7))
    check("last layer is n-1")
    target.set_aux_hidden_state_layers((0, 2, 4, 6, 8))
    check("healthy again")

    pieces = worker._pieces

    def swapped(*args: Any) -> Any:
        found = pieces(*args)
        if len(found) > 1 and found[0].count == found[1].count:
            a, b = found[0], found[1]
            found[0], found[1] = (
                type(a)(b.key, b.start, a.first, a.count, b.capacity),
                type(a)(a.key, a.start, b.first, b.count, a.capacity),
            )
        return found

    worker._pieces = swapped
    check("requests swapped")
    worker._pieces = pieces

    stack = torch.stack

    def planting(change: Callable[[Tensor], Any]) -> Callable[..., Tensor]:
        def patched(tensors: Any, dim: int = 0) -> Tensor:
            rows = stack(tensors, dim=dim)
            if rows.ndim == 3 and rows.shape[1] == 4:
                change(rows)
            return rows

        return patched

    norm = head.normed

    def final_norm_applied(rows: Tensor) -> None:
        rows[:, 3] = norm(rows[:, 3]).to(rows.dtype)

    for fault, change in (
        ("final norm applied", final_norm_applied),
        ("layer 4 zero", lambda rows: rows[:, 1].zero_()),
        ("layer 6 not finite", lambda rows: rows[:, 2, 5].fill_(float("nan"))),
    ):
        torch.stack = planting(change)
        check(fault)
        torch.stack = stack
    engine.close()
    return said


def smol(model: str, mode: str) -> dict[str, Any]:
    """SmolLM2: answers and states, generated and by prefill, in capture mode `mode`."""
    engine = VllmEngine(spec_for(model, SMOL_LAYERS, 30, capture_mode=mode))
    prompts = smol_prompts(model)
    done = answers(engine, prompts)
    again = prefills(engine, prompts, done)
    out: dict[str, Any] = {
        "prompts": prompts,
        "answers": [d.answer_ids for d in done],
        "reasons": [d.finish_reason for d in done],
        "states": [d.states for d in done],
        "prefill": [d.states for d in again],
    }
    if mode == "auxiliary":
        wanted = reference(model, [p + d.answer_ids for p, d in zip(prompts, done, strict=True)])
        ids = [*SMOL_LAYERS, 30]
        out["errors"] = [errors(d.states, w[:-1, ids]) for d, w in zip(done, wanted, strict=True)]
    out["held"], out["threads"] = leftovers(engine)
    return out


def smol_bf16(model: str) -> dict[str, Any]:
    """The same in bf16, the type of real runs: errors against fp32, beside those of Hugging Face in bf16."""
    engine = VllmEngine(spec_for(model, SMOL_LAYERS, 30, dtype="bfloat16"))
    prompts = smol_prompts(model)
    done = answers(engine, prompts)
    engine.close()
    sequences = [p + d.answer_ids for p, d in zip(prompts, done, strict=True)]
    ids = [*SMOL_LAYERS, 30]
    exact = torch.cat([w[:-1, ids] for w in reference(model, sequences)])
    noisy = torch.cat([w[:-1, ids] for w in reference(model, sequences, torch.bfloat16)])
    ours = torch.cat([d.states for d in done]).float()
    head = load_target_head(inspect_target(model))
    hits = torch.cat(
        [
            head.logits(d.states[len(p) - 1 :, -1]).argmax(-1) == torch.tensor(d.answer_ids)
            for p, d in zip(prompts, done, strict=True)
        ]
    )

    def median(states: Tensor) -> list[float]:
        return ((states - exact).norm(dim=-1) / exact.norm(dim=-1)).median(0).values.tolist()

    return {
        "dtype": str(done[0].states.dtype),
        "ours": median(ours),
        "hugging_face": median(noisy),
        "agreement": float(hits.float().mean()),
        "row_checks": [check_states(d.states, ids) for d in done],
    }


def plain(model: str) -> dict[str, Any]:
    """Plain vLLM generation of the same prompts."""
    prepare_process()
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=MAX_POSITIONS,
        enforce_eager=True,
        kv_cache_memory_bytes=2**29,
        max_num_seqs=8,
    )
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    done = llm.generate([TokensPrompt(prompt_token_ids=p) for p in smol_prompts(model)], params, use_tqdm=False)
    return {
        "answers": [list(d.outputs[0].token_ids) for d in done],
        "reasons": [d.outputs[0].finish_reason for d in done],
    }


def other_process(model: str, mode: str = "auxiliary", **changes: Any) -> dict[str, Any]:
    """A worker in another process: states by shared memory, packed ones too; a cancelled request; the death."""
    engine = VllmEngine(spec_for(model, (2, 4, 6), LAYERS, capture_mode=mode, **changes))
    prompts = tiny_prompts(5, 70)
    done = answers(engine, prompts)
    assert engine._exports is not None
    folder = Path(engine._exports.name)
    cancelled = _cancel(engine)
    engine.pack("int8")
    packed = answers(engine, prompts)
    files = [p.name for p in folder.iterdir() if not p.name.startswith(".rows-")]  # those serve the next requests
    children = multiprocessing.active_children()
    for child in children:
        os.kill(child.pid or 0, signal.SIGKILL)
    after = asyncio.run(all_of(engine, [Request("late", [5, 6, 7], 4)]))
    engine.close()
    wanted = reference(model, [p + d.answer_ids for p, d in zip(prompts, done, strict=True)])
    ids = [2, 4, 6, LAYERS]
    return {
        "children": len(children),
        "cancelled": cancelled,
        "errors": [errors(d.plain(), w[:-1, ids]) for d, w in zip(done, wanted, strict=True)],
        "packed_errors": [errors(d.plain(), w[:-1, ids]) for d, w in zip(packed, wanted, strict=True)],
        "files": files,
        "after": [type(d).__name__ for d in after],
        "folder_left": folder.exists(),
    }


def mla(folder: str) -> dict[str, Any]:
    """A class that gives no s_0. Distances of each state at position 0 to every s_k of Hugging Face.

    Position 0 alone, because vLLM's CPU kernels for latent attention and Hugging Face part ways after it.
    """
    model = str(make_mla(Path(folder)))
    engine = VllmEngine(spec_for(model, (2, 3, 4), 6))
    prompts = tiny_prompts(5, 40, 33)
    done = answers(engine, prompts, 20)
    engine.close()
    wanted = reference(model, [p + d.answer_ids for p, d in zip(prompts, done, strict=True)])
    return {
        "distances": [
            [errors(state.expand(7, -1)[None], w[:1]) for state in d.states[0]]
            for d, w in zip(done, wanted, strict=True)
        ],
        "shapes": [d.states.shape for d in done],
    }


def family(model: str, dtype: str) -> dict[str, Any]:
    """A target of another family: every state of prompt and answer against Hugging Face, and the self-check's word.

    In bf16 Hugging Face's own noise is measured too, against its fp32.
    """
    info = inspect_target(model)
    n, head = info.num_layers, load_target_head(info)
    engine = VllmEngine(spec_for(model, tuple(range(1, n)), n, dtype=dtype), self_check=False)
    try:
        run_self_check(engine)
        verdict = "passed"
    except UserError as error:
        verdict = str(error)
    prompts = tiny_prompts(5, 40, 33)
    gives_embedding = engine.check_embeddings(True)
    jobs = [engine.submit(Request(f"row {i}", p, 20)) for i, p in enumerate(prompts)]
    done = [job.future.result() for job in jobs]
    first = [engine.take_embeddings(j, d.states.shape[0]) for j, d in zip(jobs, done, strict=True) if gives_embedding]
    engine.close()
    sequences = [p + d.answer_ids for p, d in zip(prompts, done, strict=True)]
    wanted = torch.cat([w[:-1] for w in reference(model, sequences)])  # [N, n+1, H]
    states = torch.cat([d.states for d in done]).float()  # [N, n, H]
    hits = [
        head.logits(d.states[len(p) - 1 :, -1]).argmax(-1) == torch.tensor(d.answer_ids)
        for p, d in zip(prompts, done, strict=True)
    ]
    out: dict[str, Any] = {
        "shapes": [(len(s), tuple(d.states.shape)) for s, d in zip(sequences, done, strict=True)],
        "self_check": verdict,
        "embedding_errors": errors(torch.cat(first)[:, None], wanted[:, :1]) if gives_embedding else None,
        "errors": errors(states, wanted[:, 1:]),
        "medians": _medians(states, wanted),
        "greedy": float(torch.cat(hits).float().mean()),
    }
    if dtype == "bfloat16":
        noisy = torch.cat([w[:-1] for w in reference(model, sequences, torch.bfloat16)])
        own = _medians(noisy[:, 1:], wanted)
        out["noise"] = [own[k - 1][k] for k in range(1, n + 1)]
    return out


def _medians(states: Tensor, wanted: Tensor) -> list[list[float]]:
    """Median relative distance of each captured state 1..n to each s_0..s_n: [N, n, H], [N, n+1, H] -> [n][n+1]."""
    off = (states[:, :, None] - wanted[:, None]).norm(dim=-1) / wanted[:, None].norm(dim=-1)  # [N, n, n+1]
    return [[float(x) for x in row] for row in off.median(0).values]


SCENARIOS: dict[str, Callable[[str], dict[str, Any]]] = {
    "tiny": tiny,
    "preempt": preempt,
    "planted": planted,
    "auxiliary": lambda model: smol(model, "auxiliary"),
    "extract": lambda model: smol(model, "extract"),
    "smol_bf16": smol_bf16,
    "plain": plain,
    "other_worker": lambda model: other_process(model, engine_args={"distributed_executor_backend": "mp"}),
    "other_extract": lambda model: other_process(model, "extract", engine_process=True),
    "mla": mla,
    "family_float32": lambda model: family(model, "float32"),
    "family_bfloat16": lambda model: family(model, "bfloat16"),
}

if __name__ == "__main__":
    name, folder, out = sys.argv[1:]
    torch.save(SCENARIOS[name](folder), out)
