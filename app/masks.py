"""Conversations to token ids and loss masks.

One render of the whole list of messages, tokenised once; the mask is derived from that text. Where the target
answers anew the boundary is the engine's own and no mask is made here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from app.errors import RowError
from app.target import Renderer

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Tokenised:
    """Token ids of one engine request.

    answer_ids and loss_mask only for conversations taken as they are: the answer begins at the first supervised
    token, the mask covers prompt and answer.
    """

    prompt_ids: list[int]
    answer_ids: list[int] | None = None
    loss_mask: list[bool] | None = None
    truncated: bool = False


@dataclass(frozen=True)
class MaskRule:
    """How conversations taken as they are become samples."""

    method: str  # auto | generation_tags | prefix | all
    max_length: int
    over: str = "cut_end"  # drop | cut_at_turn | cut_end
    min_supervised: int = 2
    end_ids: frozenset[int] = frozenset()  # tokens that end a turn


def check_prompt_length(ids: list[int], max_length: int) -> None:
    """A prompt must leave room for an answer of two tokens: fewer supervise nothing (CONTRACTS.md section 2).

    Raises:
        RowError: `prompt_too_long`.
    """
    if len(ids) > max_length - 2:
        raise RowError(
            "prompt_too_long",
            f"{len(ids)} prompt tokens leave no room for an answer in max_length {max_length}",
        )


def tokenise_as_is(renderer: Renderer, messages: Messages, rule: MaskRule) -> tuple[list[Tokenised], str]:
    """The samples of a conversation taken as it is, and the mask method that made them.

    One sample with a span per answer where the template renders append-only, else one per answer, each rendered
    with the history it was given (templates drop earlier thinking). Masks are checked after cutting.

    Raises:
        RowError: `empty_mask` (the template has no tags, say), `no_mask_method` (no boundary can be found),
            `template_rejects`, `template_rejects_prefix`, `too_long`, `no_target_tokens_left`.
    """
    method = rule.method
    if method == "auto":
        method = "generation_tags" if renderer.has_generation_tags and renderer.is_fast else "prefix"
    if method == "generation_tags":
        masked = [renderer.render_with_tags(messages)]
    elif method == "prefix":
        masked = _prefix_masks(renderer, messages, rule.end_ids)
    elif method == "all":
        ids = renderer.render(messages, add_generation_prompt=False)
        masked = [(ids, [True] * len(ids))]
    else:
        raise RowError("no_mask_method", f"method {method!r} does not fit conversations taken as they are")
    if not any(any(mask) for _, mask in masked):
        raise RowError("empty_mask", f"method {method} supervises no token")
    samples: list[Tokenised] = []
    first: RowError | None = None
    for ids, mask in masked:
        try:
            samples.append(_cut(ids, mask, rule))
        except RowError as error:
            first = first or error
    if not samples:
        assert first is not None
        raise first
    return samples, method


def _cut(ids: list[int], mask: list[bool], rule: MaskRule) -> Tokenised:
    """Apply the length limit, then check what is left."""
    last = max((i for i, m in enumerate(mask) if m), default=-1) + 1
    ids, mask = ids[:last], mask[:last]  # nothing is learnt behind the last answer
    truncated = len(ids) > rule.max_length
    if truncated:
        if rule.over == "drop":
            raise RowError("too_long", f"{len(ids)} tokens exceed max_length {rule.max_length}")
        end = rule.max_length
        if rule.over == "cut_at_turn":
            end = max((i + 1 for i, m in enumerate(mask[:end]) if m and not mask[i + 1]), default=0)
        else:
            end = max((i + 1 for i, m in enumerate(mask[:end]) if m), default=0)
        ids, mask = ids[:end], mask[:end]
    supervised = sum(mask)
    if supervised < rule.min_supervised or not any(a and b for a, b in pairwise(mask)):
        raise RowError(
            "no_target_tokens_left", f"{supervised} supervised tokens are left in the first {rule.max_length} tokens"
        )
    start = max(1, mask.index(True))
    return Tokenised(ids[:start], ids[start:], mask, truncated)


def _prefix_masks(
    renderer: Renderer, messages: Messages, end_ids: frozenset[int]
) -> list[tuple[list[int], list[bool]]]:
    """Masks by rendering what stood before each answer: it must be a beginning of what the whole renders to."""
    whole = renderer.text(messages, add_generation_prompt=False)
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    befores = {i: _prefix(renderer, messages, i) for i in answers}
    afters = {i: renderer.text(messages[: i + 1], add_generation_prompt=False) for i in answers}
    spans = [_span(whole, befores[i], afters[i]) for i in answers]
    found = [s for s in spans if s is not None]
    if len(found) == len(spans):
        return [_mask_of(renderer, whole, found, end_ids)]
    # Earlier turns are rendered differently once later ones follow: each answer is a sample of its own.
    masked = []
    for i in answers:
        span = _span(afters[i], befores[i], afters[i])
        if span is None:
            raise RowError(
                "no_mask_method",
                f"the template does not render message {i} as a continuation of its prompt; regenerate it, or give a"
                " template with generation tags",
            )
        masked.append(_mask_of(renderer, afters[i], [span], end_ids))
    return masked


def _prefix(renderer: Renderer, messages: Messages, number: int) -> str:
    try:
        return renderer.text(messages[:number], add_generation_prompt=True)
    except RowError as error:
        raise RowError("template_rejects_prefix", f"before message {number}: {error.detail}") from error


def _span(whole: str, before: str, after: str) -> tuple[int, int] | None:
    """Characters of an answer in `whole`, or None where it does not stand between the two renders."""
    if not (whole.startswith(before) and whole.startswith(after)) or len(after) <= len(before):
        return None
    return len(before), len(after)


def _mask_of(
    renderer: Renderer, text: str, spans: list[tuple[int, int]], end_ids: frozenset[int]
) -> tuple[list[int], list[bool]]:
    """Token ids of `text`, tokenised once, and the tokens that lie in `spans` up to their last end-of-turn.

    Raises:
        RowError: `no_mask_method`, where a token lies across the boundary: no engine would have emitted it.
    """
    ids, places = renderer.tokens(text, [c for span in spans for c in span])
    mask = [False] * len(ids)
    for begin, end in spans:
        inside = [i for i, (first, _) in enumerate(places) if begin <= first < end]
        if not inside or (inside[0] and places[inside[0] - 1][1] > begin):
            raise RowError("no_mask_method", f"a token lies across character {begin}, where an answer begins")
        ends = [i for i in inside if ids[i] in end_ids]
        last = ends[-1] if ends else inside[-1]  # behind it stands what the template adds, not the target
        mask[inside[0] : last + 1] = [True] * (last + 1 - inside[0])
    return ids, mask
