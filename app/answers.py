"""What the target wrote: its thinking, its text, its tool calls, and whether they can be learnt from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_OPEN, _CLOSE = "<think>", "</think>"
# Where a call begins in the text, of the families whose templates write calls as JSON.
_CALL_MARKS = ("<tool_call>", "<|tool_call|>", "<|tool_calls_section_begin|>", "[TOOL_CALLS]", "<|python_tag|>", "{")


@dataclass(frozen=True)
class Answer:
    """A decoded answer, taken apart."""

    reasoning: str | None
    content: str  # what follows the thinking, calls included
    leftover_tag: bool  # a think tag stands where none belongs

    @property
    def thinking_only(self) -> bool:
        return self.reasoning is not None and not self.content.strip()


def read_answer(text: str, thinks: bool, opened: bool) -> Answer:
    """Split an answer's thinking from its content.

    Args:
        text: the answer without its end-of-turn token.
        thinks: the template knows thinking; else every think tag is a leftover.
        opened: the prompt ended with an open think tag.
    """
    reasoning, content = None, text
    stripped = text.lstrip()
    if thinks and (opened or stripped.startswith(_OPEN)):
        body = text if opened else stripped[len(_OPEN) :]
        reasoning, closed, rest = body.partition(_CLOSE)
        reasoning, content = reasoning.strip("\n"), rest.lstrip("\n") if closed else ""
    left = _OPEN in content or _CLOSE in content or (reasoning is not None and _OPEN in reasoning)
    return Answer(reasoning, content, left)


def calls_in(text: str) -> list[tuple[str, Any]]:
    """Tool calls written as JSON objects in `text`: (name, arguments), in order."""
    decoder = json.JSONDecoder()
    calls: list[tuple[str, Any]] = []
    at = text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):  # a model that stutters opens brackets without end
            at = text.find("{", at + 1)
            continue
        function = value.get("function", value) if isinstance(value, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            arguments = function.get("arguments", function.get("parameters", {}))
            calls.append((function["name"], _parsed(arguments)))
        at = text.find("{", end)
    return calls


def recorded_calls(message: dict[str, Any] | None) -> list[tuple[str, Any]]:
    """The calls of a canonical assistant message, as `calls_in` gives them."""
    calls = (message or {}).get("tool_calls", [])
    return [(c["function"]["name"], c["function"]["arguments"]) for c in calls]


def history_message(answer: Answer, recorded: dict[str, Any] | None, same_calls: bool) -> dict[str, Any]:
    """The answer as the assistant message that later turns are rendered from."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if same_calls and recorded is not None:
        starts = [answer.content.find(mark) for mark in _CALL_MARKS if mark in answer.content]
        message["content"] = answer.content[: min(starts)].rstrip() if starts else answer.content
        message["tool_calls"] = recorded["tool_calls"]
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    return message


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
