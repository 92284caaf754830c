"""Acceptance by position: counted by a replay, compared with an engine's, and what a departure looks like."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from app.bench.intervals import acceptance_intervals
from app.samples import Sample
from app.train.alignment import supervision_mask
from app.train.evaluate import Proposer

TOLERANCE = 0.02  # of a position's joint acceptance
MIN_DRAFTS = 500  # that reach a position, below which it is not judged
_SOME_DRAFTS = 100  # enough to see one factor
_NONE = 0.02  # acceptance of the first position that is none
_MILD = 0.6  # of the acceptance: a smaller share is no matter of sampling or text
_EVEN = 0.15  # by which factors of the positions may differ and still be one factor

FEATURES = "wrong features, vocabulary or embedding when served"
SERVED_OTHERWISE = "served as something else"
RECURRENCE = "the draft's own steps when served"
SAMPLING = "sampling or template when served"


@dataclass(frozen=True)
class Profile:
    """Joint acceptance by position, and the drafts it was counted over.

    Of a replay, `unknown` is what may come on top: tokens drafted past the end of an answer, of which the answer does
    not tell whether the engine, which counts them, accepted them; `margin` is half the width of the 95 % interval of
    `joint` over conversations.
    """

    joint: tuple[float, ...]
    drafts: float
    unknown: tuple[float, ...] = ()
    margin: tuple[float, ...] = ()

    def reaching(self, position: int) -> float:
        """Drafts whose tokens before `position` were all accepted."""
        return self.drafts * (self.joint[position - 1] if position else 1.0)

    def given(self, position: int) -> float:
        """Acceptance at `position` of the drafts that reach it."""
        before = self.joint[position - 1] if position else 1.0
        return self.joint[position] / before if before else 0.0


@dataclass(frozen=True)
class Verdict:
    """What two profiles say of each other; no cause where they agree at every judged position."""

    words: str
    judged: int  # positions with enough drafts
    cause: str | None = None
    next_step: str = ""


def compare(replayed: Profile, engine: Profile) -> Verdict:
    """The engine's profile against the replay's: within TOLERANCE and the replay's margin at every position with
    MIN_DRAFTS, or the first position that departs and the cause whose profile this is."""
    numbers = f"{percent(replayed.joint)} replayed, {percent(engine.joint)} in the engine"
    width = min(len(replayed.joint), len(engine.joint))
    judged = [i for i in range(width) if min(replayed.reaching(i), engine.reaching(i)) >= MIN_DRAFTS]
    apart = [i for i in judged if _distance(replayed, engine, i) > TOLERANCE]
    if not apart:
        return Verdict(f"{numbers} by position, {len(judged)} of {width} judged", len(judged))
    depth = apart[0]
    cause, why, step = _profile(replayed, engine, depth, width)
    return Verdict(f"{numbers}: departs at position {depth}, {why}", len(judged), cause, step)


def _distance(replayed: Profile, engine: Profile, position: int) -> float:
    """How far the engine lies outside of what the replay allows for."""
    margin = replayed.margin[position] if replayed.margin else 0.0
    low = replayed.joint[position] - margin
    high = replayed.joint[position] + margin + (replayed.unknown[position] if replayed.unknown else 0.0)
    return max(low - engine.joint[position], engine.joint[position] - high, 0.0)


def replay(samples: Iterable[Sample], draft: Proposer, k: int, resamples: int = 0) -> Profile:
    """Walk every answer to its last token, as the engine does: draft k, accept those before the first miss, go on.

    With `resamples` of the conversations the profile has a margin, where there are several.
    """
    by_conversation: dict[str, list[int]] = {}  # drafts, then those that accepted at least 1 .. k
    unknown = [0] * k
    for sample in samples:
        counts = by_conversation.setdefault(sample.conversation_id, [0] * (1 + k))
        (proposals,) = draft([sample], k)  # [n, k]
        ids, starts = sample.token_ids, supervision_mask(sample.loss_mask, 0).nonzero().flatten().tolist()
        row_of = {t: row for row, t in enumerate(starts)}
        t = starts[0] if starts else -1
        while t in row_of:
            truth = ids[t + 2 : t + 2 + k]  # fewer than k at the end
            hits = int((proposals[row_of[t], : len(truth)] == truth).long().cumprod(-1).sum())
            for position in range(1 + hits):
                counts[position] += 1
            if hits == len(truth):
                for position in range(hits, k):
                    unknown[position] += 1
            t += hits + 1
    drafts, *accepted = map(sum, zip([0] * (1 + k), *by_conversation.values(), strict=True))
    total = max(1, drafts)
    ends = acceptance_intervals(list(by_conversation.values()), resamples, seed=0) if resamples else None
    margin = tuple((high - low) / 2 for low, high in ends[1]) if ends else ()
    return Profile(tuple(n / total for n in accepted), drafts, tuple(n / total for n in unknown), margin)


def _profile(replayed: Profile, engine: Profile, depth: int, width: int) -> tuple[str, str, str]:
    """Cause, why, next step for profiles that part at `depth` first."""
    if engine.joint[0] < _NONE <= replayed.joint[0]:
        step = "serve with method eagle3 / EAGLE3 and with this export's own d2t (A1, A2, A5)"
        return SERVED_OTHERWISE, "nothing is accepted: the EAGLE flag or the vocabulary map", step
    known = [i for i in range(width) if min(replayed.reaching(i), engine.reaching(i)) >= _SOME_DRAFTS]
    factors = [engine.given(i) / replayed.given(i) for i in known if replayed.given(i)]
    if depth == 0 and len(factors) > 1 and max(factors) - min(factors) <= _EVEN and min(factors) >= _MILD:
        said = f"every position by about the same factor {sum(factors) / len(factors):.2f}"
        return SAMPLING, f"{said}: temperature, or prompts rendered otherwise", "look at D1, D4 and D8"
    # What goes wrong later moves the starts too, and with them the first position a little.
    if depth > 0 or (factors and abs(factors[0] - 1) < _EVEN < factors[0] - min(factors)):
        step = "compare rope, max_position_embeddings, norm_output and head_dim of the served config.json (C4, C5)"
        return RECURRENCE, "the first is right, or nearly: rotary base, positions, norms or the fed-back state", step
    step = "compare layer ids, d2t and embedding of the served folder with this export's (A2, A5, A7, B2)"
    return FEATURES, "the first position is wrong already: layers, states, vocabulary or embedding", step


def percent(joint: Sequence[float]) -> str:
    return "/".join(f"{100 * p:.1f}" for p in joint) + " %"
