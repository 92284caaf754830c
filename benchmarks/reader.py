"""How fast stored samples are read: opening, and the stream that training sees, from the page cache.

    python -m benchmarks.reader                             # a made run of 4 GB of hidden size 4096
    python -m benchmarks.reader --run RUN_DIR --epochs 2    # a run of your own
    python -m benchmarks.reader --codec fp8 --compression zstd --parts 200 --samples 64

Prints the time to open (O(parts): neither masks nor states are read) and stored bytes per second through `StepLoader`:
shuffled, read, checked, cut and packed, as the trainer takes them. Seconds of the processor are of all threads.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from app.parts import PARTS, PartEntry, read_entry, write_part
from app.samples import SampleReader, conversation_ids
from app.states import StatesFile
from app.storage import Store
from app.train.data import StepLoader, StepPlan


def make_run(store: Store, args: argparse.Namespace) -> list[PartEntry]:
    """Parts of random states; half of every sample is an answer."""
    pool = torch.randn(args.tokens, 4, args.hidden).bfloat16()
    rng = random.Random(0)
    entries = []
    for part in range(args.parts):
        rows, states = [], []
        for i in range(args.samples):
            tokens = rng.randrange(args.tokens // 2, args.tokens)
            ids = [rng.randrange(32_000) for _ in range(tokens)]
            name, prompt = f"{part * args.samples + i:024x}", tokens // 2
            rows.append(
                {
                    "sample_id": f"{name}-0", "conversation_id": name, "turn": 0, "source": "s", "domain": "d",
                    "use": "regenerate", "private": False, "messages": json.dumps([{"content": "word " * tokens}]),
                    "template_kwargs": "{}", "sampling": '{"temperature": 0.0}', "prompt_ids": ids[:prompt],
                    "answer_ids": ids[prompt:], "loss_mask": [False] * prompt + [True] * (tokens - prompt),
                    "mask_method": "engine", "finish_reason": "stop", "truncated": False,
                }
            )  # fmt: skip
            states.append(pool[: tokens - 1])
        entry = {
            "part": part, "key": "k", "rows_in": len(rows), "conversations": len(rows), "rejects": [], "cut_short": [],
            "tokens": {}, "finish_reasons": {}, "layers": [2, 16, 29], "dtype": "bfloat16", "hidden_size": args.hidden,
            "seconds": 0.0, "codec": args.codec, "compression": args.compression,
        }  # fmt: skip
        entries.append(write_part(store, entry, rows, states))
    return entries


def entries_of(store: Store) -> list[PartEntry]:
    names = [n for n in store.files(PARTS) if n.endswith(".json")]
    return [e for n in names if (e := read_entry(store, int(n[5:-5]))) is not None and not e.cleaned]


def timed(what: str, work: Callable[[], Any], stored: int = 0) -> Any:
    real, cpu = time.perf_counter(), time.process_time()
    result = work()
    real, cpu = time.perf_counter() - real, time.process_time() - cpu
    rate = f", {stored / 1e9 / real:.2f} GB/s ({stored / 1e9 / cpu:.2f} per processor second)" if stored else ""
    print(f"  {what:<38} {real:8.2f} s, processor {cpu:8.2f} s{rate}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help="a run folder; default: one is made in a temporary folder")
    parser.add_argument("--codec", default="bf16")
    parser.add_argument("--compression", default="none")
    parser.add_argument("--parts", type=int, default=20)
    parser.add_argument("--samples", type=int, default=16, help="per part")
    parser.add_argument("--tokens", type=int, default=600, help="of the longest sample")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--tokens-per-step", type=int, default=8192)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the packing")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(args.run or folder)
        entries = entries_of(store) if args.run else make_run(store, args)
        split = timed(f"ids of {len(entries)} parts", lambda: dict.fromkeys(conversation_ids(store, entries), "train"))
        reader = timed("open", lambda: SampleReader(store, entries, split))
        plan = timed("plan", lambda: StepPlan(reader.infos, args.tokens_per_step, 0, 1 << 20))
        states = sum(int(e.files["states"]["size"]) for e in entries)
        names = [f"{PARTS}/{e.files['states']['name']}" for e in entries]
        timed("read the states files whole", lambda: [len(store.read_bytes(n)) for n in names], states)
        timed("open the states files", lambda: [StatesFile.open(store, n) for n in names])
        order = random.Random(1).sample(range(len(reader)), len(reader))
        timed("samples, one after another, mapped", lambda: [reader[i].token_ids for i in order])
        loader = StepLoader(reader, plan, 7)
        for _ in range(args.epochs):
            timed("one epoch through StepLoader", lambda: sum(1 for _ in loader.steps(0, plan.steps_per_epoch)), states)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(f"  {len(reader)} samples, {states / 1e9:.2f} GB of states; peak memory {peak:.2f} GB with mapped pages")


if __name__ == "__main__":
    main()
