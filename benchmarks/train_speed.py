"""Training speed and memory beside speculators' trainer, on the same rows of one GPU.

    python -m benchmarks.train_speed                      # Llama-3.1-8B's shape, 12 processes, one GPU
    python -m benchmarks.train_speed --gpu-list 0 1       # the same, two at once
    python -m benchmarks.train_speed --tiny               # sizes for a CPU, to prove this file

One step is 8,192 tokens: eight documents of 1,024, of which the first part is prompt and `--share` percent is answer.
States, tokens and weights are random and on the device beforehand, so data costs nothing. Ours is the trainer's own
step; the peer's is its model, collation and loss in the order of its trainer (bf16 autocast, clipping), with fused
AdamW. Both train their head, which the peer by itself would freeze (`--peer-head frozen`). Every (who, K, share) is a
process of its own; compiling falls into the warm-up.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import math
import os
import queue
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from app.config import TrainConfig
from app.draft_config import DraftConfig
from app.errors import UserError
from app.parts import teacher_positions
from app.samples import Sample, SampleInfo
from app.storage import Store
from app.target import TargetHead
from app.train.alignment import pack
from app.train.data import LoadedStep
from app.train.draft import Eagle3Draft
from app.train.trainer import Trainer, TrainJob
from benchmarks.peer import LOSSES, peer_batch, peer_loss, peer_model, peer_version

WHO = ("ours", "peer")
LIMIT_S = 400  # a process that takes longer prints where its threads stand and ends
DOCUMENTS = 8
STEP_DECAY = 0.8
LENGTH, TINY_LENGTH = 1024, 64
LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
    "target_hidden_size": 4096,
    "aux_layer_ids": (2, 16, 29),
}
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "draft_vocab_size": 128,
    "target_hidden_size": 64,
    "aux_layer_ids": (1, 2, 3),
}


COLUMNS = (
    "K",
    "supervised",
    "ours ms/step",
    "peer ms/step",
    "ours tok/s",
    "peer tok/s",
    "speed-up",
    "of the time, data excluded",
    "ours peak GiB (reserved)",
    "peer peak GiB (reserved)",
    "of the memory",
)
CARRIED = ("steps", "warmup", "threads", "peer-loss", "peer-head")  # options that a cell's process is given


class Cell(NamedTuple):
    who: str
    k: int
    share: int  # percent of the tokens


class RandomSamples:
    """Samples in memory behind the reader's interface."""

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples
        self.infos = [
            SampleInfo(s.sample_id, s.conversation_id, s.domain, len(s.token_ids), len(s.teacher_pos)) for s in samples
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


def shape_of(args: argparse.Namespace) -> DraftConfig:
    common = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072}
    return DraftConfig(**(TINY if args.tiny else LLAMA_8B), **common)


def random_head(shape: DraftConfig, device: torch.device) -> TargetHead:
    """A target's head and embedding [V, H], bf16 on `device`."""

    def rows() -> torch.Tensor:
        return (0.02 * torch.randn(shape.vocab_size, shape.hidden_size, device=device)).bfloat16()

    return TargetHead(
        norm_weight=torch.ones(shape.hidden_size, device=device),
        norm_eps=shape.rms_norm_eps,
        norm_plus_one=False,
        lm_head=rows(),
        embed_tokens=rows(),
    )


def random_samples(shape: DraftConfig, length: int, share: int) -> list[Sample]:
    """Documents of `length` tokens whose last `share` percent are the answer."""
    samples = []
    for number in range(DOCUMENTS):
        mask = torch.arange(length) >= length - length * share // 100  # [T]
        positions = teacher_positions(mask)  # [S]
        samples.append(
            Sample(
                sample_id=f"d{number}",
                conversation_id=f"d{number}",
                domain="random",
                split="train",
                token_ids=torch.randint(0, shape.vocab_size, (length,)),
                loss_mask=mask,
                aux=torch.randn(length - 1, 3 * shape.hidden_size).bfloat16(),
                teacher=torch.randn(len(positions), shape.hidden_size).bfloat16(),
                teacher_pos=positions,
                greedy=True,
            )
        )
    return samples


class Job(NamedTuple):
    step: Callable[[], Any]
    loss: Callable[[], float]  # of the last step
    rows: int  # supervised at the first unroll step


def our_job(cell: Cell, args: argparse.Namespace, device: torch.device, folder: str) -> Job:
    """The trainer's own step over one packed step that lies on the device."""
    shape, length = shape_of(args), TINY_LENGTH if args.tiny else LENGTH
    on_device = random_head(shape, device)
    samples = random_samples(shape, length, cell.share)
    with torch.device(device):
        draft = Eagle3Draft(shape)
    draft.init_from_target(on_device, torch.arange(shape.draft_vocab_size))
    head = replace(on_device, **{n: getattr(on_device, n).cpu() for n in ("norm_weight", "lm_head", "embed_tokens")})
    epochs = args.warmup + args.steps
    config = TrainConfig(unroll_steps=cell.k, step_decay=STEP_DECAY, epochs=epochs, schedule="constant")
    source = RandomSamples(samples)
    trainer = Trainer(TrainJob(draft, head, source, None, config, Store(folder), device=device))
    packed = pack(samples, cell.k).to(device)
    loaded = LoadedStep(0, 0, list(range(len(samples))), [packed], packed.tokens)
    last: list[Any] = [None]

    def step() -> None:
        last[0], *_ = trainer._train_step(loaded, False, False)
        trainer.step += 1

    def loss() -> float:
        return float(trainer._reduce(last[0], loaded.tokens, 1.0)["loss"])

    return Job(step, loss, packed.counts[0])


def peer_job(cell: Cell, args: argparse.Namespace, device: torch.device, folder: str) -> Job:
    """A step as speculators' trainer makes it."""
    shape, length = shape_of(args), TINY_LENGTH if args.tiny else LENGTH
    kept = torch.arange(shape.draft_vocab_size, device=device)
    model = peer_model(shape, random_head(shape, device), kept, cell.k, device, args.peer_head == "trained")
    samples = random_samples(shape, length, cell.share)
    batch = peer_batch(samples, DOCUMENTS * length, shape.hidden_size)
    batch = {name: value.to(device) for name, value in batch.items()}
    settings = peer_loss(cell.k, STEP_DECAY, args.peer_loss)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
    last: list[Any] = [None]

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            _, loss, _ = model(**batch, **settings)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        last[0] = loss.detach()

    return Job(step, lambda: float(last[0]), int(batch["loss_mask"].sum()))


def measure(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step and memory at its peak, warm."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        job = (our_job if cell.who == "ours" else peer_job)(cell, args, device, folder)
        gc.collect()
        started = time.perf_counter()
        for _ in range(args.warmup):
            job.step()
        warm = _clock(device) - started
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        started = _clock(device)
        for _ in range(args.steps):
            job.step()
        seconds = (_clock(device) - started) / args.steps
        loss = job.loss()
    if not math.isfinite(loss):
        raise RuntimeError(f"the loss is {loss}")
    on_gpu = device.type == "cuda"
    host_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {
        "seconds": seconds,
        "warmup_seconds": warm,
        "tokens": DOCUMENTS * (TINY_LENGTH if args.tiny else LENGTH),
        "rows": job.rows,
        "loss": loss,
        "peak": torch.cuda.max_memory_allocated() if on_gpu else host_bytes,
        "reserved": torch.cuda.max_memory_reserved() if on_gpu else 0,
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "torch": torch.__version__,
    }


def _clock(device: torch.device) -> float:
    """The time when all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def run_cell(cell: Cell, args: argparse.Namespace, gpu: str | None) -> dict[str, Any]:
    """This file in a process of its own, on GPU `gpu`; its result, or `error`."""
    options = [f"--{name}={getattr(args, name.replace('-', '_'))}" for name in CARRIED]
    command = [sys.executable, "-m", "benchmarks.train_speed", "--cell", *map(str, cell), *options]
    if args.tiny:
        command.append("--tiny")
    environment = dict(os.environ, HF_HUB_OFFLINE="1")
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    lines = done.stdout.splitlines()
    found = [line for line in lines if line.startswith("result {")]
    if not found:
        sys.stderr.write("\n".join(lines[-40:])[-6000:] + "\n")
        return {"error": lines[-1] if lines else f"exit status {done.returncode}"}
    result: dict[str, Any] = json.loads(found[-1].removeprefix("result "))
    return result


def run_cells(cells: list[Cell], args: argparse.Namespace) -> dict[Cell, dict[str, Any]]:
    """Every cell, one at a time per GPU of `--gpu-list`."""
    waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
    for cell in cells:
        waiting.put(cell)
    results: dict[Cell, dict[str, Any]] = {}

    def work(gpu: str | None) -> None:
        while True:
            try:
                cell = waiting.get_nowait()
            except queue.Empty:
                return
            started = time.perf_counter()
            results[cell] = got = run_cell(cell, args, gpu)
            took = time.perf_counter() - started
            line = f"{cell.who} K={cell.k} {cell.share} %: {got.get('error') or _in_words(got)}; {took:.0f} s in all"
            print(line, file=sys.stderr, flush=True)

    threads = [threading.Thread(target=work, args=(gpu,)) for gpu in args.gpu_list or [None]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _in_words(got: dict[str, Any]) -> str:
    return (
        f"{1000 * got['seconds']:.1f} ms/step, {got['peak'] / 2**30:.2f} GiB, {got['rows']:,} rows supervised,"
        f" loss {got['loss']:.3f}, warm after {got['warmup_seconds']:.0f} s"
    )


def table(results: dict[Cell, dict[str, Any]], args: argparse.Namespace) -> str:
    """The results in Markdown: a line for each K and share."""
    good = {cell: got for cell, got in results.items() if "error" not in got}
    if not good:
        return "nothing ran"
    any_one = next(iter(good.values()))
    lines = [
        f"{any_one['device']}, torch {any_one['torch']}; {any_one['tokens']:,} tokens a step in {DOCUMENTS} documents;"
        f" {args.warmup} steps to warm up, {args.steps} measured",
    ]
    if "peer" in args.who:
        lines.append(f"peer: speculators {peer_version()}, {args.peer_loss} KL, head {args.peer_head}")
    lines += ["", "| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for k in args.k:
        for share in args.share:
            lines.append(_row(k, share, good.get(Cell("ours", k, share)), good.get(Cell("peer", k, share))))
    return "\n".join(lines)


def _row(k: int, share: int, ours: dict[str, Any] | None, peer: dict[str, Any] | None) -> str:
    def each(show: Callable[[dict[str, Any]], str]) -> list[str]:
        return ["-" if got is None else show(got) for got in (ours, peer)]

    ratios = ["-", "-", "-"]
    if ours and peer:
        of_time = ours["seconds"] / peer["seconds"]
        ratios = [f"{1 / of_time:.2f}x", f"{of_time:.2f}", f"{ours['peak'] / peer['peak']:.2f}"]
    values = [
        str(k),
        f"{share} %",
        *each(lambda got: f"{1000 * got['seconds']:.1f}"),
        *each(lambda got: f"{got['tokens'] / got['seconds']:,.0f}"),
        *ratios[:2],
        *each(lambda got: f"{got['peak'] / 2**30:.1f} ({got['reserved'] / 2**30:.1f})"),
        ratios[2],
    ]
    return "| " + " | ".join(values) + " |"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--who", nargs="+", choices=WHO, default=list(WHO))
    made.add_argument("--k", nargs="+", type=int, default=[3, 7], help="unroll steps")
    made.add_argument("--share", nargs="+", type=int, default=[75, 50, 25], help="percent of the tokens supervised")
    made.add_argument("--steps", type=int, default=10, help="measured")
    made.add_argument("--warmup", type=int, default=5)
    made.add_argument("--peer-loss", choices=LOSSES, default="eager", help="fused does not compile on torch 2.11")
    made.add_argument("--peer-head", choices=("trained", "frozen"), default="trained")
    made.add_argument("--gpu-list", nargs="+", help="CUDA device numbers; a process on each at once")
    made.add_argument("--threads", type=int, default=1, help="on a CPU")
    made.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    made.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    return made


def main() -> None:
    args = parser().parse_args()
    if args.cell:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        who, k, share = args.cell
        print("result " + json.dumps(measure(Cell(who, int(k), int(share)), args)), flush=True)
        return
    if "peer" in args.who:
        try:
            peer_version()
        except UserError as error:
            sys.exit(str(error))
    # The peer first, and of each K one: the others find its compiled graphs in the cache.
    ordered = [
        (w, share, k) for w in sorted(args.who, reverse=True) for share in args.share for k in sorted(args.k)[::-1]
    ]
    results = run_cells([Cell(w, k, share) for w, share, k in ordered], args)
    print(table(results, args), flush=True)
    sys.exit(any("error" in got for got in results.values()))


if __name__ == "__main__":
    main()
