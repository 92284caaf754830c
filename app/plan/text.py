"""A plan, and a plan against what was done, as lines of text."""

from __future__ import annotations

from app.plan.estimate import FULL, Plan
from app.plan.hardware import GIB
from app.units import size_text, time_text


def plan_lines(plan: Plan, run_url: str, local: bool) -> list[str]:
    """One screen or two."""
    lines = ["", f"draftmill plan {run_url}", ""]

    def line(label: str, text: str) -> None:
        lines.append(f"  {label:<12} {text}")

    line("counted in", plan.origin)
    for s in plan.sources:
        quantiles = ", ".join(f"{100 * q:.0f} %: {n:,}" for q, n in s["quantiles"].items())
        line(
            s["name"][:12],
            f"{s['rows']:,} rows, {s['samples']:,.0f} samples, {s['prompt_tokens']:,.0f} prompt +"
            f" {s['answer_tokens']:,.0f} answer tokens, {size_text(s['bytes'])} ({s['use']})",
        )
        line("", f"tokens a sample, before limits: {quantiles}, longest {s['longest']:,}")
    tokens = plan.prompt_tokens + plan.answer_tokens
    line("tokens", f"{tokens:,.0f} ({plan.prompt_tokens:,.0f} prompt, {plan.answer_tokens:,.0f} answer)")
    lines.append("")
    for form, size in plan.forms.items():
        lines.append(f"  {form:<52} {size_text(size):>12}  {size / max(1.0, tokens):>9,.0f} bytes a token")
    if plan.bytes_bound > 1.02 * plan.bytes:
        lines.append(f"  {'should every answer reach its limit':<52} {size_text(plan.bytes_bound):>12}")
    lines.append(f"  {'checkpoints, export, prompts':<52} {size_text(plan.other_bytes):>12}")
    lines.append("")
    lines += _disk(plan, local)
    lines.append("")
    for stage in plan.stages:
        gpus = f"{stage.gpu_hours:10,.2f} GPU-hours on {stage.gpus}" if stage.gpus else ""
        lines.append(f"  {stage.name:<12} {time_text(stage.seconds):>10}{gpus}")
    if plan.overlap_s:
        lines.append(f"  {'overlap':<12} {'-' + time_text(plan.overlap_s):>10}  training begins beside generate")
    total = f"{plan.gpu_hours:10,.2f} GPU-hours" if plan.gpu_hours else ""
    if plan.price is not None and plan.gpu_hours:
        total += f", {plan.gpu_hours * plan.price:,.2f} USD at {plan.price:g} a GPU-hour"
    lines.append(f"  {'total':<12} {time_text(plan.seconds):>10}{total}")
    if plan.price is not None and not plan.gpu_hours:
        line(
            "price",
            f"--price {plan.price:g} is of a GPU-hour and this run holds no GPU, so no cost is worked out; describe"
            " GPUs with --gpus-per-node, or leave it out",
        )
    lines.append(f"  a second pass for the states would add {time_text(plan.second_pass_s)}; here it adds none")
    lines.append("")
    line("memory", f"about {plan.train_memory / GIB:,.1f} GiB at peak for a training worker")
    for text in plan.node:
        line("generate", text)
    line("slowest", plan.slowest)
    lines += ["", "  context       rejected        cut   tokens lost"]
    for row in plan.contexts:
        mark = "  <- generate.max_length" if row.length == plan.max_length else ""
        lines.append(f"  {row.length:>7,}     {row.rejected:>9.1%}  {row.cut:>9.1%}     {row.tokens_lost:>9.1%}{mark}")
    lines.append("")
    for text in plan.advice:
        line("advice", text)
    for text in plan.assumptions:
        line("assumed", text)
    lines += _rates(plan)
    lines.append("")
    for limit in plan.limits:
        line("DOES NOT FIT", f"{limit.what}; {limit.change}")
    if plan.fits:
        line("verdict", f"fits: {plan.slowest} takes longest, nothing is short")
    lines.append("")
    return lines


def _disk(plan: Plan, local: bool) -> list[str]:
    h = plan.hardware
    free = f"{size_text(h.disk_free)} {h.disk_origin}" if h.disk_free is not None else h.disk_origin
    share = f", {plan.disk / h.disk_free:.1%} of it (limit {FULL:.0%})" if h.disk_free else ""
    where = "on the one disk of the run folder" if local else "in the store"
    each = (
        f"{size_text(plan.disk)} where the run folder is a node's own disk, none on the others"
        if local
        else f"up to {size_text(plan.bytes)} of cached parts on each node that trains"
    )
    gpus = f"{h.nodes} node(s) with {h.gpus_per_node} {h.gpu_name or ''} GPU(s)" if h.gpus else (
        f"{h.nodes} node(s), {h.cpus_per_node} cores, no GPU"
    )  # fmt: skip
    return [
        f"  {'hardware':<12} {gpus} ({h.origin})",
        f"  {'disk':<12} {size_text(plan.disk)} in total {where}{share}; {free}",
        f"  {'a node':<12} {each}",
    ]


def _rates(plan: Plan) -> list[str]:
    """Rates by where they are from."""
    by_origin: dict[str, list[str]] = {}
    for name, rate in plan.rates.to_json().items():
        unit = name.replace("_tokens_per_s", " tokens/s").replace("_samples_per_s", " samples/s")
        unit = unit.replace("_start_s", " start s").replace("_", " ")
        by_origin.setdefault(rate["origin"], []).append(f"{unit} {rate['value']:,.{2 if rate['value'] < 10 else 0}f}")
    return [f"  {'rates':<12} {origin}: {', '.join(items)}" for origin, items in by_origin.items()]


def compare_lines(run_url: str, pairs: list[tuple[str, float | None, float | None]], origin: str) -> list[str]:
    """Planned against actual; `pairs` are (what, planned, actual), what ends in the unit."""
    lines = [
        "",
        f"draftmill plan against {run_url}",
        f"planned from {origin}",
        "",
        f"  {'':<22} {'planned':>14} {'actual':>14}   actual/planned",
    ]
    for what, planned, actual in pairs:
        name, _, unit = what.rpartition(" ")
        ratio = f"{actual / planned:>10.2f}" if planned and actual is not None else ""
        lines.append(f"  {name:<22} {_value(planned, unit):>14} {_value(actual, unit):>14}   {ratio}".rstrip())
    lines.append("")
    return lines


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return size_text(value)
    return time_text(value) if unit == "s" else f"{value:,.0f}"
