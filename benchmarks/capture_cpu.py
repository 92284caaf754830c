"""What capture costs: plain generation against both capture modes, on SmolLM2 and this machine's CPU.

    python benchmarks/capture_cpu.py [--requests 64] [--new-tokens 128] [--rounds 2]

Every measurement is a process of its own with the same engine settings (bf16, eager, 32 requests at once,
every core); rounds alternate, and the best of each counts, so that a busy moment hits no one mode.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time

from app.engine.base import EngineSpec, Request

MODES = ("plain", "auxiliary", "extract", "prefill")
CONCURRENT = 32
LAYERS, NUM_LAYERS, USABLE_IDS = (2, 15, 27), 30, 49152
PROMPT_TOKENS = (20, 40, 60, 80)


def spec_for(model: str, mode: str) -> EngineSpec:
    return EngineSpec(
        model=model,
        aux_layer_ids=LAYERS,
        num_layers=NUM_LAYERS,
        capture_mode="extract" if mode == "extract" else "auxiliary",
        max_model_len=1024,
        max_num_seqs=CONCURRENT,
        enforce_eager=True,
        kv_cache_gib=1.0,
    )


def prompts_of(count: int) -> list[list[int]]:
    """Fixed prompts of 20 to 80 tokens."""
    return [
        [(7919 * (p + 1) + 104729 * row) % USABLE_IDS for p in range(PROMPT_TOKENS[row % len(PROMPT_TOKENS)])]
        for row in range(count)
    ]


def plain(model: str, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds of vLLM's own generation."""
    from app.engine.process import prepare_process

    prepare_process()
    from vllm import LLM, SamplingParams, TokensPrompt

    from app.engine.vllm_args import engine_args

    args = engine_args(spec_for(model, "plain"), on_cpu=True)
    llm = LLM(**{k: v for k, v in args.items() if k not in ("worker_cls", "additional_config")})
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    inputs = [TokensPrompt(prompt_token_ids=p) for p in prompts]
    llm.generate(inputs[:CONCURRENT], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    started = time.perf_counter()
    llm.generate(inputs, params, use_tqdm=False)
    return time.perf_counter() - started


def captured(model: str, mode: str, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds of our engine, every request with its states; `prefill` takes the answers as given."""
    from app.engine.vllm_engine import VllmEngine

    engine = VllmEngine(spec_for(model, mode))
    answer = [1 + i % 1000 for i in range(new_tokens)] if mode == "prefill" else None

    async def all_of(chosen: list[list[int]], length: int) -> None:
        requests = [
            Request(f"row {i}", p, length, {"ignore_eos": True}, answer_ids=answer and answer[:length])
            for i, p in enumerate(chosen)
        ]
        done = await asyncio.gather(*(engine.complete(r) for r in requests))
        assert all(d.states.shape[0] == len(p) + length - 1 for d, p in zip(done, chosen, strict=True))

    asyncio.run(all_of(prompts[:CONCURRENT], 8))
    started = time.perf_counter()
    asyncio.run(all_of(prompts, new_tokens))
    seconds = time.perf_counter() - started
    engine.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--mode", choices=MODES, help="measure one mode in this process and print the seconds")
    args = parser.parse_args()

    from app.packaged import packaged_target

    model = str(packaged_target("smollm2-135m"))
    prompts = prompts_of(args.requests)
    if args.mode is not None:
        if args.mode == "plain":
            seconds = plain(model, prompts, args.new_tokens)
        else:
            seconds = captured(model, args.mode, prompts, args.new_tokens)
        print(f"seconds {seconds}")
        return
    tokens = args.requests * args.new_tokens
    rates: dict[str, list[float]] = {mode: [] for mode in MODES}
    for round_ in range(args.rounds):
        for mode in MODES:
            command = [sys.executable, __file__, "--mode", mode, "--requests", str(args.requests)]
            command += ["--new-tokens", str(args.new_tokens)]
            # Threads that spin while they wait lose a large part of the time to whatever else runs.
            env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
            out = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
            seconds = float(out.split("seconds ")[-1].split()[0])
            rates[mode].append(tokens / seconds)
            print(f"round {round_ + 1}  {mode:<10} {tokens / seconds:7.1f} tok/s", file=sys.stderr, flush=True)
    best = {mode: max(values) for mode, values in rates.items()}
    print(
        f"{args.requests} requests, {CONCURRENT} at once, {args.new_tokens} answer tokens each; best of {args.rounds}"
    )
    print("| mode | answer tok/s | of plain |\n| --- | --- | --- |")
    for mode in MODES:
        print(f"| {mode} | {best[mode]:.0f} | {best[mode] / best['plain']:.2f} |")


if __name__ == "__main__":
    main()
