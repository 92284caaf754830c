"""Is more data worth it: the acceptance length against the number of training samples, and where it goes.

Drafts are trained on nested shares of a run's samples, the same number of epochs each, so that every sample of every
point is seen as often; each is walked over the same held-out conversations. The law is length = a - b * n^-c, with
0 <= a <= k + 1: what a draft can reach, b how far it is off at one sample, c how fast more samples close it.
Intervals resample the held-out conversations, the same ones for all points; they do not know how another seed of the
training would have come out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from app.captured import load_entries
from app.clean import CURVE as FOLDER
from app.clean import POINT as _POINT
from app.config import Config
from app.draft_config import DraftConfig
from app.errors import UserError
from app.pipeline import Stage, StageContext, StageResult, run_pipeline, stage_state
from app.runfolder import RunFolder, digest_of
from app.samples import SampleReader, load_split
from app.stages import STAGES
from app.storage import Store
from app.target import load_target_head
from app.train.evaluate import GreedyDraft, batches, summarise, walk
from app.train.loop import FOLDER as WHOLE
from app.train.loop import Place
from app.train.stage import train_in
from app.train.state import load_draft_state, read_weights

log = logging.getLogger("draftmill")

FRACTIONS = ("1/8", "1/4", "1/2", "1")
_TRAIN = next(stage for stage in STAGES if stage.name == "train")
_BATCH_TOKENS = 8192
_BOOTSTRAP = 1000
_EXPONENTS = np.linspace(0.05, 2.0, 79)
_MIN_POINTS = 3
_WORTH = 0.01  # a gain below it is none

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Point:
    """One trained draft. C held-out conversations, in the order of their ids; none where only the interval is known."""

    samples: int
    length: float
    low: float
    high: float
    num_draft_tokens: int
    steps: int = 0
    drafts: tuple[float, ...] = ()  # [C] starts of the walk
    accepted: tuple[float, ...] = ()  # [C]


@dataclass(frozen=True)
class Law:
    """length(n) = a - b * (n / n0)^-c, n0 the largest number of samples."""

    a: float
    b: float
    c: float
    n0: float

    def __call__(self, samples: float) -> float:
        return self.a - self.b * (samples / self.n0) ** -self.c

    @property
    def doubling(self) -> float:
        """What twice the samples add to the length."""
        return self.b * (1 - 2.0**-self.c)


def curve_of_runs(runs: Sequence[Config]) -> list[str]:
    """Lines about finished runs as points.

    Raises:
        UserError: one is not evaluated, they differ in target or k, or they are too few.
    """
    points, targets = [], set()
    for config in runs:
        run = RunFolder(config.run_dir, config.storage.options)
        train, generate = run.manifest("train"), run.manifest("generate")
        found = run.store.read_json("evaluate/evaluate.json")
        if train is None or generate is None or found is None:
            raise UserError(f"{run.url} is not trained and evaluated; run `draftmill evaluate` there first")
        targets.add(generate.inputs.get("target weights"))
        low, high = found["interval"]
        points.append(
            Point(
                int(train.counts["samples"]), found["acceptance_length"], low, high, found["num_draft_tokens"],
                int(train.counts["steps"]),
            )
        )  # fmt: skip
    if len(targets) > 1 or len({p.num_draft_tokens for p in points}) > 1:
        raise UserError("these runs differ in their target or in evaluate.num_draft_tokens: they are no one curve")
    note = "the runs are taken as they are: their held-out conversations and epochs should be the same"
    return [*lines_of(points), note]


def curve_of_run(config: Config, fractions: Sequence[str]) -> list[str]:
    """Train what is missing of the curve of a run whose generate and vocab are done; lines about it.

    Raises:
        UserError: a fraction is none, or as `run`.
    """
    shares = parse_fractions(fractions)
    stage = Stage(
        FOLDER,
        lambda ctx: run(ctx, shares),
        inputs=("generate", "vocab"),
        config_keys=(*_TRAIN.config_keys, "evaluate.num_draft_tokens", "evaluate.bootstrap"),
        execution_keys=_TRAIN.execution_keys,
        outside=lambda ctx: {"fractions": digest_of([str(s) for s in shares])},
        check=_TRAIN.check,
    )
    run_pipeline(config, [stage])
    found = Store(config.run_dir, config.storage.options).read_json(f"{FOLDER}/curve.json")
    return lines_of([_point(values) for values in found["points"]])


def parse_fractions(texts: Sequence[str]) -> list[Fraction]:
    """Ascending shares of the samples, in (0, 1].

    Raises:
        UserError: one is not, or they are too few.
    """
    try:
        shares = sorted({Fraction(t.strip()) for t in texts})
    except (ValueError, ZeroDivisionError) as error:
        raise UserError(f"fractions {','.join(texts)}: write them as 1/8,1/4,1/2,1") from error
    if not shares or not 0 < shares[0] <= shares[-1] <= 1:
        raise UserError(f"fractions {','.join(texts)}: each is a share of the samples, above 0 and up to 1")
    if len(shares) < _MIN_POINTS:
        raise UserError(f"a curve needs {_MIN_POINTS} fractions, {','.join(texts)} are {len(shares)}")
    return shares


def run(ctx: StageContext, shares: Sequence[Fraction]) -> StageResult:
    """Train and measure every share, each in a folder of its own under `curve/`; writes `curve/curve.json`.

    Raises:
        UserError: no conversation is held out, or as the train stage.
    """
    points = []
    for share in shares:
        point = _trained_point(ctx, share)
        log.info(
            "curve: %s of the samples (%d): acceptance length %.3f (%.3f..%.3f)",
            share, point.samples, point.length, point.low, point.high,
        )  # fmt: skip
        points.append(point)
    ctx.run.store.write_json(f"{FOLDER}/curve.json", {"points": [asdict(p) for p in points]})
    return StageResult(outputs=[f"{FOLDER}/curve.json"], counts={"points": len(points)})


def _trained_point(ctx: StageContext, share: Fraction) -> Point:
    """The point of a share: as it was measured, from the run's own training, or trained now."""
    folder = f"{FOLDER}/{share.numerator}-{share.denominator}"
    store, e = ctx.run.store, ctx.config.evaluate
    made_from = digest_of(
        [
            *(ctx.input(name).digest for name in ("generate", "vocab")),
            _TRAIN.outside(ctx) if _TRAIN.outside else {},
            ctx.config.train.model_dump(mode="json", exclude={k.split(".")[1] for k in _TRAIN.execution_keys}),
            [e.holdout, e.holdout_seed, e.num_draft_tokens, e.bootstrap],
        ]
    )
    known = store.read_json(f"{folder}/{_POINT}")
    if isinstance(known, dict) and known.get("made_from") == made_from:
        return _point(known["point"])
    if share == 1 and stage_state(_TRAIN, ctx).state == "done":
        manifest = ctx.input("train")
        where, shape, summary = WHOLE, DraftConfig(**manifest.extra["draft_config"]), manifest.counts
    else:
        where = folder
        summary, shape = train_in(ctx, Place(folder, float(share)))
    point = _measured(ctx, store.sub(where), shape, summary)
    store.write_json(f"{folder}/{_POINT}", {"made_from": made_from, "point": asdict(point)})
    if where == folder:
        for big in ("checkpoints", "best"):
            store.delete(f"{folder}/{big}")
    return point


def _measured(ctx: StageContext, trained: Store, shape: DraftConfig, summary: dict[str, Any]) -> Point:
    """Walk the held-out conversations with the last weights, in the precision they would be exported in."""
    config, store = ctx.config, ctx.run.store
    entries = load_entries(ctx)
    reader = SampleReader(store, entries, load_split(store, entries, config), ("holdout",))
    if not len(reader):
        raise UserError("curve: no conversation is held out; set evaluate.holdout above 0")
    dtype: torch.dtype = getattr(torch, shape.dtype)
    weights, _ = read_weights(trained, "last")
    stored = {n: t.to(dtype) if t.is_floating_point() else t for n, t in weights.items()}
    draft = load_draft_state(shape, stored, load_target_head(ctx.target).embed_tokens)
    if torch.cuda.is_available():
        draft = draft.cuda()
    k, propose = config.evaluate.num_draft_tokens, GreedyDraft(draft.eval())
    tallies = [
        t for batch in batches((reader[i] for i in range(len(reader))), _BATCH_TOKENS) for t in walk(batch, propose, k)
    ]
    found = summarise(tallies, k, config.evaluate.bootstrap, config.evaluate.holdout_seed)
    sums: dict[str, list[float]] = {}
    for t in tallies:
        held = sums.setdefault(t.conversation_id, [0.0, 0.0])
        held[0] += t.drafts
        held[1] += sum(t.accepted_at)
    drafts, accepted = zip(*(sums[c] for c in sorted(sums)), strict=True)
    return Point(
        int(summary["samples"]), found.length, found.low, found.high, k, int(summary["steps"]), drafts, accepted
    )  # fmt: skip


def _point(values: dict[str, Any]) -> Point:
    return Point(**{**values, "drafts": tuple(values["drafts"]), "accepted": tuple(values["accepted"])})


def fit(samples: Array, lengths: Array, weights: Array, most: float) -> Law:
    """The law closest to P points by weighted squares: c on a grid, a and b in closed form, b >= 0 and a <= `most`."""
    n0 = float(samples.max())
    x = (samples / n0)[None, :] ** -_EXPONENTS[:, None]  # [E, P]
    w = weights / weights.sum()  # [P]
    mean_x, mean_y = x @ w, float(lengths @ w)
    spread = ((x - mean_x[:, None]) ** 2) @ w  # [E]
    b = np.maximum(-((x - mean_x[:, None]) * (lengths - mean_y)) @ w / np.maximum(spread, 1e-30), 0.0)  # [E]
    a = mean_y + b * mean_x  # [E]
    capped = a > most
    b = np.where(capped, np.maximum((x * (most - lengths)) @ w / ((x * x) @ w), 0.0), b)
    a = np.where(capped, most, a)
    faults = ((a[:, None] - b[:, None] * x - lengths) ** 2) @ w  # [E]
    best = int(faults.argmin())
    return Law(float(a[best]), float(b[best]), float(_EXPONENTS[best]), n0)


def resampled(points: Sequence[Point], count: int = _BOOTSTRAP, seed: int = 0) -> Array:
    """Lengths of the points under `count` resamplings [count, P]: of the same held-out conversations for all, or where
    only intervals are known, normal draws for each."""
    rng = np.random.default_rng(seed)
    conversations = {len(p.drafts) for p in points}
    if conversations == {0} or len(conversations) > 1:
        middle = np.array([p.length for p in points])
        return middle + _deviations(points) * rng.standard_normal((count, len(points)))
    drafts = np.array([p.drafts for p in points], float)  # [P, C]
    accepted = np.array([p.accepted for p in points], float)  # [P, C]
    picks = rng.integers(0, drafts.shape[1], (count, drafts.shape[1]))  # [count, C]
    lengths: Array = (1 + accepted[:, picks].sum(-1) / np.maximum(drafts[:, picks].sum(-1), 1)).T
    return lengths


def _deviations(points: Sequence[Point]) -> Array:
    """Standard deviations [P] from the 95 % intervals; all the same where one is unknown."""
    widths = np.array([(p.high - p.low) / 3.92 for p in points])
    return widths if (widths > 0).all() else np.full(len(points), max(widths.max(), 1e-6))


def lines_of(points: Sequence[Point]) -> list[str]:
    """The table, the law and what doubling the data would give.

    Raises:
        UserError: too few different numbers of samples.
    """
    points = sorted(points, key=lambda p: p.samples)
    samples = np.array([p.samples for p in points], float)
    if len(set(samples.tolist())) < _MIN_POINTS:
        raise UserError(f"a curve needs {_MIN_POINTS} different numbers of samples, these are {len(set(samples))}")
    lengths, weights = np.array([p.length for p in points]), _deviations(points) ** -2
    most = float(points[0].num_draft_tokens + 1)
    law, draws = fit(samples, lengths, weights, most), resampled(points)
    laws = [fit(samples, row, weights, most) for row in draws]
    lines = [f"{'samples':>10} {'steps':>8}  acceptance length (95 %)   over the one before (95 %)"]
    for i, p in enumerate(points):
        text = f"{p.samples:>10,} {p.steps:>8,}  {p.length:.3f} ({p.low:.3f}..{p.high:.3f})"
        if i:
            low, high = _interval(draws[:, i] - draws[:, i - 1])
            text = f"{text:<48}{p.length - points[i - 1].length:+.3f} ({low:+.3f}..{high:+.3f})"
        lines.append(text)
    low, high = _interval([f.a for f in laws])
    at_one = law.b * law.n0**law.c
    limit = f"its limit is {law.a:.2f} ({low:.2f}..{high:.2f})"
    lines.append(f"law: length = {law.a:.3f} - {at_one:.3g} * samples^-{law.c:.2f}; {limit}")
    low, high = _interval([f.doubling for f in laws])
    lines.append(f"doubling the {points[-1].samples:,} samples gives {law.doubling:+.3f} ({low:+.3f}..{high:+.3f})")
    lines.append(_verdict(law, low, high))
    return lines


def _verdict(law: Law, low: float, high: float) -> str:
    now = law(law.n0)
    if high < _WORTH:
        return "more data of this kind is not worth it: other prompts, a longer training or another shape may be"
    if low < _WORTH:
        return "these points do not settle it: hold more conversations out (evaluate.holdout) or add a point"
    share = f"{100 * law.doubling / now:.1f} % more tokens a step of the target"
    return f"more data is worth it if {share} are: generate as many again and train on all"


def _interval(values: Any) -> tuple[float, float]:
    low, high = np.quantile(np.asarray(values, float), [0.025, 0.975])
    return float(low), float(high)
