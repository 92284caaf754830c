"""Proof before the first row that a server serves the very target whose states are captured.

Its name and length limit are read from /v1/models; a few fixed prompts are answered greedily, and the tokens must be
those that our own prefill predicts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import torch

from app.engine.base import Completion, EngineSpec, Request
from app.engine.endpoints import Endpoint, Endpoints, Refused, form_of
from app.engine.server_format import COMPLETIONS, GENERATE, NoAnswer, TargetTokens, read_reply, request_body
from app.errors import RowError, UserError
from app.target import Renderer, TargetInfo, load_target_head

log = logging.getLogger("draftmill")

MIN_AGREEMENT = 0.8  # of greedy tokens; another numeric form of the same weights gives 0.9 and more
NEW_TOKENS = 16
QUESTIONS = (
    "What is the capital of France?",
    "Name three animals that live in the sea.",
    "Write one sentence about the weather in spring.",
    "How many days are there in a week?",
    "Write a function in Python that adds two numbers.",
    "Translate into German: the house is old.",
    "Why is the sky blue?",
    "Give me a short recipe for bread.",
)

_NO_IDS = "use a server that returns token ids: vLLM, or SGLang by the completions API"
_ADVICE = {
    "prompt_differs": "start it with the target's own tokenizer and chat template (target.chat_template)",
    "tokens_unknown": _NO_IDS,
    "end_token_unknown": _NO_IDS,
}

Capture = Callable[[Request], Awaitable[Completion]]


class EndpointCheck:
    """The check of every server of one engine.

    Args:
        capture: prefill of a request whose answer is known.

    Raises:
        UserError: the check prompts cannot be rendered, or do not fit.
    """

    def __init__(self, spec: EngineSpec, target: TargetInfo, tokens: TargetTokens, capture: Capture) -> None:
        assert spec.endpoints is not None
        self._spec, self._servers = spec, spec.endpoints
        self._target, self._tokens, self._capture = target, tokens, capture
        self._requests = check_requests(tokens, spec.endpoints.template_kwargs)

    async def __call__(self, endpoints: Endpoints, endpoint: Endpoint) -> None:
        """Check one server; sets its model name and the form it is asked in.

        Raises:
            NoAnswer: it does not answer now.
            UserError: it serves something else, or nothing that can be used.
        """
        await self._find_model(endpoints, endpoint)
        await self._find_form(endpoints, endpoint)
        answered: list[tuple[Request, list[int]]] = []
        faults: list[RowError] = []
        for request in self._requests:
            try:
                reply = await endpoints.patiently(endpoint, request)
                answered.append((request, self._tokens.answer(reply, request)))
            except RowError as fault:
                faults.append(fault)
        if 2 * len(answered) < len(self._requests):
            advice = _ADVICE.get(faults[0].reason, "its own log says more")
            raise UserError(
                f"{endpoint.url} cannot be used: {len(faults)} of {len(self._requests)} check prompts failed"
                f" ({faults[0]}); {advice}"
            )
        try:
            agreed, count = await self._agreement(answered)
        except RowError as error:  # an id that the target does not have, say
            raise UserError(f"{endpoint.url} does not serve {self._target.name}: its answers fail ({error})") from error
        if agreed < MIN_AGREEMENT * count:
            raise UserError(
                f"{endpoint.url} does not serve {self._target.name}: of {count} greedy tokens that it answered only"
                f" {100 * agreed / count:.0f} % are those that the target predicts here (at least"
                f" {100 * MIN_AGREEMENT:.0f} % are expected); serve the target of target.model, in the same revision"
            )
        how = "token ids" if endpoint.gives_ids else "text, which is tokenised again"
        log.info("generate: %s serves %r, %d of %d greedy tokens agree; it gives %s", endpoint.url, endpoint.model,
                 agreed, count, how)  # fmt: skip

    async def _find_model(self, endpoints: Endpoints, endpoint: Endpoint) -> None:
        try:
            data = await endpoint.send("/models")
            listed = {str(m["id"]): m for m in data["data"]}
        except (Refused, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{endpoint.url}/models lists no models ({error}); give base URLs that end in /v1"
            ) from error
        names = ", ".join(sorted(listed)) or "none"
        wanted = self._servers.model
        if wanted is not None and wanted not in listed:
            raise UserError(f"{endpoint.url} serves no model {wanted!r} (generate.endpoint_model); it lists {names}")
        if wanted is None and len(listed) != 1:
            raise UserError(f"{endpoint.url} lists the models {names}; name the target in generate.endpoint_model")
        endpoint.model = wanted or next(iter(listed))
        length, need = listed[endpoint.model].get("max_model_len"), self._spec.max_model_len
        if isinstance(length, int) and length < need:
            raise UserError(
                f"{endpoint.url} serves up to {length} tokens and generate.max_length is {need}; lower"
                f" generate.max_length, or start the server with --max-model-len {need} (SGLang: --context-length)"
            )

    async def _find_form(self, endpoints: Endpoints, endpoint: Endpoint) -> None:
        """Which fields the server knows and whether it gives token ids."""
        request = self._requests[0]
        endpoint.extras, endpoint.form = True, form_of(self._servers)
        try:
            reply = await endpoints.patiently(endpoint, request)
        except RowError:
            endpoint.extras = endpoint.gives_ids = False  # a strict server; any other reason will show again
            return
        endpoint.gives_ids = reply.token_ids is not None
        if endpoint.gives_ids or endpoint.form != COMPLETIONS:
            return
        try:
            read_reply(GENERATE, await endpoint.send(GENERATE, request_body(request, GENERATE, "", True)))
        except (NoAnswer, Refused, RowError, UserError):  # not SGLang, or it is not reached there: the text must do
            return
        endpoint.form, endpoint.gives_ids = GENERATE, True

    async def _agreement(self, answered: list[tuple[Request, list[int]]]) -> tuple[int, int]:
        """Greedy tokens of the server that our own states predict, and how many there are."""
        states, emitted = [], []
        for request, ids in answered:
            done = await self._capture(replace(request, answer_ids=ids))
            states.append(done.plain()[len(request.prompt_ids) - 1 :, -1])  # s_n [answer, H]
            emitted += ids
        predicted = await asyncio.to_thread(self._predicted, torch.cat(states))
        return sum(a == b for a, b in zip(predicted, emitted, strict=True)), len(emitted)

    def _predicted(self, s_n: torch.Tensor) -> list[int]:
        """Greedy next tokens of s_n [N, H]."""
        ids: list[int] = load_target_head(self._target).logits(s_n).argmax(-1).tolist()
        return ids


def check_requests(tokens: TargetTokens, template_kwargs: dict[str, Any]) -> list[Request]:
    """The check prompts, as the template renders them; as plain text where the target has none."""
    requests = []
    for number, question in enumerate(QUESTIONS):
        messages = [{"role": "user", "content": question}]
        if tokens.tokenizer.chat_template:
            try:
                prompt = Renderer(tokens.tokenizer, template_kwargs).render(messages, True)
            except RowError as error:
                raise UserError(f"the target's chat template cannot render a plain question ({error})") from error
        else:
            prompt = list(tokens.tokenizer(question)["input_ids"])
        room = min(NEW_TOKENS, tokens.max_model_len - len(prompt))
        if room > 1:
            identity, greedy = f"endpoint check {number}", {"temperature": 0.0}
            requests.append(Request(identity, prompt, room, greedy, None, messages, template_kwargs))
    if not requests:
        raise UserError(f"generate.max_length {tokens.max_model_len} leaves no room for the check of the endpoints")
    return requests
