"""Acceptance length offline: a walk over emitted answers, as the server walks them (CONTRACTS section 6).

From row t the draft proposes k tokens for x_{t+2} .. x_{t+1+k}. R of them, counted from the first, equal what
the target emitted; the target adds one token of its own; the next start is row t + R + 1. The first start is
row P-1, where P is the first token of the answer: the server drafts only after the target's first token.
Acceptance length = 1 + (sum of R) / (number of starts), the bonus token included.

Edge rule: a start with fewer than k tokens left in the answer is not counted. The server does draft there,
and counts what it accepts past the end, which no captured answer can tell.

Answers sampled at a temperature: the draft is greedy, as vLLM serves it by default, so a proposal d is
accepted with probability P(d), P the target's softmax at that temperature. That it equals the sampled token has
just this expectation, so `evaluate` needs no change; `evaluate_sampled` puts P(d) itself in its place. It also tells
the other way of drafting, `draft_sample_method=probabilistic`: the draft draws from its own softmax q, and a draw x is
accepted with probability min(1, P(x) / q(x)), 1 - TV(P, q) on the mean. Given the emitted token x the draft's token was
accepted with probability min(1, q(x) / P(x)), independently at each place, which makes the walk over a given answer a
chain with known chances: `walk_sampled` follows all its branches at once. Both hold for answers sampled at that
temperature without top_p, top_k and the like.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from app.codecs import decoded
from app.target import TargetHead
from app.train.alignment import TrainingSample, pack, supervision_mask
from app.train.draft import Eagle3Draft
from app.train.loss import Teacher, unroll

Drafting = Literal["greedy", "probabilistic"]  # vLLM's draft_sample_method


class EvaluationSample(TrainingSample, Protocol):
    @property
    def conversation_id(self) -> str: ...
    @property
    def domain(self) -> str: ...


# Per sample the proposals of its starts, [n, k] int64 target ids: rows where supervision_mask(m, 0) is on.
# A proposal after the first miss of its row is never looked at and may be anything, -1 say.
Proposer = Callable[[Sequence[EvaluationSample], int], list[Tensor]]


@dataclass(frozen=True)
class Chances:
    """Of the n starts of a sample, by place of the chain; [n, k] fp64 each, nothing is read where an answer ends."""

    given: Tensor  # that the proposal was accepted, given the emitted token and that all before it were
    ahead: Tensor  # the same before the token is known: the expectation of `given` over the target's softmax


@dataclass(frozen=True)
class Tally:
    """What the walk counted in one conversation; expected numbers where acceptance is a chance."""

    conversation_id: str
    domain: str
    drafts: float  # starts visited
    accepted_at: tuple[float, ...]  # [k] starts that accepted at least i+1 proposals


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of k proposals a draft; rates are shares, the length counts the bonus token."""

    drafting: Drafting
    num_draft_tokens: int
    conversations: int
    drafts: float  # whole numbers, unless they are expectations
    accepted: float
    length: float
    low: float  # 95 % interval of the length, conversations resampled
    high: float
    rate: float  # accepted / (k * drafts)
    per_position: list[float]  # joint: share of drafts that accepted at least i+1
    position_intervals: list[tuple[float, float]]  # 95 % interval of each, as of the length
    by_domain: dict[str, Acceptance]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class GreedyDraft:
    """Proposals of a trained draft, greedy, in one pass over all starts.

    While a row's proposals are hits they are the true tokens, so feeding true tokens gives exactly what the
    server computes up to and including the first miss.
    """

    def __init__(self, draft: Eagle3Draft, dtype: torch.dtype = torch.bfloat16) -> None:
        self.draft, self.dtype = draft, dtype

    @torch.no_grad()
    def __call__(self, samples: Sequence[EvaluationSample], k: int) -> list[Tensor]:
        device = self.draft.d2t.device
        packed = pack(samples, k)
        rows = packed.counts[0]
        proposals = torch.full((rows, k), -1)  # [N_0, k]
        if rows:
            packed = packed.to(device)
            weight = self.draft.lm_head.weight.to(self.dtype)  # [Vd, H]
            kept, chunk = self.draft.kept_ids, max(1, 2**24 // len(weight))
            for step, hidden in enumerate(unroll(self.draft.cast(self.dtype), packed)):  # [N_k, H]
                top = [torch.mm(part, weight.T).argmax(-1) for part in hidden.split(chunk)]
                starts = packed.ahead[step] - step  # where row t stands among the N_0: rows of a turn are adjacent
                if len(starts):
                    proposals[starts.cpu(), step] = kept[torch.cat(top)].cpu()
        counts = [int(supervision_mask(s.loss_mask, 0).sum()) for s in samples]
        return list(proposals.split(counts))


class SampledDraft:
    """Chances of a trained draft under the target's softmax at a temperature, for both ways of drafting."""

    def __init__(
        self, draft: Eagle3Draft, head: TargetHead, temperature: float, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.draft, self.temperature, self.dtype = draft, temperature, dtype
        self.teacher = Teacher(head, draft.kept_ids, dtype, draft.d2t.device)

    @torch.no_grad()
    def __call__(self, samples: Sequence[EvaluationSample], k: int) -> dict[Drafting, list[Chances]]:
        packed = pack(samples, k)
        rows, device = packed.counts[0], self.draft.d2t.device
        found = torch.zeros(4, rows, k, dtype=torch.float64)
        if rows:
            packed = packed.to(device)
            labels = self.draft.target_to_draft[packed.labels]  # [N_0]
            weight = self.draft.lm_head.weight.to(self.dtype)  # [Vd, H]
            size = self.teacher.rows_at_once
            for step, hidden in enumerate(unroll(self.draft.cast(self.dtype), packed)):  # [N_k, H]
                ahead = packed.ahead[step]  # [N_k]
                for part, at in zip(hidden.split(size), ahead.split(size), strict=True):
                    logits = torch.mm(part, weight.T)  # [n, Vd]
                    teacher = self.teacher.distribution(decoded(packed.teacher[at]), self.temperature, True)
                    truth = teacher.probs * teacher.inside.unsqueeze(-1)  # [n, Vd]
                    values = chances(logits, truth, labels[at], self.temperature)  # [4, n]
                    found[:, (at - step).cpu(), step] = values.double().cpu()
        counts = [int(supervision_mask(s.loss_mask, 0).sum()) for s in samples]
        given, ahead_of, drawn, overlap = (x.split(counts) for x in found)
        return {
            "greedy": [Chances(*pair) for pair in zip(given, ahead_of, strict=True)],
            "probabilistic": [Chances(*pair) for pair in zip(drawn, overlap, strict=True)],
        }


def chances(logits: Tensor, truth: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """`Chances` of n rows, given and ahead for greedy drafting, then for probabilistic: [4, n].

    logits [n, Vd] of the draft, truth [n, Vd] the target's own mass P over the draft vocabulary, labels [n] the emitted
    tokens as draft ids, -1 outside the draft vocabulary.
    """
    q = torch.softmax(logits.to(truth.dtype) / temperature, -1)  # [n, Vd]
    said, label = labels >= 0, labels.clamp(min=0).unsqueeze(-1)  # [n], [n, 1]
    top = q.argmax(-1)  # [n]
    ratio = (q.gather(1, label) / truth.gather(1, label).clamp(min=torch.finfo(q.dtype).tiny)).squeeze(1)  # [n]
    return torch.stack(
        [
            (top == labels).to(q.dtype),
            truth.gather(1, top.unsqueeze(-1)).squeeze(1),  # P(d)
            torch.where(said, ratio.clamp(max=1.0), 0.0),
            torch.minimum(truth, q).sum(-1),  # 1 - TV
        ]
    )


def walk(samples: Sequence[EvaluationSample], propose: Proposer, k: int) -> list[Tally]:
    """Walk every answer of `samples`; one tally per sample; `summarise` joins conversations."""
    tallies = []
    for sample, proposals in zip(samples, propose(samples, k), strict=True):
        hits = proposals == _emitted(sample, k)  # [n, k]
        tallies.append(_tally(sample, Chances(hits.double(), hits.double())))
    return tallies


def walk_sampled(samples: Sequence[EvaluationSample], found: Sequence[Chances]) -> list[Tally]:
    """Expected tallies of answers that were sampled, one per sample."""
    return [_tally(sample, chance) for sample, chance in zip(samples, found, strict=True)]


def _tally(sample: EvaluationSample, chance: Chances) -> Tally:
    """Every start with the probability that the walk visits it: from t to t + R + 1 with that of R accepted ones."""
    k = chance.given.shape[1]
    starts = supervision_mask(sample.loss_mask, 0).nonzero().flatten().tolist()  # n
    whole = supervision_mask(sample.loss_mask, k - 1).tolist()  # T-1: rows whose k proposals all lie in the answer
    begins = {max(p - 1, 0) for p in _answers(sample.loss_mask)}
    visited: dict[int, float] = {}
    drafts, accepted_at = 0.0, [0.0] * k
    for t, given, ahead in zip(starts, chance.given.tolist(), chance.ahead.tolist(), strict=True):
        visit = 1.0 if t in begins else visited.get(t, 0.0)
        if not visit or not whole[t]:
            continue
        drafts += visit
        reach = visit  # that the walk is here and all proposals so far were accepted
        for i in range(k):
            accepted_at[i] += reach * ahead[i]
            further = reach * given[i]
            visited[t + i + 1] = visited.get(t + i + 1, 0.0) + reach - further
            reach = further
            if not reach:
                break
        visited[t + k + 1] = visited.get(t + k + 1, 0.0) + reach
    return Tally(sample.conversation_id, sample.domain, drafts, tuple(accepted_at))


def _emitted(sample: EvaluationSample, k: int) -> Tensor:
    """The tokens that the starts' proposals are for: [n, k] target ids, -2 past the end."""
    ids, starts = sample.token_ids, supervision_mask(sample.loss_mask, 0).nonzero()  # [n, 1]
    at = starts + 2 + torch.arange(k)  # [n, k]
    return ids[at.clamp(max=len(ids) - 1)].masked_fill(at >= len(ids), -2)


def _answers(loss_mask: Tensor) -> list[int]:
    """First positions of the supervised spans."""
    m = loss_mask.bool()
    opens = m.clone()
    opens[1:] &= ~m[:-1]
    return opens.nonzero().flatten().tolist()


def summarise(
    tallies: Iterable[Tally], k: int, bootstrap: int = 1000, seed: int = 0, drafting: Drafting = "greedy"
) -> Acceptance:
    """Acceptance numbers with a bootstrap interval over conversations, overall and per domain."""
    joined: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * (k + 1))
    for tally in tallies:
        sums = joined[tally.domain, tally.conversation_id]
        for i, n in enumerate((tally.drafts, *tally.accepted_at)):
            sums[i] += n
    keys = sorted(joined)
    counts = torch.tensor([joined[key] for key in keys], dtype=torch.float64).view(-1, k + 1)  # [C, 1+k]
    domains = sorted({domain for domain, _ in keys})
    by_domain = {}
    for domain in domains:
        mine = torch.tensor([d == domain for d, _ in keys])
        by_domain[domain] = _acceptance(counts[mine], k, bootstrap, seed, drafting, {})
    return _acceptance(counts, k, bootstrap, seed, drafting, by_domain)


def _acceptance(
    counts: Tensor, k: int, bootstrap: int, seed: int, drafting: Drafting, by_domain: dict[str, Acceptance]
) -> Acceptance:
    """counts [C, 1+k]: drafts, then drafts that accepted at least 1 .. k, by conversation."""
    drafts, accepted = counts[:, 0], counts[:, 1:].sum(-1)  # [C]
    total, hits = float(drafts.sum()), float(accepted.sum())
    low = high = length = 1 + hits / total if total else 1.0
    rates = [float(n) / total if total else 0.0 for n in counts[:, 1:].sum(0)]
    edges = [(rate, rate) for rate in rates]
    if total and bootstrap and len(counts) > 1:
        g = torch.Generator().manual_seed(seed)
        picks = torch.randint(0, len(counts), (bootstrap, len(counts)), generator=g)  # [B, C]
        lengths = 1 + accepted[picks].sum(-1) / drafts[picks].sum(-1).clamp(min=1)  # [B]
        ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
        low, high = torch.quantile(lengths, ends).tolist()
        for i in range(k):
            shares = counts[:, i + 1][picks].sum(-1) / drafts[picks].sum(-1).clamp(min=1)  # [B]
            least, most = torch.quantile(shares, ends).tolist()
            edges[i] = (least, most)
    return Acceptance(
        drafting=drafting,
        num_draft_tokens=k,
        conversations=len(counts),
        drafts=int(total) if total.is_integer() else total,
        accepted=int(hits) if hits.is_integer() else hits,
        length=length,
        low=low,
        high=high,
        rate=hits / (k * total) if total else 0.0,
        per_position=rates,
        position_intervals=edges,
        by_domain=by_domain,
    )


def evaluate(
    samples: Iterable[EvaluationSample], propose: Proposer, k: int,
    bootstrap: int = 1000, seed: int = 0, tokens_at_once: int = 8192,
) -> Acceptance:  # fmt: skip
    """Acceptance of `propose` over `samples`, read lazily and walked in batches of about `tokens_at_once`."""
    tallies: list[Tally] = []
    for batch in batches(samples, tokens_at_once):
        tallies += walk(batch, propose, k)
    return summarise(tallies, k, bootstrap, seed)


def evaluate_sampled(
    samples: Iterable[EvaluationSample], draft: SampledDraft, k: int,
    bootstrap: int = 1000, seed: int = 0, tokens_at_once: int = 8192,
) -> dict[Drafting, Acceptance]:  # fmt: skip
    """Expected acceptance by way of drafting on `samples`, all sampled at the temperature of `draft`."""
    tallies: dict[Drafting, list[Tally]] = {"greedy": [], "probabilistic": []}
    for batch in batches(samples, tokens_at_once):
        for drafting, found in draft(batch, k).items():
            tallies[drafting] += walk_sampled(batch, found)
    return {drafting: summarise(t, k, bootstrap, seed, drafting) for drafting, t in tallies.items()}


def batches(samples: Iterable[EvaluationSample], tokens: int) -> Iterator[list[EvaluationSample]]:
    """Consecutive samples of about `tokens` tokens together, at least one each."""
    batch: list[EvaluationSample] = []
    held = 0
    for sample in samples:
        if batch and held + len(sample.token_ids) > tokens:
            yield batch
            batch, held = [], 0
        batch.append(sample)
        held += len(sample.token_ids)
    if batch:
        yield batch
