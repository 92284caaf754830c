"""Personal logs and exports as conversations: request logs, server logs, and what chat programs export.

Everything recognised here is marked private: reports and logs show no text of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from app.sources.exports import from_export
from app.sources.raw import RawConversation
from app.sources.requests import from_request_log
from app.sources.server_logs import from_server_line, from_sglang_object, is_request_line, vllm_request
from app.sources.streams import join_chunks

__all__ = ["from_log", "is_request_line", "join_streams"]

_MAX_BODIES = 4096  # requests whose body was seen and whose details may still come


def from_log(row: Any) -> RawConversation | None:
    """A row of a log or an export as a conversation; None where it is neither.

    Args:
        row: a JSON object, or a line of text of a server's log.

    Raises:
        RowError: it is one, but cannot be used. No detail quotes the row's text.
    """
    if isinstance(row, str):
        return from_server_line(row)
    if not isinstance(row, dict):
        return None
    for recognise in (from_export, from_sglang_object, from_request_log):
        raw = recognise(row)
        if raw is not None:
            return raw
    return None


def join_streams(rows: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Rows in which one request is one row, in order of first appearance; all others pass through as they are.

    Chunks of a streamed response, one a line, are joined by their id (`join_chunks` says how and what a cut stream
    becomes). vLLM logs a request's body and then its rendered prompt: the second line is left out where the first was
    seen. Memory is bounded.
    """
    return join_chunks(_without_details(rows))


def _without_details(rows: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    bodies: OrderedDict[str, None] = OrderedDict()
    for where, row in rows:
        found = vllm_request(row) if isinstance(row, str) else None
        if found is not None:
            identity, is_body = found
            if not is_body and identity in bodies:
                continue
            if is_body:
                bodies[identity] = None
                if len(bodies) > _MAX_BODIES:
                    bodies.popitem(last=False)
        yield where, row
