"""Acceptance at a temperature: expected walks against speculative sampling done by dice on small vocabularies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from app.train.alignment import supervision_mask
from app.train.evaluate import (
    Chances,
    GreedyDraft,
    SampledDraft,
    chances,
    evaluate_sampled,
    summarise,
    walk,
    walk_sampled,
)
from app.train.reference import reference_logits
from tests.train.debug import FakeSample, debug_draft, debug_head, make_sample, random_samples, span_mask

V, K, SAID = 6, 3, 4  # target tokens, proposals, tokens of the draft vocabulary: the first ones


def chain_tables(seed: int) -> tuple[Tensor, Tensor]:
    """A target P and a draft's logits, by the token before: [V, V] and [V, SAID]."""
    g = torch.Generator().manual_seed(seed)
    return (1.2 * torch.randn(V, V, generator=g)).softmax(-1), 1.5 * torch.randn(V, SAID, generator=g)


def served(truth: Tensor, logits: Tensor, greedy: bool, rounds: int, seed: int) -> tuple[float, list[float]]:
    """Speculative sampling by dice: acceptance length and joint acceptance by place."""
    g = torch.Generator().manual_seed(seed)
    q = torch.zeros(V, V)
    q[:, :SAID] = logits.softmax(-1)
    if greedy:
        q = torch.nn.functional.one_hot(q.argmax(-1), V).float()
    residual = (truth - q).clamp(min=0)
    accepted_at, last = [0] * K, 0

    def draw(weights: Tensor) -> int:
        return int(torch.multinomial(weights, 1, generator=g))

    for _ in range(rounds):
        for place in range(K):
            token = draw(q[last])
            if float(torch.rand(1, generator=g)) >= float(truth[last, token] / q[last, token]):
                last = draw(residual[last])
                break
            accepted_at[place] += 1
            last = token
        else:
            last = draw(truth[last])
    return 1 + sum(accepted_at) / rounds, [n / rounds for n in accepted_at]


def sampled_texts(truth: Tensor, count: int, length: int) -> list[FakeSample]:
    """Texts of the target alone, all supervised but the first token."""
    g = torch.Generator().manual_seed(1)
    samples = []
    for number in range(count):
        ids = [0]
        dice = torch.rand(length, generator=g).tolist()
        sums = truth.cumsum(-1).tolist()
        while len(ids) < length:
            ids.append(min(V - 1, sum(s < dice[len(ids)] for s in sums[ids[-1]])))
        sample = make_sample(span_mask(length, [(1, length)]), name=f"c{number}", seed=number)
        samples.append(type(sample)(**{**sample.__dict__, "token_ids": torch.tensor(ids)}))
    return samples


def chances_of(sample: FakeSample, truth: Tensor, logits: Tensor, greedy: bool) -> Chances:
    """From the tables, as the draft would give them when it is fed the true tokens."""
    ids = torch.cat([sample.token_ids, sample.token_ids.new_zeros(K)])
    starts = supervision_mask(sample.loss_mask, 0).nonzero()  # [n, 1]
    at = starts + 2 + torch.arange(K)  # [n, k]
    before, token = ids[at - 1].flatten(), ids[at].flatten()
    labels = torch.where(token < SAID, token, -1)
    values = chances(logits[before], truth[before][:, :SAID], labels, 1.0).double()  # [4, n*k]
    given, ahead = values[:2] if greedy else values[2:]
    return Chances(given.view(-1, K), ahead.view(-1, K))


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_expected_walk_is_what_speculative_sampling_does(greedy: bool, seed: int) -> None:
    """The target's own texts tell, without any draw of the draft, what a server accepts on the way to such texts."""
    truth, logits = chain_tables(seed)
    length, places = served(truth, logits, greedy, 15000, seed=7)
    samples = sampled_texts(truth, 20, 1000)
    result = summarise(walk_sampled(samples, [chances_of(s, truth, logits, greedy) for s in samples]), K)
    assert result.length == pytest.approx(length, abs=0.03)
    assert result.per_position == pytest.approx(places, abs=0.02)
    other = summarise(walk_sampled(samples, [chances_of(s, truth, logits, not greedy) for s in samples]), K)
    assert abs(other.length - length) > 0.05  # the two ways of drafting are not alike


def test_the_expected_walk_is_the_mean_over_all_its_branches() -> None:
    """Every walk through two answers followed one by one, with random chances."""
    sample = make_sample(span_mask(22, [(2, 12), (13, 22)]), name="c")
    starts = supervision_mask(sample.loss_mask, 0).nonzero().flatten().tolist()
    whole = supervision_mask(sample.loss_mask, K - 1).tolist()
    chance = torch.rand(len(starts), K, generator=torch.Generator().manual_seed(0)).double()

    def branches(t: int) -> tuple[float, list[float]]:
        if t not in starts or not whole[t]:
            return 0.0, [0.0] * K
        p = chance[starts.index(t)].tolist()
        drafts, accepted_at = 1.0, [0.0] * K
        for run in range(K + 1):
            weight = float(torch.tensor(p[:run]).prod()) * (1 - p[run] if run < K else 1)
            more, further = branches(t + run + 1)
            drafts += weight * more
            accepted_at = [
                a + weight * (f + (i < run)) for i, (a, f) in enumerate(zip(accepted_at, further, strict=True))
            ]
        return drafts, accepted_at

    first, second = branches(1), branches(12)
    (tally,) = walk_sampled([sample], [Chances(chance, chance)])
    assert tally.drafts == pytest.approx(first[0] + second[0], rel=1e-6)
    assert tally.accepted_at == pytest.approx([a + b for a, b in zip(first[1], second[1], strict=True)], rel=1e-6)


def test_what_is_expected_ahead_is_the_mean_of_what_is_given() -> None:
    """P(d) and 1 - TV are the means, over the target's softmax, of the chances given the token."""
    truth, logits = chain_tables(3)
    for before in range(V):
        labels = torch.arange(V)
        labels[SAID:] = -1
        values = chances(logits[before].expand(V, -1), truth[before, :SAID].expand(V, -1), labels, 0.8)  # [4, V]
        weights = truth[before]
        assert float((weights * values[0]).sum()) == pytest.approx(float(values[1, 0]), rel=1e-5)
        assert float((weights * values[2]).sum()) == pytest.approx(float(values[3, 0]), rel=1e-5)


@pytest.mark.parametrize("vocab", [12, 96])
def test_chances_of_a_draft_are_those_of_its_logits(vocab: int) -> None:
    """Against the dense definition of the draft and the whole softmax of the target."""
    head, temperature = debug_head(), 0.7
    draft = debug_draft(head, draft_vocab_size=vocab)
    sample = make_sample(span_mask(18, [(3, 10), (11, 18)]), seed=5)
    found = SampledDraft(draft, head, temperature, torch.float32)([sample], K)
    logits = reference_logits(draft, sample, K)  # [k, T-1, Vd]
    starts = supervision_mask(sample.loss_mask, 0).nonzero().flatten()
    checked = 0
    for row, t in enumerate(starts.tolist()):
        for place in range(K):
            if not bool(supervision_mask(sample.loss_mask, place)[t]):
                continue
            truth = (head.logits(sample.teacher[sample.teacher_pos == t + 1 + place])[0] / temperature).softmax(-1)
            q = torch.zeros(96)
            q[draft.kept_ids] = (logits[place, t].detach() / temperature).softmax(-1)
            token, best = int(sample.token_ids[t + 2 + place]), int(q.argmax())
            expected = {
                "greedy": (float(best == token), float(truth[best])),
                "probabilistic": (min(1.0, float(q[token] / truth[token])), float(torch.minimum(truth, q).sum())),
            }
            for drafting, (given, ahead) in expected.items():
                mine = found[drafting][0]  # type: ignore[index]
                assert float(mine.given[row, place]) == pytest.approx(given, rel=1e-3, abs=1e-5)
                assert float(mine.ahead[row, place]) == pytest.approx(ahead, rel=1e-3, abs=1e-5)
            checked += 1
    assert checked > 20


def test_certain_chances_walk_as_hits_do() -> None:
    """The plain walk is the expected one where each proposal is either the emitted token or not."""
    draft, head = debug_draft(), debug_head()
    samples = random_samples(20, seed=2, longest=30)
    found = SampledDraft(draft, head, 1.0, torch.float32)(samples, K)["greedy"]
    certain = walk_sampled(samples, [Chances(c.given, c.given) for c in found])
    assert certain == walk(samples, GreedyDraft(draft, torch.float32), K)


def test_both_ways_of_drafting_are_labelled() -> None:
    samples = random_samples(20, seed=4, longest=40)
    result = evaluate_sampled(samples, SampledDraft(debug_draft(), debug_head(), 1.0, torch.float32), K)
    assert {name: a.drafting for name, a in result.items()} == {"greedy": "greedy", "probabilistic": "probabilistic"}
    assert result["greedy"].drafts != result["probabilistic"].drafts
    batched = evaluate_sampled(
        samples, SampledDraft(debug_draft(), debug_head(), 1.0, torch.float32), K, tokens_at_once=1
    )
    assert batched["probabilistic"].length == pytest.approx(result["probabilistic"].length, rel=1e-5)
