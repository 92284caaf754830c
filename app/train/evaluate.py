"""Acceptance length offline: a walk over emitted answers, as the server walks them (CONTRACTS section 6).

From row t the draft proposes k tokens for x_{t+2} .. x_{t+1+k}. R of them, counted from the first, equal what
the target emitted; the target adds one token of its own; the next start is row t + R + 1. The first start is
row P-1, where P is the first token of the answer: the server drafts only after the target's first token.
Acceptance length = 1 + (sum of R) / (number of starts), the bonus token included.

Edge rule: a start with fewer than k tokens left in the answer is not counted. The server does draft there,
and counts what it accepts past the end, which no captured answer can tell.

Answers sampled at a temperature: the draft is greedy, as vLLM serves it by default, so a proposal q is
accepted with probability p(q); that it equals the sampled token has just this expectation, and the walk needs
no change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from app.train.alignment import TrainingSample, pack, supervision_mask
from app.train.draft import Eagle3Draft
from app.train.loss import unroll


class EvaluationSample(TrainingSample, Protocol):
    @property
    def conversation_id(self) -> str: ...
    @property
    def domain(self) -> str: ...


# Per sample the proposals of its starts, [n, k] int64 target ids: rows where supervision_mask(m, 0) is on.
# A proposal after the first miss of its row is never looked at and may be anything, -1 say.
Proposer = Callable[[Sequence[EvaluationSample], int], list[Tensor]]


@dataclass(frozen=True)
class Tally:
    """What the walk counted in one conversation."""

    conversation_id: str
    domain: str
    drafts: int  # starts visited
    accepted_at: tuple[int, ...]  # [k] starts that accepted at least i+1 proposals


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of k proposals a draft; rates are shares, the length counts the bonus token."""

    num_draft_tokens: int
    conversations: int
    drafts: int
    accepted: int
    length: float
    low: float  # 95 % interval of the length, conversations resampled
    high: float
    rate: float  # accepted / (k * drafts)
    per_position: list[float]  # joint: share of drafts that accepted at least i+1
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


def walk(samples: Sequence[EvaluationSample], propose: Proposer, k: int) -> list[Tally]:
    """Walk every answer of `samples`; one tally per sample; `summarise` joins conversations."""
    tallies = []
    for sample, proposals in zip(samples, propose(samples, k), strict=True):
        accepted_at, drafts = [0] * k, 0
        starts = supervision_mask(sample.loss_mask, 0).nonzero().flatten()  # [n]
        whole = supervision_mask(sample.loss_mask, k - 1)  # [T-1], rows whose k proposals all lie in the answer
        runs = run_lengths(sample, starts, proposals)  # [n]
        begins = {max(p - 1, 0) for p in _answers(sample.loss_mask)}
        following: int | None = None
        for t, accepted in zip(starts.tolist(), runs.tolist(), strict=True):
            if t in begins:
                following = t
            if t == following and bool(whole[t]):
                drafts += 1
                for i in range(accepted):
                    accepted_at[i] += 1
                following = t + accepted + 1
        tallies.append(Tally(sample.conversation_id, sample.domain, drafts, tuple(accepted_at)))
    return tallies


def run_lengths(sample: EvaluationSample, starts: Tensor, proposals: Tensor) -> Tensor:
    """Hits before the first miss: starts [n], proposals [n, k] -> [n]."""
    ids, k = sample.token_ids, proposals.shape[1]
    at = starts.unsqueeze(-1) + 2 + torch.arange(k)  # [n, k], positions proposed for
    emitted = ids[at.clamp(max=len(ids) - 1)].masked_fill(at >= len(ids), -2)  # [n, k]
    return (proposals == emitted).long().cumprod(-1).sum(-1)  # [n]


def _answers(loss_mask: Tensor) -> list[int]:
    """First positions of the supervised spans."""
    m = loss_mask.bool()
    opens = m.clone()
    opens[1:] &= ~m[:-1]
    return opens.nonzero().flatten().tolist()


def summarise(tallies: Iterable[Tally], k: int, bootstrap: int = 1000, seed: int = 0) -> Acceptance:
    """Acceptance numbers with a bootstrap interval over conversations, overall and per domain."""
    joined: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0] * (k + 1))
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
        by_domain[domain] = _acceptance(counts[mine], k, bootstrap, seed, {})
    return _acceptance(counts, k, bootstrap, seed, by_domain)


def _acceptance(counts: Tensor, k: int, bootstrap: int, seed: int, by_domain: dict[str, Acceptance]) -> Acceptance:
    """counts [C, 1+k]: drafts, then drafts that accepted at least 1 .. k, by conversation."""
    drafts, accepted = counts[:, 0], counts[:, 1:].sum(-1)  # [C]
    total, hits = float(drafts.sum()), float(accepted.sum())
    low = high = length = 1 + hits / total if total else 1.0
    if total and bootstrap and len(counts) > 1:
        g = torch.Generator().manual_seed(seed)
        picks = torch.randint(0, len(counts), (bootstrap, len(counts)), generator=g)  # [B, C]
        lengths = 1 + accepted[picks].sum(-1) / drafts[picks].sum(-1).clamp(min=1)  # [B]
        low, high = torch.quantile(lengths, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Acceptance(
        num_draft_tokens=k,
        conversations=len(counts),
        drafts=int(total),
        accepted=int(hits),
        length=length,
        low=low,
        high=high,
        rate=hits / (k * total) if total else 0.0,
        per_position=[float(n) / total if total else 0.0 for n in counts[:, 1:].sum(0)],
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
