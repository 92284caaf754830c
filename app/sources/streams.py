"""Streamed responses put together again: lists of chunks, raw server-sent events, log files of one chunk a line.

Chunks are OpenAI's `chat.completion.chunk`, as vLLM 0.32 and SGLang send them (`reasoning` and `reasoning_content`).
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from app.errors import RowError

MAX_HELD = 4096  # rows held back behind the oldest open stream before that one counts as cut
MAX_CHARACTERS = 64 << 20  # text held in all open streams
_MAX_CLOSED = 4096  # ids remembered for chunks that come late
_CHUNK = "chat.completion.chunk"


class StreamedAnswer:
    """The first choice of a stream, filled chunk by chunk."""

    def __init__(self) -> None:
        self.chunks = 0
        self.characters = 0
        self.finish_reason: str | None = None
        self._texts: dict[str, list[str]] = {"content": [], "reasoning_content": [], "refusal": []}
        self._calls: dict[int, dict[str, Any]] = {}

    def add(self, chunk: dict[str, Any]) -> None:
        """Take one chunk in.

        Raises:
            RowError: `failed_request`, where the stream reports an error; `bad_response`, where it is no chunk.
        """
        self.chunks += 1
        if chunk.get("error"):
            raise RowError("failed_request", f"chunk {self.chunks} of the stream reports an error")
        choices = chunk.get("choices") or []
        if not isinstance(choices, list) or not all(isinstance(c, dict) for c in choices):
            raise RowError("bad_response", f"chunk {self.chunks} of the stream has choices of an unknown form")
        for choice in choices:
            if choice.get("index", 0) != 0:
                continue
            delta = choice.get("delta") or {}
            if isinstance(choice.get("text"), str):  # completions
                delta = {"content": choice["text"]}
            if not isinstance(delta, dict):
                raise RowError("bad_response", f"chunk {self.chunks} of the stream has a delta that is no object")
            self._add_delta(delta)
            if choice.get("finish_reason"):
                self.finish_reason = str(choice["finish_reason"])

    def _add_delta(self, delta: dict[str, Any]) -> None:
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        for name, text in (
            ("content", delta.get("content")),
            ("reasoning_content", thought),
            ("refusal", delta.get("refusal")),
        ):
            if isinstance(text, str) and text:
                self._texts[name].append(text)
                self.characters += len(text)
        calls = delta.get("tool_calls") or []
        if isinstance(delta.get("function_call"), dict):
            calls = [{"index": 0, "function": delta["function_call"]}]
        if not isinstance(calls, list) or not all(isinstance(c, dict) for c in calls):
            raise RowError("bad_response", f"chunk {self.chunks} of the stream has tool calls of an unknown form")
        for position, piece in enumerate(calls):
            index = piece.get("index")
            call = self._calls.setdefault(
                index if isinstance(index, int) else position, {"id": None, "name": "", "arguments": []}
            )
            function = piece.get("function") or {}
            call["id"] = call["id"] or piece.get("id")
            call["name"] = call["name"] or function.get("name") or ""
            if isinstance(function.get("arguments"), str):
                call["arguments"].append(function["arguments"])
                self.characters += len(function["arguments"])

    def response(self) -> dict[str, Any]:
        """The response the same request would have had without streaming."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._texts["content"])}
        for name in ("reasoning_content", "refusal"):
            if self._texts[name]:
                message[name] = "".join(self._texts[name])
        if self._calls:
            message["tool_calls"] = [
                {
                    **({"id": call["id"]} if call["id"] else {}),
                    "type": "function",
                    "function": {"name": call["name"], "arguments": "".join(call["arguments"])},
                }
                for _, call in sorted(self._calls.items())
            ]
        choice = {"index": 0, "message": message, "finish_reason": self.finish_reason}
        return {"object": "chat.completion", "choices": [choice]}


def response_of(events: list[Any], done: bool = False) -> dict[str, Any]:
    """The response of a whole stream.

    Args:
        events: chunks of chat completions or completions, or the events of the Responses API.
        done: the stream's end was seen ([DONE]).

    Raises:
        RowError: `cut_stream`, where the end is missing; `failed_request`; `bad_response`.
    """
    answer = StreamedAnswer()
    for event in events:
        if not isinstance(event, dict):
            raise RowError("bad_response", f"the stream holds an event that is {type(event).__name__}, not an object")
        kind = event.get("type")
        if kind in ("response.completed", "response.incomplete") and isinstance(event.get("response"), dict):
            return event["response"]
        if kind in ("response.failed", "error"):
            raise RowError("failed_request", f"the stream ends in {kind}")
        answer.add(event)
    if answer.finish_reason is None and not done:
        raise RowError("cut_stream", f"{len(events)} chunks and no finish_reason")
    return answer.response()


def is_sse(text: str) -> bool:
    """Whether a text is server-sent events."""
    start = text.lstrip()
    return start.startswith(("data:", "event:", ": "))


def response_of_sse(text: str) -> dict[str, Any]:
    """The response of raw server-sent events.

    Raises:
        RowError: as `response_of`.
    """
    events: list[Any] = []
    data: list[str] = []
    done = False
    for line in [*text.splitlines(), ""]:
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line.strip() and data:
            joined = "\n".join(data)
            data = []
            if joined.strip() == "[DONE]":
                done = True
                continue
            try:
                events.append(json.loads(joined))
            except ValueError as error:
                raise RowError("cut_stream", f"event {len(events) + 1} of the stream is no JSON") from error
    return response_of(events, done)


@dataclass
class _Slot:
    """A place in the order of rows: a row, or a stream that is still open."""

    where: str
    row: Any = None
    stream: StreamedAnswer | None = None
    extras: dict[str, Any] = field(default_factory=dict)  # what a log wraps around the chunk, its request say


def join_chunks(rows: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Join the chunks that belong together, by their id, into one row each: {"response": ..., + what was around them}.

    A joined row stands where its first chunk stood and carries its `where`. Chunks of several streams may alternate.
    A stream without an end becomes a RowError `cut_stream`, as does one behind which `MAX_HELD` rows wait or with which
    the open streams exceed `MAX_CHARACTERS`. Rows that are no chunks pass through as they are.
    """
    order: deque[_Slot] = deque()
    open_streams: dict[str, _Slot] = {}
    closed: OrderedDict[str, bool] = OrderedDict()  # id -> was cut
    characters = 0

    def close(identity: str, row: Any, cut: bool) -> None:
        nonlocal characters
        slot = open_streams.pop(identity)
        assert slot.stream is not None
        characters -= slot.stream.characters
        slot.row, slot.stream, slot.extras = row, None, {}
        closed[identity] = cut
        if len(closed) > _MAX_CLOSED:
            closed.popitem(last=False)

    def cut_oldest(why: str) -> None:
        identity, slot = next(iter(open_streams.items()))
        assert slot.stream is not None
        close(identity, RowError("cut_stream", f"{slot.stream.chunks} chunks and no finish_reason{why}"), True)

    for where, row in rows:
        chunk, extras = _chunk_of(row)
        if chunk is None:
            if not order:
                yield where, row
                continue
            order.append(_Slot(where, row))
        else:
            identity = str(chunk["id"])
            if identity not in open_streams:
                if _is_late(chunk, closed.get(identity)):
                    continue
                open_streams[identity] = _Slot(where, stream=StreamedAnswer())
                order.append(open_streams[identity])
            slot = open_streams[identity]
            assert slot.stream is not None
            slot.extras = {**extras, **slot.extras}
            before = slot.stream.characters
            try:
                slot.stream.add(chunk)
                characters += slot.stream.characters - before
                if slot.stream.finish_reason is not None:
                    close(identity, {**slot.extras, "response": slot.stream.response()}, False)
            except RowError as error:
                characters += slot.stream.characters - before
                close(identity, error, True)
        while characters > MAX_CHARACTERS and open_streams:
            cut_oldest("; the open streams are too long to hold")
        if len(order) > MAX_HELD and open_streams:
            cut_oldest(f" within {MAX_HELD} rows")
        while order and order[0].stream is None:
            first = order.popleft()
            yield first.where, first.row
    while open_streams:
        cut_oldest("")
    for slot in order:
        yield slot.where, slot.row


def _chunk_of(row: Any) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """A row's chunk, bare or under `response` or `chunk`, and what stands around it."""
    if not isinstance(row, dict):
        return None, {}
    if row.get("object") == _CHUNK and isinstance(row.get("id"), str):
        return row, {k: row[k] for k in ("request", "messages") if k in row}
    for key in ("response", "chunk"):
        inner = row.get(key)
        if isinstance(inner, dict) and inner.get("object") == _CHUNK and isinstance(inner.get("id"), str):
            return inner, {k: v for k, v in row.items() if k != key}
    return None, {}


def _is_late(chunk: dict[str, Any], was_cut: bool | None) -> bool:
    """Whether a chunk is the rest of a stream that is closed: usage after the end, or what follows a cut."""
    if was_cut is None:
        return False
    choices = [c for c in chunk.get("choices") or [] if isinstance(c, dict) and c.get("index", 0) == 0]
    return was_cut or not any(c.get("delta") or c.get("text") for c in choices)
