"""Lines of the request logs of vLLM and SGLang.

vLLM, as of 0.32 (entrypoints/serve/utils/request_logger.py), with --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG:
    Request ID JSON body: {...}                                  the request as it came, the best source
    Request ID details: prompt: '...', prompt_token_ids: ...     the prompt as the template rendered it
and, until 0.10 or so, `Received request ID: prompt: '...', params: SamplingParams(...), ...`.
SGLang (srt/utils/request_logger.py, early 2026), with --log-requests --log-requests-level 3: text lines
`Receive: obj=GenerateReqInput(...)` and `Finish: obj=GenerateReqInput(...), out={...}`, or with
--log-requests-format json objects with `event`, `rid`, `obj`, `out`.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

from app.errors import RowError
from app.sources.raw import RawConversation
from app.sources.rendered import read_answer, read_prompt
from app.sources.requests import from_body

_VLLM_BODY = re.compile(r"\bRequest (\S+) JSON body: (\{.*)\Z", re.S)
_VLLM_DETAILS = re.compile(r"\bRequest (\S+) details: prompt: (?=None|['\"])")
_VLLM_RECEIVED = re.compile(r"\bReceived request (\S+): (?:prompt: (?=None|['\"])|params: )")
_SGLANG_OBJECT = re.compile(r'\{"timestamp": .*"event": "request\.(received|finished)"')
_SGLANG = re.compile(r"\b(Receive|Finish): obj=(\w+)\(")
# A line either server writes: `INFO 11-30 06:41:20 [logger.py:41]`, with or without the process, or `[2026-01-31 ...]`.
_SERVER_LINE = re.compile(
    r"\A(?:\((?:\w+ )?pid=\d+\) )?(?:(?:INFO|DEBUG|WARNING|ERROR)\s+\d\d-\d\d \d\d:\d\d:\d\d |INFO:\s+\S)"
    r"|\A\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[ \]]|\.\d)"
)


def is_request_line(line: str) -> bool:
    """Whether a line of a server's log holds a request's text: all else in such a file is no row.

    SGLang logs a chat twice, first as token ids alone: of its lines those with text count.
    """
    if _SGLANG_OBJECT.match(line):
        return '"text": "' in line
    if _SGLANG.search(line):
        return re.search(r"\btext=['\"\[]", line) is not None
    found = _VLLM_DETAILS.search(line) or _VLLM_RECEIVED.search(line)
    return _VLLM_BODY.search(line) is not None or (found is not None and found[0].endswith(": prompt: "))


def vllm_request(line: str) -> tuple[str, bool] | None:
    """A vLLM line's request id and whether the line holds the request's body; None for other lines.

    The id is the bare one: a chat's details line writes it as `chatcmpl-ID`, a completion's as `cmpl-ID-0`.
    """
    if found := _VLLM_BODY.search(line):
        return found[1], True
    if found := _VLLM_DETAILS.search(line):
        return re.sub(r"\A(?:chatcmpl|cmpl)-|(?<=[0-9a-f]{16})-\d+\Z", "", found[1]), False
    return None


def from_server_line(line: str) -> RawConversation | None:
    """A line of a server's log; None where it is none.

    Raises:
        RowError: `not_a_request` for the server's other lines; `no_prompt`, `cut_line`, `rendered_prompt`,
            `token_prompt`.
    """
    line = line.rstrip("\r\n")
    if _SGLANG_OBJECT.match(line):
        try:
            return from_sglang_object(json.loads(line))
        except ValueError as error:
            raise RowError("cut_line", "the line is cut") from error
    if found := _VLLM_BODY.search(line):
        try:
            body = json.loads(found[2])
        except ValueError as error:
            raise RowError("cut_line", "the JSON body is cut; start vLLM without --max-log-len") from error
        # An embedding's body looks like one of the Responses API but for the id.
        generates = bool(body.keys() & {"messages", "prompt"}) or found[1].startswith("resp_")
        raw = from_body(body, "vllm_log") if generates else None
        if raw is None:
            raise RowError("no_prompt", "the JSON body is of no chat or completion")
        return raw
    for pattern in (_VLLM_DETAILS, _VLLM_RECEIVED):
        if found := pattern.search(line):
            if found[0].endswith(": prompt: "):
                return _of_vllm(found[1], line, found.end())
            raise RowError("no_prompt", "this vLLM logs prompts at VLLM_LOGGING_LEVEL=DEBUG only")
    if found := _SGLANG.search(line):
        if found[2] != "GenerateReqInput":
            raise RowError("not_a_request", f"a {found[2]} generates nothing")
        return _of_sglang_line(line, found.end(), found[1] == "Finish")
    if _SERVER_LINE.match(line):
        raise RowError("not_a_request", "a line of a server's log without a prompt")
    return None


def from_sglang_object(row: dict[str, Any]) -> RawConversation | None:
    """SGLang's JSON form; None where it is none.

    Raises:
        RowError: as `from_server_line`.
    """
    obj = row.get("obj")
    if row.get("event") not in ("request.received", "request.finished") or not isinstance(obj, dict):
        return None
    out = row.get("out") if row["event"] == "request.finished" else None
    answer = out.get("text") if isinstance(out, dict) else None
    meta = out.get("meta_info") if isinstance(out, dict) else None
    finish = meta.get("finish_reason") if isinstance(meta, dict) else None
    if isinstance(finish, dict) and finish.get("type") == "abort":
        raise RowError("failed_request", "the request was aborted")
    for text in (obj.get("text"), answer):
        if isinstance(text, str) and len(text) == 2051 and text[1024:1027] == "...":
            raise RowError("cut_line", "the text is cut; start SGLang with --log-requests-level 3")
    return _of_sglang(obj.get("text"), answer, bool(obj.get("image_data")), obj.get("input_ids") is not None)


def _of_vllm(identity: str, line: str, at: int) -> RawConversation:
    value, _ = _value(line, at)
    if value == "None":
        raise RowError("token_prompt", "only token ids were logged")
    messages, kwargs = read_prompt(_text(value), chat=identity.startswith("chatcmpl-"))
    return RawConversation(messages, "vllm_log", template_kwargs=kwargs, private=True)


def _of_sglang_line(line: str, at: int, finished: bool) -> RawConversation:
    fields: dict[str, str] = {}
    while at < len(line) and line[at] != ")":
        name, equals, _ = line[at:].partition("=")
        if not equals or not name.isidentifier():
            raise RowError("cut_line", "the line is not of the form SGLang writes")
        fields[name], at = _value(line, at + len(name) + 1)
        at += 2 if line[at : at + 2] == ", " else 0
    if at >= len(line):
        raise RowError("cut_line", "the line has no end")
    answer = None
    if finished and line[at:].startswith("), out={"):
        at += len("), out={")
        while at < len(line) and line[at] != "}":
            key, at = _value(line, at, ":")
            value, at = _value(line, at + 2)
            if key == "'text'":
                answer = _text(value)
            if key == "'meta_info'" and "'type': 'abort'" in value:
                raise RowError("failed_request", "the request was aborted")
            at += 2 if line[at : at + 2] == ", " else 0
        if at >= len(line):
            raise RowError("cut_line", "the line has no end")
    text = fields.get("text", "None")
    images = fields.get("image_data", "None") not in ("None", "[]")
    return _of_sglang(
        None if text == "None" else _text(text), answer, images, fields.get("input_ids", "None") != "None"
    )


def _of_sglang(text: Any, answer: Any, images: bool, ids: bool) -> RawConversation:
    if images:
        raise RowError("multimodal_not_supported", "the request holds images")
    if isinstance(text, list):
        raise RowError("several_prompts", f"the request holds {len(text)} prompts at once")
    if not isinstance(text, str):
        if ids:
            raise RowError("token_prompt", "only token ids were logged; the Finish line holds the text")
        raise RowError("no_prompt", "no text was logged; start SGLang with --log-requests-level 3")
    messages, kwargs = read_prompt(text, chat=None)
    answers = read_answer(answer, text) if isinstance(answer, str) else []
    return RawConversation([*messages, *answers], "sglang_log", template_kwargs=kwargs, private=True)


def _value(line: str, at: int, stop: str = ",") -> tuple[str, int]:
    """A Python value as `repr` wrote it, up to the `stop` or closing bracket outside of it, and where that is."""
    begin, depth, quote = at, 0, ""
    while at < len(line):
        character = line[at]
        if quote:
            if character == "\\":
                at += 1
            elif character == quote:
                quote = ""
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            if depth == 0:
                break
            depth -= 1
        elif character == stop and depth == 0:
            break
        at += 1
    if quote:
        raise RowError("cut_line", "the line ends inside a text")
    return line[begin:at], at


def _text(value: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes that repr never writes
            text = ast.literal_eval(value)
    except (ValueError, SyntaxError) as error:
        raise RowError("cut_line", "a text of the line is cut") from error
    if isinstance(text, list):
        raise RowError("several_prompts", f"the request holds {len(text)} prompts at once")
    if not isinstance(text, str):
        raise RowError("cut_line", "a text of the line is cut")
    return text
