"""Answers from servers of the target, states from an engine of our own by prefill."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from app.engine.base import Completion, Engine, EngineError, EngineSpec, Request
from app.engine.board import Load, Loaded
from app.engine.endpoint_check import EndpointCheck
from app.engine.endpoints import Endpoints
from app.engine.server_format import TargetTokens
from app.errors import RowError
from app.target import TargetInfo, inspect_target, load_tokenizer

_T = TypeVar("_T")


class ServedEngine:
    """The engine `capture` with the servers of `spec.endpoints` before it, on an event loop of its own.

    A request without `answer_ids` goes to a server; the tokens it emitted are then fed to `capture`, which gives the
    states of that very answer. Requests with `answer_ids` go to `capture` at once.

    Args:
        capture: a started engine; this one closes it.

    Raises:
        UserError: no server answers within the patience, or one does not serve the target.
    """

    def __init__(self, capture: Engine, spec: EngineSpec) -> None:
        assert spec.endpoints is not None
        self._capture = capture
        self._servers = spec.endpoints
        self._endpoints: Endpoints | None = None
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="draftmill-endpoints", daemon=True)
        self._thread.start()
        try:
            target = inspect_target(spec.model, None, spec.trust_remote_code, self._servers.chat_template)
            self._tokens = _target_tokens(spec, target)
            check = EndpointCheck(spec, target, self._tokens, self._prefill)
            self._post(self._open(check)).result()
        except BaseException:
            self.close()
            raise

    async def complete(self, request: Request) -> Completion:
        """Run one request; cancelling the caller cancels it.

        Raises:
            RowError: this request alone is at fault: `bad_request` with the server's words, `tokens_unknown`,
                `end_token_unknown`, `prompt_differs`, `content_filter`, `endpoint_fails`, `timeout` of the capture,
                or a reason of the capturing engine.
            UserError: no server answers.
            EngineError: the capturing engine is dead, or this one was closed.
        """
        if self._closed:
            raise EngineError("the engine was closed")
        try:
            return await asyncio.wrap_future(self._post(self._complete(request)))
        except asyncio.CancelledError as error:
            if self._closed:
                raise EngineError("the engine was closed") from error
            raise

    def load(self) -> Load:
        """The servers' answers and the capturing engine's steps; what waits is what the servers work on."""
        servers = self._endpoints
        inner = self._capture.load() if isinstance(self._capture, Loaded) else Load(0, 0, 0)
        if servers is None:
            return inner
        asked, answers = sum(e.gate.in_flight for e in servers.all), sum(e.answers for e in servers.all)
        return replace(inner, steps=inner.steps + answers, queue=inner.queue + asked, note=servers.silence)

    def close(self) -> None:
        """Close the connections, the loop and the capturing engine; requests under way get an EngineError."""
        if self._closed:
            return
        self._closed = True
        self._post(self._shut_down()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._capture.close()

    def _post(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _open(self, check: EndpointCheck) -> None:
        self._endpoints = Endpoints(self._servers, check)
        await self._endpoints.ready()

    async def _shut_down(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._endpoints is not None:
            await self._endpoints.close()

    async def _complete(self, request: Request) -> Completion:
        if request.answer_ids is not None:
            return await self._prefill(request)
        assert self._endpoints is not None
        reply = await self._endpoints.answer(request)
        ids = self._tokens.answer(reply, request)
        done = await self._prefill(replace(request, answer_ids=ids))
        return replace(done, finish_reason=reply.reason)

    async def _prefill(self, request: Request) -> Completion:
        limit = self._servers.prefill_timeout_s
        try:
            async with asyncio.timeout(limit):
                return await self._capture.complete(request)
        except TimeoutError as error:
            raise RowError("timeout", f"the states of an answer were not captured within {limit:g} s") from error


def _target_tokens(spec: EngineSpec, target: TargetInfo) -> TargetTokens:
    assert spec.endpoints is not None
    tokenizer = load_tokenizer(target.model, spec.trust_remote_code, spec.endpoints.chat_template)
    ends = list(target.eos_token_ids)
    if isinstance(tokenizer.eos_token_id, int) and tokenizer.eos_token_id not in ends:
        ends.append(tokenizer.eos_token_id)
    return TargetTokens(tokenizer, tuple(ends), spec.max_model_len)
