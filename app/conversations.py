"""Rows of a source file to conversations, and conversations to token ids and loss masks."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from app.errors import RowError
from app.target import Renderer

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
_WHOLE = ("top_k", "max_new_tokens")
_SAMPLING = {"temperature": (0.0, 1e3), "top_p": (1e-9, 1.0), "top_k": (-1, 1e9), "max_new_tokens": (1, 1e9)}


@dataclass(frozen=True)
class Conversation:
    """A conversation in its canonical form."""

    messages: list[dict[str, Any]]
    domain: str | None
    template_kwargs: dict[str, Any]
    sampling: dict[str, Any]  # the row's own values over the run's

    def id(self, use: str) -> str:
        """Content hash. What the target answers anew is no part of it: two records of one prompt are repeats."""
        messages = self.messages
        if use == "regenerate":
            messages = [m for m in messages if m["role"] != "assistant"]
        canonical = [use, messages, self.template_kwargs, self.sampling]
        text = json.dumps(canonical, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def parse_row(row: Any, system_prompt: str | None, use: str) -> Conversation:
    """A row of `{"prompt": ...}` or `{"messages": [...]}` as a conversation.

    Raises:
        RowError: with the reason the row is rejected by.
    """
    if not isinstance(row, dict):
        raise RowError("not_an_object", f"a row must be a JSON object, this is {type(row).__name__}")
    if "messages" in row:
        messages = _messages(row["messages"])
    elif "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"].strip():
            raise RowError("empty_prompt", "prompt is empty or not text")
        messages = [{"role": "user", "content": row["prompt"]}]
    else:
        raise RowError("unknown_shape", f"neither prompt nor messages among {sorted(map(str, row))[:8]}")
    if system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": system_prompt}, *messages]
    if not any(m["role"] == "user" for m in messages):
        raise RowError("no_turns", "no user turn")
    if use == "regenerate":
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
    elif not any(m["role"] == "assistant" for m in messages):
        raise RowError("no_target_turn", "taken as it is, but no assistant turn")
    template_kwargs = _mapping(row, "template_kwargs")
    if taken := sorted(RESERVED_KWARGS & template_kwargs.keys()):
        raise RowError("bad_template_kwargs", f"{', '.join(taken)} cannot be set by a row")
    domain = row.get("domain")
    return Conversation(
        messages=messages,
        domain=domain if isinstance(domain, str) and domain else None,
        template_kwargs=template_kwargs,
        sampling=_sampling(_mapping(row, "sampling")),
    )


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise RowError("no_turns", "messages is empty or not a list")
    messages = []
    for number, message in enumerate(value):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES:
            raise RowError("unknown_role", f"message {number} has role {role!r}")
        content = message.get("content")
        if isinstance(content, list):
            content = _flatten(content, number)
        if content is not None and not isinstance(content, str):
            raise RowError("bad_content", f"message {number} has content of type {type(content).__name__}")
        kept = {k: v for k, v in message.items() if k in _KEPT_KEYS and v is not None}
        if role == "assistant" and not (content or kept):
            raise RowError("empty_assistant", f"message {number} is empty")
        if role in ("user", "system") and not (content or "").strip():
            raise RowError("empty_turn", f"message {number} ({role}) is empty")
        messages.append({"role": role, "content": content or "", **kept})
    return messages


_KEPT_KEYS = ("reasoning_content", "tool_calls", "tool_call_id", "name")


def _flatten(parts: list[Any], number: int) -> str:
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RowError("multimodal_not_supported", f"message {number} has a part of type {kind}")
    return "".join(texts)


def _mapping(row: dict[str, Any], key: str) -> dict[str, Any]:
    value = row.get(key) or {}
    if not isinstance(value, dict):
        raise RowError(f"bad_{key}", f"{key} is {type(value).__name__}, not an object")
    return value


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


@dataclass(frozen=True)
class Tokenised:
    """Token ids of a conversation as the engine will see them."""

    prompt_ids: list[int]
    answer_ids: list[int] | None  # as_is only
    loss_mask: list[bool] | None  # as_is only, over prompt + answer
    method: str


def turns_to_answer(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Groups of messages, each ending where the target must answer; recorded answers are left out."""
    groups: list[list[dict[str, Any]]] = []
    current: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            if current:
                groups.append(current)
                current = []
        else:
            current.append(message)
    if current:
        groups.append(current)
    return groups


def tokenise_regenerate(renderer: Renderer, messages: list[dict[str, Any]], max_length: int) -> Tokenised:
    """The prompt of the first turn.

    Raises:
        RowError: `prompt_too_long`, `template_rejects`.
    """
    ids = renderer.render(turns_to_answer(messages)[0], add_generation_prompt=True)
    check_prompt_length(ids, max_length)
    return Tokenised(ids, None, None, "engine")


def check_prompt_length(ids: list[int], max_length: int) -> None:
    """A prompt must leave room for an answer of two tokens: fewer supervise nothing (CONTRACTS.md section 2).

    Raises:
        RowError: `prompt_too_long`.
    """
    if len(ids) > max_length - 2:
        raise RowError(
            "prompt_too_long",
            f"{len(ids)} prompt tokens leave no room for an answer in max_length {max_length}",
        )


def tokenise_as_is(
    renderer: Renderer, messages: list[dict[str, Any]], max_length: int, method: str, eos: frozenset[int]
) -> Tokenised:
    """One render of the whole conversation, its mask, and the cut at `max_length`, checked in that order.

    Raises:
        RowError: `empty_mask` (the template has no tags, say), `no_mask_method` (not append-only),
            `no_target_tokens_left` (nothing supervised survives the cut), `template_rejects`.
    """
    if method == "auto":
        method = "generation_tags" if renderer.has_generation_tags else "prefix"
    if method == "generation_tags":
        ids, mask = renderer.render_with_tags(messages)
    elif method == "prefix":
        ids, mask = _prefix_mask(renderer, messages, eos)
    elif method == "all":
        ids = renderer.render(messages, add_generation_prompt=False)
        mask = [True] * len(ids)
    else:
        raise RowError("no_mask_method", f"method {method!r} does not fit conversations taken as they are")
    if not any(mask):
        raise RowError("empty_mask", f"method {method} supervises no token")
    ids, mask = ids[:max_length], mask[:max_length]
    if not any(a and b for a, b in pairwise(mask)):
        raise RowError("no_target_tokens_left", f"nothing supervised in the first {max_length} tokens")
    end = max(i for i, m in enumerate(mask) if m) + 1
    ids, mask = ids[:end], mask[:end]
    start = max(1, mask.index(True))
    return Tokenised(ids[:start], ids[start:], mask, method)


def _prefix_mask(
    renderer: Renderer, messages: list[dict[str, Any]], eos: frozenset[int]
) -> tuple[list[int], list[bool]]:
    """Mask by rendering each prefix: valid only where every prefix is a beginning of the whole."""
    ids = renderer.render(messages, add_generation_prompt=False)
    mask = [False] * len(ids)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = renderer.render(messages[:number], add_generation_prompt=True)
        after = renderer.render(messages[: number + 1], add_generation_prompt=False)
        if ids[: len(before)] != before or ids[: len(after)] != after or len(after) <= len(before):
            raise RowError(
                "no_mask_method",
                f"the template does not render message {number} append-only; regenerate it, or give a template"
                " with generation tags",
            )
        end = len(after)
        ends = [i for i in range(len(before), end) if ids[i] in eos]
        if ends:
            end = ends[-1] + 1  # what follows the end-of-turn token is the template's, not the target's
        mask[len(before) : end] = [True] * (end - len(before))
    return ids, mask
