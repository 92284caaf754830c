"""The training loop of one worker: plain PyTorch, the same with one rank or many.

Every rank sums its rows' losses over the *global* count of supervised rows, and gradients are summed over
ranks: N workers do what one worker does with the same global batch. A step is the same whether it is done in
one pass or several. Nothing in a step draws random numbers, so a run continued from a checkpoint equals one
never stopped.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from app.config import TrainConfig
from app.draft_config import DraftConfig
from app.storage import Store
from app.target import TargetHead
from app.train import sharding
from app.train.activations import GIB, Activations, Rows, room
from app.train.alignment import pack
from app.train.data import LoadedStep, SampleSource, StepLoader, StepPlan, cut, on_device
from app.train.draft import Eagle3Draft
from app.train.eight_bit import EightBitAdamW
from app.train.evaluate import GreedyDraft, Tally, batches, summarise, walk
from app.train.guards import BadSteps, Watch, suspects
from app.train.loss import StepStats, UnrolledLoss
from app.train.objective import Objective
from app.train.progress import WAITS, Waits, Window
from app.train.ranks import Ranks
from app.train.state import (
    Metrics,
    SavedState,
    StopRequest,
    has_best,
    load_latest,
    optimizer_tensors,
    restore_optimizer,
    save_best,
    save_state,
)
from app.train.trackers import Tracker, flat_numbers
from app.train.update import move
from app.train.window_plan import WindowPlan, WindowSource

log = logging.getLogger("draftmill")

# Settings that change how a run is carried out, never what it computes.
EXECUTION_KEYS = (
    "workers", "shard", "use_gpu", "cpus_per_worker", "checkpoint_every_s", "keep_checkpoints", "max_bad_steps",
    "min_teacher_agreement", "trackers", "activation_gib", "embedding_device", "stall_minutes", "resources",
)  # fmt: skip
TOKENS_PER_PASS = {"cpu": 4096, "cuda": 8192}
LOG_LINES = 2000
LOG_EVERY_S = 15.0  # a progress line for people
CPU = torch.device("cpu")


@dataclass(frozen=True)
class TrainJob:
    """What one worker trains with; nothing in it knows of Ray."""

    draft: Eagle3Draft  # initialised or warm-started, on the CPU
    head: TargetHead
    train: SampleSource
    valid: SampleSource | None
    config: TrainConfig
    store: Store  # the training folder
    num_draft_tokens: int = 3  # k of the validation walk
    device: torch.device = CPU
    on_validation: Callable[[dict[str, Any]], None] = lambda values: None
    check: Callable[[Ranks], dict[str, Any]] = lambda ranks: {}  # before step 1, its numbers go into the summary
    trackers: Callable[[int], Sequence[Tracker]] = lambda step: ()  # of the leading rank, by the step it goes on from
    pulse: Callable[[int, int, str], None] = lambda step, steps, doing: None  # a sign of life, of every rank
    initial_digest: str | None = None  # of the weights `draft` starts from, where they are another draft's
    windows: WindowSource | None = None  # where `train` and `valid` grow while training goes on
    longest: int | None = None  # tokens that no sample to come exceeds, with `windows`


class Trainer:
    def __init__(self, job: TrainJob, ranks: Ranks | None = None) -> None:
        c = job.config
        self.job, self.config, self.ranks = job, c, ranks or Ranks()
        self.draft = job.draft
        self.draft.check_loaded()
        where = CPU if c.embedding_device == "cpu" else job.device
        self.draft.place(job.device, where)
        self.ranks.same_start(self.draft.parameters())
        self.fingerprint = self._fingerprint(self.draft)
        saved = load_latest(job.store, self.fingerprint)
        if saved is not None:
            self.draft.load_exported(saved.weights)
        if c.shard and self.ranks.active:
            sharding.shard(self.draft, job.device, where)
        self.dtype = usable_dtype(c.compute_dtype, job.device)
        self.loss = UnrolledLoss(self.draft, job.head, c.unroll_steps, c.step_decay, self.dtype, Objective.of(c))
        self.plan = self._plan()
        self.activations = self._activations()
        self.total_steps = self.plan.total(c.epochs)
        self.validation_steps = self.plan.validations(c.epochs, c.validate_every_epochs)
        matrices = [p for p in self.draft.parameters() if p.dim() > 1]
        norms = [p for p in self.draft.parameters() if p.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": c.weight_decay},
            {"params": norms, "weight_decay": 0.0},
        ]
        self.optimizer: torch.optim.Optimizer
        if c.optimizer_state == "8bit":
            self.optimizer = EightBitAdamW(groups, c.learning_rate, c.betas)
        else:
            self.optimizer = torch.optim.AdamW(groups, lr=c.learning_rate, betas=c.betas, fused=True)
        self.step, self.seconds, self.waited, self.last_loss = 0, 0.0, 0.0, math.nan
        self.waited_for_parts = 0.0  # seconds, apart from those of `waited`
        self.stopped = False
        self.validations: list[dict[str, Any]] = []
        self.train_losses: list[float] = []  # of the lines since the last validation
        self.checked: dict[str, Any] = {}
        self.bad_steps = BadSteps(c.max_bad_steps)
        if saved is not None:
            self._resume(saved)
        self.start_step = self.step
        self.trackers: Sequence[Tracker] = ()
        self.watch = Watch(self.draft, self.start_step, self.total_steps, self.ranks.leads)

    def run(self) -> dict[str, Any]:
        """Train to the end, or until a stop is asked for (`stopped`), and return a summary.

        Raises:
            UserError: too many steps had no finite loss or gradient; the last checkpoint is left as it is.
        """
        if self.step == 0:
            self.checked = self.job.check(self.ranks)
        metrics = Metrics(self.job.store, self.step) if self.ranks.leads else None
        self.trackers = self.job.trackers(self.step) if self.ranks.leads else ()
        try:
            with StopRequest(self.job.store) as stop:
                self._run(metrics, stop)
        finally:
            for tracker in self.trackers:
                tracker.close()
        return self.summary()

    def _run(self, metrics: Metrics | None, stop: StopRequest) -> None:
        c, ranks = self.config, self.ranks
        loader = StepLoader(
            self.job.train, self.plan, c.unroll_steps, ranks.rank, ranks.world,
            TOKENS_PER_PASS[self.job.device.type], pin=self.job.device.type == "cuda",
            fits=self.activations.fits_whole,
            embedding=self.draft.embed_tokens.weight if c.embedding_device == "cpu" else None,
        )  # fmt: skip
        log_every = max(1, self.total_steps // LOG_LINES)
        last_save = last_line = started = time.monotonic()
        before, waited_before, window = self.seconds, self.waited, Window()
        steps = Waits(self._coming(loader, metrics, stop), lambda: self.waited_for_parts)
        for loaded in steps:
            due = ranks.leads and time.monotonic() - last_save > c.checkpoint_every_s
            stats, norm, save, self.stopped = self._train_step(loaded, due, stop.asked(ranks.leads))
            self.step += 1
            self.job.pulse(self.step, self.total_steps, "trains")
            self.seconds, self.waited = before + time.monotonic() - started, waited_before + steps.total
            window.add(stats, loaded.tokens, self.step)
            window.waited += steps.last
            if self.step % log_every == 0 or self.step == self.total_steps:
                values = self._write_line(window, norm, metrics)
                if metrics is not None and values and time.monotonic() - last_line > LOG_EVERY_S:
                    self._log_progress(values, (time.monotonic() - started) / (self.step - self.start_step))
                    last_line = time.monotonic()
                window = Window()
            self.watch.after_step(self.step)
            if self.step in self.validation_steps:
                self._validate(metrics)
                save, window.start = True, time.monotonic()
            if save or self.stopped or self.step == self.total_steps:
                self._save(metrics)
                last_save = time.monotonic()
            if self.stopped:
                stop.done(self.step, self.total_steps, ranks.leads)
                return
        self.watch.after_step(self.step, ends=True)

    def _coming(self, loader: StepLoader, metrics: Metrics | None, stop: StopRequest) -> Iterator[LoadedStep]:
        """The steps to do, those of windows that are still to come too; ends where a stop is asked meanwhile."""
        yield from on_device(loader.steps(self.step, self._known_steps), self.job.device)
        while self.plan.open:
            if not self._next_windows(metrics, stop):
                self.stopped = True
                stop.done(self.step, self.total_steps, self.ranks.leads)
                return
            yield from on_device(loader.steps(self.step, self._known_steps), self.job.device)
        ended = any(v["step"] == self.step for v in self.validations)
        if self.job.windows is not None and not ended:  # the windows it had turned out to be all
            self._validate(metrics)
            self._save(metrics)

    @property
    def _known_steps(self) -> int:
        return self.plan.ready if isinstance(self.plan, WindowPlan) and self.plan.open else self.total_steps

    def _next_windows(self, metrics: Metrics | None, stop: StopRequest) -> bool:
        """Save, and wait until there is more to learn from or the windows are closed; False: a stop is asked for."""
        source, plan, ranks = self.job.windows, self.plan, self.ranks
        assert source is not None and isinstance(plan, WindowPlan)
        before, started, waits = self.waited_for_parts, time.monotonic(), False
        while True:
            told = ranks.gather((source.look() if ranks.leads else None, stop.asked(ranks.leads)))
            asked = any(one for _, one in told)
            source.take(told[0][0])
            self._grow(plan)
            there = plan.ready > self.step or not plan.open
            if not waits and (asked or not there) and self.step:
                self._save(metrics)
            if asked or there:
                if ranks.leads and waits and not asked:
                    log.info("training: goes on, %d samples in %d windows so far", len(plan.indices), plan.taken)
                return not asked
            if ranks.leads and not waits:
                log.info("training: caught up with generate at step %d, and waits for parts", self.step)
            waits = True
            self.job.pulse(self.step, self.total_steps, WAITS)
            time.sleep(source.every_s)
            self.waited_for_parts = before + time.monotonic() - started

    def _grow(self, plan: WindowPlan) -> None:
        """Plan the windows that were taken, and what follows from them."""
        c, infos = self.config, self.job.train.infos
        if not plan.grow():
            return
        self.total_steps = self.watch.total_steps = plan.total(c.epochs)
        self.validation_steps = plan.validations(c.epochs, c.validate_every_epochs)
        self.activations.require([infos[i] for i in plan.indices], plan.max_tokens, self.activations_said)

    def _write_line(self, window: Window, norm: float, metrics: Metrics | None) -> dict[str, Any] | None:
        """One line of the log for the steps of `window`; None where all of them were skipped."""
        values = None
        if window.stats is not None:
            values = self._reduce(window.stats, window.tokens, window.seconds, window.waited)
            self.last_loss = values["loss"]
            self.train_losses.append(values["loss"])
            self.watch.after_line(values)
        if metrics is not None:
            line = {"step": self.step, **({**values, "grad_norm": norm} if values else {})}
            self._publish(metrics, line | ({"skipped": window.skipped} if window.skipped else {}))
        return values

    def _publish(self, metrics: Metrics, line: dict[str, Any]) -> None:
        metrics.write(line)
        for tracker in self.trackers:
            tracker.log(flat_numbers(line), self.step)

    def _log_progress(self, values: dict[str, Any], seconds_per_step: float) -> None:
        log.info(
            "training: step %d of %d, loss %.3f, %.0f tokens/s, %.0f %% of the time without data, %.0f s left",
            self.step, self.total_steps, values["loss"], values["tokens_per_s"], 100 * values["data_wait_share"],
            (self.total_steps - self.step) * seconds_per_step,
        )  # fmt: skip

    def summary(self) -> dict[str, Any]:
        """Plain numbers of the run so far."""
        last = self.validations[-1:]  # with windows the first ones are over fewer conversations
        lengths = [v["acceptance_length"] for v in self.validations if v["conversations"] == last[0]["conversations"]]
        return {
            "steps": self.step,
            "epochs": self.plan.epochs_after(self.step),
            "steps_per_epoch": self.plan.steps_per_epoch,
            "samples": len(self.plan.indices),
            "samples_left_out": self.plan.left_out,
            "samples_cut": self.plan.cut,
            "loss": self.last_loss,
            "seconds": self.seconds,
            "data_wait_share": self.waited / max(self.seconds, 1e-9),
            "waited_for_parts_s": self.waited_for_parts,
            "skipped_steps": self.bad_steps.count,
            "teacher_agreement": self.checked,
            "validation": self.validations,
            "best_acceptance_length": max(lengths, default=None),
            "parameters": sum(p.numel() for p in self.draft.parameters()),
        }

    def _train_step(self, loaded: LoadedStep, save_due: bool, stop: bool) -> tuple[StepStats | None, float, bool, bool]:
        """One optimiser step: this rank's statistics (None: skipped), the gradient's norm, and what all ranks do
        next: save, stop."""
        ranks, device = self.ranks, self.job.device
        packs = loaded.packs
        kept = [self.loss.keep(p) for p in packs]
        own = torch.stack([self.loss.counts(p, k) for p, k in zip(packs, kept, strict=True)]).sum(0)  # [K]
        control = torch.cat([own, own.new_tensor([float(save_due), float(stop)])])  # [K+2]
        *counts, save, stop_all = (ranks.sum(control.to(device)) if ranks.active else control).tolist()
        stats: StepStats | None = None
        total = torch.tensor(counts, dtype=torch.float64)
        jobs = []
        for p, keep in zip(packs, kept, strict=True):
            again, keeps = self.activations.plan(Rows.of_pack(p))
            jobs.append(partial(self.loss, p, total, keep, again, keeps))
        for part in sharding.passes(self.draft, jobs):
            stats = part if stats is None else stats + part
        assert stats is not None
        if not sharding.is_sharded(self.draft):
            ranks.sum_gradients(self.draft.parameters())
        rate = learning_rate(self.config, self.step, self.plan.rate_total(self.step, self.config.epochs))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm, moved = move(self.optimizer, self.draft, self.config.grad_clip, stats.loss.isfinite().all(), ranks)
        if not moved:
            self._skip(loaded, norm)
            stats = None
        elif self.loss.objective.adapts:
            self.loss.adapt(ranks.sum(stats.alpha.clone()), torch.tensor(counts))
        return stats, norm, save > 0, stop_all > 0

    def _skip(self, loaded: LoadedStep, norm: float) -> None:
        """Leave weights and moments as they are, on every rank; UserError at the limit."""
        named = [name for names in self.ranks.gather(suspects(self.job.train, loaded.samples)) for name in names]
        known = [name for name in named if "states hold" in name]
        said = self.bad_steps.skip(self.step + 1, self.total_steps, norm, known or named)
        if self.ranks.leads:
            log.warning("training: %s", said)

    def _reduce(self, stats: StepStats, tokens: int, seconds: float, waited: float = 0.0) -> dict[str, Any]:
        """Global numbers of a window of steps, by unroll step where they are lists.

        `waited` seconds of the window passed without data on this rank; the rank that waited longest counts, as the
        others wait for it.
        """
        waits = torch.zeros(self.ranks.world, device=stats.rows.device)
        waits[self.ranks.rank] = waited
        count = torch.full_like(stats.rows, tokens)
        sums = torch.stack([stats.rows, stats.loss, stats.hits, stats.alpha, count])
        rows, loss, hits, alpha, total = self.ranks.sum(sums).cpu()  # [K] each
        measured = {"alpha_by_step": (alpha / rows.clamp(min=1)).tolist()} if self.loss.objective.measures_alpha else {}
        mean = loss / rows.clamp(min=1)  # [K]
        weights = self.config.step_decay ** torch.arange(len(mean), dtype=torch.float64)  # [K]
        return {
            "step": self.step,
            "epoch": self.plan.epochs_after(self.step),
            "loss": float((weights * mean).sum()),
            "loss_by_step": mean.tolist(),
            "accuracy_by_step": (hits / rows.clamp(min=1)).tolist(),
            "rows_by_step": [int(n) for n in rows],
            **measured,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "tokens_per_s": float(total[0]) / max(seconds, 1e-9),
            "data_wait_share": min(1.0, float(self.ranks.sum(waits).max()) / max(seconds, 1e-9)),
            "seconds": self.seconds,
        }

    def _validate(self, metrics: Metrics | None) -> None:
        """Walk the validation answers, each rank its share; keep the weights if they are the best so far."""
        if self.job.valid is not None and len(self.job.valid):
            with torch.no_grad(), sharding.whole(self.draft):
                self._walk(self.job.valid, metrics)

    def _walk(self, source: SampleSource, metrics: Metrics | None) -> None:
        k = self.job.num_draft_tokens
        propose = GreedyDraft(self.draft, self.dtype)
        count = self.plan.valid_count(self.step, len(source))
        mine = (cut(source[i], self.plan.max_tokens) for i in range(self.ranks.rank, count, self.ranks.world))
        tallies: list[Tally] = []
        stats = StepStats.zeros(self.config.unroll_steps, self.job.device)
        for batch in batches(mine, TOKENS_PER_PASS[self.job.device.type]):
            self.job.pulse(self.step, self.total_steps, "validates")
            tallies += walk(batch, propose, k)
            packed = pack(batch, self.config.unroll_steps).to(self.job.device)
            stats = stats + self.loss(packed, keep=self.loss.keep(packed))[1]
        acceptance = summarise([t for part in self.ranks.gather(tallies) for t in part], k)
        means = self._reduce(stats, 0, 1.0)
        values = {
            "step": self.step,
            "epoch": means["epoch"],
            "acceptance_length": acceptance.length,
            "interval": [acceptance.low, acceptance.high],
            "acceptance_per_position": acceptance.per_position,
            "num_draft_tokens": k,
            "conversations": acceptance.conversations,
            "loss": means["loss"],
            "train_loss": sum(self.train_losses) / len(self.train_losses) if self.train_losses else None,
            "accuracy_by_step": means["accuracy_by_step"],
        }
        self.train_losses = []
        alike = [v for v in self.validations if v["conversations"] == acceptance.conversations]  # fewer are no measure
        best = max((v["acceptance_length"] for v in alike), default=-math.inf)
        self.validations.append(values)
        if metrics is not None:
            self._publish(metrics, {"step": self.step, "validation": values})
            text = "training: step %d/%d, epoch %.2f: acceptance length %.3f (%.3f..%.3f), %d conversations"
            numbers = (acceptance.length, acceptance.low, acceptance.high, acceptance.conversations)
            log.info(text, self.step, self.total_steps, values["epoch"], *numbers)
            if acceptance.length > best or not has_best(self.job.store):
                save_best(
                    self.job.store,
                    self._weights(),
                    {"step": self.step, "fingerprint": self.fingerprint, **values},
                )
            self.watch.after_validation([*alike, values])
        self.job.on_validation(values)

    def _save(self, metrics: Metrics | None) -> None:
        random_states = self.ranks.gather(torch.get_rng_state())
        if metrics is None and not sharding.is_sharded(self.draft):
            return
        optimizer, weights = optimizer_tensors(self.draft, self.optimizer), self._weights()
        if metrics is None:
            return
        metrics.flush()
        optimizer |= {f"rng/{rank}": state for rank, state in enumerate(random_states)}
        epoch, step_of_epoch = self.plan.place(self.step)
        meta = {
            "fingerprint": self.fingerprint,
            "epoch": epoch,
            "step_of_epoch": step_of_epoch,
            "total_steps": self.total_steps,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "loss": self.last_loss,
            "alpha": self.loss.alpha.tolist(),
            "seconds": self.seconds,
            "waited": self.waited,
            "waited_for_parts": self.waited_for_parts,
            "validations": self.validations,
            "train_losses": self.train_losses,
            "bad_steps": self.bad_steps.count,
            "checked": self.checked,
            "world": self.ranks.world,
        }
        for tracker in self.trackers:
            tracker.flush()
        save_state(self.job.store, self.step, weights, optimizer, meta, self.config.keep_checkpoints)

    def _resume(self, saved: SavedState) -> None:
        """Take up a checkpoint of this very run, whose weights are loaded."""
        restore_optimizer(self.draft, self.optimizer, saved.optimizer)
        meta = saved.meta
        self.step, self.seconds, self.waited, self.last_loss = (meta[k] for k in ("step", "seconds", "waited", "loss"))
        self.waited_for_parts = meta.get("waited_for_parts", 0.0)
        self.validations, self.train_losses = list(meta["validations"]), list(meta["train_losses"])
        self.bad_steps.count, self.checked = meta["bad_steps"], meta["checked"]
        self.loss.alpha = self.loss.alpha.new_tensor(meta["alpha"])
        if f"rng/{self.ranks.rank}" in saved.optimizer:
            torch.set_rng_state(saved.optimizer[f"rng/{self.ranks.rank}"])
        if self.ranks.leads:
            log.info(
                "training: resumed at step %d, epoch %d (step %d of it), learning rate %.3g, last loss %.4f",
                self.step, meta["epoch"], meta["step_of_epoch"], meta["learning_rate"], self.last_loss,
            )  # fmt: skip

    def _weights(self) -> dict[str, Tensor]:
        state = {name: sharding.full(tensor) for name, tensor in self.draft.export_state_dict().items()}
        del state["embed_tokens.weight"]  # the target's own, read again from there
        return state

    def _plan(self) -> StepPlan:
        c, longest = self.config, longest_document(self.config, self.draft.config)
        if self.job.windows is not None:
            return WindowPlan(self.job.windows, c.tokens_per_step, c.seed, longest)
        return StepPlan(self.job.train.infos, c.tokens_per_step, c.seed, longest)

    def _activations(self) -> Activations:
        """What passes may keep, by the budget; longer documents than the plan takes whole are named.

        Raises:
            UserError: a document alone needs more.
        """
        c, plan, infos = self.config, self.plan, [self.job.train.infos[i] for i in self.plan.indices]
        if plan.cut and self.ranks.leads:
            log.warning(
                "training: %d of %d samples are longer than %d tokens (%s) and are cut there: %d tokens are not learnt",
                plan.cut, len(infos), plan.max_tokens, limit_name(c, self.draft.config), plan.cut_tokens,
            )  # fmt: skip
        if c.activation_gib == "auto":
            # With windows to come the budget must not depend on when one looks: passes would be made up otherwise.
            longest = min(plan.max_tokens, self.job.longest or max(plan.tokens.values()))
            budget = room(c, self.draft.config, self.job.device, self.ranks.world, longest)
            said = "auto, what the memory leaves"
        else:
            budget, said = int(c.activation_gib * GIB), "train.activation_gib"
        on_cpu = self.job.device.type == "cpu"
        activations = Activations(self.draft.config, self.dtype.itemsize, c.unroll_steps, budget, keeps_more=on_cpu)
        self.activations_said = said
        activations.require(infos, plan.max_tokens, said)
        return activations

    def _fingerprint(self, draft: Eagle3Draft) -> str:
        """Digest of all that decides what the steps compute: settings, data lengths, draft, vocabulary.

        Settings at their default are left out: a key that a later version adds must not end trainings under way.
        """
        infos, windows = self.job.train.infos, self.job.windows
        if windows is not None:  # the first one: those that follow are told by the file of windows
            infos = infos[: windows.pieces[0].samples]
        lengths = [(i.sample_id, i.num_tokens, i.num_supervised) for i in infos]
        parts = [
            self.config.model_dump(mode="json", exclude=set(EXECUTION_KEYS), exclude_defaults=True),
            draft.config.model_dump(mode="json"),
            lengths,
            hashlib.sha256(draft.kept_ids.cpu().numpy().tobytes()).hexdigest(),
            self.job.initial_digest,
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def longest_document(config: TrainConfig, draft: DraftConfig) -> int:
    """Tokens of a document beyond which it is cut."""
    most = draft.max_position_embeddings
    return most if config.max_document is None else min(most, config.max_document)


def limit_name(config: TrainConfig, draft: DraftConfig) -> str:
    """Which setting `longest_document` comes from."""
    own = config.max_document is not None and config.max_document < draft.max_position_embeddings
    return "train.max_document" if own else "the draft's max_position_embeddings"


def usable_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """The compute dtype: bf16 only where the processor multiplies it itself, emulation is slower than fp32."""
    if wanted == "float32":
        return torch.float32
    if device.type == "cpu":
        tests = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        if not any(getattr(torch.cpu, name, lambda: False)() for name in tests):
            log.info("training: this CPU has no bf16 arithmetic, computing in fp32")
            return torch.float32
    return torch.bfloat16


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """Rate of optimiser step `step` (from 0): linear warm-up, then the schedule down to the minimum ratio."""
    warmup = math.ceil(config.warmup_ratio * total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, total_steps - warmup)
    if config.schedule == "constant":
        share = 1.0
    elif config.schedule == "linear":
        share = 1.0 - done
    else:
        share = 0.5 * (1.0 + math.cos(math.pi * done))
    low = config.min_learning_rate_ratio
    return config.learning_rate * (low + (1.0 - low) * share)
