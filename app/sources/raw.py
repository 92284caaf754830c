"""A conversation as a source gave it, in OpenAI's form but not checked yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RawConversation:
    """What a recogniser of a row's shape returns."""

    messages: list[dict[str, Any]]  # role, content (str, part list or None), reasoning_content, tool_calls, ...
    shape: str  # what was recognised, "alpaca" say
    tools: list[dict[str, Any]] | None = None  # OpenAI tool definitions
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    domain: str | None = None
    private: bool = False  # from someone's own log
