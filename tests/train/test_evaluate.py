"""The acceptance walk: by hand, against an oracle (F68), and against a draft served token by token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from app.train.alignment import supervision_mask
from app.train.evaluate import EvaluationSample, GreedyDraft, Tally, evaluate, summarise, walk
from tests.train.debug import FakeSample, debug_draft, debug_head, make_sample, random_samples, span_mask
from tests.train.serving import serve


def test_walk_by_hand() -> None:
    """Answer x3..x12, k = 2. Row t proposes x_{t+2}, x_{t+3}."""
    sample = make_sample(span_mask(13, [(3, 13)]), name="c")
    truth = sample.token_ids
    wrong = (truth + 1) % 96

    def propose(samples: Sequence[EvaluationSample], k: int) -> list[Tensor]:
        rows = range(2, 11)  # starts: m_{t+1} and m_{t+2}
        hits = {2: (True, True), 5: (False, True), 6: (True, False), 8: (True, True)}
        table = []
        for t in rows:
            first, second = hits.get(t, (True, True))
            table.append([(truth if first else wrong)[t + 2], (truth if second else wrong)[min(t + 3, 12)]])
        return [torch.tensor(table)]

    # 2 -> R 2 -> 5 -> R 0 (the second hit does not count) -> 6 -> R 1 -> 8 -> R 2 -> 11: past the end.
    assert walk([sample], propose, 2) == [Tally("c", sample.domain, 4, (3, 2))]
    result = evaluate([sample], propose, 2)
    assert result.length == 1 + 5 / 4
    assert result.per_position == [3 / 4, 2 / 4]
    assert result.rate == 5 / 8


def test_starts_with_fewer_than_k_tokens_left_are_not_counted() -> None:
    sample = make_sample(span_mask(9, [(3, 9)]))

    def all_wrong(samples: Sequence[EvaluationSample], k: int) -> list[Tensor]:
        return [torch.full((5, k), -1)]  # rows 2..6

    # All misses, so every row is a start; row 4 is the last with three tokens left, row 6 with one.
    assert walk([sample], all_wrong, 3)[0].drafts == 3
    assert walk([sample], all_wrong, 1)[0].drafts == 5


def test_every_turn_of_a_sample_is_walked_from_its_own_start() -> None:
    sample = make_sample(span_mask(20, [(2, 8), (10, 18)]))

    def perfect(samples: Sequence[EvaluationSample], k: int) -> list[Tensor]:
        rows = supervision_mask(sample.loss_mask, 0).nonzero().flatten()
        at = (rows[:, None] + 2 + torch.arange(k)).clamp(max=19)
        return [sample.token_ids[at]]

    # Turn x2..x7: row 1 proposes x3..x5, row 5 has one token left.
    # Turn x10..x17: row 9 proposes x11..x13, row 13 x15..x17.
    assert walk([sample], perfect, 3) == [Tally(sample.conversation_id, sample.domain, 3, (3, 3, 3))]


def oracle_samples(n: int = 20) -> tuple[list[FakeSample], object]:
    """Samples whose emitted tokens are the teacher's own first choices."""
    head, samples = debug_head(), []
    for i in range(n):
        sample = make_sample(span_mask(40, [(8, 40)]), seed=i, name=f"c{i}")
        ids = sample.token_ids.clone()
        ids[sample.teacher_pos + 1] = head.logits(sample.teacher).argmax(-1)
        samples.append(type(sample)(**{**sample.__dict__, "token_ids": ids}))
    return samples, head


@pytest.mark.parametrize("shift", [0, 1])
def test_oracle_from_the_teacher_scores_one_and_falls_when_shifted(shift: int) -> None:
    samples, head = oracle_samples()

    def oracle(batch: Sequence[EvaluationSample], k: int) -> list[Tensor]:
        out = []
        for s in batch:
            rows = supervision_mask(s.loss_mask, 0).nonzero().flatten()
            choice = torch.full((len(s.token_ids) + k + 2,), -1)
            choice[s.teacher_pos] = head.logits(s.teacher).argmax(-1)  # type: ignore[attr-defined]
            out.append(choice[rows[:, None] + 1 + shift + torch.arange(k)])
        return out

    result = evaluate(samples, oracle, 3)
    if shift == 0:
        assert result.per_position == [1.0, 1.0, 1.0]
        assert result.length == result.low == result.high == 4.0
        assert set(result.by_domain) == {"math", "code"}
    else:
        assert result.length < 1.3


def test_the_walk_of_a_draft_equals_the_walk_of_its_server() -> None:
    """Answers made of the draft's own words, with misses put in, so that runs of every length occur."""
    draft, k = debug_draft(draft_vocab_size=96), 3
    samples = []
    for seed in range(4):
        sample = make_sample(span_mask(30, [(6, 30)]), seed=seed, name=f"c{seed}")
        ids = sample.token_ids
        for t in range(5, 28):
            if (t * 7 + seed) % 4:
                ids[t + 2] = serve(draft, sample, t, 1)[0][0]
        samples.append(sample)
    for sample in samples:
        expected, t = [], 5
        while t + 1 + k < 30:
            hits = 0
            for proposed, emitted in zip(
                serve(draft, sample, t, k)[0], sample.token_ids[t + 2 : t + 2 + k], strict=True
            ):
                if proposed != emitted:
                    break
                hits += 1
            expected.append(hits)
            t += hits + 1
        (tally,) = walk([sample], GreedyDraft(draft, torch.float32), k)
        assert tally.drafts == len(expected)
        assert sum(tally.accepted_at) == sum(expected) > 0


def test_batching_and_device_of_samples_do_not_change_the_counts() -> None:
    draft = debug_draft()
    samples = random_samples(20, seed=2, longest=30)
    one = evaluate(samples, GreedyDraft(draft, torch.float32), 3, tokens_at_once=1)
    many = evaluate(iter(samples), GreedyDraft(draft, torch.float32), 3)
    assert one == many
    assert one.drafts > 0


def test_interval_resamples_conversations_and_contains_the_estimate() -> None:
    tallies = [Tally(f"c{i // 2}", "d", 10, (i % 5, i % 3)) for i in range(40)]
    result = summarise(tallies, 2, bootstrap=500)
    assert result.conversations == 20
    assert result.low < result.length < result.high
    assert summarise([], 2).length == 1.0
