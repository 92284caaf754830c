"""How long the bench takes: every pass over prompts, with and without the draft, and the engines that are started."""

from __future__ import annotations

from app.bench.sets import SetTurns
from app.config import Config
from app.plan.hardware import Rates
from app.plan.tokens import TokenStats


def bench_seconds(config: Config, stats: TokenStats, rates: Rates, held: float, sets: SetTurns) -> float:
    """Every pass as `app/pipelines/bench.py` makes them: the sweep over the held-out prompts, a share `held` of all;
    the sets, the domains and the draws of the test of distributions once, at the headline's setting."""
    bench, anew = config.bench, [s for s in stats.sources if s.use == "regenerate"]
    cut = min(1.0, (bench.max_new_tokens or config.generate.max_new_tokens) / config.generate.max_new_tokens)
    answers = cut * held * sum(s.answer for s in anew)
    if not answers:
        return 0.0
    mean = cut * sum(s.answer for s in anew) / sum(s.samples for s in anew)
    ks = bench.drafting(config.evaluate.num_draft_tokens)
    passes = bench.repeats * len(bench.concurrencies)
    asked, earlier = sets.asked * mean, sets.earlier * mean
    drawn = bench.test_prompts * bench.test_samples * bench.test_tokens if bench.temperature else 0
    by_domain = bench.domain_pass and len({s.domain or s.label for s in config.sources if s.use == "regenerate"}) > 1
    plain = passes * answers + asked + earlier + drawn
    drafted = len(ks) * passes * answers + asked + drawn + by_domain * answers
    if bench.server is not None and bench.baseline_server is None:
        plain, drafted = 0.0, drafted + earlier - drawn
    starts = 1 + len(ks) if bench.server is None else 0
    return (
        starts * rates.bench_start_s.value
        + plain / rates.bench_tokens_per_s.value
        + drafted / rates.draft_tokens_per_s.value
    )


def bench_assumptions(config: Config, sets: SetTurns) -> list[str]:
    """What `bench_seconds` takes for granted, in words."""
    found = []
    if sets.asked:
        found.append(f"answers to the {sets.asked:,} turns of bench.sets are taken to be as long as the run's own")
    if config.bench.server is not None:
        found.append("bench.server is taken to be as fast as an engine of ours; it is started by others")
    return found
