"""The metrics of a run as Ray exports them: names, units and tags, here and nowhere else.

Every metric carries the tags `run` (name of the run folder), `stage` and `source`, who tells it: `driver`, `HOST:PID`
of an engine, `worker N` of a training. Prometheus sees them under `Metric.exported`; deploy/grafana shows them.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

TAGS = ("run", "stage", "source")


@dataclass(frozen=True)
class Metric:
    """One metric; a counter only grows, a gauge says how it is now."""

    name: str
    kind: Literal["counter", "gauge"]
    unit: str
    about: str
    tags: tuple[str, ...] = ()  # beside TAGS

    @property
    def exported(self) -> str:
        """The name in Prometheus."""
        return f"ray_{self.name}{'_total' if self.kind == 'counter' else ''}"


# By the key that our own code says.
METRICS: dict[str, Metric] = {
    # generate, of an engine
    "rows": Metric("draftmill_rows", "counter", "rows", "conversations that ended, kept or not"),
    "answer_tokens": Metric("draftmill_answer_tokens", "counter", "tokens", "tokens of answers that ended"),
    "engine_running": Metric("draftmill_engine_running", "gauge", "requests", "requests the engine works on"),
    "engine_queue": Metric("draftmill_engine_queue", "gauge", "requests", "requests that wait for the engine"),
    "kv_use": Metric("draftmill_kv_use", "gauge", "share", "tokens held over those that the KV cache holds"),
    # generate, of the driver
    "parts": Metric("draftmill_parts", "counter", "parts", "parts committed"),
    "rejects": Metric("draftmill_rejects", "counter", "rows", "rows rejected, by reason", ("reason",)),
    "bytes_written": Metric("draftmill_bytes_written", "counter", "bytes", "bytes of committed parts"),
    "rows_left": Metric("draftmill_rows_left", "gauge", "rows", "rows that have not ended"),
    "engines": Metric("draftmill_engines", "gauge", "engines", "engines that tell of themselves"),
    "stalls": Metric("draftmill_stalls", "gauge", "stalls", "engines ended for want of a sign of life"),
    # train, of the leading worker, by the name in a line of metrics.jsonl
    "step": Metric("draftmill_train_step", "gauge", "steps", "optimiser steps done"),
    "loss": Metric("draftmill_train_loss", "gauge", "nats", "training loss, all unroll steps"),
    "tokens_per_s": Metric(
        "draftmill_train_tokens_per_second", "gauge", "tokens/s", "tokens trained on per second, all workers"
    ),
    "data_wait_share": Metric(
        "draftmill_train_data_wait_share", "gauge", "share", "share of the time in which the step loop waits for data"
    ),
    "validation/acceptance_length": Metric(
        "draftmill_train_acceptance_length", "gauge", "tokens", "acceptance length of the validation walk"
    ),
}


class Meter:
    """Tells metrics of one stage of the run at `run_url`, from a process that is connected to Ray.

    A metric that cannot be told is left out: none is worth a run.
    """

    def __init__(self, run_url: str, stage: str, source: str) -> None:
        self._tags = {"run": run_name(run_url), "stage": stage, "source": source}
        self._metrics: dict[str, Any] = {}

    def add(self, key: str, amount: float, **tags: str) -> None:
        """Count `amount` more."""
        if amount > 0:
            with contextlib.suppress(Exception):
                self._metric(key).inc(amount, tags or None)

    def set(self, key: str, value: float | None, **tags: str) -> None:
        """Say how it is now; None: nobody knows."""
        if value is not None:
            with contextlib.suppress(Exception):
                self._metric(key).set(value, tags or None)

    def set_known(self, values: Mapping[str, float]) -> None:
        """Set those of `values` that are metrics."""
        for key in METRICS.keys() & values.keys():
            self.set(key, values[key])

    def _metric(self, key: str) -> Any:
        if key not in self._metrics:
            metric, ray_metrics = METRICS[key], importlib.import_module("ray.util.metrics")
            kind = ray_metrics.Counter if metric.kind == "counter" else ray_metrics.Gauge
            made = kind(metric.name, description=f"{metric.about} ({metric.unit})", tag_keys=(*TAGS, *metric.tags))
            made.set_default_tags(self._tags)
            self._metrics[key] = made
        return self._metrics[key]


def run_name(run_url: str) -> str:
    """The last part of the run folder's location."""
    return run_url.rstrip("/").rsplit("/", 1)[-1]
