"""The parity gates: the same numbers by two ways that share nothing, and what it means where they part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from app.codecs import decoded
from app.doctor.facts import Facts, Look, temperature_of
from app.doctor.finding import NORM, OTHER_TARGET, SHIFTED_STATES, Finding, NotApplicable, failed, passed
from app.doctor.layers import NORMED, cause_of
from app.doctor.profile import MIN_DRAFTS, Profile, compare, replay
from app.doctor.replay import StepDraft
from app.doctor.states import is_normed, of_their_row
from app.doctor.suspects import served_wrongly
from app.samples import Sample, SampleReader
from app.target import TargetHead
from app.train.data import cut
from app.train.guards import Agreement, agreement, agreement_words
from app.train.loop import least_agreement

_WORK = 2e12  # multiplications of a replay on a CPU


def teacher_gives_tokens(facts: Facts) -> Finding:
    """P1: lm_head(final_norm(stored s_n)) gives the tokens that were emitted."""
    least = least_agreement(facts.config.train, facts.entries)
    if least == 0:
        raise NotApplicable("train.min_teacher_agreement is 0")
    anew = [look for look in facts.captured if look.row["use"] == "regenerate"]
    found = _agreement(facts, anew, facts.head)
    numbers = found.to_json()
    if not numbers:
        raise NotApplicable("too few tokens of answers made anew")
    said = agreement_words(numbers)
    if _worst(numbers) >= least:
        return passed(said)
    again = "generate again; its self-check must pass"
    words = f"{said}, at least {least:g} is wanted"
    rows = torch.cat([_teacher(facts.sample(look.index)) for look in anew[:8]])
    if is_normed(facts.head, rows):
        return failed(NORM, f"{words}: the final norm was applied before they were stored", again)
    for shift in (-1, 1):
        if _worst(_agreement(facts, anew, facts.head, shift).to_json()) >= least:
            return failed(SHIFTED_STATES, f"{words}; they give the tokens {shift:+d} position beside", again)
    if (other := _of_another_row(facts)) is not None:
        return failed(other, f"{words} (see B2)", again)
    if (layer := _teacher_layer(facts)) is not None:
        cause = cause_of([layer], [facts.target.num_layers])
        return failed(cause, f"{words}: they are the states after {layer} layers", again)
    return failed(OTHER_TARGET, f"{words}: another target's, another revision's, or too coarse a codec", again)


def replay_against_engine(facts: Facts) -> Finding:
    """P2: the exported draft, replayed in plain PyTorch, is accepted as often at each position as in the engine."""
    b = facts.manifest("bench").counts
    if b.get("temperature"):
        raise NotApplicable(f"the bench sampled at temperature {b['temperature']:g}; the replay is greedy")
    if not b["drafts"]:
        raise NotApplicable("the server tells averages, no acceptance by position")
    if (changed := facts.ctx.run.output_fault(facts.manifest("export"), "checksum")) is not None:
        raise NotApplicable(f"the export was changed since it was served ({changed})")
    reader, k = facts.holdout(), int(b["num_draft_tokens"])
    chosen = _benched(facts, reader)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draft = StepDraft(facts.draft_config, facts.draft_tensors, device)
    resamples = facts.config.evaluate.bootstrap
    replayed = replay(_as_benched(reader, chosen, int(b["max_new_tokens"])), draft, k, resamples)
    engine = Profile(tuple(b["acceptance_per_position"]), b["drafts"])
    verdict = compare(replayed, engine)
    said = verdict.words
    if verdict.cause is not None:
        fits = []
        for cause, words, suspect in served_wrongly(facts.draft_config, facts.draft_tensors, device):
            found = compare(replay(_as_benched(reader, chosen, int(b["max_new_tokens"])), suspect, k), engine)
            if found.cause is None and found.judged > 1:
                fits.append((cause, words))
        if fits:
            said += f"; as with {' or '.join(words for _, words in fits)}"
        return failed(fits[0][0] if fits else verdict.cause, said, verdict.next_step)
    if verdict.judged == 0:
        raise NotApplicable(f"fewer than {MIN_DRAFTS} drafts: {said}")
    return passed(said)


class _Moved:
    """Samples whose tokens are moved against their states, and whose teacher is that of the answer, for `agreement`."""

    def __init__(self, facts: Facts, shift: int) -> None:
        self._facts, self._shift = facts, shift

    @property
    def infos(self) -> Sequence[Any]:
        return self._facts.reader.infos

    def __len__(self) -> int:
        return len(self._facts.reader)

    def __getitem__(self, index: int) -> Sample:
        sample, prompt = self._facts.sample(index), len(self._facts.reader.row(index)["prompt_ids"])
        own = sample.teacher_pos >= prompt - 1  # [S]
        moved = sample.token_ids.roll(-self._shift)
        return replace(sample, token_ids=moved, teacher=sample.teacher[own], teacher_pos=sample.teacher_pos[own])


def _agreement(facts: Facts, looks: Sequence[Look], head: TargetHead, shift: int = 0) -> Agreement:
    """Stored s_n at p against the token emitted at p + 1 + shift."""
    return agreement(head, _Moved(facts, shift), [(look.index, look.temperature) for look in looks])


def _worst(numbers: dict[str, Any]) -> float:
    return min(numbers.get("greedy_share", 1.0), numbers.get("sampled_ratio", 1.0))


def _teacher(sample: Sample) -> Tensor:
    return decoded(sample.teacher).float()


def _of_another_row(facts: Facts) -> str | None:
    """The cause that B2 names, where it can tell one."""
    try:
        return of_their_row(facts).cause
    except NotApplicable:
        return None


def _teacher_layer(facts: Facts) -> int | None:
    """The layer that the teacher's states really are of, where that can be told and is not the last."""
    try:
        match = facts.matches[3]
    except NotApplicable:
        return None
    return match.nearest if match.fits and not match.is_right and match.nearest != NORMED else None


def _benched(facts: Facts, reader: SampleReader) -> list[int]:
    """Places in `reader` of the held-out answers that the bench asked for again.

    Raises:
        NotApplicable: they were sampled, or a CPU would take too long over them. The engine's counters are of all
            answers together, so that some of them would be compared with others.
    """
    rows = [reader.row(i) for i in range(len(reader))]
    asked = [i for i, row in enumerate(rows) if row["use"] == "regenerate"]
    greedy = [i for i in asked if temperature_of(rows[i]) == 0]
    if len(greedy) < len(asked) or not greedy:
        raise NotApplicable("the held-out answers were sampled, and the bench answers greedily")
    if torch.cuda.is_available():
        return greedy
    size = sum(t.numel() for n, t in facts.exported.items() if t.dim() == 2 and "embed" not in n)
    most = _WORK / max(1, size * facts.config.evaluate.num_draft_tokens)
    tokens = sum(reader.infos[i].num_tokens for i in greedy)
    if tokens > most:
        raise NotApplicable(
            f"the held-out answers have {tokens:,} tokens, and a CPU would take too long over more than {int(most):,};"
            " run the doctor where there is a GPU"
        )
    return greedy


def _as_benched(reader: SampleReader, chosen: Sequence[int], max_new_tokens: int) -> Iterator[Sample]:
    """The samples, their answers cut where the bench cut them."""
    for i in chosen:
        yield cut(reader[i], len(reader.row(i)["prompt_ids"]) + max_new_tokens)
