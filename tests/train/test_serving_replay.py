"""Serving order against training: every depth of every draft round, for every combination of norm flags (F50, F68)."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations
from typing import Any

import pytest
import torch

from app.draft_config import NORM_FLAGS
from app.train.alignment import pack
from app.train.draft import Eagle3Draft
from app.train.evaluate import GreedyDraft, walk
from app.train.loss import unroll
from tests.train.debug import debug_config, debug_draft, debug_head, make_sample, span_mask
from tests.train.serving import serve, serve_answer

COMBINATIONS = list(chain.from_iterable(combinations(NORM_FLAGS, n) for n in range(len(NORM_FLAGS) + 1)))
K = 4


@pytest.mark.parametrize("flags", COMBINATIONS, ids=lambda f: "+".join(f) or "none")
def test_serving_order_reproduces_the_training_logits_at_every_depth(flags: tuple[str, ...]) -> None:
    """All rows of two turns, the chain fed with the true tokens as training is."""
    draft = debug_draft(**dict.fromkeys(flags, True))
    sample = make_sample(span_mask(22, [(5, 13), (15, 22)]), seed=3)
    packed = pack([sample], K)
    with torch.no_grad():
        by_step = [draft.lm_head(h) for h in unroll(draft.cast(torch.float32), packed)]
    for step in range(K):
        for i, t in enumerate(packed.rows[step].tolist()):
            _, logits = serve(draft, sample, t, step + 1, forced=sample.token_ids[t + 2 : t + 3 + step])
            torch.testing.assert_close(by_step[step][i], logits[step], rtol=1e-4, atol=1e-5)


SHAPES: list[dict[str, Any]] = [
    {"num_key_value_heads": 1},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    {"draft_vocab_size": 96, "target_hidden_size": 48},
]


@pytest.mark.parametrize("flags", COMBINATIONS, ids=lambda f: "+".join(f) or "none")
@pytest.mark.parametrize("true_tokens", [False, True])
def test_a_request_served_round_by_round_is_what_training_and_the_walk_computed(
    flags: tuple[str, ...], true_tokens: bool
) -> None:
    """Prefill, then chains of k from each row the walk visits; rows of a chain are made anew from the target's states.

    With the draft's own tokens the logits agree up to and including the first miss, which is all the server looks at.
    """
    shape = SHAPES[len(flags) % len(SHAPES)]
    draft = debug_draft(**shape, **dict.fromkeys(flags, True))
    sample = make_sample(span_mask(30, [(6, 30)]), hidden=shape.get("target_hidden_size", 32), seed=len(flags))
    ids = sample.token_ids.clone()
    sample = replace(sample, token_ids=ids)
    for t in range(5, 28):  # the draft's own words, with misses put in, so that runs of every length occur
        if t % 4:
            ids[t + 2] = serve(draft, sample, t, 1)[0][0]
    packed = pack([sample], K)
    with torch.no_grad():
        by_step = [draft.lm_head(h) for h in unroll(draft.cast(torch.float32), packed)]
    rounds = serve_answer(draft, sample, answer=6, k=K, true_tokens=true_tokens)
    depths = 0
    for turn in rounds:
        seen = len(turn.logits) if true_tokens else min(turn.accepted + 1, len(turn.logits))
        for step in range(seen):
            row = packed.rows[step].tolist().index(turn.start)
            torch.testing.assert_close(by_step[step][row], turn.logits[step], rtol=1e-4, atol=1e-5)
            depths += 1
    assert depths > len(rounds) > 4
    (tally,) = walk([sample], GreedyDraft(draft, torch.float32), K)
    whole = [r.accepted for r in rounds if len(r.logits) == K]
    assert (tally.drafts, sum(tally.accepted_at)) == (len(whole), sum(whole))
    assert 0 < sum(whole) < K * len(whole)


@pytest.mark.parametrize("flag", NORM_FLAGS)
def test_a_server_that_ignores_a_flag_computes_something_else(flag: str) -> None:
    """F50: the same weights under the other meaning give other logits, at the depth where the flag acts."""
    sample, head = make_sample(span_mask(20, [(4, 20)])), debug_head()
    draft = debug_draft(head, **{flag: True})
    ignored = Eagle3Draft(debug_config())
    ignored.load_exported({n: t for n, t in draft.export_state_dict().items() if "fc_norm" not in n})
    true, false = (
        serve(d, sample, 9, K, forced=sample.token_ids[11 : 11 + K])[1].log_softmax(-1) for d in (draft, ignored)
    )
    apart = (true - false).abs().amax(-1)  # [K]
    assert float(apart[-1]) > 1e-2
    if flag == "norm_output":  # the first proposal does not depend on it
        assert float(apart[0]) < 1e-5
    else:
        assert float(apart[0]) > 1e-2
