"""Bench: the held-out prompts with and without the draft, by our own vLLM or by running servers (docs/bench.md).

Acceptance comes from the server's own counters, by difference; outputs are compared token by token, or where they are
sampled by a test of their distribution. A sweep over draft tokens and concurrency gives the cost model.
"""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from app.bench.engine import ServeSpec, refuse_owned_args, serve
from app.bench.form import other_form
from app.bench.intervals import acceptance_intervals
from app.bench.measure import Ask, Done, Job, Served, Templates, do
from app.bench.outputs import same_distribution, stored
from app.bench.server import RunningServer
from app.bench.sets import read_sets, set_digests
from app.bench.settings import acceptance, compare, cost, intervals, joined
from app.captured import load_entries
from app.cluster import cause_of, connect, gpu_count
from app.errors import UserError
from app.parts import PartEntry
from app.pipeline import StageContext, StageResult
from app.pipelines import evaluate
from app.samples import SampleReader, load_split
from app.sizing import serving_gpus
from app.target import load_tokenizer

log = logging.getLogger("draftmill")
_DOMAIN, _SET = "domain ", "set "
_SHORT = ("acceptance_length", "interval", "acceptance_per_position")

# Does a job with this many draft tokens, 0: without the draft; None: there is nothing that could.
Serve = Callable[[int, Job], Done | None]


def check(ctx: StageContext) -> None:
    """Raises UserError where nothing would be left to measure, bench.engine_args would measure something else, or a set
    cannot be read."""
    evaluate.check(ctx)
    refuse_owned_args(ctx.config.bench.engine_args)
    read_sets(ctx.config.bench.sets, ctx.config.bench.set_rows, ctx.listing)


def outside(ctx: StageContext) -> dict[str, str]:
    """Digests of the sets; what a running server serves is not known before it is measured, so it is anew each time."""
    bench = ctx.config.bench
    found = set_digests(bench.sets, ctx.listing)
    return found if bench.server is None else {**found, "state of bench.server": str(time.time_ns())}


def run(ctx: StageContext) -> StageResult:
    """Serve, count, compare; writes `bench/bench.json` and `bench/outputs.jsonl`.

    Raises:
        UserError: there is no held-out prompt, or vLLM or a server cannot serve the pair.
    """
    config, bench = ctx.config, ctx.config.bench
    entries = load_entries(ctx)
    rows = _held_out(ctx, entries)
    form = other_form(config, ctx.target, entries[0])
    if form is not None:
        log.warning("bench: %s", form)
    templates = _templates(ctx)
    asks = [templates.ask(r["prompt_ids"], n) for n, r in enumerate(rows)]
    ks = bench.drafting(config.evaluate.num_draft_tokens)
    log.info(
        "bench: %d prompts (every turn of %d held-out conversations), first without the draft",
        len(rows),
        len({r["conversation_id"] for r in rows}),
    )
    service = _engines(ctx) if bench.server is None else _servers(ctx)
    plain = Job(asks, bench.concurrencies, bench.repeats, templates, chats=_chats(ctx), draws=_draws(ctx, asks, 0))
    baseline = service(0, plain)
    if baseline is not None:
        log.info("bench: %.0f tokens/s; now with the draft", baseline.cells[0].tokens_per_second)
    sets = {_SET + name: s for name, s in baseline.sets.items()} if baseline is not None else {}
    full = replace(
        plain,
        groups={**_by_domain(rows, asks, bench.domain_pass), **sets},
        chats={} if baseline is not None else plain.chats,
        draws=_draws(ctx, asks, 1) if baseline is not None else [],
    )
    drafted: dict[int, Done] = {}
    for k in ks:
        done = service(k, full if k == ks[0] else replace(full, groups={}, chats={}, draws=[]))
        assert done is not None  # only a baseline may be missing
        drafted[k] = done
    result = {**_result(ctx, rows, baseline, drafted), "other_form": form}
    _write(ctx, rows, baseline, drafted[ks[0]], result)
    _tell(result)
    return StageResult(outputs=["bench/bench.json", "bench/outputs.jsonl"], counts=result)


def served_alone(ctx: StageContext) -> float:
    """Acceptance length of the exported draft at `evaluate.num_draft_tokens` on the held-out prompts, no baseline.

    Raises:
        UserError: as `run`.
    """
    rows, k = _held_out(ctx, load_entries(ctx)), ctx.config.evaluate.num_draft_tokens
    templates = _templates(ctx)
    asks = [templates.ask(r["prompt_ids"], n) for n, r in enumerate(rows)]
    done = _engines(ctx)(k, Job(asks, ctx.config.bench.concurrencies[:1], 1, templates))
    assert done is not None
    return float(acceptance(done.cells[0], k)["acceptance_length"])


def _held_out(ctx: StageContext, entries: list[PartEntry]) -> list[dict[str, Any]]:
    """The rows of every held-out prompt that the target answers anew."""
    split = load_split(ctx.run.store, entries, ctx.config)
    reader = SampleReader(ctx.run.store, entries, split, ("holdout",))
    rows = [r for r in (reader.row(i) for i in range(len(reader))) if r["use"] == "regenerate"]
    if not rows:
        raise UserError("bench: no prompt is held out; set evaluate.holdout above 0")
    return rows


def _result(
    ctx: StageContext, rows: list[dict[str, Any]], baseline: Done | None, drafted: dict[int, Done]
) -> dict[str, Any]:
    config, bench = ctx.config, ctx.config.bench
    conversations = [r["conversation_id"] for r in rows]
    cells, dones = [], list(drafted.items())
    for k, done in dones:
        for number, served in enumerate(done.cells):
            plain = baseline.cells[number] if baseline is not None else None
            cell = compare(plain, served, k, sampled=bench.temperature > 0)
            cell |= intervals(served, conversations, config.evaluate.bootstrap, bench.seed)
            cell |= {"concurrency": served.concurrency, "temperature": bench.temperature}
            cells.append(cell)
    head, first = cells[0], dones[0][1]
    by_draft_tokens = {
        str(k): {
            **{name: cell[name] for name in _SHORT},
            "domains": _domains(rows, done, k, config.evaluate.bootstrap, bench.seed),
        }
        for cell, done in zip(cells[:: len(bench.concurrencies)], drafted.values(), strict=True)
        for k in [cell["num_draft_tokens"]]
    }
    private = {number for number, row in enumerate(rows) if row["private"]}
    examples = [{**e, "sample_id": rows[e["prompt"]]["sample_id"]} for e in head["mismatch_examples"]]
    all_done = [d for d in (baseline, *drafted.values()) if d is not None]
    return {
        **head,
        "mismatch_examples": _in_words(ctx, examples, private),
        "prompts": len(rows),
        "conversations": len(set(conversations)),
        "max_new_tokens": _limit(ctx),
        "served_by": "our vLLM" if bench.server is None else bench.server,
        "domains": by_draft_tokens[str(head["num_draft_tokens"])]["domains"],
        "by_draft_tokens": by_draft_tokens,
        "sets": _sets(baseline, first, head["num_draft_tokens"], bench.temperature > 0),
        "distribution_test": _distribution_test(ctx, baseline, first),
        "sweep": [{n: v for n, v in c.items() if n != "mismatch_examples"} for c in cells],
        "cost_model": cost(cells),
        "server_starts": len(all_done),
        "passes_s": sum(sum(s.seconds) for d in all_done for s in (*d.cells, *d.groups.values())),
    }


def _domains(rows: list[dict[str, Any]], done: Done, k: int, resamples: int, seed: int) -> dict[str, Any]:
    """Acceptance by domain: from counters where a domain had a pass of its own, else from the sizes of the outputs."""
    served, found = done.cells[0], {}
    where: dict[str, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        where[row["domain"]].append(number)
    whole = intervals(served, [r["conversation_id"] for r in rows], 1, seed)["interval"] is not None
    for name, numbers in sorted(where.items()):
        counts = [served.streamed[n] for n in numbers] if whole else []
        own = done.groups.get(_DOMAIN + name, served if len(where) == 1 else None)
        if own is not None and not _drafted(own, _DOMAIN + name):
            continue
        if own is not None:
            told = {**acceptance(own, k), "source": "counters"}
        elif counts and sum(c[0] for c in counts):
            drafts, accepted = sum(c[0] for c in counts), sum(sum(c[1:]) for c in counts)
            told = {"acceptance_length": 1 + accepted / drafts, "drafts": drafts, "accepted": accepted}
            told["source"] = "sizes of outputs"
        else:
            continue
        by_conversation = joined(counts, [rows[n]["conversation_id"] for n in numbers]) if counts else {}
        ends = acceptance_intervals(list(by_conversation.values()), resamples, seed)
        found[name] = {**told, "interval": ends and ends[0], "prompts": len(numbers)}
    return found


def _drafted(served: Served, group: str) -> bool:
    """Whether a group's answers made a draft; one that made none is told of and left out, the others stand."""
    if served.drafts or served.gauges is not None:
        return True
    log.warning("bench: the answers of %s are so short that nothing was drafted; it is left out", group)
    return False


def _sets(baseline: Done | None, done: Done, k: int, sampled: bool) -> dict[str, Any]:
    """What each benchmark set gave, at the headline's setting."""
    found = {}
    source = baseline if baseline is not None else done
    for name, asks in source.sets.items():
        served = done.groups.get(_SET + name, done.groups.get(name))
        plain = baseline.groups.get(name) if baseline is not None else None
        if served is None or not _drafted(served, _SET + name):
            continue
        cell = compare(plain, served, k, sampled)
        left_out = ("mismatch_examples", "speedup_interval", "tokens_per_second_interval")
        found[name] = {n: v for n, v in cell.items() if n not in left_out} | {"prompts": len(asks)}
    return found


def _distribution_test(ctx: StageContext, baseline: Done | None, done: Done) -> dict[str, Any] | None:
    bench = ctx.config.bench
    if baseline is None or not done.draws:
        return None
    n = bench.test_samples
    without, with_draft = ([d.draws[i : i + n] for i in range(0, len(d.draws), n)] for d in (baseline, done))
    found = same_distribution(without, with_draft, bench.test_tokens, seed=bench.seed)
    return {**found, "temperature": bench.temperature}


def _draws(ctx: StageContext, asks: list[Ask], side: int) -> list[Ask]:
    """Prompts of the test of distributions, each `test_samples` times; the sides have seeds of their own."""
    bench = ctx.config.bench
    if not bench.temperature:
        return []
    chosen = asks[: bench.test_prompts]
    first = bench.seed + 1_000_003 * (1 + side)
    return [
        replace(ask, max_tokens=min(ask.max_tokens, bench.test_tokens), seed=first + number * bench.test_samples + i)
        for number, ask in enumerate(chosen)
        for i in range(bench.test_samples)
    ]


def _by_domain(rows: list[dict[str, Any]], asks: list[Ask], wanted: bool) -> dict[str, list[Ask]]:
    groups: dict[str, list[Ask]] = defaultdict(list)
    for row, ask in zip(rows, asks, strict=True):
        groups[_DOMAIN + row["domain"]].append(ask)
    return dict(groups) if wanted and len(groups) > 1 else {}


def _limit(ctx: StageContext) -> int:
    return ctx.config.bench.max_new_tokens or ctx.config.generate.max_new_tokens


def _templates(ctx: StageContext) -> Templates:
    target, bench = ctx.config.target, ctx.config.bench
    return Templates(
        ctx.target.model,
        target.trust_remote_code,
        target.chat_template,
        target.template_kwargs,
        # The engine must not outgrow what the answers were captured under: lengths are cut the same way.
        ctx.config.generate.max_length,
        _limit(ctx),
        bench.temperature,
        bench.seed,
    )


def _chats(ctx: StageContext) -> dict[str, list[list[dict[str, Any]]]]:
    return read_sets(ctx.config.bench.sets, ctx.config.bench.set_rows, ctx.listing)


def _engines(ctx: StageContext) -> Serve:
    """Engines of our own, one after another."""
    config = ctx.config
    connect(config.ray)
    on_gpu = gpu_count() > 0
    draft = ctx.run.store.sub("export/draft")
    spec = ServeSpec(
        target=ctx.target.model,
        draft=None,
        num_draft_tokens=0,
        dtype=config.target.dtype,
        max_model_len=min(config.generate.max_length + 32, ctx.target.max_position_embeddings),
        max_num_seqs=max(config.bench.concurrencies),
        on_gpu=on_gpu,
        tensor_parallel=serving_gpus(ctx.target, config),
        kv_cache_gib=config.generate.kv_cache_gib,
        trust_remote_code=config.target.trust_remote_code,
        enforce_eager=config.generate.enforce_eager or not on_gpu,
        engine_args=config.bench.engine_args,
    )

    if config.bench.temperature and not on_gpu:
        log.warning(
            "bench: vLLM's CPU build samples wrongly where a draft is used (vLLM 0.32, its issue 55005); measure"
            " bench.temperature above 0 on a GPU, or expect the test of the outputs to say so"
        )

    def service(k: int, job: Job) -> Done:
        this = replace(spec, draft=draft, num_draft_tokens=k) if k else spec
        return _serve_elsewhere(this, job, config.ray.engine_cpus)

    return service


def _serve_elsewhere(spec: ServeSpec, job: Job, cpus: float) -> Done:
    """Run `serve` in a process of its own, so that the engine's memory is given back."""
    import ray

    resources: dict[str, Any] = {"num_gpus": spec.tensor_parallel} if spec.on_gpu else {"num_cpus": cpus}
    task = ray.remote(max_calls=1, max_retries=1, **resources)(serve)
    try:
        done: Done = ray.get(task.remote(spec, job))
    except Exception as error:
        cause = cause_of(error)
        if isinstance(cause, UserError):
            raise cause from error
        raise
    return done


def _servers(ctx: StageContext) -> Serve:
    """The running servers of the configuration."""
    bench, target = ctx.config.bench, ctx.config.target
    tokenizer = load_tokenizer(ctx.target.model, target.trust_remote_code, target.chat_template)

    def tokenise(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def service(k: int, job: Job) -> Done | None:
        url, setting = (bench.server, "bench.server") if k else (bench.baseline_server, "bench.baseline_server")
        if url is None:
            log.info("bench: bench.baseline_server is not set, so speeds and outputs are compared with nothing")
            return None
        done = do(RunningServer(url, setting, bench.server_model, tokenise), job)
        for served in done.cells:
            if served.prefix_hits:
                log.warning(
                    "bench: %s had %d prompt tokens in its prefix cache: its times to the first token are too short;"
                    " start it with --no-enable-prefix-caching (SGLang: --disable-radix-cache)",
                    setting, served.prefix_hits,
                )  # fmt: skip
            if not k and (served.drafts or served.gauges):
                raise UserError(f"{setting} {url} drafts too; give a server of the target without a draft")
            if k and not (served.drafts or served.gauges):
                raise UserError(
                    f"{setting} {url} drafted nothing; start it with the draft (export/serve.json says how)"
                )
        return done

    return service


def _in_words(ctx: StageContext, examples: list[dict[str, Any]], private: set[int]) -> list[dict[str, Any]]:
    """The examples with their tokens as text beside the ids, both of which stay hidden for private prompts."""
    if not examples:
        return []
    target = ctx.config.target
    tokenizer = load_tokenizer(ctx.target.model, target.trust_remote_code, target.chat_template)

    def told(example: dict[str, Any]) -> dict[str, Any]:
        if example["prompt"] in private:
            return {**example, "baseline": "(private)", "draft": "(private)", "baseline_ids": [], "draft_ids": []}
        sides = ("baseline", "draft")
        words = {side: str(tokenizer.decode(example[side])) for side in sides}
        return {**example, **words, **{f"{side}_ids": example[side] for side in sides}}

    return [told(e) for e in examples]


def _write(
    ctx: StageContext, rows: list[dict[str, Any]], baseline: Done | None, done: Done, result: dict[str, Any]
) -> None:
    ours = done.cells[0].outputs
    theirs: Sequence[list[int] | None] = baseline.cells[0].outputs if baseline is not None else [None] * len(ours)
    lines = [stored(r, a, b) for r, a, b in zip(rows, theirs, ours, strict=True)]
    ctx.run.store.write_json("bench/bench.json", result)
    ctx.run.store.write_bytes("bench/outputs.jsonl", "".join(json.dumps(x) + "\n" for x in lines).encode())


def _tell(result: dict[str, Any]) -> None:
    log.info(
        "bench: acceptance length %.3f, %.0f tokens/s with the draft",
        result["acceptance_length"],
        result["tokens_per_second"]["draft"],
    )
    if result["output_mismatches"] is not None:
        log.info("bench: %d of %d outputs differ", result["output_mismatches"], result["prompts"])
    if result["distribution_test"] is not None:
        log.info("bench: sampled outputs, one distribution with and without the draft? p = %.4f",
                 result["distribution_test"]["p_value"])  # fmt: skip
    if not result["comparable"] and result["speedup"] is not None:
        log.warning("bench: other programs took the processor meanwhile; the two speeds cannot be compared")
    for case in result["mismatch_examples"][:3]:
        log.info(
            "bench: prompt %d differs from token %d on: %r without the draft, %r with it",
            case["prompt"],
            case["first_difference"],
            case["baseline"],
            case["draft"],
        )
    for line in (result["cost_model"] or {}).get("lines", []) if len(result["sweep"]) > 1 else []:
        log.info("bench: %s", line)
