"""Conversations in their canonical form: checked, repaired where that is safe, named by their content."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from app.errors import RowError
from app.sources.raw import RawConversation

_ROLES = ("system", "developer", "user", "assistant", "tool")
# Parameters of apply_chat_template itself: a row may fill the template's variables, not these.
RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)
MOST_NESTED = 100  # levels of lists and objects in a row: templates and JSON go down them one call each
_WHOLE = ("top_k", "max_new_tokens")
_SAMPLING = {"temperature": (0.0, 1e3), "top_p": (1e-9, 1.0), "top_k": (-1, 1e9), "max_new_tokens": (1, 1e9)}


@dataclass(frozen=True)
class Conversation:
    """A conversation in its canonical form.

    A message has `role`, `content` (always text), and where given `reasoning_content`, `tool_calls` (arguments as
    objects, the form templates are written for), `tool_call_id`, `name`.
    """

    messages: list[dict[str, Any]]
    domain: str | None
    template_kwargs: dict[str, Any]  # `tools` among them
    sampling: dict[str, Any]  # the row's own values over the run's
    shape: str = "messages"
    private: bool = False
    notes: Counter[str] = field(default_factory=Counter)  # what was repaired or is out of the ordinary

    def id(self, use: str) -> str:
        """Content hash. What the target answers anew is no part of it, only where it answers: two records of one
        prompt are repeats."""
        messages: list[Any] = self.messages
        if use == "regenerate":
            messages = [turn.inputs for turn in turns_to_answer(self.messages)]
        canonical = [use, messages, self.template_kwargs, self.sampling]
        text = json.dumps(canonical, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


@dataclass(frozen=True)
class Turn:
    """What the target is given before one of its answers, and what was recorded as that answer."""

    inputs: list[dict[str, Any]]
    recorded: dict[str, Any] | None


def turns_to_answer(messages: list[dict[str, Any]]) -> list[Turn]:
    """The conversation cut where the target must answer; answers in a row are one, the last."""
    turns: list[Turn] = []
    current: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "assistant":
            current.append(message)
        elif current:
            turns.append(Turn(current, message))
            current = []
        elif turns:
            turns[-1] = Turn(turns[-1].inputs, message)
    if current:
        turns.append(Turn(current, None))
    return turns


def canonical(raw: RawConversation, system_prompt: str | None, use: str) -> Conversation:
    """Check and repair a conversation.

    Leading assistant turns are dropped, and trailing ones where the target answers anew; a role that repeats stays
    and is counted.

    Raises:
        RowError: with the reason the row is rejected by.
    """
    notes: Counter[str] = Counter()
    messages = [_canonical_message(m, number) for number, m in enumerate(raw.messages)]
    start = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages))
    while start < len(messages) and messages[start]["role"] == "assistant":
        del messages[start]
        notes["leading_assistant_dropped"] += 1
    if not any(m["role"] == "user" for m in messages):
        raise RowError("no_turns", "no user turn")
    roles = [m["role"] for m in messages]
    if any(a == b and a in ("user", "assistant") for a, b in pairwise(roles)):
        notes["role_repeats"] += 1
    if system_prompt is not None and roles[0] not in ("system", "developer"):
        messages = [{"role": "system", "content": system_prompt}, *messages]
    if any(m.get("reasoning_content") or (m["role"] == "assistant" and "</think>" in m["content"]) for m in messages):
        notes["reasoning"] += 1
    if use == "regenerate":
        while messages[-1]["role"] == "assistant":
            messages.pop()
    elif not any(m["role"] == "assistant" for m in messages):
        raise RowError("no_target_turn", "taken as it is, but no assistant turn")
    template_kwargs = dict(raw.template_kwargs)
    if taken := sorted(RESERVED_KWARGS & template_kwargs.keys()):
        raise RowError("bad_template_kwargs", f"{', '.join(taken)} cannot be set by a row")
    if raw.tools:
        template_kwargs["tools"] = raw.tools
    _check_values([messages, template_kwargs, raw.sampling, raw.domain])
    return Conversation(
        messages=messages,
        domain=raw.domain,
        template_kwargs=template_kwargs,
        sampling=_sampling(raw.sampling),
        shape=raw.shape,
        private=raw.private,
        notes=notes,
    )


def _check_values(value: list[Any]) -> None:
    """What JSON inside a row's texts became may be what no line of JSON could hold.

    Raises:
        RowError: `bad_json` where it is nested too deep, `bad_encoding` where a text is not Unicode.
    """
    level: list[Any] = [value]
    for _ in range(MOST_NESTED + 1):
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v) if _is_nest(inner)]
        if not level:
            break
    else:
        raise RowError("bad_json", f"the row is nested more than {MOST_NESTED} levels deep")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RowError("bad_encoding", "a text in the row holds half a surrogate pair") from error


def _is_nest(value: Any) -> bool:
    return isinstance(value, dict | list | tuple)


def _canonical_message(message: dict[str, Any], number: int) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise RowError("unknown_role", f"message {number} has role {role!r}")
    content = message.get("content")
    if isinstance(content, list):
        content = _flatten(content, number)
    elif isinstance(content, dict) and role == "tool":
        content = json.dumps(content, ensure_ascii=False)
    if content is not None and not isinstance(content, str):
        raise RowError("bad_content", f"message {number} has content of type {type(content).__name__}")
    kept: dict[str, Any] = {}
    for key in ("reasoning_content", "tool_call_id", "name"):
        if isinstance(message.get(key), str) and message[key]:
            kept[key] = message[key]
    if role == "assistant" and message.get("tool_calls"):
        kept["tool_calls"] = _tool_calls(message["tool_calls"], number)
    if role == "assistant" and not (content or "").strip() and not kept.keys() & {"reasoning_content", "tool_calls"}:
        raise RowError("empty_assistant", f"message {number} is empty")
    if role in ("user", "system", "developer") and not (content or "").strip():
        raise RowError("empty_turn", f"message {number} ({role}) is empty")
    return {"role": role, "content": content or "", **kept}


def _flatten(parts: list[Any], number: int) -> str:
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text"):
            if not isinstance(part.get("text"), str):
                raise RowError("bad_content", f"message {number} has a text part without text")
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RowError("multimodal_not_supported", f"message {number} has a part of type {kind}")
    return "".join(texts)


def _tool_calls(calls: Any, number: int) -> list[dict[str, Any]]:
    """Arguments as objects, as vLLM hands them to the template."""
    if isinstance(calls, str):
        try:
            calls = json.loads(calls)
        except (ValueError, RecursionError) as error:
            raise RowError("bad_tool_call", f"message {number}: tool_calls is not JSON ({error})") from error
    if not isinstance(calls, list):
        raise RowError("bad_tool_call", f"message {number}: tool_calls is {type(calls).__name__}, not a list")
    kept = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError("bad_tool_call", f"message {number}: a tool call has no function name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError) as error:
                raise RowError(
                    "bad_tool_arguments", f"message {number}: the arguments of {function['name']} are no JSON ({error})"
                ) from error
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise RowError(
                "bad_tool_arguments", f"message {number}: the arguments of {function['name']} are no JSON object"
            )
        identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        kept.append({**identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return kept


def _sampling(values: dict[str, Any]) -> dict[str, Any]:
    for key, value in values.items():
        if key not in _SAMPLING:
            raise RowError("bad_sampling", f"unknown sampling value {key!r}; known: {', '.join(_SAMPLING)}")
        low, high = _SAMPLING[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise RowError("bad_sampling", f"{key} = {value!r} is outside {low:g}..{high:g}")
        if key in _WHOLE and value != int(value):
            raise RowError("bad_sampling", f"{key} = {value!r} is not a whole number")
    return values
