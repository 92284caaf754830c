"""Measures a service, an engine of our own or a running server: passes over prompts, what they took, what was accepted.

Times of a request: to its first token, `ttft`; between tokens, `inter_token`: (last - first) / (tokens - 1); and the
`gap` between two outputs, which with a draft hold several tokens each.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from app.bench.intervals import middle_and_tail
from app.errors import RowError
from app.target import Renderer, load_tokenizer

WARM_UP_TOKENS = 8  # of each answer before the first measured pass: every batch size was seen, nothing else is paid


@dataclass(frozen=True)
class Ask:
    """One prompt."""

    prompt_ids: list[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None


@dataclass
class Answer:
    """What came back: tokens, and when."""

    ids: list[int]
    started: float  # seconds of one clock, all of them
    arrivals: list[float]  # of each output
    sizes: list[int]  # tokens of each output; empty where they are not told
    tokens: int  # as the service counts them


@dataclass
class Served:
    """What a service did with the prompts at one concurrency."""

    outputs: list[list[int]]  # token ids, in prompt order, of the last pass
    seconds: list[float]  # of each measured pass
    tokens: int  # output tokens of the last pass
    pass_tokens: list[int] = field(default_factory=list)  # of each pass; empty: `tokens` each
    concurrency: int = 0
    cpu_share: float | None = None  # of the machine's cores, what this process got; CPU engines only
    foreign_share: float | None = None  # what other programs (and a hypervisor) took of them meanwhile
    foreign_tokens: int = 0  # that a server gave others meanwhile
    prefix_hits: int = 0  # prompt tokens a server did not compute, having them from before
    drafts: int = 0  # counters, by difference over the measured passes
    draft_tokens: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    gauges: dict[str, Any] | None = None  # SGLang: what it says of itself (app/bench/metrics.py)
    streamed: list[list[int]] = field(default_factory=list)  # by prompt: outputs after the first, those > 1, ...
    latency_s: float = 0.0  # of all requests together, first to last
    ttft: list[float] = field(default_factory=list)
    inter_token: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    @property
    def speeds(self) -> list[float]:
        """Tokens a second of each pass."""
        tokens = self.pass_tokens or [self.tokens] * len(self.seconds)
        return [n / s for n, s in zip(tokens, self.seconds, strict=True)]

    @property
    def tokens_per_second(self) -> float:
        return float(np.mean(self.speeds))

    @property
    def latency(self) -> dict[str, Any]:
        """Median and 95th percentile of the request times, seconds."""
        return {
            "ttft": middle_and_tail(self.ttft),
            "inter_token": middle_and_tail(self.inter_token),
            "gap": middle_and_tail(self.gaps),
        }

    def step_seconds(self, acceptance_length: float) -> float | None:
        """Seconds of a step of one request (app/cost_model.py)."""
        tokens = sum(self.pass_tokens)
        return self.latency_s * acceptance_length / tokens if tokens and self.latency_s else None


class Service(Protocol):
    """What answers: `begin` and `end` enclose what is to be counted."""

    on_cpu: bool  # it runs in this process on the CPU

    def answer(self, asks: Sequence[Ask], concurrency: int) -> list[Answer]: ...
    def begin(self) -> None: ...
    def end(self, into: Served) -> None: ...


@dataclass(frozen=True)
class Templates:
    """How conversations become prompts; picklable."""

    target: str
    trust_remote_code: bool
    chat_template: str | None
    kwargs: dict[str, Any]
    max_length: int  # tokens of prompt and answer
    max_new_tokens: int
    temperature: float
    seed: int

    def ask(self, prompt_ids: list[int], number: int) -> Ask:
        """A prompt with what is asked of each; lengths are cut as the answers were captured."""
        room = min(self.max_new_tokens, self.max_length - len(prompt_ids))
        return Ask(prompt_ids, room, self.temperature, self.seed + number if self.temperature else None)


@dataclass(frozen=True)
class Job:
    """What one service is to do; picklable."""

    asks: list[Ask]
    concurrency: tuple[int, ...]
    repeats: int
    templates: Templates
    groups: dict[str, list[Ask]] = field(default_factory=dict)  # each a pass of its own, at the first concurrency
    chats: dict[str, list[list[dict[str, Any]]]] = field(default_factory=dict)  # sets, by name, still to be rendered
    draws: list[Ask] = field(default_factory=list)  # sampled for the test of their distribution


@dataclass
class Done:
    """What came of a job."""

    cells: list[Served]
    groups: dict[str, Served]
    draws: list[list[int]]
    sets: dict[str, list[Ask]]  # of `chats`: the prompts that were made


def do(service: Service, job: Job) -> Done:
    """Every cell of the job, then its groups and draws."""
    cells = [measured(service, job.asks, c, job.repeats) for c in job.concurrency]
    first = job.concurrency[0]
    sets = {name: _asks_of(service, chats, job.templates, first) for name, chats in job.chats.items()}
    groups = {name: measured(service, asks, first, 1) for name, asks in {**job.groups, **sets}.items() if asks}
    draws = [a.ids for a in service.answer(job.draws, max(job.concurrency))] if job.draws else []
    return Done(cells, groups, draws, sets)


def measured(service: Service, asks: Sequence[Ask], concurrency: int, repeats: int) -> Served:
    """`repeats` passes over the prompts, `concurrency` in flight, after a warm-up that is not counted."""
    warm_up = [Ask(a.prompt_ids, min(a.max_tokens, WARM_UP_TOKENS), a.temperature, a.seed) for a in asks[:concurrency]]
    service.answer(warm_up, concurrency)
    service.begin()
    cpu, machine = time.process_time(), _machine_seconds()
    seconds: list[float] = []
    passes: list[list[Answer]] = []
    for _ in range(repeats):
        started = time.perf_counter()
        passes.append(service.answer(asks, concurrency))
        seconds.append(time.perf_counter() - started)
    cpu, machine = time.process_time() - cpu, _machine_seconds() - machine
    last = passes[-1]
    result = Served([a.ids for a in last], seconds, sum(a.tokens for a in last), concurrency=concurrency)
    if service.on_cpu:
        result.cpu_share = cpu / sum(seconds) / len(os.sched_getaffinity(0))
        result.foreign_share = max(0.0, machine - cpu) / sum(seconds) / (os.cpu_count() or 1)
    _add_times(result, passes)
    service.end(result)
    return result


def _add_times(result: Served, passes: list[list[Answer]]) -> None:
    result.pass_tokens = [sum(a.tokens for a in answers) for answers in passes]
    longest = max((n for answers in passes for a in answers for n in a.sizes[1:]), default=1)
    result.streamed = [[0] * longest for _ in result.outputs]
    for answers in passes:
        for number, answer in enumerate(answers):
            at = answer.arrivals
            if not at:
                continue
            for size in answer.sizes[1:]:
                for i in range(size):
                    result.streamed[number][i] += 1
            result.latency_s += at[-1] - answer.started
            result.ttft.append(at[0] - answer.started)
            result.gaps += np.diff(at).tolist()
            if answer.tokens > 1:
                result.inter_token.append((at[-1] - at[0]) / (answer.tokens - 1))


def _asks_of(service: Service, chats: list[list[dict[str, Any]]], templates: Templates, concurrency: int) -> list[Ask]:
    """The prompt of every user turn: earlier turns are answered by this service, once, and those answers stay.

    A turn whose prompt leaves no room for an answer ends its conversation.
    """
    tokenizer = load_tokenizer(templates.target, templates.trust_remote_code, templates.chat_template)
    renderer = Renderer(tokenizer, templates.kwargs)
    asks: list[Ask] = []
    going: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [([], list(chat)) for chat in chats]
    while going:
        turn: list[tuple[list[dict[str, Any]], list[dict[str, Any]], Ask]] = []
        for said, coming in going:
            end = next((i for i, m in enumerate(coming) if m["role"] == "user"), None)
            if end is None:
                continue
            said, coming = [*said, *coming[: end + 1]], coming[end + 1 :]
            try:
                ask = templates.ask(renderer.render(said, True), len(asks) + len(turn))
            except RowError:
                continue
            if ask.max_tokens > 0:
                turn.append((said, coming, ask))
        asks += [ask for *_, ask in turn]
        going = [(said, coming) for said, coming, _ in turn if coming]
        answers = service.answer([ask for _, coming, ask in turn if coming], concurrency) if going else []
        for (said, _), answer in zip(going, answers, strict=True):
            text = str(tokenizer.decode(answer.ids, skip_special_tokens=True))
            said.append({"role": "assistant", "content": text})
    return asks


def _machine_seconds() -> float:
    """CPU seconds that all programs of this machine used since it started, and that a hypervisor took from it."""
    try:
        user, nice, system, _idle, _io, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
