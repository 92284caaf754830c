"""What a chat template adds to a conversation and what it leaves out, found by rendering marks in place of the text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from app.errors import RowError
from app.target import Renderer

Messages = list[dict[str, Any]]
_SYSTEM, _USER, _OTHER = "QXSYSTEMXQ", "QXUSERXQ", "QXOTHERXQ"
_MARK = re.compile(r"QX[CR]\d+XQ")
_TAGGED_REASONING = re.compile(r"<think>\s*QXR\d+XQ\s*</think>")
_EMPTY_THINK = re.compile(r"<think>\s*</think>")
_TURN = re.compile(
    r"<[|｜][^|｜<>]*[|｜]>|</?(?:s|bos|eos|start_of_turn|end_of_turn)>|\[/?(?:INST|AVAILABLE_TOOLS|SYSTEM_PROMPT)\]"
)
_ROLES = re.compile(r"^\s*(?:system|developer|user|assistant|model|tool|human|ai)\s*:?\s*$", re.I | re.M)
_QUOTE = 120


@dataclass
class Additions:
    """Text of a render that is in no message."""

    default_system: str | None = None
    words: list[str] = field(default_factory=list)  # each addition in words, quotes of the template's text among them
    left_out: list[str] = field(default_factory=list)  # what of the messages is not in the render


def default_system(renderer: Renderer) -> str | None:
    """The system prompt the template writes for a conversation without one; None where there is none or no telling."""
    user = {"role": "user", "content": _USER}
    try:
        alone = renderer.text([user], add_generation_prompt=False)
        both = renderer.text([{"role": "system", "content": _SYSTEM}, user], add_generation_prompt=False)
    except RowError:
        return None
    if _USER not in alone or not (0 <= both.find(_SYSTEM) < both.find(_USER)):
        return None
    prefix, suffix = both[: both.index(_SYSTEM)], both[both.index(_SYSTEM) + len(_SYSTEM) : both.index(_USER)]
    head = alone[: alone.index(_USER)]
    if not (head.startswith(prefix) and head.endswith(suffix)) or len(head) < len(prefix) + len(suffix):
        return None
    return head[len(prefix) : len(head) - len(suffix)].strip() or None


def ignores_messages(renderer: Renderer) -> str | None:
    """What is wrong with a template that does not show the target what the user says, in words; None: nothing."""

    def shown(*contents: str) -> str:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
        return renderer.text(messages, add_generation_prompt=True).casefold()

    user, other = _USER.casefold(), _OTHER.casefold()
    try:
        one, another, several = shown(_USER), shown(_OTHER), shown(_USER, "x", _OTHER)
    except RowError:
        return None  # the rows it rejects are counted
    if one == another:
        return "renders the same text whatever the messages say: the target would answer no question"
    if user not in one or other not in several:
        return "leaves out what the user says, or a part of it"
    return None if user in several else "leaves out the user turns before the last"


def ignored_roles(renderer: Renderer) -> list[str]:
    """Those of `system` and `developer` whose text the template leaves out without an error."""
    user = {"role": "user", "content": _USER}
    found = []
    for role in ("system", "developer"):
        try:
            text = renderer.text([{"role": role, "content": _SYSTEM}, user], add_generation_prompt=True)
        except RowError:
            continue
        if _SYSTEM.casefold() not in text.casefold():
            found.append(role)
    return found


def additions(renderer: Renderer, messages: Messages, add_generation_prompt: bool) -> Additions:
    """What the template adds to `messages` and leaves out of them.

    The template is asked to render marks in place of each message's text, so a template that decides by what the
    text says may add more.

    Raises:
        RowError: `template_rejects`.
    """
    marked: Messages = []
    names: dict[str, str] = {}
    for number, message in enumerate(messages):
        copy = dict(message)
        if message.get("content"):
            copy["content"] = f"QXC{number}XQ"
            names[copy["content"]] = f"the text of message {number} ({message['role']})"
        if message.get("reasoning_content"):
            copy["reasoning_content"] = f"QXR{number}XQ"
            names[copy["reasoning_content"]] = f"the reasoning of message {number}"
        if message.get("tool_calls"):
            copy["tool_calls"] = [
                {**c, "function": {"name": c["function"]["name"], "arguments": {}}} for c in message["tool_calls"]
            ]
        marked.append(copy)
    text = renderer.text(marked, add_generation_prompt)
    found = Additions(left_out=[name for mark, name in names.items() if mark not in text])
    calls = {c["function"]["name"] for m in messages for c in m.get("tool_calls", [])}
    tools = [str(t["function"].get("name")) for t in renderer.template_kwargs.get("tools") or []]
    if not any(m["role"] in ("system", "developer") for m in messages):
        system = default_system(renderer)
        if system is not None and system in text:
            found.default_system = system
            text = text.replace(system, " ", 1)
    if _EMPTY_THINK.search(text):
        found.words.append("an empty think block")
    if _TAGGED_REASONING.search(text):
        found.words.append("think tags around the reasoning")
    text = _TAGGED_REASONING.sub(" QXR0XQ ", _EMPTY_THINK.sub(" ", text))
    if text.rstrip().endswith("<think>"):
        found.words.append("an open think tag for the answer to begin in")
        text = text.rstrip().removesuffix("<think>")
    special = sorted(map(str, renderer.tokenizer.all_special_tokens), key=len, reverse=True)
    for piece in _MARK.split(text):
        for token in special:
            piece = piece.replace(token, "\n")
        piece = _ROLES.sub("", _TURN.sub("\n", piece)).strip()
        if not piece:
            continue
        if any(name in piece for name in tools) and not (calls and "<tool_call>" in piece and "{" not in piece):
            words = f"text of {len(tools)} tools ({len(piece):,} characters)"
        elif any(name in piece for name in calls):
            words = "tool calls in the template's form"
        elif re.fullmatch(r"(?:\s|</?tool_response>)+", piece):
            words = "tags around tool results"
        else:
            quoted = " ".join(piece.split())
            words = f'"{quoted[:_QUOTE]}{"..." if len(quoted) > _QUOTE else ""}"'
        if words not in found.words:
            found.words.append(words)
    if tools and not any(name in text for name in tools):
        found.left_out.append(f"the {len(tools)} tools")
    if calls and not any(name in text for name in calls):
        found.left_out.append("the tool calls")
    return found
