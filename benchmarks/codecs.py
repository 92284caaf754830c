"""What each way of storing states costs and saves: bytes, speed, error, and acceptance of a draft trained on it.

    python -m benchmarks.codecs RUN_DIR                                          # bytes, speed, error
    python -m benchmarks.codecs RUN_DIR --train --seeds 0 1 2 --steps 300        # and acceptance length
    python -m benchmarks.codecs RUN_DIR --target FOLDER --out FILE.json --parts 4

RUN_DIR is a run whose generate and vocab stages are finished with `capture.codec=bf16`; nothing in it is changed. Its
parts are encoded anew into a temporary folder. Needs neither Ray nor an engine, and uses a GPU where there is one.

Every draft sees the same samples in the same order for a seed, and is judged by the same walk over the held-out
answers, whose states are the plain ones: those that a server would feed it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from app.codecs import CODECS, COMPRESSIONS, Encoded, States, decoded, encode
from app.config import Config, parse_config
from app.errors import UserError
from app.parts import PARTS, PartEntry, read_entry, teacher_positions, write_part
from app.plan.cost import naive_bytes
from app.runfolder import RunFolder
from app.samples import SampleReader, load_split
from app.states import StatesFile, write_states
from app.storage import Store
from app.target import TargetInfo, load_target_head
from app.train.data import StepPlan
from app.train.evaluate import GreedyDraft, evaluate
from app.train.loop import draft_config, new_draft
from app.train.trainer import Trainer, TrainJob

FORMS = [(codec, c) for codec in CODECS for c in COMPRESSIONS if c != "planes" or codec == "bf16"]
_OUTLIER = 10  # times the median of a token's state: an outlier channel, left out of the second error
_DERIVED = ("aux_start", "teacher_start", "teacher_rows", "num_tokens")  # columns that write_part adds


@dataclass(frozen=True)
class Run:
    """A finished capture."""

    store: Store
    config: Config
    target: TargetInfo
    entries: list[PartEntry]
    kept_ids: Tensor  # [Vd]


def open_run(url: str, target: str | None, parts: int | None) -> Run:
    """The run at `url`, its target at the folder `target` where that is not where the run says.

    Raises:
        UserError: its stages are not finished, or its states are not plain.
    """
    folder = RunFolder(url)
    generate = folder.manifest("generate")
    if generate is None or not folder.store.exists("vocab/vocab.safetensors"):
        raise UserError(f"{folder.url}: generate and vocab are not both finished; run `draftmill vocab` there first")
    info = TargetInfo.from_json({**generate.extra["target"], **({"model": target} if target else {})})
    config = parse_config(yaml.safe_load(folder.store.read_bytes("config.yaml")), f"{folder.url}/config.yaml")
    numbers = range(int(generate.counts["parts"]))
    entries = [e for p in numbers if (e := read_entry(folder.store, p)) is not None and not e.cleaned][:parts]
    if not entries or any(e.codec != "bf16" for e in entries):
        raise UserError(f"{folder.url}: the study needs states stored with capture.codec=bf16")
    kept = load_file(folder.store.local("vocab/vocab.safetensors"))["kept_ids"]
    return Run(folder.store, config, info, entries, kept)


def samples_of(run: Run, entry: PartEntry) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
    """Rows of a part with their plain states, aux [T-1, 3, H] and teacher [S, 1, H]."""
    rows = pq.read_table(run.store.local(f"{PARTS}/{entry.files['rows']['name']}")).to_pylist()
    file = StatesFile.open(run.store, f"{PARTS}/{entry.files['states']['name']}")
    for row in rows:
        length, a, t = len(row["loss_mask"]) - 1, row["aux_start"], row["teacher_start"]
        aux = decoded(file.rows("aux", a, a + length)).clone()
        teacher = decoded(file.rows("teacher", t, t + row["teacher_rows"])).clone()
        yield row, aux.view(length, 3, -1), teacher.unsqueeze(1)


@dataclass
class Measured:
    """Sums over the parts of one form."""

    plain: int = 0  # bytes of the states that are kept, as they were captured
    stored: int = 0  # bytes of the states files
    parts: int = 0  # bytes of states and rows
    tokens: int = 0
    quantise_s: float = 0.0
    write_s: float = 0.0  # compression and the file
    read_s: float = 0.0  # read from the page cache, and decompression
    decode_s: float = 0.0
    errors: dict[str, list[float]] | None = None  # state -> mean relative error by sample
    ordinary: dict[str, list[float]] | None = None  # the same without outlier channels


def measure(
    run: Run, codec: str, compression: str, out: Store, device: torch.device
) -> tuple[Measured, list[PartEntry]]:
    """Encode every part of `run` into `out`; what it took, and the entries."""
    names = [f"s{k}" for k in run.entries[0].layers[:3]] + [f"s{run.target.num_layers}"]
    found = Measured(errors={n: [] for n in names}, ordinary={n: [] for n in names})
    made = []
    for entry in run.entries:
        plain = list(samples_of(run, entry))
        samples, found.quantise_s = _timed(
            lambda plain=plain: [(encode(a, codec), encode(t, codec)) for _, a, t in plain], found.quantise_s
        )
        made.append(_commit(out, entry, plain, codec, compression))
        path = out.scratch() / "states"
        about = {"codec": codec, "compression": compression}
        with open(path, "wb") as file:
            _, found.write_s = _timed(partial(write_states, file, samples, entry.hidden_size, about), found.write_s)
        path.unlink()
        found.plain += sum(a.nbytes + t.nbytes for _, a, t in plain)
        found.stored += int(made[-1].files["states"]["size"])
        found.parts += made[-1].bytes
        found.tokens += sum(len(row["loss_mask"]) for row, _, _ in plain)
        _read_back(out, made[-1], plain, found, device)
    return found, made


def _commit(out: Store, entry: PartEntry, plain: list[Any], codec: str, compression: str) -> PartEntry:
    rows, states = [], []
    for row, aux, teacher in plain:
        whole = torch.zeros(len(aux), 4, aux.shape[-1], dtype=aux.dtype)
        whole[:, :3] = aux
        whole[teacher_positions(torch.tensor(row["loss_mask"])), 3] = teacher[:, 0]
        rows.append({k: v for k, v in row.items() if k not in _DERIVED})
        states.append(whole)
    return write_part(out, {**entry.__dict__, "codec": codec, "compression": compression}, rows, states)


def _read_back(out: Store, entry: PartEntry, plain: list[Any], found: Measured, device: torch.device) -> None:
    """Read a part again sample by sample, and compare it with what it was."""
    file = StatesFile.open(out, f"{PARTS}/{entry.files['states']['name']}")
    assert file.samples is not None and found.errors is not None and found.ordinary is not None
    for number, (_, aux, teacher) in enumerate(plain):
        bounds = file.bounds(number)
        assert bounds is not None
        stored, found.read_s = _timed(
            lambda b=bounds: [_touched(file.rows(kind, *at)) for kind, at in zip(("aux", "teacher"), b, strict=True)],
            found.read_s,
        )
        moved = [s.map(lambda t: t.to(device)) if isinstance(s, Encoded) else s.to(device) for s in stored]
        _wait(device)
        values, found.decode_s = _timed(lambda m=moved: [decoded(s) for s in m], found.decode_s, device)
        got = [*values[0].view(aux.shape).unbind(1), values[1]]
        for name, x, y in zip(found.errors, [*aux.unbind(1), teacher[:, 0]], got, strict=True):
            if len(x):
                x, y = x.to(device).float(), y.float()
                keep = x.abs() < _OUTLIER * x.abs().median(-1, keepdim=True).values
                found.errors[name].append(float(((x - y).norm(dim=-1) / x.norm(dim=-1)).mean()))
                found.ordinary[name].append(
                    float((((x - y) * keep).norm(dim=-1) / (x * keep).norm(dim=-1).clamp(min=1e-9)).mean())
                )


def _touched(states: States) -> States:
    """`states` in memory of their own, as packing copies them."""
    return states.map(Tensor.clone) if isinstance(states, Encoded) else states.clone()


def _timed(work: Any, before: float, device: torch.device | None = None) -> tuple[Any, float]:
    """The result, and `before` with the seconds added: on a GPU real ones, else the processor's, which other programs
    on the machine hardly change."""
    on_gpu = device is not None and device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    started = clock()
    result = work()
    if on_gpu and device is not None:
        _wait(device)
    return result, before + clock() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def trained_length(
    run: Run, store: Store, entries: list[PartEntry], seed: int, steps: int, device: torch.device
) -> float:
    """Acceptance length of a draft trained on `entries` in `store`, walked over the plain held-out answers."""
    split = load_split(run.store, run.entries, run.config)
    train = SampleReader(store, entries, split, ("train",))
    settings = run.config.train.model_copy(update={"seed": seed, "checkpoint_every_s": 1e9, "keep_checkpoints": 1})
    head = load_target_head(run.target)
    shape = draft_config(run.target, settings, run.entries[0].layers, len(run.kept_ids))
    plan = StepPlan(train.infos, settings.tokens_per_step, seed, shape.max_position_embeddings)
    settings = settings.model_copy(update={"epochs": steps / plan.steps_per_epoch})
    with tempfile.TemporaryDirectory() as folder:
        draft = new_draft(shape, head, run.kept_ids, seed)
        Trainer(TrainJob(draft, head, train, None, settings, Store(folder), device=device)).run()
    held_out = SampleReader(run.store, run.entries, split, ("holdout",))
    found = evaluate(
        (held_out[i] for i in range(len(held_out))),
        GreedyDraft(draft.eval()),
        run.config.evaluate.num_draft_tokens,
        bootstrap=0,
    )
    return found.length


def study(
    run: Run, forms: list[tuple[str, str]], seeds: list[int], steps: int, device: torch.device
) -> list[dict[str, Any]]:
    """A line per form; with `seeds` also acceptance lengths, once per codec: compression loses nothing."""
    lines: list[dict[str, Any]] = []
    lengths: dict[str, list[float]] = {}
    for codec, compression in forms:
        with tempfile.TemporaryDirectory() as folder:
            out = Store(folder)
            found, entries = measure(run, codec, compression, out, device)
            if seeds and codec not in lengths:
                lengths[codec] = [trained_length(run, out, entries, seed, steps, device) for seed in seeds]
        line = as_line(found, codec, compression, run.target.hidden_size)
        line["acceptance_lengths"] = lengths.get(codec, [])
        lines.append(line)
        print(text_of(line), flush=True)
    return lines


def as_line(found: Measured, codec: str, compression: str, hidden: int) -> dict[str, Any]:
    """Plain numbers: bytes a token, ratio to four plain states of every token, GB of plain states per second."""

    def speed(*seconds: float) -> float:
        return found.plain / 1e9 / max(sum(seconds), 1e-9)

    assert found.errors is not None and found.ordinary is not None
    return {
        "codec": codec,
        "compression": compression,
        "bytes_per_token": found.parts / found.tokens,
        "ratio": found.parts / naive_bytes(found.tokens, hidden),
        "of_kept_states": found.stored / found.plain,
        "encode_gb_s": speed(found.quantise_s, found.write_s),
        "quantise_gb_s": speed(found.quantise_s),
        "read_gb_s": speed(found.read_s),
        "decode_gb_s": speed(found.decode_s),
        "error": {n: statistics.mean(v) for n, v in found.errors.items() if v},
        "error_without_outliers": {n: statistics.mean(v) for n, v in found.ordinary.items() if v},
    }


HEAD = (
    f"{'codec':<6}{'packed':<8}{'B/token':>8}{'ratio':>7}{'kept':>7}{'quant.':>8}{'encode':>8}{'read':>7}{'decode':>8}"
    "  relative error by state (without outlier channels)"
)


def text_of(line: dict[str, Any]) -> str:
    errors = "  ".join(
        f"{name} {error:.3f} ({line['error_without_outliers'][name]:.3f})" for name, error in line["error"].items()
    )
    text = (
        f"{line['codec']:<6}{line['compression']:<8}{line['bytes_per_token']:>8.0f}{line['ratio']:>7.3f}"
        f"{line['of_kept_states']:>7.3f}{line['quantise_gb_s']:>8.2f}{line['encode_gb_s']:>8.2f}"
        f"{line['read_gb_s']:>7.2f}{line['decode_gb_s']:>8.2f}  {errors}"
    )
    if lengths := line["acceptance_lengths"]:
        each = ", ".join(f"{x:.4f}" for x in lengths)
        text += f"\n{'':14}acceptance length {statistics.mean(lengths):.4f} ({each})"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run folder with plain states")
    parser.add_argument("--target", help="folder of the target, where it is not where the run says")
    parser.add_argument("--parts", type=int, help="only the first N parts")
    parser.add_argument("--forms", nargs="+", help="codec or codec+compression, fp8+zstd say; default: all")
    parser.add_argument(
        "--train", action="store_true", help="train a draft on each codec and walk the held-out answers"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300, help="optimiser steps of each draft")
    parser.add_argument("--tokens-per-step", type=int, help="default: the run's train.tokens_per_step")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of quantising and decoding")
    parser.add_argument("--cpu", action="store_true", help="no GPU though there is one")
    parser.add_argument("--out", type=Path, help="also write the lines as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.cpu else "cpu")
    try:
        run = open_run(args.run, args.target, args.parts)
        if args.tokens_per_step:
            train = run.config.train.model_copy(update={"tokens_per_step": args.tokens_per_step})
            run = replace(run, config=run.config.model_copy(update={"train": train}))
        forms = [f for f in FORMS if not args.forms or f[0] in args.forms or "+".join(f) in args.forms]
        print(
            f"{len(run.entries)} parts of {args.run}, {device}; speeds in GB/s of plain states, ratio to four of them"
        )
        print(HEAD)
        lines = study(run, forms, args.seeds if args.train else [], args.steps, device)
    except UserError as error:
        raise SystemExit(f"codecs: {error}") from error
    if args.out:
        args.out.write_text(json.dumps(lines, indent=2) + "\n")


if __name__ == "__main__":
    main()
