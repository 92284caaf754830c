"""Section D: text that the server never sees. Acceptance is middling then, and varies by topic."""

from __future__ import annotations

import json
from typing import Any

from app.doctor.facts import Facts, Look
from app.doctor.finding import TEMPLATE, Finding, NotApplicable, failed, passed
from app.errors import RowError
from app.judge import Judge
from app.template_probe import default_system

_AGAIN = (
    "serve with the template the answers were made with (target.chat_template, target.template_kwargs), or generate"
)
_CLOCK = "strftime_now"  # the function by which a template asks for the date
_FAULT_SHARE = 0.1  # of samples looked at


def same_template(facts: Facts) -> Finding:
    """D1: the prompts are what today's template and arguments make of the messages."""
    recorded = {e.record["template"] for e in facts.entries if e.record.get("template")}
    today = facts.target.extra.get("template_digest")
    if others := recorded - {today}:
        said = f"the answers were made with template {', '.join(sorted(others))}, today's is {today}"
        return failed(TEMPLATE, said, f"{_AGAIN} again")
    wrong, seen = _rendered_otherwise(facts)
    if wrong:
        said = f"{wrong} of {seen} prompts are not what today's template makes of their messages"
        return failed(TEMPLATE, said, f"{_AGAIN} again")
    if not seen:
        raise NotApplicable("no sample looked at was answered anew")
    return passed(f"{seen} prompts rendered again, token by token equal; template {today}")


def think_tags(facts: Facts) -> Finding:
    """D2: thinking opens once, closes once, and is kept."""
    if not facts.renderer(facts.looks[0].row).thinks:
        raise NotApplicable("the template knows no thinking")
    judge = Judge(facts.tokenizer, facts.target.eos_token_ids, facts.config.quality)
    left = sum("leftover" in judge.classes(look.row) for look in facts.looks)
    if left > _FAULT_SHARE * len(facts.looks):
        said = f"{left} of {len(facts.looks)} answers hold a think, tool or role tag where none belongs"
        return failed(TEMPLATE, said, f"{_AGAIN} again")
    return passed(f"{len(facts.looks)} answers, {left} with a tag where none belongs")


def tool_turns(facts: Facts) -> Finding:
    """D3: tools, calls and results stand in the prompt as in serving."""
    with_tools = [look for look in facts.looks if _has_tools(look.row)]
    if not with_tools:
        raise NotApplicable("no sample looked at has tools")
    wrong, seen = _rendered_otherwise(facts, with_tools)
    if wrong:
        return failed(TEMPLATE, f"{wrong} of {seen} prompts with tools are rendered otherwise", f"{_AGAIN} again")
    return passed(f"{len(with_tools)} samples with tools, rendered whole")


def system_prompt(facts: Facts) -> Finding:
    """D4: which system prompt the target really saw."""
    roles = [{m["role"] for m in json.loads(look.row["messages"])} for look in facts.looks]
    own = sum(bool(r & {"system", "developer"}) for r in roles)
    added = default_system(facts.renderer(facts.looks[0].row))
    said = f"{own} of {len(roles)} samples bring their own"
    said += (
        "; the template adds none"
        if added is None
        else f"; the template adds its default to the other {len(roles) - own}"
    )
    return passed(said, "" if added is None or own == len(roles) else "the server must leave it in place too")


def ids_of_the_engine(facts: Facts) -> Finding:
    """D5: answers are token ids from the engine, never text tokenised again."""
    limit = facts.target.tokenizer_len
    outside = sum(any(not 0 <= i < limit for i in look.ids) for look in facts.looks)
    if outside:
        said = f"{outside} samples hold ids that the tokenizer's {limit:,} do not have"
        return failed(TEMPLATE, said, "they were made with another tokenizer: generate again")
    anew = [look for look in facts.looks if look.row["use"] == "regenerate"]
    other = sorted({str(look.row["mask_method"]) for look in anew} - {"engine"})
    note = f"masks of answers made anew come from {', '.join(other)}" if other else ""
    return passed(f"{len(anew)} answers with the engine's own ids, all below {limit:,}", note)


def on_policy(facts: Facts) -> Finding:
    """D6: the answers are the target's own."""
    share = facts.own_share
    note = "" if share == 1 else "answers taken as they are teach what the target may not say: use: regenerate is safer"
    return passed(f"{100 * share:.0f} % of the samples are answered by the target itself", note)


def cut_answers(facts: Facts) -> Finding:
    """D7: an answer that was cut has no end token that the target never wrote."""
    cut = [look for look in facts.looks if look.row["finish_reason"] == "length"]
    invented = [look for look in cut if look.row["answer_ids"][-1] in facts.target.eos_token_ids]
    if invented:
        said = f"{len(invented)} of {len(cut)} answers cut by length end with an end token"
        return failed(TEMPLATE, said, "cut answers must stay open: generate again")
    shares = facts.ctx.run.manifest("generate")
    finishes = shares.counts["finish_reasons"] if shares is not None else {}
    whole, length = finishes.get("stop", 0), finishes.get("length", 0)
    many = length > 0.05 * max(1, whole + length)
    note = "raise generate.max_new_tokens" if many else ""
    return passed(f"{length:,} of {whole + length:,} answers were cut by length; none got an end token", note)


def bench_as_served(facts: Facts) -> Finding:
    """D8: the bench asks with the template's prompts, and at a known temperature."""
    heat = float(facts.manifest("bench").counts.get("temperature") or 0)
    heats = {look.temperature for look in facts.looks if look.row["use"] == "regenerate"}
    others = ", ".join(f"{t:g}" for t in sorted(heats - {heat}))
    note = f"answers were sampled at temperature {others}: acceptance there is another" if others else ""
    return passed(f"the held-out prompts' own token ids, at temperature {heat:g}", note)


def _rendered_otherwise(facts: Facts, looks: list[Look] | None = None) -> tuple[int, int]:
    """How many prompts of answers made anew are not what their messages render to, and of how many.

    Raises:
        NotApplicable: some are not, and the template writes the time of rendering into them.
    """
    wrong = seen = dated = 0
    for look in looks if looks is not None else facts.looks:
        if look.row["use"] != "regenerate":
            continue
        messages: list[dict[str, Any]] = json.loads(look.row["messages"])
        if messages[-1]["role"] == "assistant":
            messages.pop()
        seen += 1
        renderer = facts.renderer(look.row)
        try:
            differs = renderer.render(messages, True) != list(look.row["prompt_ids"])
        except RowError:
            differs = True
        wrong += differs
        dated += differs and _CLOCK in str(renderer.template)
    if dated:
        raise NotApplicable(f"the template writes the date ({_CLOCK}), and {dated} of {seen} prompts are of another")
    return wrong, seen


def _has_tools(row: dict[str, Any]) -> bool:
    if json.loads(row["template_kwargs"] or "{}").get("tools"):
        return True
    return any(m["role"] == "tool" or m.get("tool_calls") for m in json.loads(row["messages"]))
