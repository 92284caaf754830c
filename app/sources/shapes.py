"""The shape of a row, recognised by its keys: public sets, pairs, turns, trajectories, logs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from app.config import ColumnName
from app.errors import RowError
from app.sources.logs import from_log
from app.sources.raw import RawConversation

_ROLES = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "ipython": "tool",
    "function_call": "function_call",
}
_LISTS = ("messages", "conversations", "conversation", "trajectory", "history", "dialog", "dialogue")
_QUESTIONS = ("prompt", "question", "query", "problem", "instruction")
_ANSWERS = ("response", "completion", "answer", "output", "solution", "chosen")
WITHHELD = "the row is private: no more is said of it"
_QUOTING = ("unknown_role", "multimodal_not_supported", "unsupported_item", "bad_message")
_REASONING = ("reasoning_content", "reasoning", "thinking")


def to_raw(row: Any, columns: Mapping[ColumnName, str]) -> RawConversation:
    """A parsed row as a conversation.

    Args:
        row: what the reader gave: an object, a list of messages, or a line of text.
        columns: our field -> the row's key (dots go inside); empty: the shape is recognised.

    Raises:
        RowError: `unknown_shape`, `missing_column`, or what is wrong with the shape it has.
    """
    try:
        return _recognised(row, columns)
    except RecursionError as error:
        raise RowError("bad_json", "JSON inside the row is nested too deep") from error


def _recognised(row: Any, columns: Mapping[ColumnName, str]) -> RawConversation:
    if isinstance(row, str):
        return _logged(row) or RawConversation([{"role": "user", "content": row}], "text")
    if isinstance(row, list):
        row = {"messages": row}
    if not isinstance(row, dict):
        raise RowError("not_an_object", f"a row must be a JSON object, this is {type(row).__name__}")
    if columns:
        return _by_columns(row, columns)
    return _logged(row) or _by_keys(row)


def _by_columns(row: dict[str, Any], columns: Mapping[ColumnName, str]) -> RawConversation:
    """What the named columns hold. A row of a log stays private, and what its errors would quote of it is withheld."""
    if not _is_of_a_log(row):
        return _by_keys(_mapped(row, columns))
    try:
        return replace(_by_keys(_mapped(row, columns)), private=True)
    except RowError as error:
        raise _withheld(error) from error


def _is_of_a_log(row: dict[str, Any]) -> bool:
    try:
        return from_log(row) is not None
    except RowError:  # of one, and not usable in its own shape
        return True


def _by_keys(row: dict[str, Any]) -> RawConversation:
    for recognise in _RECOGNISERS:
        raw = recognise(row)
        if raw is not None:
            return _with_extras(raw, row)
    raise RowError(
        "unknown_shape",
        f"no known shape has the keys {', '.join(sorted(map(str, row))[:8]) or 'of an empty object'};"
        " name them in sources[].columns",
    )


def _logged(row: Any) -> RawConversation | None:
    """A log's or an export's conversation; what its errors would quote of it is withheld."""
    try:
        return from_log(row)
    except RowError as error:
        raise _withheld(error) from error


def _withheld(error: RowError) -> RowError:
    return RowError(error.reason, WITHHELD if error.reason in _QUOTING else error.detail)


def _mapped(row: dict[str, Any], columns: Mapping[ColumnName, str]) -> dict[str, Any]:
    """The row under our own names."""
    mapped: dict[str, Any] = {}
    for name, key in columns.items():
        node: Any = row
        for part in key.split("."):
            if not isinstance(node, dict) or part not in node:
                raise RowError("missing_column", f"no column {key!r} among {', '.join(sorted(map(str, row))[:8])}")
            node = node[part]
        mapped[name] = node
    kept: dict[str, Any] = {k: row[k] for k in ("template_kwargs", "sampling", "domain") if k in row}
    return {**kept, **mapped}


def _from_list(row: dict[str, Any]) -> RawConversation | None:
    """`messages` of OpenAI, `conversations` of ShareGPT, `history`/`trajectory` of agents."""
    for key in _LISTS:
        value = row.get(key)
        if key == "history" and isinstance(value, list) and all(isinstance(v, list | tuple) for v in value):
            continue  # pairs before an instruction: Alpaca with a history
        if key in row and (isinstance(value, list) or key in ("messages", "conversations")):
            break
    else:
        return None
    if value is None or not isinstance(value, list) or not value:
        raise RowError("no_turns", f"{key} is empty or not a list")
    messages: list[dict[str, Any]] = []
    sharegpt = False
    for number, item in enumerate(value):
        if not isinstance(item, dict):
            raise RowError("bad_message", f"{key}[{number}] is {type(item).__name__}, not an object")
        sharegpt = sharegpt or "from" in item
        messages.append(_message(item, number, messages))
    shape = "sharegpt" if sharegpt else {"trajectory": "trajectory", "history": "trajectory"}.get(key, "messages")
    return RawConversation([m for m in messages if m], shape)


def _message(item: dict[str, Any], number: int, before: list[dict[str, Any]]) -> dict[str, Any]:
    name = item.get("role", item.get("from", item.get("type") if "text" in item else None))
    role = _ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise RowError("unknown_role", f"message {number} has role {name!r}")
    content = next((item[k] for k in ("content", "value", "text", "system_prompt") if item.get(k) is not None), None)
    if role == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": _calls_of(content, number)}
    message: dict[str, Any] = {"role": role, "content": content}
    for key in _REASONING:
        if isinstance(item.get(key), str) and item[key]:
            message["reasoning_content"] = item[key]
            break
    for key in ("tool_calls", "tool_call_id", "name"):
        if item.get(key):
            message[key] = item[key]
    legacy = item.get("function_call")
    if role == "assistant" and isinstance(legacy, dict) and "tool_calls" not in message:
        message["tool_calls"] = [{"type": "function", "function": legacy}]
    return message


def _calls_of(value: Any, number: int) -> list[dict[str, Any]]:
    """ShareGPT's function_call turn: one call or a list of them, as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError("bad_tool_call", f"message {number}: the function_call is not JSON ({error})") from error
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(c, dict) and isinstance(c.get("name"), str) for c in calls):
        raise RowError("bad_tool_call", f"message {number}: a function_call needs a name and arguments")
    return [
        {"type": "function", "function": {"name": c["name"], "arguments": c.get("arguments", c.get("parameters", {}))}}
        for c in calls
    ]


def _from_turns(row: dict[str, Any]) -> RawConversation | None:
    """EAGLE's and MT-bench's `turns`: the user's side alone."""
    turns = row.get("turns")
    if not isinstance(turns, list):
        return None
    if not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise RowError("no_turns", "turns is empty or holds something that is not text")
    messages = [{"role": "user", "content": t} for t in turns]
    return RawConversation(_with_system(row, messages), "turns", domain=_text(row.get("category")))


def _from_alpaca(row: dict[str, Any]) -> RawConversation | None:
    """`instruction`, `input`, `output`, and LLaMA-Factory's `system` and `history` pairs."""
    if "instruction" not in row:
        return None
    instruction, extra = _text(row["instruction"]), _text(row.get("input"))
    question = "\n\n".join(part for part in (instruction, extra) if part)
    if not question:
        raise RowError("empty_prompt", "instruction and input are empty or not text")
    earlier: list[dict[str, Any]] = []
    for pair in row.get("history") or []:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise RowError("bad_history", "history holds something that is not a pair")
        earlier += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    messages = [*earlier, {"role": "user", "content": question}, *_answer(row, ("output", "response", "answer"))]
    return RawConversation(_with_system(row, messages), "alpaca")


def _from_pair(row: dict[str, Any]) -> RawConversation | None:
    """`prompt`/`response`, `question`/`answer` and their like; a prompt may be a list of messages."""
    key = next((k for k in _QUESTIONS if k in row), None)
    if key is None:
        return None
    prompt = row[key]
    if isinstance(prompt, list):
        raw = _from_list({"messages": prompt})
        assert raw is not None
        messages = raw.messages
    else:
        if not isinstance(prompt, str) or not prompt.strip():
            raise RowError("empty_prompt", f"{key} is empty or not text")
        extra = _text(row.get("input"))
        messages = [{"role": "user", "content": f"{prompt}\n\n{extra}" if extra else prompt}]
    answer = _answer(row, _ANSWERS)
    shape = "question_answer" if key == "question" else "prompt_response" if answer else "prompt"
    return RawConversation(_with_system(row, [*messages, *answer]), shape)


_RECOGNISERS: tuple[Callable[[dict[str, Any]], RawConversation | None], ...] = (
    _from_list,
    _from_turns,
    _from_alpaca,
    _from_pair,
)


def _answer(row: dict[str, Any], keys: tuple[str, ...]) -> list[dict[str, Any]]:
    for key in keys:
        value = row.get(key)
        if isinstance(value, list) and value and isinstance(value[-1], dict) and "role" in value[-1]:
            value = value[-1].get("content")  # preference sets give whole conversations
        if isinstance(value, str) and value.strip():
            message = {"role": "assistant", "content": value}
            for name in _REASONING:
                if _text(row.get(name)):
                    message["reasoning_content"] = row[name]
                    break
            return [message]
    return []


def _with_system(row: dict[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    system = _text(row.get("system")) or _text(row.get("system_prompt"))
    if system and messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    return messages


def _with_extras(raw: RawConversation, row: dict[str, Any]) -> RawConversation:
    """The row's own tools, system prompt, template arguments, sampling and domain."""
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError) as error:
            raise RowError("bad_tools", f"tools is not JSON ({error})") from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        raise RowError("bad_tools", f"tools is {type(tools).__name__}, not a list of objects")
    kwargs, sampling = _mapping(row, "template_kwargs"), _mapping(row, "sampling")
    return replace(
        raw,
        messages=_with_system(row, raw.messages) if raw.messages else raw.messages,
        tools=raw.tools or ([_tool(t) for t in tools] if tools else None),
        template_kwargs={**raw.template_kwargs, **kwargs},
        sampling={**raw.sampling, **sampling},
        domain=_text(row.get("domain")) or raw.domain,
    )


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's form; ShareGPT sets give the bare function."""
    if "function" not in tool:
        return {"type": "function", "function": tool}
    if not isinstance(tool["function"], dict):
        raise RowError("bad_tools", f"the function of a tool is {type(tool['function']).__name__}, not an object")
    return tool


def _mapping(row: dict[str, Any], key: str) -> dict[str, Any]:
    value = row.get(key) or {}
    if not isinstance(value, dict):
        raise RowError(f"bad_{key}", f"{key} is {type(value).__name__}, not an object")
    return value


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None
