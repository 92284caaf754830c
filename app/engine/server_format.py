"""What is sent to a server of the target, and how the emitted tokens are read from what comes back.

Three forms: the completions and chat APIs that OpenAI-compatible servers share, and SGLang's own `/generate`, which
gives token ids where an older SGLang's completions do not. Nothing here does input or output.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from app.engine.base import Request
from app.errors import RowError
from app.masks import MaskRule, tokenise_as_is
from app.target import Renderer

COMPLETIONS, CHAT, GENERATE = "/completions", "/chat/completions", "/generate"

# Sent beside a request's own values: a server fills what is missing from the model's generation_config.json.
_NEUTRAL = {"temperature": 0.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_NEUTRAL_EXTRAS = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
# Fields of vLLM and SGLang that are no part of OpenAI's API; strict servers refuse them.
_EXTRAS = {"return_token_ids": True, "skip_special_tokens": False, "spaces_between_special_tokens": False}
_ID_END = 2**31  # token ids are stored as int32
_REASONS = {"stop": "stop", "eos": "stop", "tool_calls": "stop", "function_call": "stop", "length": "length"}


class NoAnswer(Exception):
    """A server did not answer; this says nothing about the row.

    `kind`: `gone` (no connection), `busy` (429), `slow` (time-out), `away` (502, 503, 504) or `broken` (anything else
    that is no answer).
    """

    def __init__(self, kind: str, words: str, retry_after_s: float | None = None) -> None:
        super().__init__(words)
        self.kind = kind
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Reply:
    """One answer as a server tells it."""

    reason: str  # stop | length
    token_ids: list[int] | None  # what was emitted, where the server says
    text: str  # completions: the text of the answer
    message: dict[str, Any] | None  # chat: the assistant's message, as the server took it apart
    end_id: int | None  # the token it stopped at, where the server says
    prompt_ids: list[int] | None
    prompt_tokens: int | None
    completion_tokens: int | None


def request_body(request: Request, form: str, model: str, extras: bool) -> dict[str, Any]:
    """The JSON of `request` for the API `form` (COMPLETIONS, CHAT or GENERATE).

    Args:
        extras: send the fields that only vLLM and SGLang know.

    Raises:
        RowError: `no_messages`, for chat.
    """
    if form == GENERATE:
        named = {k: v for k, v in request.sampling.items() if k != "seed"}  # another name in every SGLang
        values = {**_NEUTRAL, **_NEUTRAL_EXTRAS, **named, "max_new_tokens": request.max_new_tokens}
        return {"input_ids": request.prompt_ids, "sampling_params": {**values, "skip_special_tokens": False}}
    body = {**_NEUTRAL, **(_NEUTRAL_EXTRAS if extras else {}), **request.sampling}
    body |= {"model": model, "max_tokens": request.max_new_tokens, "n": 1, "stream": False}
    if extras:
        body |= _EXTRAS
    if form == COMPLETIONS:
        return {**body, "prompt": request.prompt_ids}
    if request.messages is None:
        raise RowError("no_messages", "generate.endpoint_api=chat needs the conversation of a request")
    kwargs = dict(request.template_kwargs)
    tools = kwargs.pop("tools", None)
    if tools:
        body["tools"] = tools
    if kwargs:
        body["chat_template_kwargs"] = kwargs
    return {**body, "messages": [_sent_message(m) for m in request.messages]}


def read_reply(form: str, data: Any) -> Reply:
    """A server's JSON as a Reply.

    Raises:
        NoAnswer: it holds no finished answer.
        RowError: `content_filter`.
    """
    try:
        return _read_generate(data) if form == GENERATE else _read_choice(data)
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise NoAnswer("broken", "what came back is no answer in the form of this API") from error


def _read_choice(data: Any) -> Reply:
    choice, usage = data["choices"][0], data.get("usage") or {}
    message, ids = choice.get("message"), _ids(choice.get("token_ids"))
    return Reply(
        reason=_reason(choice["finish_reason"]),
        token_ids=ids,
        text="" if message is not None or ids is not None else _text(choice["text"]),
        message=None if message is None else _message(message),
        end_id=_end_id(choice.get("stop_reason", choice.get("matched_stop"))),  # vLLM's name, SGLang's name
        prompt_ids=_ids(choice.get("prompt_token_ids") or data.get("prompt_token_ids")),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
    )


def _read_generate(data: Any) -> Reply:
    meta = data["meta_info"]
    finish = meta["finish_reason"]
    return Reply(
        reason=_reason(finish["type"]),
        token_ids=_ids(data["output_ids"]),
        text="",
        message=None,
        end_id=_end_id(finish.get("matched")),
        prompt_ids=None,
        prompt_tokens=_count(meta.get("prompt_tokens")),
        completion_tokens=_count(meta.get("completion_tokens")),
    )


def _reason(told: Any) -> str:
    if told == "content_filter":
        raise RowError("content_filter", "the server withheld its answer")
    if told not in _REASONS:
        raise NoAnswer("broken", f"the server ended the request with {told!r}")
    return _REASONS[told]


def _ids(values: Any) -> list[int] | None:
    """Token ids; ValueError where they are none."""
    if values is None:
        return None
    if not isinstance(values, list) or not all(type(v) is int and 0 <= v < _ID_END for v in values):
        raise ValueError("these are no token ids")
    return values


def _end_id(value: Any) -> int | None:
    """The token an answer stopped at; None where it stopped at a text, or nothing is said."""
    return value if type(value) is int and 0 <= value < _ID_END else None


def _count(value: Any) -> int | None:
    if value is not None and (type(value) is not int or value < 0):
        raise ValueError("this is no number of tokens")
    return value


def _text(value: Any) -> str:
    """A text that can be tokenised; ValueError where it is none, or holds half a surrogate pair."""
    if not isinstance(value, str):
        raise ValueError("this is no text")
    value.encode()
    return value


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A server's assistant message, its fields of the types that `_received_message` reads."""
    texts = [message.get(name) for name in ("content", "reasoning_content", "reasoning")]
    for call in message.get("tool_calls") or []:
        texts += [call["function"]["name"], call["function"].get("arguments")]
    if not all(isinstance(text or "", str) for text in texts):
        raise ValueError("a field of the message is no text")
    json.dumps(message, ensure_ascii=False).encode()  # no half of a surrogate pair
    return message


def _sent_message(message: dict[str, Any]) -> dict[str, Any]:
    """A canonical message in OpenAI's form: arguments of calls are JSON text there, and calls have ids."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for number, call in enumerate(message["tool_calls"]):
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        function = {**call["function"], "arguments": arguments}
        calls.append({"id": f"call_{number}", **call, "function": function})
    return {**message, "tool_calls": calls}


@dataclass(frozen=True)
class TargetTokens:
    """The target's own view of text: what is needed to read tokens from a reply."""

    tokenizer: Any  # PreTrainedTokenizerBase
    end_ids: tuple[int, ...]  # tokens that end an answer
    max_model_len: int

    def answer(self, reply: Reply, request: Request) -> list[int]:
        """Ids that the target emitted for `request`, the end token included when it stopped there.

        Raises:
            RowError: `prompt_differs`, `tokens_unknown`, `end_token_unknown` or `empty_answer`: the tokens cannot be
                known, so nothing could be learnt from them.
        """
        self._check_prompt(reply, request)
        if reply.token_ids is not None:
            ids = self._with_end(list(reply.token_ids), reply)
        elif reply.message is not None:
            ids = self._rendered(reply, request)
        else:
            ids = self._with_end(self._encoded(reply.text), reply)
        if not ids:
            raise RowError("empty_answer", "the server answered nothing")
        if reply.token_ids is None and reply.completion_tokens not in (None, len(ids)):
            raise RowError(
                "tokens_unknown",
                f"the answer's text has {len(ids)} tokens and the server emitted {reply.completion_tokens}",
            )
        if len(ids) > request.max_new_tokens + 1:  # the end token, which not every server counts
            raise RowError(
                "tokens_unknown", f"the answer's text has {len(ids)} tokens and {request.max_new_tokens} were asked for"
            )
        return ids

    def _check_prompt(self, reply: Reply, request: Request) -> None:
        count = len(request.prompt_ids)
        if reply.prompt_ids is not None and reply.prompt_ids != request.prompt_ids:
            raise RowError("prompt_differs", "the server's template or tokenizer made other tokens of the prompt")
        if reply.prompt_tokens not in (None, count):
            raise RowError("prompt_differs", f"the prompt has {count} tokens and the server saw {reply.prompt_tokens}")

    def _encoded(self, text: str) -> list[int]:
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        again = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if again != text or "\ufffd" in text:  # bytes that are no character yet: the text has lost them
            raise RowError("tokens_unknown", "the answer's text does not give back the tokens it was made of")
        return ids

    def _with_end(self, ids: list[int], reply: Reply) -> list[int]:
        """`ids` with the end token that servers leave out of the text, where it is known which."""
        if reply.reason != "stop" or (ids and ids[-1] in (*self.end_ids, reply.end_id)):
            return ids
        if reply.end_id is not None:
            return [*ids, reply.end_id]
        if len(self.end_ids) == 1 and (reply.token_ids is None or reply.completion_tokens in (None, len(ids) + 1)):
            return [*ids, self.end_ids[0]]
        raise RowError("end_token_unknown", "the answer stopped and the server does not say at which token")

    def _rendered(self, reply: Reply, request: Request) -> list[int]:
        """The answer's tokens in the template's render of the whole conversation, by the prefix rule of masks.py."""
        assert request.messages is not None and reply.message is not None
        renderer = Renderer(self.tokenizer, request.template_kwargs)
        rule = MaskRule("prefix", self.max_model_len, "drop", end_ids=frozenset(self.end_ids))
        try:
            samples, _ = tokenise_as_is(renderer, [*request.messages, _received_message(reply.message)], rule)
        except RowError as error:
            raise RowError("tokens_unknown", f"the answer cannot be rendered ({error})") from error
        last = samples[-1]
        assert last.answer_ids is not None and last.loss_mask is not None
        ids = last.prompt_ids + last.answer_ids
        start = len(request.prompt_ids)
        if ids[:start] != request.prompt_ids or not all(last.loss_mask[start:]):
            raise RowError("tokens_unknown", "the template renders the answer to other tokens than its prompt's sequel")
        answer = ids[start:]
        if reply.reason == "length":  # the template closed what the target had not
            while answer and answer[-1] in self.end_ids:
                answer.pop()
        return answer


def _received_message(message: dict[str, Any]) -> dict[str, Any]:
    """A server's assistant message in the canonical form that templates are given."""
    kept: dict[str, Any] = {"role": "assistant", "content": message.get("content") or ""}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        kept["reasoning_content"] = reasoning
    calls = []
    for call in message.get("tool_calls") or []:
        function = call["function"]
        try:
            arguments = json.loads(function.get("arguments") or "{}")
            json.dumps(arguments, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:  # half a surrogate pair among the ValueErrors
            raise RowError("tokens_unknown", "the arguments of a tool call are no JSON") from error
        calls.append({"id": call.get("id"), "type": "function", "function": {**function, "arguments": arguments}})
    if calls:
        kept["tool_calls"] = calls
    return kept
