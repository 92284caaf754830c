"""The summary of a run: `results.json` and one screen of text."""

from __future__ import annotations

from typing import Any

from app.budget import STOPPED_BY, stopped_words
from app.runfolder import Manifest, RunFolder

_TIMES = ("ttft", "inter_token")  # of a request, medians


def collect(run: RunFolder) -> dict[str, Any]:
    """What the manifests of the finished stages say; absent stages leave their keys out."""
    results: dict[str, Any] = {}
    ingest, generate = current_manifest(run, "ingest"), current_manifest(run, "generate")
    if ingest is not None:
        rejected = dict(ingest.counts["rejected"])
        kept = ingest.counts["kept"]
        if generate is not None:
            kept = generate.counts["kept"]
            for reason, count in generate.counts["rejected"].items():
                rejected[reason] = rejected.get(reason, 0) + count
        results["rows"] = {
            "in": ingest.counts["rows_in"],
            "kept": kept,
            "rejected": sum(rejected.values()),
            "not_drawn": ingest.counts["not_drawn"],
        }
        results["reject_reasons"] = rejected
        results["sources"] = ingest.counts["sources"]
        results["skipped_sources"] = ingest.counts["skipped_sources"]
        results["benchmark_overlap"] = ingest.counts["overlap"]
    if generate is not None:
        tokens = generate.counts["tokens"]
        results["tokens"] = tokens["prompt"] + tokens["answer"]
        results["tokens_by_kind"] = tokens
        results["bytes"] = generate.counts["bytes"]
        results["samples"] = generate.counts["samples"]
        results["finish_reasons"] = generate.counts["finish_reasons"]
        results["aux_layers"] = generate.extra["layers"]
        results["versions"] = generate.versions
        if STOPPED_BY in generate.extra:
            record = generate.extra[STOPPED_BY]
            results[STOPPED_BY] = {**record, "words": stopped_words(record)}
    for stage in ("quality", "vocab", "train", "export", "evaluate", "bench"):
        manifest = current_manifest(run, stage)
        if manifest is not None:
            results[stage] = manifest.counts
    return results


def current_manifest(run: RunFolder, stage: str) -> Manifest | None:
    """The manifest of a stage, unless an input was made again since: then its numbers are of another run."""
    manifest = run.manifest(stage)
    if manifest is None:
        return None
    inputs = {name: run.manifest(name) for name in manifest.inputs if " " not in name}
    stale = any(m is not None and m.digest != manifest.inputs[name] for name, m in inputs.items())
    return None if stale else manifest


def write_results(run: RunFolder, timings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Write and return `results.json`; `timings` are the stages of this invocation."""
    results = {**collect(run), "stages": timings}
    run.store.write_json("results.json", results)
    return results


def summary_lines(url: str, results: dict[str, Any]) -> list[str]:
    """One screen: what went in, what came out, whether it is faster, and where the time went."""
    lines = ["", f"draftmill run {url}", ""]

    def line(label: str, text: str) -> None:
        lines.append(f"  {label:<12} {text}")

    rows = results.get("rows")
    if rows:
        reasons = ", ".join(f"{r} {n}" for r, n in results["reject_reasons"].items())
        line(
            "rows",
            f"{rows['in']} in, {rows['kept']} kept, {rows['rejected']} rejected{f' ({reasons})' if reasons else ''}"
            + (f", {rows['not_drawn']} not drawn" if rows["not_drawn"] else ""),
        )
    for name, why in results.get("skipped_sources", {}).items():
        line("SKIPPED", f"source {name}: {why.partition(': ')[2]}")
    if STOPPED_BY in results:
        line("PARTIAL", f"generate was {results[STOPPED_BY]['words']}")
    if "tokens" in results:
        t = results["tokens_by_kind"]
        line("tokens", f"{results['tokens']:,} ({t['prompt']:,} prompt, {t['answer']:,} answer)")
        line(
            "states",
            f"{results['bytes'] / 1e6:,.1f} MB, {results['bytes'] / max(1, results['tokens']):,.0f} bytes a token",
        )
    evaluate = results.get("evaluate")
    if evaluate:
        low, high = evaluate["interval"]
        line(
            "estimate",
            f"acceptance length {evaluate['acceptance_length']:.3f} offline"
            f" (95 % {low:.3f}..{high:.3f}), {evaluate['conversations']} held-out conversations",
        )
    bench = results.get("bench")
    if bench:
        for label, text in bench_lines(bench):
            line(label, text)
    lines.append("")
    for name, timing in results["stages"].items():
        note = f"{timing['seconds']:8.1f} s{'  (reused)' if timing['reused'] else ''}"
        line(name, note)
    lines += ["", f"  report: {url}/report/report.html", ""] if "report" in results["stages"] else [""]
    return lines


def bench_lines(bench: dict[str, Any]) -> list[tuple[str, str]]:
    """What was served: (label, text) of each line; what was compared with nothing is left out."""
    where = "vLLM" if bench.get("served_by", "our vLLM") == "our vLLM" else bench["served_by"]
    length = f"acceptance length {bench['acceptance_length']:.3f} in {where}, {bench['num_draft_tokens']} draft tokens"
    per = ", ".join(f"{100 * p:.1f} %" for p in bench["acceptance_per_position"])
    by_position = f"by position {per}; " if per else ""
    lines = [("served", length), ("", f"{by_position}rate {100 * bench['acceptance_rate']:.1f} %")]
    speed = bench["tokens_per_second"]
    if bench["speedup"] is None:
        return [*lines, ("speed", f"{speed['draft']:,.0f} tokens/s with the draft")]
    busy = "" if bench["comparable"] else "; not comparable, other programs took the processor"
    tokens = f"{speed['baseline']:,.0f} tokens/s without, {speed['draft']:,.0f} with the draft"
    lines.append(("speed", f"{tokens} ({bench['speedup']:.2f}x){busy}"))
    if all((bench.get("latency") or {}).get(side, {}).get("inter_token") for side in ("baseline", "draft")):
        first, every = ([1e3 * bench["latency"][s][n]["p50"] for s in ("baseline", "draft")] for n in _TIMES)
        times = f"first token {first[0]:,.0f}, {first[1]:,.0f} ms; a token each {every[0]:.1f}, {every[1]:.1f} ms"
        lines.append(("", times))
    lines += [("", text) for text in bench["cost_model"]["lines"][:-1]] if len(bench.get("sweep", [])) > 1 else []
    test = bench.get("distribution_test")
    if test is not None:
        said = "one distribution with and without the draft" if test["p_value"] >= 0.01 else "not of one distribution"
        return [*lines, ("outputs", f"{said}: p = {test['p_value']:.4f} at temperature {test['temperature']:g}")]
    told = f"{bench['output_mismatches']} of {bench['prompts']} differ from those without the draft"
    return [*lines, ("outputs", told)]
