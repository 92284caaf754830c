"""Logs of requests and responses of OpenAI-compatible servers and proxies.

Seen in: OpenAI's chat completions, Responses and batch file reference (2025), vLLM 0.32 and LiteLLM 1.x logs.
"""

from __future__ import annotations

import json
from typing import Any

from app.errors import RowError
from app.sources.raw import RawConversation
from app.sources.streams import is_sse, response_of, response_of_sse

_REQUESTS = ("request", "request_body", "body", "input")
_RESPONSES = ("response", "response_body", "output")
# A bare body is told from a data set's row by what only a request has.
_REQUEST_ONLY = frozenset(
    {"chat_template_kwargs", "stream", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stream_options"}
)
_RESPONSE_KEYS = frozenset({"choices", "output", "error", "body"})


def from_request_log(row: dict[str, Any]) -> RawConversation | None:
    """A logged request with its response, if it has one, as a conversation.

    The request's sampling values are not taken over: the run's own count. Of several choices the first is taken, which
    the shape's name says.

    Raises:
        RowError: `failed_request`, `cut_stream`, `bad_response`, `no_prompt`, `partial_conversation`, ...
    """
    body = _request_body(row)
    response = next((row[k] for k in _RESPONSES if row.get(k) is not None), None)
    if body is None:
        if isinstance(row.get("messages"), list) and _is_response(response):
            body, shape = row, "litellm_log"
        elif "model" in row and _REQUEST_ONLY & row.keys() and _is_body(row):
            body, shape, response = row, "openai_request", None
        elif _is_response(response) and not row.keys() & {"messages", "prompt", "conversations", "instruction"}:
            _check_status(row, response)
            raise RowError("no_prompt", "a response without its request; log both in one row")
        else:
            return None
    else:
        shape = "openai_log" if response is not None else "openai_request"
    _check_status(row, response)
    answer, several = _answer(response) if response is not None else ([], False)
    messages = _messages_of(body)
    if body.get("continue_final_message"):
        raise RowError("continued_message", "the request continues an answer (continue_final_message)")
    if "messages" not in body and "prompt" not in body:
        shape = shape.replace("openai", "responses")
    return RawConversation(
        messages=[*messages, *answer],
        shape=f"{shape}_first_choice" if several else shape,
        tools=_tools(body),
        template_kwargs=_template_kwargs(body),
        private=True,
    )


def from_body(body: dict[str, Any], shape: str) -> RawConversation | None:
    """A request body alone; None where it is none.

    Raises:
        RowError: as `from_request_log`.
    """
    if not _is_body(body):
        return None
    return RawConversation(
        _messages_of(body), shape, tools=_tools(body), template_kwargs=_template_kwargs(body), private=True
    )


def _request_body(row: dict[str, Any]) -> dict[str, Any] | None:
    for key in _REQUESTS:
        value = _parsed(row.get(key))
        if isinstance(value, dict):
            inner = _parsed(value.get("body"))  # an HTTP request: method, headers, body
            if isinstance(inner, dict) and _is_body(inner):
                return inner
            if _is_body(value):
                return value
        elif key == "input" and isinstance(value, list) and value and _is_answer(row.get("output")):
            if all(isinstance(item, dict) and "role" in item for item in value):
                return {**row, "messages": value}
            if all(isinstance(item, dict) and ("role" in item or "type" in item) for item in value):
                return row
    return None


def _is_body(value: dict[str, Any]) -> bool:
    if isinstance(value.get("messages"), list):
        return True
    return "model" in value and isinstance(value.get("prompt", value.get("input")), str | list)


def _is_response(value: Any) -> bool:
    value = _parsed(value)
    if isinstance(value, str):
        return is_sse(value) and "{" in value
    if isinstance(value, list):
        return bool(value) and all(isinstance(v, dict) and "choices" in v for v in value)
    if not isinstance(value, dict):
        return False
    body = _parsed(value.get("body"))
    return bool(
        isinstance(value.get("choices"), list)
        or (isinstance(value.get("output"), list) and value.get("object") == "response")
        or (isinstance(body, dict) and _is_response(body))
        or ("status_code" in value and "body" in value)
        or (isinstance(value.get("error"), dict) and "message" in value["error"])
    )


def _is_answer(value: Any) -> bool:
    value = _parsed(value)
    return _is_response(value) or (isinstance(value, dict) and ("role" in value or "content" in value))


def _is_item(value: Any) -> bool:
    """Whether it is an item of the Responses API, and no event of its stream."""
    if not isinstance(value, dict) or "choices" in value:
        return False
    return "role" in value or ("type" in value and not str(value["type"]).startswith(("response.", "error")))


def _parsed(value: Any) -> Any:
    """A JSON object or list given as a string, as a value; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _check_status(row: dict[str, Any], response: Any) -> None:
    response = _parsed(response)
    for holder in (row, response if isinstance(response, dict) else {}):
        for key in ("status", "status_code", "response_status"):
            status = holder.get(key)
            if isinstance(status, str) and status.isdigit():
                status = int(status)
            if isinstance(status, int) and not isinstance(status, bool) and status >= 400:
                raise RowError("failed_request", f"the server answered with status {status}")
            if status in ("failure", "failed", "error", "cancelled"):
                raise RowError("failed_request", f"the response has status {status}")
        if holder.get("error"):
            raise RowError("failed_request", "the response is an error")
    if isinstance(response, dict) and isinstance(inner := _parsed(response.get("body")), dict):
        _check_status({}, inner)


def _answer(response: Any) -> tuple[list[dict[str, Any]], bool]:
    """The response's messages, and whether it has more choices than the one taken."""
    value = _parsed(response)
    if isinstance(value, dict) and value.get("body") is not None and "choices" not in value:
        value = _parsed(value["body"])
    if isinstance(value, str):
        if is_sse(value) and "{" in value:
            value = response_of_sse(value)
        elif value.lstrip()[:2] in ('{"', "{\n", "[{"):
            raise RowError("bad_response", "the response is cut or not JSON")
        else:
            return ([{"role": "assistant", "content": value}] if value.strip() else []), False
    elif isinstance(value, list):
        if value and all(_is_item(v) for v in value):
            return _items(value), False
        value = response_of(value)
    if not isinstance(value, dict):
        raise RowError("bad_response", f"the response is {type(value).__name__}, not an object")
    if value.get("error"):
        raise RowError("failed_request", "the response is an error")
    if isinstance(value.get("output"), list):
        return _items(value["output"]), False
    if "choices" not in value and ("role" in value or "content" in value):
        return [_message({"role": "assistant", **value}, 0)], False
    if "choices" not in value and not value.keys() & _RESPONSE_KEYS:
        if isinstance(response, str):  # the answer is itself JSON: structured output
            return [{"role": "assistant", "content": response}], False
        raise RowError("bad_response", "the response has no choices")
    choices = value.get("choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(c, dict) for c in choices):
        raise RowError("bad_response", "the response has no choices")
    first = next((c for c in choices if c.get("index") == 0), choices[0])
    if first.get("finish_reason") in ("content_filter", "error", "abort"):
        raise RowError("failed_request", f"the answer ended by {first['finish_reason']}")
    if isinstance(first.get("text"), str):
        return [{"role": "assistant", "content": first["text"]}], len(choices) > 1
    if not isinstance(first.get("message"), dict):
        raise RowError("bad_response", "the first choice has no message")
    return [_message({"role": "assistant", **first["message"]}, 0)], len(choices) > 1


def _messages_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The request's messages: chat completions, completions or Responses."""
    if isinstance(body.get("messages"), list):
        if not body["messages"]:
            raise RowError("no_turns", "messages is empty")
        return [_message(m, number) for number, m in enumerate(body["messages"])]
    if "prompt" in body:
        prompt = body["prompt"]
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if isinstance(prompt, list):
            kind = "token ids alone" if all(isinstance(p, int) for p in prompt) else f"{len(prompt)} prompts at once"
            raise RowError("token_prompt" if "ids" in kind else "several_prompts", f"the request holds {kind}")
        if not isinstance(prompt, str) or not prompt.strip():
            raise RowError("empty_prompt", "the prompt is empty or not text")
        return [{"role": "user", "content": prompt}]
    for key in ("previous_response_id", "conversation"):
        if body.get(key):
            raise RowError("partial_conversation", f"what came before lies with the server ({key})")
    given = body.get("input")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else _items(given or [])
    if isinstance(body.get("instructions"), str) and body["instructions"].strip():
        messages = [{"role": "system", "content": body["instructions"]}, *messages]
    return messages


def _message(message: Any, number: int) -> dict[str, Any]:
    """A message with the fields a template reads; the older function calls as tool calls."""
    if not isinstance(message, dict):
        raise RowError("bad_message", f"message {number} is {type(message).__name__}, not an object")
    role = message.get("role")
    content = message.get("content")
    if content is None and isinstance(message.get("refusal"), str):
        content = message["refusal"]
    kept: dict[str, Any] = {"role": "tool" if role == "function" else role, "content": content}
    thought = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thought, str):
        kept["reasoning_content"] = thought
    for key in ("tool_calls", "tool_call_id", "name"):
        if message.get(key):
            kept[key] = message[key]
    if isinstance(message.get("function_call"), dict) and "tool_calls" not in kept:
        kept["tool_calls"] = [{"type": "function", "function": message["function_call"]}]
    return kept


def _items(items: Any) -> list[dict[str, Any]]:
    """Items of the Responses API as messages: reasoning and calls join the assistant's message they belong to."""
    if not isinstance(items, list):
        raise RowError("bad_message", f"input is {type(items).__name__}, not a list")
    messages: list[dict[str, Any]] = []
    thoughts: list[str] = []

    def assistant() -> dict[str, Any]:
        if not messages or messages[-1]["role"] != "assistant" or thoughts:
            messages.append({"role": "assistant", "content": ""})
            if thoughts:
                messages[-1]["reasoning_content"] = "\n\n".join(thoughts)
                thoughts.clear()
        return messages[-1]

    for number, item in enumerate(items):
        if not isinstance(item, dict):
            raise RowError("bad_message", f"item {number} is {type(item).__name__}, not an object")
        kind = item.get("type", "message")
        if kind == "message" and item.get("role") == "assistant":
            message = assistant()
            message["content"] += _item_text(item.get("content"), number)
        elif kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary")
            given = parts if isinstance(parts, list) else []
            texts = [p["text"] for p in given if isinstance(p, dict) and isinstance(p.get("text"), str)]
            thoughts += [t for t in texts if t.strip()]
        elif kind == "function_call":
            call: dict[str, Any] = {
                "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }
            if isinstance(item.get("call_id"), str):
                call["id"] = item["call_id"]
            assistant().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = item.get("output")
            result = {"role": "tool", "content": output}
            messages.append({**result, "tool_call_id": item["call_id"]} if item.get("call_id") else result)
        else:
            raise RowError("unsupported_item", f"item {number} has type {kind}")
    return messages


def _item_text(content: Any, number: int) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else []:
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise RowError("bad_content", f"item {number} has a part that is no text")
        texts.append(text)
    return "".join(texts)


def _tools(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Tool definitions in the chat form; the server's own tools (web search, say) are left out."""
    tools = body.get("tools")
    if not tools and body.get("functions"):
        tools = body["functions"]
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise RowError("bad_tools", "tools is not a list of objects")
    kept = []
    for tool in tools:
        if isinstance(tool.get("function"), dict):
            kept.append({"type": "function", "function": tool["function"]})
        elif tool.get("type", "function") == "function" and isinstance(tool.get("name"), str):
            kept.append({"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}})
    return kept or None


def _template_kwargs(body: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    extra = body.get("extra_body")
    for holder in (extra if isinstance(extra, dict) else {}, body):
        kwargs = holder.get("chat_template_kwargs")
        if kwargs is None:
            continue
        if not isinstance(kwargs, dict):
            raise RowError("bad_template_kwargs", f"chat_template_kwargs is {type(kwargs).__name__}, not an object")
        merged.update(kwargs)
    return merged
