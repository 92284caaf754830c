"""Engines that serve a right export wrongly, as replays: where one has the engine's own profile, it names the cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

import torch
from torch import Tensor

from app.codecs import decoded
from app.doctor.finding import BAD_MAP, NORM, ROPE, SWAPPED
from app.doctor.replay import StepDraft
from app.draft_config import DraftConfig
from app.samples import Sample
from app.train.evaluate import EvaluationSample, Proposer

_USUAL_BASE = 1e4  # what readers take where they find none
_FLAGS = ("norm_output", "norm_before_residual")


def served_wrongly(
    config: DraftConfig, tensors: Mapping[str, Tensor], device: str
) -> Iterator[tuple[str, str, Proposer]]:
    """Cause, words, and the draft as such an engine would compute it."""
    if config.has_vocab_map:
        without = {**tensors, "d2t": torch.zeros_like(tensors["d2t"])}
        yield BAD_MAP, "a map that is not read", StepDraft(config, without, device)
    for flag in _FLAGS:
        other = config.model_copy(update={flag: not getattr(config, flag)})
        yield NORM, f"{flag} the other way", StepDraft(other, tensors, device)
    if (config.rope_theta, config.rope_scaling) != (_USUAL_BASE, None):
        plain = config.model_copy(update={"rope_theta": _USUAL_BASE, "rope_scaling": None})
        yield ROPE, f"a rotary base of {_USUAL_BASE:g}, plain", StepDraft(plain, tensors, device)
    right = StepDraft(config, tensors, device)
    for order in list(permutations(range(3)))[1:]:
        yield SWAPPED, f"the states in the order {list(order)}", _InOrder(right, order)


class _InOrder:
    """A draft whose three states come in another order."""

    def __init__(self, draft: StepDraft, order: Sequence[int]) -> None:
        self._draft, self._order = draft, order

    def __call__(self, samples: Sequence[EvaluationSample], k: int) -> list[Tensor]:
        return self._draft([self._turned(s) for s in samples], k)

    def _turned(self, sample: EvaluationSample) -> EvaluationSample:
        assert isinstance(sample, Sample)
        parts = decoded(sample.aux).chunk(3, -1)
        return replace(sample, aux=torch.cat([parts[i] for i in self._order], -1))
