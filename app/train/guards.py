"""What stops a training that cannot come to anything, or warns of it: each with what to look at.

| guard | when | what it does |
| --- | --- | --- |
| `require_agreement` | before step 1 | stops: the stored states do not give the tokens that were emitted |
| `BadSteps` | every step | skips a step without numbers, stops at the limit |
| `Watch` | after 50 steps, at the end | warns: a norm's weight never moved |
| | after a tenth of the steps | warns: the loss is that of a draft that knows nothing (`random_level`) |
| | every validation | warns: validation loss rises while training loss falls (`overfits`) |
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from app.codecs import decoded
from app.errors import UserError
from app.target import TargetHead
from app.train.data import SampleSource
from app.train.draft import Eagle3Draft
from app.train.sharding import local

log = logging.getLogger("draftmill")

NORM_CHECK_STEPS = 50
RANDOM_SHARE = 0.1  # of the steps, after which the loss must have left the random level
RANDOM_LEVEL = 0.75  # of log(Vd)
RANDOM_ALPHA = 0.02  # acceptance of the first draft token
GAP_VALIDATIONS = 3  # in a row
AGREEMENT_SAMPLES = 48  # looked at before step 1, over all ranks
AGREEMENT_ROWS = 32  # positions of one of them, spread over its answer
MIN_TOKENS = 32  # fewer say nothing
INT4_AGREEMENT = 0.75  # SmolLM2's states: 0.99, 0.98 as int8, 0.97 as fp8, 0.87 as int4; those of layer n-3 0.49
_ROWS_AT_ONCE = 512
_NAMED = 8  # samples in a message


class BadSteps:
    """Steps whose loss or gradient was NaN or infinite; counted over the whole training, resumes included."""

    def __init__(self, limit: int, count: int = 0) -> None:
        self.limit, self.count = limit, count

    def skip(self, step: int, total_steps: int, value: float, samples: Sequence[str]) -> str:
        """Count step `step` (from 1) as skipped; returns the sentence to log.

        Raises:
            UserError: one more than the limit.
        """
        self.count += 1
        which = ", ".join(samples[:_NAMED]) + (f" and {len(samples) - _NAMED} more" if len(samples) > _NAMED else "")
        if self.count <= self.limit:
            return f"step {step} of {total_steps} is skipped, its gradient norm is {value}; samples: {which}"
        raise UserError(
            f"training broke at step {step} of {total_steps}: the gradient norm is {value}, and {self.count} steps"
            f" without numbers are more than train.max_bad_steps = {self.limit}. Weights were not changed by them and"
            f" the last checkpoint stays. Samples: {which}. Lower train.learning_rate, or look at these samples"
            " (draftmill inspect RUN --id ID)"
        )


def suspects(source: SampleSource, indices: Iterable[int]) -> list[str]:
    """Which samples of a broken step to name: those whose states are not finite, else all of them."""
    held = list(indices)
    broken = []
    for i in held:
        sample = source[i]
        if not all(bool(torch.isfinite(decoded(s)).all()) for s in (sample.aux, sample.teacher)):
            broken.append(f"{source.infos[i].sample_id} (its states hold NaN or infinity)")
    return broken or [str(source.infos[i].sample_id) for i in held]


class Watch:
    """Looks at a training as it goes; the leading rank warns, once of each kind."""

    def __init__(self, draft: Eagle3Draft, start_step: int, total_steps: int, leads: bool) -> None:
        self.draft, self.start_step, self.total_steps, self.leads = draft, start_step, total_steps, leads
        self.norms = {n: local(p.detach()).clone() for n, p in draft.named_parameters() if p.dim() == 1}
        self.warned: set[str] = set()
        self.level_due: float | None = max(NORM_CHECK_STEPS, RANDOM_SHARE * total_steps)

    def after_step(self, step: int, ends: bool = False) -> None:
        """Norm weights that never left their start are the mark of updates too small for their type."""
        done = step - self.start_step
        if done != NORM_CHECK_STEPS and not (ends and done > NORM_CHECK_STEPS):
            return
        still = [n for n, p in self.draft.named_parameters() if n in self.norms and local(p).equal(self.norms[n])]
        if still:
            said = f"{', '.join(still)} did not change in {done} steps: updates too small for the type"
            self._warn("norms", f"{said}, no gradient, or a train.learning_rate of next to nothing")

    def after_line(self, values: Mapping[str, Any]) -> None:
        """`values`: a line of the log; the first one after a tenth of the steps is judged."""
        if self.level_due is None or values["step"] < self.level_due:
            return
        self.level_due = None
        said = random_level(values, self.draft.config.draft_vocab_size)
        if said is not None:
            self._warn(
                "level",
                f"after {values['step']} of {self.total_steps} steps {said}. Look at train.learning_rate, at the share"
                " of supervised tokens, and whether the states belong to their rows (capture.spot_check)",
            )

    def after_validation(self, validations: Sequence[Mapping[str, Any]]) -> None:
        if overfits(validations):
            self._warn(
                "gap",
                f"validation loss rises since {GAP_VALIDATIONS} validations while the training loss falls: more epochs"
                " teach this data by heart. Bring more prompts or fewer epochs, and set export.checkpoint=best",
            )

    def _warn(self, kind: str, text: str) -> None:
        if self.leads and kind not in self.warned:
            log.warning("training: %s", text)
        self.warned.add(kind)


def random_level(values: Mapping[str, Any], draft_vocab_size: int) -> str | None:
    """What shows, in words, that a draft still knows nothing; None where it has learnt something.

    values: a line of the log. The loss of unroll step 0 is judged. Of a draft that finds all Vd tokens equally likely
    the cross-entropy is log(Vd) and the KL log(Vd) - H(teacher), and a teacher's entropy is small beside log(Vd): above
    0.75 log(Vd) not even the frequencies of tokens are learnt, which takes a draft a few dozen steps. The lk losses are
    no such scale; with them the acceptance is judged, which is about Vd * min(p, 1/Vd), next to nothing, at the start.
    """
    level, loss = math.log(draft_vocab_size), values["loss_by_step"][0]
    if "alpha_by_step" in values:
        alpha = values["alpha_by_step"][0]
        return None if alpha > RANDOM_ALPHA else f"{100 * alpha:.2f} % of the first draft tokens would be accepted"
    if loss < RANDOM_LEVEL * level:
        return None
    said = f"the loss of the first draft token is {loss:.2f}"
    return f"{said}, and a draft that knows nothing has about log(Vd) = {level:.2f}"


def overfits(validations: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the validation loss rose at each of the last three validations while the training loss fell."""
    last = [v for v in validations if v.get("train_loss") is not None][-GAP_VALIDATIONS - 1 :]
    if len(last) <= GAP_VALIDATIONS:
        return False
    return all(b["loss"] > a["loss"] and b["train_loss"] < a["train_loss"] for a, b in pairwise(last))


@dataclass(frozen=True)
class Agreement:
    """How far stored states give the tokens that were emitted. Sums over positions, so that ranks add up."""

    greedy: int = 0  # positions of answers at temperature 0
    hits: int = 0  # of them, the emitted token is the first choice of all V
    sampled: int = 0  # positions of answers at a temperature
    emitted: float = 0.0  # sum of the emitted tokens' probabilities at that temperature
    expected: float = 0.0  # sum of sum_x p(x)^2, what `emitted` is on average where the tokens were drawn from p

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(
            self.greedy + other.greedy,
            self.hits + other.hits,
            self.sampled + other.sampled,
            self.emitted + other.emitted,
            self.expected + other.expected,
        )

    def to_json(self) -> dict[str, Any]:
        """Shares by kind; a kind with too few tokens to say anything is left out."""
        out: dict[str, Any] = {}
        if self.greedy >= MIN_TOKENS:
            out |= {"greedy_tokens": self.greedy, "greedy_share": self.hits / self.greedy}
        if self.sampled >= MIN_TOKENS:
            out |= {"sampled_tokens": self.sampled, "sampled_ratio": self.emitted / max(self.expected, 1e-12)}
        return out


def agreement(head: TargetHead, source: SampleSource, rows: Iterable[tuple[int, float]]) -> Agreement:
    """Compare lm_head(final_norm(stored s_n)) over all V with the emitted tokens.

    rows: index in `source` and the temperature its answer was made at.
    """
    states, tokens, heats = [], [], []
    for index, temperature in rows:
        sample = source[index]
        teacher = decoded(sample.teacher)  # [S, H]
        if not len(teacher):
            continue
        at = torch.linspace(0, len(teacher) - 1, min(AGREEMENT_ROWS, len(teacher))).long().unique()  # [n]
        states.append(teacher[at])
        tokens.append(sample.token_ids[sample.teacher_pos[at] + 1])
        heats.append(torch.full((len(at),), float(temperature)))
    if not states:
        return Agreement()
    parts = zip(*(torch.cat(x).split(_ROWS_AT_ONCE) for x in (states, tokens, heats)), strict=True)
    return sum((_compare(head, *part) for part in parts), Agreement())


def _compare(head: TargetHead, s_n: Tensor, tokens: Tensor, heat: Tensor) -> Agreement:
    """s_n [n, H], emitted tokens [n], temperatures [n]."""
    logits = head.logits(s_n)  # [n, V]
    greedy = heat == 0  # [n]
    p = torch.softmax(logits[~greedy] / heat[~greedy].unsqueeze(-1), -1)  # [m, V]
    return Agreement(
        greedy=int(greedy.sum()),
        hits=int((logits[greedy].argmax(-1) == tokens[greedy]).sum()),
        sampled=len(p),
        emitted=float(p.gather(-1, tokens[~greedy].unsqueeze(-1)).sum()),
        expected=float(p.square().sum()),
    )


def require_agreement(found: Agreement, least: float) -> dict[str, Any]:
    """`found` as plain numbers.

    Raises:
        UserError: below `least`, for greedy answers the share of first choices, for sampled ones the mean
            probability of the emitted tokens over what it is for tokens drawn from that distribution.
    """
    numbers = found.to_json()
    share, ratio = numbers.get("greedy_share", 1.0), numbers.get("sampled_ratio", 1.0)
    if share >= least and ratio >= least:
        return numbers
    said = (
        f"{100 * share:.1f} % of {found.greedy} greedy tokens are their first choice"
        if share < least
        else f"{found.sampled} sampled tokens have {ratio:.2f} times the probability that drawn ones have on average"
    )
    raise UserError(
        f"train: the stored states of the last layer do not give the tokens that were emitted: {said}, and"
        f" train.min_teacher_agreement is {least:g} (0.97 is usual). The draft would learn another model. Likely: they"
        " are not the last layer's; the final norm was applied before they were stored, or its gain is (1 + w); the"
        " target's weights are another revision or numeric form than the ones that answered; or capture.codec keeps"
        " too little. Look at the self-check's line in the log of generate"
    )


def agreement_words(numbers: Mapping[str, Any]) -> str:
    """The numbers of `require_agreement` as a line for people."""
    said = []
    if "greedy_share" in numbers:
        said.append(f"{100 * numbers['greedy_share']:.1f} % of {numbers['greedy_tokens']} greedy tokens")
    if "sampled_ratio" in numbers:
        ratio = f"with {numbers['sampled_ratio']:.2f} times the probability expected"
        said.append(f"{numbers['sampled_tokens']} sampled tokens {ratio}")
    return f"the stored states give {', '.join(said)}" if said else "too few regenerated tokens to compare with states"
