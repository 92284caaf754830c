"""Section B: trained on wrong features. Training's own numbers may look good: validation reads the same states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from app.bench.form import other_form
from app.codecs import decoded
from app.doctor.facts import Facts, Look
from app.doctor.finding import (
    BAD_STATES,
    NORM,
    OTHER_ROW,
    OTHER_TARGET,
    SHIFTED_STATES,
    Finding,
    NotApplicable,
    failed,
    passed,
)  # fmt: skip
from app.doctor.layers import median_error
from app.draft_config import NORM_FLAGS
from app.engine.row_checks import check_states
from app.engine.spot_check import TOLERANCE
from app.engine.vllm_args import OWNED_ARGS
from app.errors import UserError
from app.record import record_of, refuse_mismatch
from app.samples import Sample
from app.target import TargetHead, name_list

_NORMED = 0.02  # how far from 1 the size of an un-gained row may be for the final norm to have been applied
_AGAIN = "delete the part's entry in generate/parts and run the generate stage again"
_WRAPPER_KEYS = ("ForConditionalGeneration", "VL", "Vision", "Multimodal")


def plausible(facts: Facts) -> Finding:
    """B1: finite, not zero, no constant rows, norms in a band; of rows spread over each sample."""
    for look in facts.captured:
        sample = facts.sample(look.index)
        layers = [*look.entry.layers[:3], facts.target.num_layers]
        aux = decoded(sample.aux).unflatten(-1, (3, -1))  # [n, 3, H]
        teacher = decoded(sample.teacher).unsqueeze(1)  # [n, 1, H]
        fault = check_states(aux, layers[:3]) or (check_states(teacher, layers[3:]) if len(teacher) else None)
        if fault is not None:
            return failed(BAD_STATES, f"{_name(look)}: {fault}", f"{_AGAIN}; if it stays, set capture.mode=extract")
    return passed(f"{len(facts.captured)} samples of {len(facts.some_entries)} parts")


def of_their_row(facts: Facts) -> Finding:
    """B2: the target, run again on a row's tokens, gives the row's states."""
    matches = facts.matches
    if all(m.fits for m in matches):
        error = max(m.nearest_error for m in matches)
        return passed(f"{len(facts.recomputed)} samples computed again: relative error {error:.3f}")
    layer = matches[0].recorded
    for shift in (-1, 1):
        if _shifted_error(facts.recomputed, layer, shift) <= TOLERANCE:
            said = f"row t holds the states of position t{shift:+d}"
            return failed(SHIFTED_STATES, said, f"the capture lost a position; {_AGAIN}")
    if _of_another(facts.recomputed, layer):
        return failed(OTHER_ROW, "rows hold each other's states", f"set capture.mode=extract; {_AGAIN}")
    worst = max(matches, key=lambda m: m.nearest_error)
    said = f"layer {worst.recorded}: relative error {worst.nearest_error:.2f} at best; no layer or position fits"
    return failed(OTHER_TARGET, said, f"capture from the target that will be served; {_AGAIN}")


def prefix_caching(facts: Facts) -> Finding:
    """B3: a cached prefix is not computed again and has no states."""
    if taken := sorted(OWNED_ARGS.keys() & facts.config.generate.engine_args.keys()):
        return failed(BAD_STATES, f"generate.engine_args sets {name_list(taken)}", "remove it and generate again")
    if facts.config.generate.engine != "vllm":
        raise NotApplicable(f"engine {facts.config.generate.engine} is not ours")
    return passed("off, and engine arguments cannot switch it on")


def final_norm(facts: Facts) -> Finding:
    """B4: the final norm once, before the teacher's head; the draft's norm flags and gains as trained."""
    if facts.has("export"):
        if (fault := _norms_of_export(facts)) is not None:
            return fault
        said = "norm flags and gains exported as trained"
        if all(look.entry.cleaned for look in facts.looks):
            return passed(said)
    else:
        said = "not exported yet"
    states = [decoded(facts.sample(look.index).teacher).float() for look in facts.captured[:8]]
    rows = torch.cat(states)  # [N, H]
    if not len(rows):
        raise NotApplicable("no sample looked at has a teacher state")
    if is_normed(facts.head, rows):
        evidence = "the teacher's stored states are normed already: rows without the gain have size 1"
        return failed(NORM, evidence, f"store s_n before the final norm, which the teacher applies once; {_AGAIN}")
    return passed(f"s_n is stored before the final norm; {said}")


def same_target(facts: Facts) -> Finding:
    """B5: revision, type and quantisation at capture are those of today, and the bench's."""
    entries = facts.entries
    try:
        refuse_mismatch(entries, _without_template(record_of(facts.config, facts.target, entries[0].layers)))
    except UserError as error:
        return failed(OTHER_TARGET, str(error), "capture from the target that will be served")
    note = other_form(facts.config, facts.target, entries[0]) or ""
    form = facts.target.quantization or facts.config.target.dtype
    return passed(f"weights {facts.target.weights_digest}, {form}, in all {len(entries)} parts", note)


def inner_model(facts: Facts) -> Finding:
    """B6: of a multimodal wrapper, the states are those of the language model inside."""
    if not any(key in facts.target.architecture for key in _WRAPPER_KEYS):
        raise NotApplicable(f"{facts.target.architecture} is no wrapper")
    if not all(m.fits for m in facts.matches):
        return failed(OTHER_TARGET, "the language model inside gives other states", "see B2")
    return passed("the language model inside gives the stored states")


def is_normed(head: TargetHead, s_n: Tensor) -> bool:
    """Whether rows [N, H] have the final norm applied already: without its gain their root mean square is 1."""
    gain = head.norm_weight + 1.0 if head.norm_plus_one else head.norm_weight  # [H]
    usable = gain.abs() > 1e-3  # [H]
    size = (s_n[:, usable] / gain[usable]).pow(2).mean(-1).sqrt()  # [N]
    return bool(((size - 1).abs() < _NORMED).float().mean() > 0.9)


def _norms_of_export(facts: Facts) -> Finding | None:
    """What is wrong with the exported draft's norms."""
    again = "run the export stage again: the norms are part of what was trained"
    if facts.has("train"):
        wanted, raw = facts.trained, facts.exported_config
        for flag in NORM_FLAGS:
            if bool(raw.get(flag, False)) != getattr(wanted, flag):
                return failed(
                    NORM, f"config.json has {flag} {raw.get(flag)}, trained with {getattr(wanted, flag)}", again
                )
        gains = {n: t for n, t in facts.trained_weights.items() if "norm" in n}
        for name, trained in gains.items():
            found = facts.exported.get(name)
            if found is None or not torch.equal(found, trained.to(found.dtype)):
                said = "is missing" if found is None else "is not the trained one"
                return failed(NORM, f"{name} {said} in the exported file", again)
    if found_by_lint := facts.lint_of("config norm", "config fc_norm"):
        return failed(NORM, str(found_by_lint[0]), again)
    return None


def _without_template(record: dict[str, object]) -> dict[str, object]:
    """What D1 looks at is left to it."""
    return {k: v for k, v in record.items() if k not in ("template", "tokenizer_and_template", "layers")}


def _shifted_error(recomputed: Sequence[tuple[Sample, list[Tensor]]], layer: int, shift: int) -> float:
    """Median error of the lowest stored state against the target's state `shift` positions on."""
    stored, truth = [], []
    for sample, states in recomputed:
        mine, real = _lowest(sample), states[layer]
        mine, real = (mine[:-1], real[1:]) if shift > 0 else (mine[1:], real[:-1])
        stored.append(mine)
        truth.append(real)
    return median_error(torch.cat(stored), torch.cat(truth))


def _of_another(recomputed: Sequence[tuple[Sample, list[Tensor]]], layer: int) -> bool:
    """Whether a row's states are those of another row looked at, over what they do not share."""
    for sample, _ in recomputed:
        mine = _lowest(sample)
        for other, states in recomputed:
            both = min(len(mine), len(states[layer]))
            apart = (sample.token_ids[:both] != other.token_ids[:both]).nonzero().flatten()
            if other is sample or not len(apart):
                continue
            tail = slice(int(apart[0]), both)
            if median_error(mine[tail], states[layer][tail]) <= TOLERANCE:
                return True
    return False


def _lowest(sample: Sample) -> Tensor:
    """The stored state of the lowest layer [T-1, H] fp32."""
    return decoded(sample.aux).float().chunk(3, -1)[0]


def _name(look: Look) -> str:
    return f"part {look.entry.part}, a sample of {look.row['num_tokens']} tokens"
