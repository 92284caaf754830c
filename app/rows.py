"""One row of a source to a row of an ingest part, in any process: parsed, checked, tokenised."""

from __future__ import annotations

import json
import os
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from multiprocessing import get_context
from typing import Any

import numpy as np

from app.config import Config, SourceConfig
from app.conversations import RESERVED_KWARGS, Conversation, canonical, turns_to_answer
from app.errors import RowError, UserError, first_line
from app.masks import MaskRule, Tokenised, check_prompt_length, tokenise_as_is
from app.privacy import Redactor
from app.sources.shapes import WITHHELD, to_raw
from app.target import Renderer, TargetInfo, load_tokenizer

CHUNK = 512  # rows handed to a process at once
_ALONE_S = 5.0  # seconds a source is worked on here before processes start for it: starting them costs as much
MIXABLE = ("enable_thinking", "thinking")  # template arguments of which one run should hold one value


@dataclass(frozen=True)
class RowSettings:
    """What turning rows into tokens depends on, picklable."""

    model: str
    trust_remote_code: bool
    chat_template: str | None
    template_kwargs: dict[str, Any]
    rule: MaskRule
    redact: tuple[str, ...]

    @classmethod
    def of(cls, config: Config, target: TargetInfo) -> RowSettings:
        return cls(
            model=target.model,
            trust_remote_code=config.target.trust_remote_code,
            chat_template=config.target.chat_template,
            template_kwargs=config.target.template_kwargs,
            rule=MaskRule(
                method=config.capture.mask,
                max_length=config.generate.max_length,
                over=config.ingest.over,
                min_supervised=config.ingest.min_supervised,
                end_ids=frozenset(target.eos_token_ids),
            ),
            redact=tuple(config.ingest.redact),
        )


@dataclass
class Outcome:
    """What became of one row; `row` or `reject`, or only `id` where nothing but that was asked for."""

    where: str
    id: str | None = None
    row: dict[str, Any] | None = None
    reject: tuple[str, str] | None = None  # reason, detail
    notes: Counter[str] = field(default_factory=Counter)
    mixable: dict[str, Any] = field(default_factory=dict)


class RowWorker:
    """Turns rows into outcomes; holds the tokenizer."""

    def __init__(self, settings: RowSettings) -> None:
        self.settings = settings
        tokenizer = load_tokenizer(settings.model, settings.trust_remote_code, settings.chat_template)
        if taken := sorted(RESERVED_KWARGS & settings.template_kwargs.keys()):
            raise UserError(f"target.template_kwargs may not hold {', '.join(taken)}: draftmill sets these itself")
        self.renderer = Renderer(tokenizer, settings.template_kwargs)
        self._check_template()
        self._redact = Redactor(settings.redact)

    def _check_template(self) -> None:
        """A template that cannot be parsed is no fault of the rows."""
        try:
            self.renderer.text([{"role": "user", "content": "x"}], add_generation_prompt=True)
        except RowError as error:
            if "TemplateSyntaxError" in error.detail or "TemplateAssertionError" in error.detail:
                where = self.settings.chat_template or f"of {self.settings.model}"
                raise UserError(f"the chat template {where} cannot be read ({error.detail}); mend it") from error

    def chunk(self, source: SourceConfig, rows: list[tuple[str, Any]], tokenise: bool) -> list[Outcome]:
        """Outcomes of `rows`, in order; without `tokenise` a usable row gets only its id."""
        outcomes = [Outcome(where) for where, _ in rows]
        prompts: list[tuple[Outcome, Conversation, str]] = []  # tokenised together: many times faster than one by one
        for outcome, (_, row) in zip(outcomes, rows, strict=True):
            private = source.hides(False)
            try:
                conversation = self.conversation(source, row)
                private = source.hides(conversation.private)
                outcome.id = conversation.id(source.use)
                if not tokenise:
                    continue
                if source.use == "regenerate":
                    prompts.append((outcome, conversation, self._prompt(conversation)))
                else:
                    renderer = self.renderer_for(conversation)
                    samples, method = tokenise_as_is(renderer, conversation.messages, self.settings.rule)
                    self._keep(source, conversation, outcome, samples, method)
            except RowError as error:
                withheld = private and error.reason.startswith("template_rejects")  # a template may quote the row
                outcome.reject = (error.reason, WITHHELD if withheld else self._redact(error.detail))
        ids = self.renderer.encode_all([text for _, _, text in prompts])
        for (outcome, conversation, _), prompt in zip(prompts, ids, strict=True):
            try:
                check_prompt_length(prompt, self.settings.rule.max_length)
                self._keep(source, conversation, outcome, [Tokenised(prompt)], "engine")
            except RowError as error:
                outcome.reject = (error.reason, self._redact(error.detail))
        return outcomes

    def conversation(self, source: SourceConfig, row: Any) -> Conversation:
        """A parsed row in its canonical form.

        Raises:
            RowError: with the reason the row is rejected by.
        """
        if isinstance(row, RowError):
            raise row
        private = source.hides(False)
        try:
            try:
                raw = to_raw(row, source.columns)
                private = source.hides(raw.private)
                conversation = canonical(raw, source.system_prompt, source.use)
            except (AttributeError, TypeError, KeyError, IndexError, ValueError) as error:
                # A known shape with a value of another kind somewhere inside.
                raise RowError("bad_value", f"a value has no known form ({first_line(error, 200)})") from error
            if source.sampling.given:
                conversation = replace(conversation, sampling={**source.sampling.given, **conversation.sampling})
        except RowError as error:
            raise RowError(error.reason, WITHHELD) if private else error from error
        if not self.settings.redact:
            return conversation
        # In its canonical form, where JSON inside the row is parsed: replacing in JSON text could break it.
        return replace(
            conversation,
            messages=self._redact(conversation.messages),
            template_kwargs=self._redact(conversation.template_kwargs),
            domain=self._redact(conversation.domain),
        )

    def renderer_for(self, conversation: Conversation) -> Renderer:
        """The renderer with the conversation's own template arguments over the run's."""
        if not conversation.template_kwargs:
            return self.renderer
        kwargs = {**self.settings.template_kwargs, **conversation.template_kwargs}
        return Renderer(self.renderer.tokenizer, kwargs)

    def _prompt(self, conversation: Conversation) -> str:
        """What the target is given before its first answer."""
        first = turns_to_answer(conversation.messages)[0].inputs
        return self.renderer_for(conversation).text(first, add_generation_prompt=True)

    def _keep(
        self,
        source: SourceConfig,
        conversation: Conversation,
        outcome: Outcome,
        samples: list[Tokenised],
        method: str,
    ) -> None:
        messages, kwargs = conversation.messages, conversation.template_kwargs
        outcome.notes = self._notes(source, conversation)
        if truncated := sum(s.truncated for s in samples):
            outcome.notes["truncated"] += truncated
        merged = {**self.settings.template_kwargs, **kwargs}
        outcome.mixable = {k: merged[k] for k in MIXABLE if k in merged}
        outcome.row = {
            "id": outcome.id,
            "source": source.label,
            "domain": conversation.domain or source.domain or source.label,
            "use": source.use,
            "where": outcome.where,
            "private": source.hides(conversation.private),
            "messages": json.dumps(messages, ensure_ascii=False),
            "template_kwargs": json.dumps(kwargs, ensure_ascii=False),
            "sampling": json.dumps(conversation.sampling),
            "requests": [
                {
                    "prompt_ids": np.array(s.prompt_ids, np.int32),
                    "answer_ids": None if s.answer_ids is None else np.array(s.answer_ids, np.int32),
                    "loss_mask": None if s.loss_mask is None else np.array(s.loss_mask, np.bool_),
                    "truncated": s.truncated,
                }
                for s in samples
            ],
            "mask_method": method,
        }

    def _notes(self, source: SourceConfig, conversation: Conversation) -> Counter[str]:
        notes = Counter(conversation.notes)
        notes[f"shape:{conversation.shape}"] += 1
        for message in conversation.messages:
            notes[f"role:{message['role']}"] += 1
        thoughts = [m["reasoning_content"] for m in conversation.messages if m.get("reasoning_content")]
        calls = [c["function"]["name"] for m in conversation.messages for c in m.get("tool_calls", [])]
        tools = [t["function"].get("name") for t in conversation.template_kwargs.get("tools") or []]
        if not (calls or tools or (thoughts and source.use == "as_is")):
            return notes
        text = self.renderer_for(conversation).text(conversation.messages, add_generation_prompt=False)
        notes["tool_calls"] += bool(calls)
        notes["tool_calls_rendered"] += bool(calls) and all(name in text for name in calls)
        notes["tools"] += bool(tools)
        notes["tools_rendered"] += bool(tools) and all(str(name) in text for name in tools)
        notes["reasoning_rendered"] += bool(thoughts) and thoughts[-1].strip() in text
        return notes


class RowPool:
    """RowWorkers side by side; outcomes come in the order of the rows, whatever the number of processes."""

    def __init__(self, settings: RowSettings, workers: int) -> None:
        self.local = RowWorker(settings)  # faults of the settings show here, before any process starts
        self._settings, self._workers = settings, workers
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> RowPool:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def outcomes(
        self, source: SourceConfig, rows: Iterator[tuple[str, Any]], tokenise: bool = True
    ) -> Iterator[Outcome]:
        """The outcome of each row."""
        began = time.monotonic()
        chunks = iter(lambda: list(islice(rows, CHUNK)), [])
        for chunk in chunks:
            yield from self.local.chunk(source, chunk, tokenise)
            if self._workers > 1 and (self._pool is not None or time.monotonic() - began > _ALONE_S):
                break
        else:
            return
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._workers, mp_context=get_context("spawn"), initializer=_start, initargs=(self._settings,)
            )
        pending: deque[Future[list[Outcome]]] = deque()
        for chunk in chunks:
            pending.append(self._pool.submit(_chunk, source, chunk, tokenise))
            if len(pending) > 3 * self._workers:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()


_worker: RowWorker


def _start(settings: RowSettings) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker = RowWorker(settings)


def _chunk(source: SourceConfig, rows: list[tuple[str, Any]], tokenise: bool) -> list[Outcome]:
    return _worker.chunk(source, rows, tokenise)
