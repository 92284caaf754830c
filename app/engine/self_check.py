"""Proof on every start that the captured states are the ones CONTRACTS.md section 1 names.

A few fixed prompts are answered greedily. Then
- s_0 must equal the target's embedding rows: pins the layer convention, the request and the position;
- s_n through the final norm and the output head must give the emitted tokens: pins the last layer, the norm
  and, again, request and position.
The other states come from the same tensors in the same order.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from app.engine.base import Completion, EngineError, Request
from app.engine.row_checks import check_states
from app.errors import RowError, UserError

if TYPE_CHECKING:
    from app.engine.vllm_engine import VllmEngine
    from app.target import TargetHead

log = logging.getLogger(__name__)

PROMPT_LENGTHS = (5, 17, 40, 70)  # unequal, so that a mix-up of requests or offsets shows
NEW_TOKENS = 16
MIN_AGREEMENT = 0.97  # of greedy positions; the rest are near-ties of the engine's own arithmetic
NEAR_TIE = 0.05  # a token this close to the top, in standard deviations of the row's logits, is a near-tie
BF16_STEP = 2.0**-7  # largest relative distance of two neighbouring bf16 values


@dataclass(frozen=True)
class Probe:
    """One answered check prompt. T tokens."""

    prompt_ids: list[int]
    answer: Completion
    embeddings: Tensor | None  # s_0 [T-1, H], where the model class gives it


def check_prompts(usable_ids: int, max_model_len: int) -> list[list[int]]:
    """The fixed prompts: ids spread over 0..usable_ids-1, short enough for `max_model_len`."""
    room = max(1, max_model_len - NEW_TOKENS - 1)
    return [
        [(7919 * (position + 1) + 104729 * row) % usable_ids for position in range(min(length, room))]
        for row, length in enumerate(PROMPT_LENGTHS)
    ]


def embedded_ids(embed_tokens: Tensor, limit: int) -> list[int]:
    """Ids below `limit` whose row of `embed_tokens` [V, H] is not zero: a gated layer may leave a padding row zero."""
    return [int(i) for i in embed_tokens[:limit].any(-1).nonzero()[:, 0]]


def embedding_fault(probes: list[Probe], embed_tokens: Tensor) -> str | None:
    """How s_0 differs from the rows of `embed_tokens` [V, H], or None.

    One scale factor over everything is allowed: some families multiply the embedding by a constant.
    """
    got = torch.cat([p.embeddings for p in probes if p.embeddings is not None]).double()  # [N, H]
    ids = [i for p in probes if p.embeddings is not None for i in (p.prompt_ids + p.answer.answer_ids)[:-1]]
    want = embed_tokens[torch.tensor(ids)].double()  # [N, H]
    if got.shape != want.shape:
        return f"s_0 has shape {tuple(got.shape)}, the embedding rows {tuple(want.shape)}"
    scale = float((got * want).sum() / (want * want).sum())
    if abs(scale - 1) < 1e-3:
        scale = 1.0
    off = ((got - scale * want).abs() > BF16_STEP * (scale * want).abs() + 1e-30).any(-1)  # [N]
    if bool(off.any()):
        share = f"{int(off.sum())} of {len(ids)}"
        return f"s_0 is not the token's embedding at {share} positions: layer ids or positions are shifted"
    return None


def head_fault(probes: list[Probe], head: TargetHead) -> str | None:
    """How the tokens that s_n predicts differ from the emitted ones, or None."""
    s_n = torch.cat([p.answer.plain()[len(p.prompt_ids) - 1 :, -1] for p in probes])  # [N, H]
    emitted = torch.tensor([i for p in probes for i in p.answer.answer_ids])  # [N]
    logits = head.logits(s_n)  # [N, V]
    top = logits.amax(-1)  # [N]
    chosen = logits.gather(-1, emitted[:, None])[:, 0]  # [N]
    exact = logits.argmax(-1) == emitted  # [N]
    agrees = exact | (top - chosen <= NEAR_TIE * logits.std(-1))  # [N]
    share = float(agrees.float().mean())
    log.info("self-check: s_n gives %d of %d tokens exactly", int(exact.sum()), len(emitted))
    if share < MIN_AGREEMENT:
        return (
            f"s_n through the final norm and the output head gives {100 * share:.0f} % of the emitted tokens,"
            f" at least {100 * MIN_AGREEMENT:.0f} % are expected: it is not the last layer's state,"
            " or the final norm is applied twice or not at all"
        )
    return None


def find_fault(probes: list[Probe], head: TargetHead, layer_ids: tuple[int, ...]) -> str | None:
    """The first fault of the probes' states, or None."""
    for p in probes:
        count = len(p.prompt_ids) + len(p.answer.answer_ids) - 1
        if p.answer.states.shape[0] != count:
            return f"{p.answer.states.shape[0]} positions were captured of a request that has {count}"
        if fault := check_states(p.answer.states, layer_ids):
            return fault
    if all(p.embeddings is not None for p in probes):
        if fault := embedding_fault(probes, head.embed_tokens):
            return fault
    else:
        log.info("self-check: this capture gives no s_0, so s_n alone is checked")
    return head_fault(probes, head)


def run_self_check(engine: VllmEngine) -> None:
    """Answer the check prompts with a started engine and judge the states.

    Raises:
        UserError: which state is wrong, and what to do.
    """
    from app.target import inspect_target, load_target_head

    spec = engine.spec
    info = inspect_target(spec.model, trust_remote_code=spec.trust_remote_code)
    head = load_target_head(info)
    ids = embedded_ids(head.embed_tokens, min(info.tokenizer_len, engine.vocab_size))
    try:
        probes = _answer(engine, [[ids[i] for i in p] for p in check_prompts(len(ids), spec.max_model_len)])
        fault = find_fault(probes, head, (*spec.aux_layer_ids, spec.num_layers))
    except (EngineError, RowError) as error:
        fault = str(error)
    if fault is None:
        return
    way_out = (
        "set capture.mode=extract to capture by vLLM's own method"
        if spec.capture_mode == "auxiliary"
        else "this target or this vLLM version is not supported"
    )
    raise UserError(f"the self-check of hidden-state capture failed for {spec.model}: {fault}; {way_out}")


def _answer(engine: VllmEngine, prompts: list[list[int]]) -> list[Probe]:
    has_embedding = engine.check_embeddings(True)
    try:
        sampling = {"temperature": 0.0, "ignore_eos": True}
        jobs = [
            engine.submit(Request(f"self-check {i}", prompt, NEW_TOKENS, sampling)) for i, prompt in enumerate(prompts)
        ]
        answers = [job.future.result() for job in jobs]
        probes = []
        for job, prompt, answer in zip(jobs, prompts, answers, strict=True):
            embeddings = engine.take_embeddings(job, answer.states.shape[0]) if has_embedding else None
            probes.append(Probe(prompt, answer, embeddings))
    finally:
        engine.check_embeddings(False)
    return probes
