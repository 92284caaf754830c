"""Section C: trained on wrong labels or positions."""

from __future__ import annotations

import json

from app.doctor.facts import Facts, Look
from app.doctor.finding import (
    ALL_MASKED,
    CONTEXT,
    EMPTY_MASK,
    MASK,
    ORDER,
    ROPE,
    TOO_LONG,
    Finding,
    NotApplicable,
    failed,
    passed,
)  # fmt: skip
from app.errors import RowError, UserError
from app.masks import MaskRule, tokenise_as_is
from app.rope import Rope, rope_of_config
from app.target import name_list

_MIN_EQUAL = 0.97  # of proposals; bf16 and fp32 choose differently at near-ties
_MIN_PROPOSALS = 20
_GENERATE_AGAIN = "run ingest and generate again"
_EXPORT_AGAIN = "run the export stage again: the draft must be served as it was trained"


def mask_of_the_answer(facts: Facts) -> Finding:
    """C1: the mask holds the target's own tokens, its end-of-turn included, and no other."""
    masks = [(look, list(map(bool, look.row["loss_mask"]))) for look in facts.looks]
    empty = sum(not any(mask) for _, mask in masks)
    if empty > facts.config.capture.max_empty_mask_share * len(masks):
        said = f"{empty} of {len(masks)} masks are empty"
        return failed(EMPTY_MASK, said, f"look at capture.mask and the template's generation tags; {_GENERATE_AGAIN}")
    asked = [(look, mask) for look, mask in masks if look.row["mask_method"] != "all" and any(mask)]
    if every := sum(all(mask) for _, mask in asked):
        said = f"{every} of {len(masks)} masks are on at every token"
        return failed(ALL_MASKED, said, f"the prompt would be learnt too: look at capture.mask; {_GENERATE_AGAIN}")
    faults: dict[str, int] = {}
    for look, mask in asked:
        if (wanted := _wanted_mask(facts, look)) is not None and wanted != mask:
            words = _difference(mask, wanted)
            faults[words] = faults.get(words, 0) + 1
    if faults:
        words = max(faults, key=lambda w: faults[w])
        said = f"{sum(faults.values())} of {len(masks)} masks are not the answer's: {words}"
        return failed(MASK, said, f"the mask must move with the tokens: {_GENERATE_AGAIN}")
    share = sum(sum(m) for _, m in masks) / max(1, sum(len(m) for _, m in masks))
    methods = name_list(sorted({str(look.row["mask_method"]) for look, _ in masks}))
    ends = [look for look, mask in asked if look.row["finish_reason"] == "stop" and mask[-1]]
    note = "" if 0.05 <= share <= 0.95 else "a share outside 5 to 95 % is unusual"
    return passed(
        f"{len(masks)} masks by {methods}, {100 * share:.0f} % supervised, {len(ends)} with an end token", note
    )


def mask_after_cutting(facts: Facts) -> Finding:
    """C2: what is left after the length limit still teaches something."""
    limit = int(facts.entries[0].record.get("max_length") or facts.config.generate.max_length)
    long = [look for look in facts.looks if len(look.ids) > limit]
    if long:
        said = f"{len(long)} samples have more than the {limit} tokens of generate.max_length"
        return failed(TOO_LONG, said, _GENERATE_AGAIN)
    nothing = [look for look in facts.looks if not look.row["teacher_rows"]]
    if len(nothing) > facts.config.capture.max_empty_mask_share * len(facts.looks):
        said = f"{len(nothing)} of {len(facts.looks)} samples have no two supervised tokens in a row"
        return failed(EMPTY_MASK, said, "they teach nothing: raise generate.max_length, or look at the masks")
    cut = sum(bool(look.row["truncated"]) for look in facts.looks)
    return passed(f"{len(facts.looks)} samples within {limit} tokens, {cut} of them cut, all teach")


def serving_order(facts: Facts) -> Finding:
    """C3: the first draft token by the trainer's pass is the one an engine's order of rows gives."""
    return _order(facts, 0)


def later_steps(facts: Facts) -> Finding:
    """C4: the tokens after it too, fed with the draft's own tokens and state."""
    return _order(facts, 1)


def rotary(facts: Facts) -> Finding:
    """C5: base, scaling and head_dim are those trained with, and the target's."""
    target = Rope(facts.target.rope_theta, facts.target.rope_scaling)
    if facts.has("export"):
        try:
            exported = rope_of_config(facts.exported_config)
        except UserError as error:
            return failed(ROPE, str(error), _EXPORT_AGAIN)
        wanted = facts.trained.rope if facts.has("train") else target
        if exported != wanted:
            return failed(ROPE, f"config.json has {_words(exported)}, trained with {_words(wanted)}", _EXPORT_AGAIN)
        if found := facts.lint_of("config rope"):
            return failed(ROPE, str(found[0]), _EXPORT_AGAIN)
        if facts.has("train") and facts.exported_config.get("head_dim") != facts.trained.head_dim:
            said = f"config.json has head_dim {facts.exported_config.get('head_dim')}"
            return failed(ROPE, f"{said}, trained with {facts.trained.head_dim}", _EXPORT_AGAIN)
    trained = facts.trained.rope
    if trained != target and facts.config.train.init_from is None:
        said = f"trained with {_words(trained)}, the target has {_words(target)}"
        return failed(ROPE, said, "train again: the draft takes the target's rotary settings")
    note = "" if trained == target else f"kept from train.init_from; the target has {_words(target)}"
    return passed(f"{_words(trained)}, as trained", note)


def context_length(facts: Facts) -> Finding:
    """C6: max_position_embeddings covers what is served."""
    found, wanted = facts.exported_config.get("max_position_embeddings"), facts.target.max_position_embeddings
    if not isinstance(found, int) or found < wanted:
        said = f"max_position_embeddings is {found}, the target's {wanted}"
        return failed(CONTEXT, said, f"engines clamp the context to it or crash beyond; {_EXPORT_AGAIN}")
    return passed(f"{found:,}")


def _wanted_mask(facts: Facts, look: Look) -> list[bool] | None:
    """The mask a sample should have, made anew; None where it cannot be told."""
    row = look.row
    if row["use"] == "regenerate":
        return [False] * len(row["prompt_ids"]) + [True] * len(row["answer_ids"])
    config, ends = facts.config, frozenset(facts.target.eos_token_ids)
    limits = (config.generate.max_length, config.ingest.over, config.ingest.min_supervised, ends)
    try:
        made, _ = tokenise_as_is(
            facts.renderer(row), json.loads(row["messages"]), MaskRule(row["mask_method"], *limits)
        )
    except RowError:
        return None
    masks = [t.loss_mask for t in made if [*t.prompt_ids, *(t.answer_ids or [])] == look.ids]
    return masks[0] if masks else None


def _difference(mask: list[bool], wanted: list[bool]) -> str:
    """How a mask lies against the one it should be, in words."""
    starts = mask.index(True) - wanted.index(True)
    ends = mask[::-1].index(True) - wanted[::-1].index(True)
    said = []
    for what, by, early, late in (("begin", starts, "before", "after"), ("end", -ends, "before", "after")):
        if by:
            said.append(f"{what} {abs(by)} token{'s' * (abs(by) != 1)} {early if by < 0 else late} it")
    return "they " + " and ".join(said) if said else "they have gaps or joins inside"


def _order(facts: Facts, step: int) -> Finding:
    """Compare the trainer's pass with the engine's order at draft token `step`, or from it on where it is above 0."""
    equal, looked_at = facts.orders
    k = len(equal)
    depths = range(step, k if step else 1)
    mine, seen = sum(equal[i] for i in depths), sum(looked_at[i] for i in depths)
    if seen < _MIN_PROPOSALS:
        raise NotApplicable(f"only {seen} proposals to compare")
    by_depth = "/".join(f"{100 * equal[i] / looked_at[i]:.1f}" for i in depths if looked_at[i])
    said = f"{by_depth} % of {seen:,} proposals are equal{' by depth' if step else ''}"
    if mine / seen < _MIN_EQUAL:
        what = "the first draft token" if step == 0 else "draft tokens after the first"
        return failed(ORDER, f"{what}: {said}", "this is a fault of draftmill's trainer: report it with this line")
    return passed(said)


def _words(rope: Rope) -> str:
    return f"base {rope.theta:g}, {'plain' if rope.scaling is None else rope.scaling}"
