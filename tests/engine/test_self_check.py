"""The self-check's judgement, without an engine: Hugging Face's own states pass, spoilt ones are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.engine.base import Completion
from app.engine.self_check import NEW_TOKENS, PROMPT_LENGTHS, Probe, check_prompts, embedded_ids, find_fault
from app.packaged import packaged_target
from app.target import TargetHead, inspect_target, load_target_head
from tests.engine.helpers import reference

SMOL_IDS = (2, 15, 27, 30)


def probes_of(model: Path, ids: tuple[int, ...]) -> tuple[list[Probe], TargetHead]:
    """Probes as a right engine gives them: bf16 states, answers of 16 greedy tokens."""
    from transformers import AutoModelForCausalLM

    info = inspect_target(str(model))
    net = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32).eval()
    prompts = check_prompts(info.tokenizer_len, 512)
    sequences = [list(p) for p in prompts]
    for sequence in sequences:
        cache, feed = None, sequence
        for _ in range(NEW_TOKENS):
            with torch.no_grad():
                out = net(torch.tensor([feed]), past_key_values=cache, use_cache=True)
            cache, feed = out.past_key_values, [int(out.logits[0, -1].argmax())]
            sequence += feed
    probes = []
    for prompt, sequence, states in zip(prompts, sequences, reference(str(model), sequences), strict=True):
        kept = states[:-1].to(torch.bfloat16)  # [T-1, n+1, H]
        answer = Completion(sequence[len(prompt) :], "length", kept[:, ids])
        probes.append(Probe(prompt, answer, kept[:, 0]))
    return probes, load_target_head(info)


@pytest.fixture(scope="module")
def smol() -> tuple[list[Probe], TargetHead]:
    return probes_of(packaged_target("smollm2-135m"), SMOL_IDS)


def with_states(probe: Probe, states: torch.Tensor) -> Probe:
    return replace(probe, answer=replace(probe.answer, states=states))


def test_the_prompts_fit_short_engines_and_small_vocabularies() -> None:
    assert [len(p) for p in check_prompts(640, 2048)] == list(PROMPT_LENGTHS)
    assert max(len(p) for p in check_prompts(640, 32)) + NEW_TOKENS < 32
    assert all(0 <= i < 640 for p in check_prompts(640, 2048) for i in p)


def test_a_token_without_an_embedding_is_not_asked() -> None:
    """Padding rows are zero; a gated linear-attention layer leaves their state zero, which is no fault of capture."""
    rows = torch.ones(8, 4)
    rows[[0, 3]] = 0.0
    assert embedded_ids(rows, 6) == [1, 2, 4, 5]


def test_right_states_pass(smol: tuple[list[Probe], TargetHead], tiny: Path, tiny_tied: Path) -> None:
    probes, head = smol
    assert find_fault(probes, head, SMOL_IDS) is None
    for model in (tiny, tiny_tied):
        probes, head = probes_of(model, (2, 4, 6, 8))
        assert find_fault(probes, head, (2, 4, 6, 8)) is None


def test_a_scaled_embedding_passes(smol: tuple[list[Probe], TargetHead]) -> None:
    probes, head = smol
    scaled = [replace(p, embeddings=p.embeddings * 24) for p in probes if p.embeddings is not None]
    assert find_fault(scaled, head, SMOL_IDS) is None


def test_a_shifted_position_is_found(smol: tuple[list[Probe], TargetHead]) -> None:
    probes, head = smol
    rolled = [replace(p, embeddings=p.embeddings.roll(1, 0)) for p in probes if p.embeddings is not None]
    assert "s_0 is not the token's embedding" in str(find_fault(rolled, head, SMOL_IDS))


def test_a_final_norm_too_many_or_too_few_is_found(smol: tuple[list[Probe], TargetHead]) -> None:
    probes, head = smol
    twice = []
    for p in probes:
        states = p.answer.states.clone()
        states[:, -1] = head.normed(states[:, -1]).to(states.dtype)
        twice.append(with_states(p, states))
    assert "final norm" in str(find_fault(twice, head, SMOL_IDS))
    without = replace(head, norm_weight=torch.ones_like(head.norm_weight))
    assert "final norm" in str(find_fault(probes, without, SMOL_IDS))


def test_a_request_of_another_length_is_found(smol: tuple[list[Probe], TargetHead]) -> None:
    probes, head = smol
    short = [with_states(probes[0], probes[0].answer.states[:-1]), *probes[1:]]
    assert "19 positions were captured of a request that has 20" in str(find_fault(short, head, SMOL_IDS))


def test_without_s_0_the_last_state_alone_decides(smol: tuple[list[Probe], TargetHead]) -> None:
    probes, head = smol
    assert find_fault([replace(p, embeddings=None) for p in probes], head, SMOL_IDS) is None
