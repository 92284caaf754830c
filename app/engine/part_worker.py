"""The Ray Data actor: one engine, parts of conversations in, committed parts of samples out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from app.answers import Answer, calls_in, history_message, read_answer, recorded_calls
from app.budget import STOP
from app.codecs import States
from app.conversations import turns_to_answer
from app.engine import warden
from app.engine.base import Completion, Engine, EngineError, EngineSpec, Request
from app.engine.crash_search import AttemptRecord, Gate
from app.engine.factory import start_engine
from app.engine.patience import persistently
from app.engine.progress import Reports, RowCounter
from app.engine.row_checks import check_states
from app.engine.spot_check import in_checking_order, stored_differ
from app.errors import RowError, UserError
from app.masks import check_prompt_length
from app.node_target import target_here
from app.packed import Captured, PackedStates
from app.parts import PartEntry, drop_files, read_ingest_part, stored_states, write_entry, write_files
from app.record import engine_version
from app.sources.shapes import WITHHELD
from app.storage import Store
from app.target import Renderer, TargetInfo, load_tokenizer

T = TypeVar("T")
Stored = tuple[States, States]  # of a sample: auxiliary rows [T-1, 3H], the teacher's [S, H]
Samples = list[tuple[dict[str, Any], Stored]]  # SAMPLE_SCHEMA row, what is kept of its states
QUOTING = ("bad_request", "tokens_unknown")  # their details are a server's or a template's words, the row's perhaps
Answered = tuple[Samples, RowError | None]  # of one conversation
Checked = tuple[str, RowError | None]  # the row that was computed again, and why that could not be done


@dataclass(frozen=True)
class WorkerConfig:
    """What an engine actor needs, picklable."""

    run_url: str
    options: dict[str, Any]
    engine: str
    spec: EngineSpec
    target: dict[str, Any]
    chat_template: str | None
    template_kwargs: dict[str, Any]
    max_new_tokens: int
    keep_length_stopped: bool
    keep_thinking_only: bool
    sampling: dict[str, Any]
    max_bad_rows: int
    row_timeout_s: float
    max_attempts: int
    spot_check: bool = True
    codec: str = "bf16"  # of the stored states
    sync: bool = True  # a part is on the disk before it counts
    compression: str = "none"
    record: dict[str, Any] = field(default_factory=dict)  # app/record.py
    board: Any = None  # handle of the actor that hears how the engine stands (app/engine/board.py)


class PartWorker:
    """Ray Data actor: holds one engine and turns parts of conversations into committed parts of samples."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._store = Store(config.run_url, config.options)
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._rows = RowCounter()
        self._reports = Reports(self._rows, config.board, self._store)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """Make the parts named by `part` and `key`; several calls may run at once, each in a thread of its own.

        What a person can mend comes back as `{"fault": ...}`: Ray would wrap an exception in its own words.
        """
        outcomes: list[dict[str, Any]] = []
        for part, key in zip(batch["part"], batch["key"], strict=True):
            try:
                if persistently(lambda: self._store.exists(STOP), self._store.url):
                    outcomes.append({"not_begun": int(part)})
                    continue
                outcomes.append(asdict(self._make(int(part), str(key))))
            except UserError as error:
                outcomes.append({"fault": str(error)})
            except EngineError as error:
                # A dead engine must not take every retry: the process ends, Ray starts another and gives it the part.
                print(f"the engine failed and is replaced: {error}", file=sys.stderr, flush=True)
                os._exit(1)
        return {"outcome": [json.dumps(o) for o in outcomes]}

    def _make(self, part: int, key: str) -> PartEntry:
        self._rows.began(part)
        try:
            return self._make_begun(part, key)
        finally:
            self._rows.settled(part)

    def _make_begun(self, part: int, key: str) -> PartEntry:
        url = self._store.url
        rows = persistently(lambda: read_ingest_part(self._store, part), url)
        ids = [row["id"] for row in rows]
        record = persistently(lambda: AttemptRecord(self._store, part, ids, self._config.max_attempts), url)
        with self._lock:
            if self._engine is None:
                record.starts_engine()
                self._start()
                record.engine_started()
        entry = asyncio.run_coroutine_threadsafe(self._make_part(part, key, rows, record), self._loop).result()
        persistently(record.forget, url)
        return entry

    def _start(self) -> None:
        config = self._config
        warden.sweep()
        warden.guard()
        self._target = target_here(TargetInfo.from_json(config.target), self._rows.moved)
        self._tokenizer = load_tokenizer(self._target.model, config.spec.trust_remote_code, config.chat_template)
        self._loop = asyncio.new_event_loop()
        self._gate = Gate()
        threading.Thread(target=self._loop.run_forever, name="draftmill-parts", daemon=True).start()
        spec = replace(config.spec, model=self._target.model)
        self._engine = self._reports.engine = start_engine(config.engine, spec)

    async def _make_part(self, part: int, key: str, rows: list[dict[str, Any]], record: AttemptRecord) -> PartEntry:
        """A committed part. Its files are written beside the spot check, so that little is left to do after that."""
        started = time.monotonic()
        async with self._gate.enter(alone=record.now.searching):
            results, check = await self._answer_groups(part, key, rows, record)
            seconds = time.monotonic() - started
            writing = asyncio.create_task(self._write(part, key, rows, results, seconds))
            try:
                chosen, unchecked = await check
            except BaseException:
                await self._drop(writing)
                raise
            record.passed(record.now.under_way)
        if unchecked is not None:
            await self._drop(writing)
            results = [([], unchecked) if r["id"] == chosen else a for r, a in zip(rows, results, strict=True)]
            writing = asyncio.create_task(self._write(part, key, rows, results, seconds))
        entry = replace(await writing, writer=self._reports.writer())
        write = partial(write_entry, self._store, entry, self._config.sync)
        await asyncio.to_thread(persistently, write, self._store.url)
        return entry

    async def _drop(self, writing: asyncio.Task[PartEntry]) -> None:
        """Delete what `writing` wrote; whatever it failed by comes again, or something else is told."""
        with contextlib.suppress(Exception):
            written = await writing
            await asyncio.to_thread(drop_files, self._store, written)

    async def _write(
        self, part: int, key: str, rows: list[dict[str, Any]], results: list[Answered], seconds: float
    ) -> PartEntry:
        """Write the data files of a part whose rows became `results`; its entry, which is not written yet.

        Raises:
            UserError: too many rows have bad states, or the store is full or cannot be reached.
        """
        kept_rows: list[dict[str, Any]] = []
        states: list[Stored] = []
        rejects: list[dict[str, str]] = []
        cut_short: list[dict[str, str]] = []
        bad_states: list[str] = []
        conversations = 0
        for row, (samples, error) in zip(rows, results, strict=True):
            if error is not None:
                quotes = row["private"] and error.reason in QUOTING
                fault = {
                    "id": row["id"],
                    "where": row["where"],
                    "reason": error.reason,
                    "detail": WITHHELD if quotes else error.detail,
                }
                (cut_short if samples else rejects).append(fault)
                if error.reason == "bad_states":
                    bad_states.append(f"row {row['id']}: {error.detail}")
            conversations += bool(samples)
            for sample, stored in samples:
                kept_rows.append(sample)
                states.append(stored)
        if len(bad_states) > self._config.max_bad_rows:
            raise UserError(
                f"part {part}: the captured states of {len(bad_states)} rows fail their checks ({bad_states[0]});"
                " nothing learnt from such states is accepted when served. Try capture.mode=extract"
            )
        finishes = Counter(r["finish_reason"] for r in kept_rows)
        entry = {
            "part": part,
            "key": key,
            "rows_in": len(rows),
            "conversations": conversations,
            "rejects": rejects,
            "cut_short": cut_short,
            "tokens": {
                "prompt": sum(len(r["prompt_ids"]) for r in kept_rows),
                "answer": sum(len(r["answer_ids"]) for r in kept_rows),
                "supervised": sum(int(np.count_nonzero(r["loss_mask"])) for r in kept_rows),
            },
            "finish_reasons": dict(finishes),
            "layers": list(self._config.spec.aux_layer_ids),
            "dtype": self._config.spec.dtype,
            "hidden_size": self._target.hidden_size,
            "seconds": round(seconds, 3),
            "codec": self._config.codec,
            "compression": self._config.compression,
            "record": {**self._config.record, "engine": engine_version(self._config.engine)},
        }
        if conversations + sum(1 for r in rejects) != len(rows):
            raise RuntimeError(f"part {part}: {len(rows)} rows in, {conversations} kept, {len(rejects)} rejected")
        return await asyncio.to_thread(
            persistently,
            lambda: write_files(self._store, entry, kept_rows, states, sync=self._config.sync),
            self._store.url,
        )

    async def _answer_groups(
        self, part: int, key: str, rows: list[dict[str, Any]], record: AttemptRecord
    ) -> tuple[list[Answered], asyncio.Future[Checked]]:
        """What became of each row, and the spot check, which may still be under way. All rows run at once, unless rows
        of this part have ended a process."""
        by_id = {row["id"]: row for row in rows}
        crash = RowError("engine_crash", "the engine's process ended while this row alone was under way")
        answers: dict[str, asyncio.Future[Answered]] = {row: _settled(([], crash)) for row in record.now.blamed}
        check: asyncio.Future[Checked] = _settled(("", None))
        groups = list(record.now.groups)
        for number, group in enumerate(groups, 1):
            await asyncio.to_thread(persistently, lambda group=group: record.begin(group), self._store.url)
            answers |= {row: asyncio.ensure_future(self._answer(part, by_id[row])) for row in group}
            if self._config.spot_check and number == len(groups):
                check = asyncio.create_task(self._spot_check(part, key, answers))
            await asyncio.gather(*(answers[row] for row in group))
            if number < len(groups):
                record.passed(group)
        return [answers[row["id"]].result() for row in rows], check

    async def _answer(self, part: int, row: dict[str, Any]) -> Answered:
        """Samples of one conversation. A fault in a later turn keeps the turns before it."""
        samples: Samples = []
        fault: RowError | None = None
        self._rows.started(row["id"])
        try:
            turns = self._as_is(row, samples) if row["use"] == "as_is" else self._regenerate(row, samples)
            await turns
        except RowError as error:
            fault = error
        self._rows.finished(part, row["id"], sum(len(sample["answer_ids"]) for sample, _ in samples))
        return samples, fault

    async def _spot_check(self, part: int, key: str, answers: dict[str, asyncio.Future[Answered]]) -> Checked:
        """Compute one sample of the part again by itself, as soon as it is there.

        Returns the row it is of, and why that could not be done: the row is to be rejected then.

        Raises:
            UserError: its states are not those that were captured.
        """
        for row in in_checking_order(list(answers), key):
            samples, _ = await answers[row]
            if samples:
                break
        else:
            return "", None
        sample, stored = samples[-1]
        name, given = f"{sample['sample_id']}-check", sample["answer_ids"]
        request = Request(name, sample["prompt_ids"], 1, {}, given, urgent=True)
        try:
            alone = await self._complete(request)
        except RowError as error:
            return row, RowError("not_checked", f"its states could not be computed again: {error.detail}")
        layers = (*self._config.spec.aux_layer_ids, self._config.spec.num_layers)
        fault = await asyncio.to_thread(stored_differ, stored, alone.states, sample, layers)
        if fault is not None:
            raise UserError(
                f"part {part}: the states captured for {sample['sample_id']} are not those that its tokens give alone"
                f" ({fault}); nothing of this part is kept. Try capture.mode=extract, or another version of the engine"
            )
        return row, None

    async def _regenerate(self, row: dict[str, Any], samples: Samples) -> None:
        kwargs = {**self._config.template_kwargs, **json.loads(row["template_kwargs"])}
        renderer = Renderer(self._tokenizer, kwargs)
        sampling = {**self._config.sampling, **json.loads(row["sampling"])}
        limit = int(sampling.pop("max_new_tokens", self._config.max_new_tokens))
        history: list[dict[str, Any]] = []
        turns = turns_to_answer(json.loads(row["messages"]))
        for turn, given in enumerate(turns):
            history = [*history, *given.inputs]
            if turn == 0:
                prompt = list(row["requests"][0]["prompt_ids"])
            else:
                prompt = await asyncio.to_thread(renderer.render, history, True)
                check_prompt_length(prompt, self._config.spec.max_model_len)
            room = self._config.spec.max_model_len - len(prompt)
            values = _sampling_of(sampling, row["id"], turn)
            request = Request(f"{row['id']}-{turn}", prompt, min(limit, room), values, None, history, kwargs)
            done = await self._complete(request)
            if not done.answer_ids or len(done.answer_ids) < 2:
                raise RowError("empty_answer", f"turn {turn}: the target answered {len(done.answer_ids)} token(s)")
            answer = self._read(done, prompt, renderer.thinks, turn)
            calls = recorded_calls(given.recorded)
            same_calls = bool(calls) and calls_in(answer.content) == calls
            history = [*history, history_message(answer, given.recorded, same_calls)]
            mask = np.arange(len(prompt) + len(done.answer_ids)) >= len(prompt)  # [T]
            cut = done.finish_reason == "length"
            sample = self._sample(row, turn, history, request, done, mask, kwargs, cut)
            samples.append((sample, await self._stored(done, mask)))
            follows = turns[turn + 1].inputs[0] if turn + 1 < len(turns) else None
            if follows is not None and follows["role"] == "tool" and not same_calls:
                raise RowError("tool_call_differs", f"turn {turn}: the recorded tool result answers another call")

    def _read(self, done: Completion, prompt: list[int], thinks: bool, turn: int) -> Answer:
        """The answer taken apart.

        Raises:
            RowError: `stopped_by_length`, `leftover_tag`, `thinking_only`, `empty_answer`: not to be learnt from.
        """
        ids = list(done.answer_ids)
        while ids and ids[-1] in self._target.eos_token_ids:
            ids.pop()
        text = str(self._tokenizer.decode(ids, skip_special_tokens=False))
        opened = str(self._tokenizer.decode(prompt[-8:], skip_special_tokens=False)).rstrip().endswith("<think>")
        answer = read_answer(text, thinks, opened)
        if done.finish_reason == "length" and not self._config.keep_length_stopped:
            raise RowError("stopped_by_length", f"turn {turn}: the answer reached generate.max_new_tokens")
        if answer.leftover_tag:
            raise RowError("leftover_tag", f"turn {turn}: a think tag stands in the answer")
        if answer.thinking_only and not self._config.keep_thinking_only:
            raise RowError("thinking_only", f"turn {turn}: thinking and no answer ({done.finish_reason})")
        if not text.strip():
            raise RowError("empty_answer", f"turn {turn}: the answer holds no text")
        return answer

    async def _as_is(self, row: dict[str, Any], samples: Samples) -> None:
        kwargs = {**self._config.template_kwargs, **json.loads(row["template_kwargs"])}
        messages = json.loads(row["messages"])
        for number, r in enumerate(row["requests"]):
            request = Request(f"{row['id']}-{number}", list(r["prompt_ids"]), 1, {}, list(r["answer_ids"]))
            done = await self._complete(request)
            mask = np.array(r["loss_mask"], dtype=bool)  # [T]
            sample = self._sample(row, number, messages, request, done, mask, kwargs, bool(r["truncated"]))
            samples.append((sample, await self._stored(done, mask)))

    async def _stored(self, done: Completion, mask: NDArray[np.bool_]) -> Stored:
        """What is kept of the states, in the codec; row by row, so that a part's end has little left to do."""
        return await _aside(stored_states, done.states, mask, self._config.codec)

    async def _complete(self, request: Request) -> Completion:
        try:
            assert self._engine is not None
            done = await asyncio.wait_for(self._engine.complete(request), self._config.row_timeout_s)
        except TimeoutError as error:
            raise RowError("timeout", f"no answer within {self._config.row_timeout_s:g} s") from error
        expected = len(request.prompt_ids) + len(done.answer_ids) - 1
        if len(done.states) != expected:
            raise RowError("bad_states", f"{len(done.states)} states for {expected + 1} tokens")
        layers = (*self._config.spec.aux_layer_ids, self._config.spec.num_layers)
        fault = await _aside(check_states, done.states, layers)
        if fault is not None:
            raise RowError("bad_states", fault)
        return done

    def _sample(
        self,
        row: dict[str, Any],
        turn: int,
        messages: list[dict[str, Any]],
        request: Request,
        done: Completion,
        mask: NDArray[np.bool_],
        template_kwargs: dict[str, Any],
        truncated: bool,
    ) -> dict[str, Any]:
        return {
            "sample_id": f"{row['id']}-{turn}",
            "conversation_id": row["id"],
            "turn": turn,
            "source": row["source"],
            "domain": row["domain"],
            "use": row["use"],
            "private": row["private"],
            "messages": json.dumps(messages, ensure_ascii=False),
            "template_kwargs": json.dumps(template_kwargs, ensure_ascii=False),
            "sampling": json.dumps(request.sampling),
            "prompt_ids": request.prompt_ids,
            "answer_ids": done.answer_ids,
            "loss_mask": mask,
            "mask_method": row["mask_method"],
            "finish_reason": done.finish_reason,
            "truncated": truncated,
        }


async def _aside(function: Callable[..., T], states: Captured, *others: Any) -> T:
    """function(states, ...) in a thread, since a wave of rows often ends at once; of packed states at once, whose
    arithmetic is done."""
    if isinstance(states, PackedStates):
        return function(states, *others)
    return await asyncio.to_thread(function, states, *others)


def _settled(value: T) -> asyncio.Future[T]:
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future


def _sampling_of(values: dict[str, Any], identity: str, turn: int) -> dict[str, Any]:
    """Sampling of one request, seeded by the row: a part made again gets the same answers."""
    if values.get("temperature", 0) == 0:
        return {"temperature": 0.0}
    seed = (int(values.get("seed", 0)) + int(identity[:8], 16) + turn) % 2**31
    kept = {k: v for k, v in values.items() if k != "seed" and not (k == "top_k" and v <= 0)}
    return {**kept, "seed": seed}
