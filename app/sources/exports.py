"""What chat programs export, as conversations: always the branch that was shown last.

Seen in: ChatGPT's data export (conversations.json of 2025 and early 2026), Claude's (2025 and 2026, with and without
parent_message_uuid), LibreChat's JSON export (0.7 and 0.8, flat and recursive), Open WebUI's (0.5 to 0.6).

The tools of these programs are theirs, and the target has none of them: tool calls and their results are left out, and
what an assistant said around them is joined into one answer.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any

from app.errors import RowError
from app.sources.raw import RawConversation

_IMAGES = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".heic", ".bmp", ".tiff")
_DETAILS = re.compile(r'<details type="(\w+)"[^>]*>\n?(?:<summary>.*?</summary>\n?)?(.*?)</details>\n?', re.S)
_THINKING_BLOCK = re.compile(r"\A:::thinking\n(.*?)\n:::\n*", re.S)


def from_export(row: dict[str, Any]) -> RawConversation | None:
    """One conversation of an export; None where the row is none.

    Raises:
        RowError: `multimodal_not_supported`, `no_shown_branch`, `no_turns`, `bad_export`.
    """
    if isinstance(row.get("mapping"), dict):
        return _raw(_chatgpt(row), "chatgpt_export")
    if isinstance(row.get("chat_messages"), list):
        return _raw(_claude(row), "claude_export")
    chat = row.get("chat")
    if isinstance(chat, dict) and ("history" in chat or "messages" in chat):
        return _raw(_open_webui(chat), "open_webui_export")
    if isinstance(chat := row.get("messagesTree", row.get("messages")), list) and any(
        isinstance(m, dict) and ("isCreatedByUser" in m or "parentMessageId" in m) for m in chat
    ):
        return _raw(_librechat(row, chat), "librechat_export")
    return None


def _raw(messages: list[dict[str, Any]], shape: str) -> RawConversation:
    """Pieces of one answer joined; empty assistant pieces left out."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else None
        if message["role"] == "assistant" and last is not None and last["role"] == "assistant":
            for key in ("reasoning_content", "content"):
                texts = [t for t in (last.get(key), message.get(key)) if t]
                if texts or key == "content":
                    last[key] = "\n\n".join(texts)
        else:
            joined.append(dict(message))
    joined = [m for m in joined if m["role"] != "assistant" or m["content"].strip() or m.get("reasoning_content")]
    if not any(m["role"] == "user" for m in joined):
        raise RowError("no_turns", "the export holds no user turn here")
    # Reasoning without an answer is an answer that was stopped.
    joined = [m for m in joined if m["role"] != "assistant" or m["content"].strip()]
    return RawConversation(joined, shape, private=True)


def _branch(nodes: dict[str, Any], leaf: Any, parent: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
    """The nodes from the root to `leaf`.

    Raises:
        RowError: `no_shown_branch`, where the leaf is missing or parents run in a circle.
    """
    if not isinstance(leaf, str) or leaf not in nodes:
        raise RowError("no_shown_branch", "the export does not say which branch was shown")
    path: list[dict[str, Any]] = []
    seen: set[str] = set()
    while isinstance(leaf, str) and leaf in nodes:
        if leaf in seen or not isinstance(nodes[leaf], dict):
            raise RowError("no_shown_branch", "the parents of the shown branch run in a circle or are no objects")
        seen.add(leaf)
        path.append(nodes[leaf])
        leaf = parent(nodes[leaf])
    return path[::-1]


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: Any) -> list[dict[str, Any]]:
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []


def _message(role: str, text: str, thoughts: list[str]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": text}
    if thought := "\n\n".join(t for t in thoughts if t.strip()):
        message["reasoning_content"] = thought
    return message


def _chatgpt(row: dict[str, Any]) -> list[dict[str, Any]]:
    messages = []
    for node in _branch(row["mapping"], row.get("current_node"), lambda n: n.get("parent")):
        said = node.get("message")
        if not isinstance(said, dict):
            continue
        author, content, metadata = (_object(said.get(k)) for k in ("author", "content", "metadata"))
        role, kind = author.get("role"), content.get("content_type")
        if metadata.get("is_visually_hidden_from_conversation") or said.get("weight") == 0:
            continue
        if role == "assistant" and kind == "thoughts":
            thoughts = [t.get("content") for t in _objects(content.get("thoughts"))]
            messages.append(_message("assistant", "", [t for t in thoughts if isinstance(t, str)]))
        elif role in ("system", "user", "assistant") and said.get("recipient", "all") == "all":
            if kind not in ("text", "multimodal_text"):
                continue  # code, execution_output, reasoning_recap ("Thought for 8 s"), custom instructions
            text = _chatgpt_text(content.get("parts"), role)
            if text.strip() or role == "user":
                messages.append(_message(role, text, []))
    return messages


def _chatgpt_text(parts: Any, role: str) -> str:
    if not isinstance(parts, list):
        raise RowError("bad_export", "a message has no parts")
    texts = []
    spoken = any(isinstance(p, dict) and p.get("content_type") == "audio_transcription" for p in parts)
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif role == "user":
            kind = str(part.get("content_type")) if isinstance(part, dict) else type(part).__name__
            if spoken and "audio" in kind:
                continue  # its transcription is beside it
            raise RowError("multimodal_not_supported", f"a user turn has a part of type {kind}")
    return "\n".join(t for t in texts if t)


def _claude(row: dict[str, Any]) -> list[dict[str, Any]]:
    said = _objects(row["chat_messages"])
    if any(m.get("parent_message_uuid") for m in said):
        nodes = {m["uuid"]: m for m in said if isinstance(m.get("uuid"), str)}
        parents = {str(m.get("parent_message_uuid")) for m in said}
        leaves = [uuid for uuid in nodes if uuid not in parents]
        leaf = row.get("current_leaf_message_uuid") or (leaves[-1] if leaves else None)
        said = _branch(nodes, leaf, lambda m: m.get("parent_message_uuid"))
    messages = []
    for message in said:
        role = {"human": "user", "user": "user", "assistant": "assistant"}.get(str(message.get("sender")))
        if role is None:
            raise RowError("unknown_role", f"a message has sender {str(message.get('sender'))[:40]!r}")
        blocks = _objects(message.get("content"))
        texts = [b["text"] for b in blocks if b.get("type") == "text" and isinstance(b.get("text"), str)]
        thoughts = [b["thinking"] for b in blocks if b.get("type") == "thinking" and isinstance(b.get("thinking"), str)]
        if not blocks and isinstance(message.get("text"), str):
            texts = [message["text"]]
        if role == "user":
            names = [str(f.get("file_name", "")) for f in _objects(message.get("files"))]
            if any(b.get("type") == "image" for b in blocks) or any(n.lower().endswith(_IMAGES) for n in names):
                raise RowError("multimodal_not_supported", "a user turn has an image")
            for attached in _objects(message.get("attachments")):
                extracted = attached.get("extracted_content")
                if isinstance(extracted, str) and extracted.strip():
                    name = attached.get("file_name")
                    texts.append(f"{name}\n\n{extracted}" if isinstance(name, str) and name else extracted)
        messages.append(_message(role, "\n\n".join(t for t in texts if t.strip()), thoughts))
    return messages


def _librechat(row: dict[str, Any], given: list[Any]) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []
    open_nodes = [(m, None) for m in reversed(given) if isinstance(m, dict)]
    while open_nodes:
        message, parent = open_nodes.pop()
        said.append(
            message if message.get("parentMessageId") or parent is None else {**message, "parentMessageId": parent}
        )
        children = _objects(message.get("children"))
        open_nodes += [(c, message.get("messageId")) for c in reversed(children)]
    nodes = {m["messageId"]: m for m in said if isinstance(m.get("messageId"), str)}
    parents = {str(m.get("parentMessageId")) for m in said}
    leaves = [identity for identity in nodes if identity not in parents]
    # ISO times compare as text; where they are missing the last one counts.
    newest = max(
        enumerate(leaves), key=lambda pair: (str(nodes[pair[1]].get("createdAt") or ""), pair[0]), default=None
    )
    messages = []
    options = row.get("options")
    system = (options.get("promptPrefix") or options.get("system")) if isinstance(options, dict) else None
    if isinstance(system, str) and system.strip():
        messages.append(_message("system", system, []))
    for message in _branch(nodes, newest[1] if newest else None, lambda m: m.get("parentMessageId")):
        by_user = message.get("isCreatedByUser", message.get("sender") == "User")
        if message.get("error"):
            continue  # its text is the program's, not the model's
        messages.append(_librechat_message(message, bool(by_user)))
    return messages


def _librechat_message(message: dict[str, Any], by_user: bool) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    for part in _objects(message.get("content")):
        kind = part.get("type")
        value = part.get(kind) if isinstance(kind, str) else None
        value = value.get("value") if isinstance(value, dict) else value
        if kind in ("text", "think") and isinstance(value, str):
            (texts if kind == "text" else thoughts).append(value)
        elif by_user and kind in ("image_url", "image_file"):
            raise RowError("multimodal_not_supported", f"a user turn has a part of type {kind}")
    if not texts and isinstance(message.get("text"), str):
        texts = [message["text"]]
    files = _objects(message.get("files"))
    if by_user and any(str(f.get("type", "")).startswith(("image/", "audio/", "video/")) for f in files):
        raise RowError("multimodal_not_supported", "a user turn has a file that is no text")
    text = "\n\n".join(t for t in texts if t.strip())
    if not by_user and (block := _THINKING_BLOCK.match(text)):
        thoughts, text = [block[1]], text[block.end() :]
    return _message("user" if by_user else "assistant", text, thoughts)


def _open_webui(chat: dict[str, Any]) -> list[dict[str, Any]]:
    history = chat.get("history")
    if isinstance(history, dict) and isinstance(history.get("messages"), dict) and history["messages"]:
        said = _branch(history["messages"], history.get("currentId"), lambda m: m.get("parentId"))
    else:
        said = _objects(chat.get("messages"))
    messages = []
    params = chat.get("params")
    system = chat.get("system") or (params.get("system") if isinstance(params, dict) else None)
    if isinstance(system, str) and system.strip():
        messages.append(_message("system", system, []))
    for message in said:
        role, text = message.get("role"), message.get("content")
        if role not in ("system", "user", "assistant") or not isinstance(text, str):
            raise RowError("bad_export", "a message has no role or no text")
        if role == "user":
            files = _objects(message.get("files"))
            if any(f.get("type") == "image" or str(f.get("content_type", "")).startswith("image/") for f in files):
                raise RowError("multimodal_not_supported", "a user turn has an image")
        thoughts: list[str] = []
        if role == "assistant":
            thoughts = [_unquoted(b[2]) for b in _DETAILS.finditer(text) if b[1] == "reasoning"]
            text = _DETAILS.sub("", text).strip("\n")
        messages.append(_message(role, text, thoughts))
    return messages


def _unquoted(block: str) -> str:
    """The text of a reasoning block: each line is quoted by `> `, in newer versions escaped as well."""
    if block.lstrip().startswith("&gt;"):
        block = html.unescape(block)
    return "\n".join(line.removeprefix(">").removeprefix(" ") for line in block.strip("\n").split("\n"))
