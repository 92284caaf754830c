"""Prompts that a chat template has rendered, read back into messages: only where the text fits exactly.

Three families are known: ChatML (Qwen, SmolLM2), Llama 3, and Mistral's [INST]. What was read is rendered again by the
family's rule and must give the same text; anything else is rejected, for a wrong guess would train on wrong turns.
"""

from __future__ import annotations

import re
from typing import Any

from app.errors import RowError

_MARKERS = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>]{1,40}｜>|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]"
    r"|</?(?:start|end)_of_turn>|<\|?turn\|?>|<<SYS>>|</?s>|<bos>|\[gMASK\]|<unk>"
)
# Families that write their roles in plain words.
_WORDS = re.compile(r"(?:\bASSISTANT|\bAssistant|### (?:Response|Assistant|Answer)):?\s*\Z")
_TOOLS = ("<tool_call>", "<tool_response>", "<tools>", "[TOOL_CALLS]")

_CHATML_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", re.S)
_CHATML_END = {
    "<|im_start|>assistant\n": {},
    "<|im_start|>assistant\n<think>\n": {},
    "<|im_start|>assistant\n<think>\n\n</think>\n\n": {"enable_thinking": False},
}
_LLAMA_TURN = re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n(.*?)<\|eot_id\|>", re.S)
_LLAMA_START = "<|begin_of_text|>"
_LLAMA_END = "<|start_header_id|>assistant<|end_header_id|>\n\n"
_LLAMA_DATES = re.compile(r"\ACutting Knowledge Date: [A-Za-z]+ \d{4}\nToday Date: \d\d \w+ \d{4}\n\n")
_THOUGHT = re.compile(r"\A<think>\n(.*?)\n</think>\n\n(.*)\Z", re.S)
# start, end of a system prompt, then user turn before and after, answer before and after: v1, v3, Tekken (v7).
_MISTRAL = (
    ("<s> ", None, ("[INST] ", " [/INST]"), (" ", "</s>")),
    ("<s>", None, ("[INST] ", "[/INST]"), (" ", "</s>")),
    ("<s>", ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), ("[INST]", "[/INST]"), ("", "</s>")),
)


def read_prompt(text: str, chat: bool | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and template arguments of a logged prompt.

    Args:
        chat: whether a chat request gave it; None where the log does not say. What is no chat's and shows no sign of a
            template is one user turn.

    Raises:
        RowError: `rendered_prompt`, `empty_prompt`.
    """
    if not text.strip():
        raise RowError("empty_prompt", "the logged prompt is empty")
    if not _MARKERS.search(text):
        if chat or _WORDS.search(text) or any(t in text for t in _TOOLS):
            raise RowError("rendered_prompt", "the prompt was rendered by a template that cannot be read back")
        return [{"role": "user", "content": text}], {}
    for read in (_chatml, _llama3, _mistral):
        found = read(text)
        if found is not None:
            messages, kwargs = found
            if messages[-1]["role"] != "user":
                break
            return messages, kwargs
    raise RowError("rendered_prompt", "the rendered prompt does not fit ChatML, Llama 3 or Mistral exactly")


def read_answer(text: str, prompt: str) -> list[dict[str, Any]]:
    """The logged answer to a rendered prompt; none where its reasoning was cut.

    Raises:
        RowError: `rendered_prompt`, where the answer holds tool calls in the template's own form.
    """
    if any(t in text for t in _TOOLS):
        raise RowError("rendered_prompt", "the answer holds tool calls in the template's own form")
    if prompt.endswith("<think>\n"):
        text = "<think>\n" + text
    if text.startswith("<think>"):
        thought, end, rest = text.removeprefix("<think>").partition("</think>")
        if not end or "</think>" in rest:
            return []
        return [{"role": "assistant", "content": rest.strip("\n"), "reasoning_content": thought.strip("\n")}]
    for end in ("<|im_end|>", "<|eot_id|>", "</s>"):
        text = text.removesuffix(end)
    return [{"role": "assistant", "content": text}] if text.strip() else []


def _chatml(text: str) -> tuple[list[dict[str, Any]], dict[str, Any]] | None:
    for end in sorted(_CHATML_END, key=len, reverse=True):
        if text.endswith(end):
            break
    else:
        return None
    turns = _turns(text.removesuffix(end), _CHATML_TURN)
    if turns is None or not _alternate(turns):
        return None
    messages = []
    for role, content in turns:
        message: dict[str, Any] = {"role": role, "content": content}
        if role == "assistant" and (thought := _THOUGHT.match(content)):
            message["content"] = thought[2]
            if thought[1].strip():
                message["reasoning_content"] = thought[1]
        if any(mark in message["content"] for mark in ("<think>", "</think>")):
            return None
        messages.append(message)
    rendered = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns) + end
    return (messages, dict(_CHATML_END[end])) if rendered == text else None


def _llama3(text: str) -> tuple[list[dict[str, Any]], dict[str, Any]] | None:
    if not text.endswith(_LLAMA_END):
        return None
    start = _LLAMA_START if text.startswith(_LLAMA_START) else ""
    turns = _turns(text[len(start) :].removesuffix(_LLAMA_END), _LLAMA_TURN)
    if turns is None or not _alternate(turns):
        return None
    messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in turns]
    if messages[0]["role"] == "system":
        # The template adds these lines itself; left in, they would stand there twice.
        messages[0]["content"] = _LLAMA_DATES.sub("", messages[0]["content"])
        if messages[0]["content"].startswith(("Environment:", "Cutting Knowledge Date:")):
            return None
        if not messages[0]["content"]:
            del messages[0]
    rendered = "".join(f"<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>" for role, content in turns)
    return (messages, {}) if start + rendered + _LLAMA_END == text else None


def _mistral(text: str) -> tuple[list[dict[str, Any]], dict[str, Any]] | None:
    """The one version of the family's rule that fits; no turn begins or ends in a space, which tells them apart."""
    fits = []
    for start, system, (before, after), (answer, answer_end) in _MISTRAL:
        rest = text.removeprefix(start)
        opening = text[: len(text) - len(rest)]
        messages: list[dict[str, Any]] = []
        if system is not None and rest.startswith(system[0]):
            content, _, rest = rest.removeprefix(system[0]).partition(system[1])
            messages.append({"role": "system", "content": content})
        pattern = re.compile(
            rf"{re.escape(before)}(.*?){re.escape(after)}(?:{re.escape(answer)}(.*?){re.escape(answer_end)})?", re.S
        )
        at = 0
        while match := pattern.match(rest, at):
            messages.append({"role": "user", "content": match[1]})
            if match[2] is not None:
                messages.append({"role": "assistant", "content": match[2]})
            at = match.end()
        turns = [(m["role"], m["content"]) for m in messages]
        if at != len(rest) or not turns or not _alternate(turns) or any(c != c.strip() for _, c in turns):
            continue
        wraps = {"user": (before, after), "assistant": (answer, answer_end), "system": system or ("", "")}
        if opening + "".join(f"{wraps[r][0]}{c}{wraps[r][1]}" for r, c in turns) == text:
            fits.append(messages)
    return (fits[0], {}) if len(fits) == 1 else None


def _turns(text: str, pattern: re.Pattern[str]) -> list[tuple[str, str]] | None:
    """(role, content) of turns that cover the whole text."""
    turns, at = [], 0
    while match := pattern.match(text, at):
        turns.append((match[1], match[2]))
        at = match.end()
    return turns if at == len(text) and turns else None


def _alternate(turns: list[tuple[str, str]]) -> bool:
    """Whether it is [system], user, assistant, user, ... with no marker or tool form inside a turn."""
    roles = [role for role, _ in turns]
    rest = roles[1:] if roles[0] == "system" else roles
    clean = not any(_MARKERS.search(content) or any(t in content for t in _TOOLS) for _, content in turns)
    return clean and all(role == ("user", "assistant")[i % 2] for i, role in enumerate(rest))
