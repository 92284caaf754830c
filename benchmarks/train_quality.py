"""Acceptance length of our draft beside one trained by speculators' model and loss, on the states of a finished run.

    python -m benchmarks.train_quality runs/demo                                # one seed
    python -m benchmarks.train_quality runs/demo --seeds 0 1 2 --serve          # also served by vLLM

Every draft sees the same conversations in the same optimiser steps, `--supervised` answer tokens an epoch, with the
run's vocabulary map, and is measured by the same walk over the held-out conversations (app/train/evaluate.py); the
peer's weights are loaded into our draft for it, and must then propose what the peer itself proposes.

- `ours`        the product's trainer with the run's `train` settings
- `peer`        speculators' start, alignment, masks, attention and loss; optimiser, rates, w and norms as ours
- `peer-stock`  speculators as its command line trains: its norms before `fc` and before the residual, frozen head,
                w = 1, Muon and AdamW at 1e-3 with a linear schedule and 1 % warm-up, clipping at 1

The peer's loss is on where a teacher state is stored, which at step k are k rows before the answer more than serving
ever drafts from. Its `fc`, norms and layer start at random, where ours passes the highest state on.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.captured import load_entries, require_states
from app.checkpoint import write_checkpoint
from app.config import TrainConfig
from app.draft_config import DraftConfig
from app.errors import UserError
from app.pipeline import StageContext
from app.pipelines import bench
from app.pipelines.vocab import load_vocab
from app.runfolder import RunFolder
from app.samples import Sample, SampleReader, load_split
from app.status import config_of
from app.storage import Store
from app.target import TargetHead, load_target_head
from app.train.alignment import supervision_mask
from app.train.data import StepPlan, cut
from app.train.draft import Eagle3Draft
from app.train.evaluate import Acceptance, GreedyDraft, evaluate
from app.train.loop import draft_config, new_draft
from app.train.trainer import Trainer, TrainJob, learning_rate, usable_dtype
from benchmarks.peer import ATTENTIONS, LOSSES, our_names, peer_batch, peer_loss, peer_model, peer_rows, peer_version

ARMS = ("ours", "peer", "peer-stock")
ROW_MULTIPLE = 128  # of the peer's packed row on a GPU: flex attention's block
SAME_PROPOSALS = 0.95  # of the peer's proposals that its weights in our draft must repeat; the rest are near-ties
BEFORE_THE_RUN = ("ingest", "generate", "vocab")  # what bench reads of the run
PEER_RATE, PEER_WARMUP, PEER_CLIP = 1e-3, 100, 1.0  # its defaults: rate, total steps over warm-up steps, norm


class Subset:
    """Some samples of a reader, behind its interface."""

    def __init__(self, reader: SampleReader, indices: Sequence[int]) -> None:
        self.reader, self.indices = reader, list(indices)
        self.infos = [reader.infos[i] for i in self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        return self.reader[self.indices[index]]


@dataclass(frozen=True)
class Setting:
    """What all drafts share."""

    ctx: StageContext
    train: Subset
    holdout: SampleReader
    head: TargetHead
    kept_ids: Tensor  # [Vd] int64
    shape: DraftConfig
    config: TrainConfig
    device: torch.device
    peer_loss: str
    peer_attention: str | None

    @property
    def dtype(self) -> torch.dtype:
        return usable_dtype(self.config.compute_dtype, self.device)


def setting_of(args: argparse.Namespace) -> Setting:
    """The finished run as training data.

    Raises:
        UserError: the run is not finished as far as the vocab stage, or has fewer supervised tokens than asked.
    """
    config = config_of(args.run, [])
    ctx = StageContext(config, RunFolder(args.run, config.storage.options))
    entries = load_entries(ctx)
    split = load_split(ctx.run.store, entries, config)
    require_states(ctx, "train", entries)
    reader = SampleReader(ctx.run.store, entries, split, ("train",))
    train = Subset(reader, chosen(reader, args.supervised))
    kept = load_vocab(ctx.run.store).kept_ids
    changes = {"unroll_steps": args.k, "epochs": args.epochs}
    if args.step_decay is not None:
        changes["step_decay"] = args.step_decay
    settings = TrainConfig(**{**config.train.model_dump(), **changes})
    return Setting(
        ctx=ctx,
        train=train,
        holdout=SampleReader(ctx.run.store, entries, split, ("holdout",)),
        head=load_target_head(ctx.target),
        kept_ids=kept,
        shape=draft_config(ctx.target, settings, list(ctx.layers), len(kept)),
        config=settings,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        peer_loss=args.peer_loss,
        peer_attention=args.peer_attention,
    )


def chosen(reader: SampleReader, supervised: int) -> list[int]:
    """Indices of samples drawn at random until they hold `supervised` teacher rows; the same for every seed."""
    order = list(range(len(reader)))
    random.Random(0).shuffle(order)
    found: list[int] = []
    held = 0
    for index in order:
        if held >= supervised:
            return found
        found.append(index)
        held += reader.infos[index].num_supervised
    if held < supervised:
        raise UserError(f"the run has {held:,} supervised tokens to train on and --supervised asks for {supervised:,}")
    return found


def train_ours(s: Setting, seed: int, folder: str) -> tuple[Eagle3Draft, float]:
    """The product's trainer; the draft and the last logged loss."""
    config = s.config.model_copy(update={"seed": seed})
    draft = new_draft(s.shape, s.head, s.kept_ids, seed)
    trainer = Trainer(TrainJob(draft, s.head, s.train, None, config, Store(folder), device=s.device))
    summary = trainer.run()
    return trainer.draft, summary["loss"]


def train_peer(s: Setting, seed: int, stock: bool) -> tuple[Eagle3Draft, float]:
    """speculators' model and loss over the same steps; its weights in our draft, and the last loss."""
    shape, config = s.shape, s.config
    if stock:
        shape = shape.model_copy(update={"norm_before_residual": True, "norm_before_fc": True})
    plan = StepPlan(s.train.infos, config.tokens_per_step, seed, shape.max_position_embeddings)
    total = max(1, round(config.epochs * plan.steps_per_epoch))
    torch.manual_seed(seed)
    model = peer_model(shape, s.head, s.kept_ids, config.unroll_steps, s.device, not stock, s.peer_attention)
    settings = peer_loss(config.unroll_steps, 1.0 if stock else config.step_decay, s.peer_loss)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizers, rate, clip = _stock_recipe(model, total) if stock else _our_recipe(weights, config, total)
    samples: list[Sample] = []
    length, steps = 0, []
    for step in range(total):
        if step % plan.steps_per_epoch == 0:
            steps = plan.epoch(step // plan.steps_per_epoch)
            length = max(length, *(sum(plan.tokens[i] for i in one) for one in steps))
            length = -(-length // ROW_MULTIPLE) * ROW_MULTIPLE
        samples = [cut(s.train[i], plan.max_tokens) for i in steps[step % plan.steps_per_epoch]]
        loss = _forward(s, model, samples, length, settings)[1]
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, clip)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            optimizer.step()
        if step % 10 == 0:
            print(f"peer: step {step} of {total}, loss {float(loss.detach()):.3f}", file=sys.stderr, flush=True)
    draft = Eagle3Draft(shape)
    draft.init_from_target(s.head, s.kept_ids)
    draft.load_exported(our_names(model))
    draft.to(s.device)
    model.eval()
    with torch.no_grad():
        proposed = _forward(s, model, samples, length, settings)[0]
    _require_same_proposals(s, draft, samples, proposed)
    return draft, float(loss.detach())


def _forward(
    s: Setting, model: Any, samples: list[Sample], length: int, settings: dict[str, Any]
) -> tuple[list[Tensor], Tensor]:
    """Its proposals by step, each [1, length] draft ids, and its loss."""
    rows = length if s.device.type == "cuda" else peer_rows(samples)
    batch = peer_batch(samples, rows, s.shape.hidden_size, s.dtype)
    batch = {name: value.to(s.device) for name, value in batch.items()}
    with torch.autocast(s.device.type, torch.bfloat16, enabled=s.dtype == torch.bfloat16):
        proposed, loss, _ = model(**batch, **settings)
    return proposed, loss


def _our_recipe(
    weights: list[Any], config: TrainConfig, total: int
) -> tuple[list[torch.optim.Optimizer], Callable[[int], float], float]:
    groups = [
        {"params": [p for p in weights if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in weights if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)
    return [optimizer], lambda step: learning_rate(config, step, total), config.grad_clip


def _stock_recipe(model: Any, total: int) -> tuple[list[torch.optim.Optimizer], Callable[[int], float], float]:
    from speculators.train.config.schema import OptimizerArgs
    from speculators.train.optimizers import build_optimizers

    arguments = OptimizerArgs(muon_lr=PEER_RATE)
    warmup = total // PEER_WARMUP

    def rate(step: int) -> float:
        if step < warmup:
            return PEER_RATE * step / warmup
        return PEER_RATE * (total - step) / max(1, total - warmup)

    return build_optimizers(model, arguments), rate, PEER_CLIP


def _require_same_proposals(s: Setting, draft: Eagle3Draft, samples: list[Sample], proposed: list[Tensor]) -> None:
    """Raises RuntimeError where the peer's weights in our draft compute something else than in the peer."""
    same = compared = start = 0
    kept = draft.kept_ids.cpu()
    theirs = torch.stack([kept[ids[0].cpu()] for ids in proposed], -1)  # [L, K]
    for sample, ours in zip(samples, GreedyDraft(draft, s.dtype)(samples, len(proposed)), strict=True):
        rows = supervision_mask(sample.loss_mask, 0).nonzero().flatten()  # [n]
        looked = ours >= 0  # [n, K]
        same += int((ours == theirs[start + rows])[looked].sum())
        compared += int(looked.sum())
        start += peer_rows([sample])
    share = same / max(1, compared)
    print(f"peer: our draft repeats {100 * share:.1f} % of its {compared:,} proposals", file=sys.stderr, flush=True)
    if share < SAME_PROPOSALS:
        raise RuntimeError(f"the peer's weights in our draft repeat only {100 * share:.1f} % of the peer's proposals")


def measure(s: Setting, arm: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train one draft and walk the held-out answers with it."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        if arm == "ours":
            draft, loss = train_ours(s, seed, folder)
        else:
            draft, loss = train_peer(s, seed, stock=arm == "peer-stock")
    seconds = time.perf_counter() - started
    c = s.ctx.config.evaluate
    samples = (s.holdout[i] for i in range(len(s.holdout)))
    walked: Acceptance = evaluate(samples, GreedyDraft(draft), c.num_draft_tokens, c.bootstrap, c.holdout_seed)
    result = {
        "arm": arm,
        "seed": seed,
        "length": walked.length,
        "interval": [walked.low, walked.high],
        "per_position": walked.per_position,
        "conversations": walked.conversations,
        "loss": loss,
        "seconds": seconds,
    }
    if args.serve:
        with tempfile.TemporaryDirectory(dir=args.out) as folder:
            result["served"] = served(s, draft, Path(folder))
    return result


def served(s: Setting, draft: Eagle3Draft, folder: Path) -> float:
    """Acceptance length in vLLM of the exported draft, in a run folder of its own."""
    for stage in BEFORE_THE_RUN:
        (folder / stage).symlink_to(Path(s.ctx.run.store.full(stage)))
    weights = draft.export_state_dict()
    embedding = weights.pop("embed_tokens.weight")
    on_cpu = {name: tensor.cpu() for name, tensor in weights.items()}
    write_checkpoint(folder / "export/draft", draft.config, on_cpu, embedding.cpu(), s.ctx.target)
    return bench.served_alone(replace(s.ctx, run=RunFolder(str(folder))))


def table(s: Setting, results: list[dict[str, Any]]) -> str:
    """The results in Markdown, then the mean over the seeds."""
    tokens = sum(info.num_supervised for info in s.train.infos)
    c = s.config
    lines = [
        f"H {s.shape.hidden_size}, Vd {s.shape.draft_vocab_size:,}, K = {c.unroll_steps}, w = {c.step_decay:g}, rate"
        f" {c.learning_rate:g}; {len(s.train)} samples with {tokens:,} supervised tokens, {c.epochs:g} epochs,"
        f" {c.tokens_per_step:,} tokens a step; {s.device.type}, {s.dtype}, torch {torch.__version__}",
        "",
        "| draft | seed | acceptance length | 95 % interval | by position | served by vLLM | seconds |",
        "|" + " --- |" * 7,
    ]
    for r in results:
        positions = ", ".join(f"{100 * p:.1f} %" for p in r["per_position"])
        in_vllm = f"{r['served']:.3f}" if "served" in r else "-"
        low, high = r["interval"]
        lines.append(
            f"| {r['arm']} | {r['seed']} | {r['length']:.3f} | {low:.3f}..{high:.3f} | {positions} | {in_vllm} |"
            f" {r['seconds']:.0f} |"
        )
    for arm in dict.fromkeys(r["arm"] for r in results):
        lengths = [r["length"] for r in results if r["arm"] == arm]
        if len(lengths) > 1:
            spread = f"{min(lengths):.3f}..{max(lengths):.3f}"
            lines.append(f"| {arm} | mean of {len(lengths)} | {statistics.mean(lengths):.3f} | {spread} | | | |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("run", help="folder of a finished run; it is only read")
    made.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    made.add_argument("--seeds", nargs="+", type=int, default=[0])
    made.add_argument("--supervised", type=int, default=300_000, help="supervised tokens of an epoch")
    made.add_argument("--epochs", type=float, default=1.0)
    made.add_argument("--k", type=int, default=3, help="unroll steps")
    made.add_argument("--step-decay", type=float, help="w of `ours` and `peer`; default: the run's")
    made.add_argument("--peer-loss", choices=LOSSES, default="eager")
    made.add_argument("--peer-attention", choices=ATTENTIONS, help="default: flex on a GPU, eager on a CPU")
    made.add_argument("--serve", action="store_true", help="measure in vLLM too")
    made.add_argument("--out", default=tempfile.gettempdir(), help="folder for exported drafts")
    made.add_argument("--threads", type=int, default=2, help="on a CPU")
    made.add_argument("--json", type=Path, help="also write the results to this file")
    return made


def main() -> None:
    args = parser().parse_args()
    if not torch.cuda.is_available():
        torch.set_num_threads(args.threads)
    try:
        if any(arm != "ours" for arm in args.arms):
            print(f"speculators {peer_version()}", file=sys.stderr)
        s = setting_of(args)
        results = []
        for seed in args.seeds:
            for arm in args.arms:
                results.append(measure(s, arm, seed, args))
                print(json.dumps(results[-1]), file=sys.stderr, flush=True)
                if args.json:
                    args.json.write_text(json.dumps(results, indent=1))
        print(table(s, results), flush=True)
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
