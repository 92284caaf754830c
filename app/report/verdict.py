"""One sentence a person can decide by."""

from __future__ import annotations

from typing import Any

_HARDLY = 0.02  # accepted tokens a draft


def verdict(results: dict[str, Any]) -> str:
    """What was measured, or how far the run has come."""
    if "bench" in results:
        return _of_bench(results["bench"])
    if "evaluate" in results:
        found = results["evaluate"]
        low, high = found["interval"]
        return (
            f"Walking the held-out answers predicts an acceptance length of {found['acceptance_length']:.2f}"
            f" (95 % {low:.2f} to {high:.2f}); whether that is faster is not known until `draftmill bench` serves it."
        )
    if "train" in results:
        return f"The draft is trained ({results['train']['steps']:,} steps), and not measured yet."
    if "samples" in results:
        return f"{results['samples']:,} samples are there to train on, and no draft yet."
    return "Nothing is made yet that could be judged."


def _of_bench(bench: dict[str, Any]) -> str:
    speedup = bench["speedup"]
    length = f"an acceptance length of {bench['acceptance_length']:.2f}"
    at = f"at {bench['concurrency']} requests at once"
    if bench["acceptance_length"] < 1 + _HARDLY:
        return (
            f"Hardly a token of the draft is accepted, with {length}: it can only slow serving down; train it longer or"
            " on more, or ask `draftmill doctor` what is wrong."
        )
    if speedup is None:
        return f"The draft is accepted, with {length}; nothing was served without it, so its gain is not known."
    if not bench["comparable"]:
        return (
            f"The draft is accepted, with {length}; the speeds cannot be compared, because other programs took the"
            " processor while they were measured."
        )
    if speedup >= 1.02:
        return f"The draft serves {speedup:.2f} times as fast as no draft {at}, with {length}."
    elsewhere = _elsewhere(bench)
    if speedup <= 0.98:
        return (
            f"The draft is accepted ({length}), but serving with it is {1 / speedup:.2f} times slower than without"
            f" {at}; {elsewhere or 'leave it off here'}."
        )
    return f"The draft neither gains nor loses speed {at}, with {length}{'; ' + elsewhere if elsewhere else ''}."


def _elsewhere(bench: dict[str, Any]) -> str:
    """Where it would be faster by the cost model; nothing where nowhere."""
    recommended = (bench.get("cost_model") or {}).get("recommended", [])
    gains = [r for r in recommended if r["draft_tokens"] is not None]
    if not gains:
        return ""
    best = max(gains, key=lambda r: float(r["speedup"]))
    return (
        f"with {best['draft_tokens']} draft tokens at {best['concurrency']} requests at once it is"
        f" {best['speedup']:.2f} times as fast"
    )
