"""What capture costs: generation with its shards written, against plain generation and against two passes.

    python -m benchmarks.capture_speed                       # Llama-3.1-8B's shape, random weights, one GPU
    python -m benchmarks.capture_speed --shape mla           # a DeepSeek-V3-like shape that fits one card
    python -m benchmarks.capture_speed --tiny                # sizes for a CPU, to prove this file

Every mode is a process of its own, with the same engine settings and the same prompts:

- `plain`      vLLM's own engine, no capture
- `auxiliary`  our engine; the states arrive in host memory and are dropped
- `shards`     the product's whole part worker: answers, checks, states encoded and committed to `--out`
- `prefill`    our engine given finished answers: the second of two passes, states dropped
- `stock`      the same by vLLM's own method and connector, which writes a file per request to `--out`

Two passes cost `plain` and then `stock` (where it refuses the shape: `prefill`).
"""

from __future__ import annotations

import argparse
import faulthandler
import fcntl
import json
import resource
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from app.engine.base import Completion, EngineSpec, Request
from benchmarks.capture_gpu import prompts_of, run_captured, run_case, run_plain, start_plain

MODES = ("plain", "auxiliary", "shards", "prefill", "stock")
LIMIT_S = 600  # a process that takes longer prints where its threads stand and ends
LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
# DeepSeek-V3's widths with fewer layers and experts: about 21 billion weights.
MLA: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "max_position_embeddings": 4096,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
SHAPES = {"llama": ("llama", LLAMA_8B), "mla": ("deepseek_v3", MLA), "tiny": ("llama", TINY)}
SIZES = {"requests": 512, "prompt-tokens": 256, "new-tokens": 512, "concurrent": 256, "rounds": 2, "rows-per-part": 32}
TINY_SIZES = {"requests": 12, "prompt-tokens": 20, "new-tokens": 16, "concurrent": 8, "rounds": 1, "rows-per-part": 4}


class UncheckedEngine:
    """Our engine without its self-check: random weights are nowhere on disk to be compared with."""

    def __new__(cls, spec: EngineSpec) -> Any:
        from app.engine.vllm_engine import VllmEngine

        return VllmEngine(spec, self_check=False)


def make_model(folder: Path, shape: str) -> Path:
    """A configuration without weights and a word-level tokenizer with as many words as the head has rows."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import AutoConfig, PreTrainedTokenizerFast

    kind, settings = SHAPES[shape]
    common = {"eos_token_id": 1, "bos_token_id": None, "tie_word_embeddings": False, "dtype": "bfloat16"}
    config = AutoConfig.for_model(kind, **settings, **common)
    config.architectures = ["LlamaForCausalLM" if kind == "llama" else "DeepseekV3ForCausalLM"]
    config.save_pretrained(folder)
    words = {"<pad>": 0, "<end>": 1, **{f"w{i}": i for i in range(2, settings["vocab_size"])}}
    inner = Tokenizer(WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<pad>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def config_of(args: argparse.Namespace, model: str, run_dir: str) -> Any:
    """The product's configuration of this benchmark."""
    from app.config import parse_config

    return parse_config(
        {
            "run_dir": run_dir,
            "target": {"model": model},
            "sources": [{"path": "prompts.jsonl"}],
            "generate": {
                "engine": "benchmarks.capture_speed:UncheckedEngine",
                "max_length": args.prompt_tokens + args.new_tokens,
                "max_new_tokens": args.new_tokens,
                "max_num_seqs": args.concurrent,
                "kv_cache_gib": 0.5,
                "engine_args": {"load_format": "dummy", **json.loads(args.engine_args)},
            },
            "capture": json.loads(args.capture),
            "storage": {"rows_per_part": args.rows_per_part},
        },
        "benchmark",
    )


def worker_config(args: argparse.Namespace, model: str, run_dir: str) -> Any:
    """What `draftmill generate` would hand to its engine actor."""
    from app.pipelines.generate import _worker_config
    from app.sizing import Engines
    from app.target import default_aux_layers, inspect_target

    config = config_of(args, model, run_dir)
    target = inspect_target(model)
    ctx = SimpleNamespace(
        config=config,
        target=target,
        layers=default_aux_layers(target.num_layers),
        run=SimpleNamespace(url=run_dir),
    )
    engines = Engines(replicas=1, tensor_parallel=1, why="one GPU")
    made = _worker_config(ctx, torch.cuda.is_available(), engines)  # type: ignore[arg-type]
    return replace(made, spec=replace(made.spec, engine_process=False)) if args.in_process else made


def run_shards(worker: Any, parts: range, in_flight: int) -> int:
    """Make `parts`; the answer tokens that were committed."""

    def make(part: int) -> int:
        outcome = json.loads(worker({"part": [part], "key": ["benchmark"]})["outcome"][0])
        if "fault" in outcome or outcome["rejects"]:
            raise RuntimeError(outcome.get("fault") or outcome["rejects"][0])
        return int(outcome["tokens"]["answer"])

    with ThreadPoolExecutor(in_flight) as pool:
        return sum(pool.map(make, parts))


def shards_mode(model: str, args: argparse.Namespace) -> dict[str, Any]:
    from app.engine.part_worker import PartWorker
    from app.parts import ingest_table, write_ingest_part
    from app.pipelines.generate import parts_in_flight
    from app.storage import Store

    folder = tempfile.mkdtemp(prefix="capture-speed-", dir=args.out)
    worker = PartWorker(worker_config(args, model, folder))
    store = Store(folder, {})
    usable = SHAPES[args.shape][1]["vocab_size"]
    prompts = prompts_of([args.prompt_tokens] * args.requests, usable)
    per_part = args.rows_per_part
    parts = -(-len(prompts) // per_part)

    def write(first: int, chosen: list[list[int]], limit: int) -> None:
        rows = [_row(i, p, limit) for i, p in enumerate(chosen)]
        for part in range(-(-len(rows) // per_part)):
            table = ingest_table(rows[part * per_part : (part + 1) * per_part])
            write_ingest_part(store, first + part, table)

    in_flight = parts_in_flight(config_of(args, model, folder))
    write(0, prompts[: args.concurrent], 8)
    run_shards(worker, range(-(-args.concurrent // per_part)), in_flight)  # as many at once as later: kernels are made
    seconds, tokens = [], 0
    last_answer = watch_answers(worker._engine)
    for number in range(args.rounds):
        first = (number + 1) * 1000
        write(first, prompts, args.new_tokens)
        started = time.perf_counter()
        tokens = run_shards(worker, range(first, first + parts), in_flight)
        seconds.append(time.perf_counter() - started)
        after = time.perf_counter() - last_answer[0]
        print(f"shards: {seconds[-1]:.2f} s, {after:.2f} of them after the last answer", file=sys.stderr, flush=True)
        size = sum(p.stat().st_size for p in Path(folder, "generate/parts").iterdir())
        if number + 1 < args.rounds:
            shutil.rmtree(Path(folder, "generate/parts"))
    shutil.rmtree(folder)
    return {"seconds": seconds, "tokens": tokens, "bytes": size}


def watch_answers(engine: Any) -> list[float]:
    """A list whose one value is when the engine last answered."""
    last, complete = [0.0], engine.complete

    async def timed(request: Request) -> Completion:
        done: Completion = await complete(request)
        last[0] = time.perf_counter()
        return done

    engine.complete = timed
    return last


def _row(number: int, prompt: list[int], limit: int) -> dict[str, Any]:
    """A row of ingest (INGEST_SCHEMA)."""
    import numpy as np

    return {
        "id": f"{number:024x}",
        "source": "benchmark",
        "domain": "benchmark",
        "use": "regenerate",
        "where": f"prompts.jsonl:{number + 1}",
        "messages": json.dumps([{"role": "user", "content": "words"}]),
        "template_kwargs": "{}",
        "sampling": json.dumps({"max_new_tokens": limit}),
        "private": False,
        "requests": [
            {
                "prompt_ids": np.array(prompt, np.int32),
                "answer_ids": None,
                "loss_mask": None,
                "truncated": False,
            }
        ],
        "mask_method": "engine",
    }


def start_stock(spec: EngineSpec, folder: str) -> Any:
    """vLLM's engine with its own extraction and its own connector, which writes to `folder`."""
    from app.engine.process import prepare_process

    prepare_process()
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    from app.engine.vllm_args import engine_args

    args = engine_args(spec, bool(current_platform.is_cpu()))
    ids = args.pop("additional_config")["draftmill_layer_ids"]
    del args["worker_cls"]
    args["max_model_len"] = spec.max_model_len + 2
    args["speculative_config"] = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
    }
    args["kv_transfer_config"] = KVTransferConfig(
        kv_connector="ExampleHiddenStatesConnector",
        kv_role="kv_producer",
        kv_connector_extra_config={"shared_storage_path": folder},
    )
    return LLMEngine.from_engine_args(EngineArgs(**args), usage_context=UsageContext.LLM_CLASS)


def run_stock(engine: Any, sequences: list[list[int]], tag: str) -> None:
    """Prefill every sequence and wait until its file is written."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    # The connector saves what has finished in the step after: the last request of all is there to make that step.
    for number, ids in enumerate([*sequences, sequences[0][:8]]):
        engine.add_request(f"{tag}{number}", TokensPrompt(prompt_token_ids=ids), params)
    files: list[str] = []
    for last in (False, True):
        while engine.has_unfinished_requests():
            files += [o.kv_transfer_params["hidden_states_path"] for o in engine.step() if o.finished]
        if not last:
            engine.add_request(f"{tag}flush", TokensPrompt(prompt_token_ids=sequences[0][:8]), params)
    for path in files[: len(sequences)]:
        with open(path + ".lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)


def mode_seconds(mode: str, model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each round, the engine started and warm."""
    if mode == "shards":
        return shards_mode(model, args)
    spec = worker_config(args, model, "unused").spec
    usable = SHAPES[args.shape][1]["vocab_size"]
    prompts = prompts_of([args.prompt_tokens] * args.requests, usable)
    given = [[(31 * row + p) % usable for p in range(args.new_tokens)] for row in range(args.requests)]
    folder = tempfile.mkdtemp(prefix="capture-speed-", dir=args.out)
    engine: Any
    if mode == "plain":
        engine = start_plain(spec)
    elif mode == "stock":
        engine = start_stock(spec, folder)
    else:
        engine = UncheckedEngine(spec)

    def run(chosen: list[list[int]], length: int, tag: str) -> None:
        answers = [g[:length] for g in given[: len(chosen)]]
        if mode == "plain":
            run_plain(engine, chosen, length)
        elif mode == "stock":
            run_stock(engine, [p + a for p, a in zip(chosen, answers, strict=True)], tag)
        else:
            run_captured(engine, chosen, length, answers if mode == "prefill" else None)

    run(prompts[: args.concurrent], 8, "w")
    seconds = []
    for number in range(args.rounds):
        started = time.perf_counter()
        run(prompts, args.new_tokens, f"r{number}x")
        seconds.append(time.perf_counter() - started)
        print(f"{mode}: {seconds[-1]:.2f} s", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    return {"seconds": seconds, "tokens": args.requests * args.new_tokens}


def table(results: dict[str, dict[str, Any]], args: argparse.Namespace) -> str:
    """The results in Markdown."""
    lines = [
        f"{args.shape}: {args.requests} requests of {args.prompt_tokens} + {args.new_tokens} tokens,"
        f" {args.concurrent} at once, best of {args.rounds}; capture {args.capture}",
        "| mode | seconds | answer tok/s | of plain | GB written | peak host GiB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    rate = {m: r["tokens"] / min(r["seconds"]) for m, r in results.items()}
    for mode, got in results.items():
        of_plain = f"{rate[mode] / rate['plain']:.3f}" if "plain" in rate else "-"
        written = f"{got['bytes'] / 1e9:.1f}" if "bytes" in got else "-"
        lines.append(
            f"| {mode} | {min(got['seconds']):.1f} | {rate[mode]:.0f} | {of_plain} | {written} | {got['rss_gib']:.1f} |"
        )
    second = results.get("stock") or results.get("prefill")
    if second and "plain" in results and "shards" in results:
        two = min(results["plain"]["seconds"]) + min(second["seconds"])
        one = min(results["shards"]["seconds"])
        name = "stock" if "stock" in results else "prefill"
        lines.append(f"\ntwo passes (plain, then {name}): {two:.1f} s; one pass: {one:.1f} s, {two / one:.2f}x")
    return "\n".join(lines)


def run_mode(mode: str, model: str, args: argparse.Namespace) -> dict[str, Any]:
    """This file in a process of its own; its result, or `error`."""
    options = [
        f"--{n}={getattr(args, n.replace('-', '_'))}" for n in (*SIZES, "shape", "out", "capture", "engine-args")
    ]
    options += ["--in-process"] * args.in_process
    return run_case(["--mode", mode, "--model", model, *options], "benchmarks.capture_speed")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", choices=SHAPES, default="llama")
    made.add_argument("--tiny", action="store_true", help="sizes and a shape for a CPU")
    made.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    made.add_argument("--capture", default="{}", help="the configuration's capture section, JSON")
    made.add_argument("--engine-args", default="{}", help="more arguments of vLLM's engine, JSON")
    made.add_argument("--out", default=tempfile.gettempdir(), help="folder on the disk that takes the shards")
    made.add_argument("--in-process", action="store_true", help="our engine in the process that writes the parts")
    made.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    made.add_argument("--model", help=argparse.SUPPRESS)
    for name in SIZES:
        made.add_argument(f"--{name}", type=int)
    return made


def main() -> None:
    args = parser().parse_args()
    if args.tiny:
        args.shape = "tiny"
    for name, value in (TINY_SIZES if args.tiny else SIZES).items():
        if getattr(args, name.replace("-", "_")) is None:
            setattr(args, name.replace("-", "_"), value)
    if args.mode:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        result = mode_seconds(args.mode, args.model, args)
        result["rss_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print("result " + json.dumps(result), flush=True)
        sys.stdout.flush()
        return
    failed = False
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / args.shape, args.shape)
        for mode in args.modes:
            got = run_mode(mode, str(model), args)
            if "error" in got:
                print(f"{mode} did not run: {got['error']}", flush=True)
                failed = True
            else:
                results[mode] = got
    print(table(results, args), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
