"""Servers of the target behind one door: each request goes to the one with most room, and again where it failed.

A transport failure is never a row's fault. A server that fails is rested; when none has answered for the configured
patience the engine stops by name, and nothing is skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import aiohttp

from app.engine.base import EndpointSpec, Request
from app.engine.gate import Gate, Pass, rest_s
from app.engine.server_format import CHAT, COMPLETIONS, GENERATE, NoAnswer, Reply, read_reply, request_body
from app.errors import RowError, UserError, first_line

log = logging.getLogger("draftmill")

KEY_VARIABLES = ("DRAFTMILL_ENDPOINT_KEY", "OPENAI_API_KEY")
OWN_FAULTS = 8  # failures of one request, while the same server answered others, that make it the row's
_POLL_S = 0.2  # how often a waiting request looks whether a rest is over
_CONNECT_S = 10.0
_KEEP_ALIVE_S = 2.0  # below the 5 s after which uvicorn, which vLLM and SGLang use, closes an idle connection
_END_TOKEN = 1  # that not every server counts
_ROW_STATUS = (400, 413, 422)  # the server answers, and refuses this request


class Refused(Exception):
    """A server answered with a status that is no success; for one request alone (400) it is the row's fault."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"{status}: {words}")
        self.status = status


def form_of(spec: EndpointSpec) -> str:
    """The API that the configuration names."""
    return CHAT if spec.api == "chat" else COMPLETIONS


def endpoint_key() -> str | None:
    """The API key, from the environment."""
    return next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)


class Endpoint:
    """One server. What it is called and which fields it knows is found out by `app/engine/endpoint_check.py`."""

    def __init__(self, url: str, spec: EndpointSpec, session: aiohttp.ClientSession) -> None:
        self.url = url.rstrip("/")
        self.model = spec.model or ""
        self.form = form_of(spec)
        self.extras = True  # send the fields of vLLM and SGLang
        self.gives_ids = False
        self.gate = Gate(spec.concurrency)
        self.is_checked = False
        self.lost = asyncio.Event()  # it is to be checked again
        self.answers = 0
        self._session = session

    async def ask(self, request: Request) -> Reply:
        """Send one request.

        Raises:
            NoAnswer: this says nothing about the row.
            RowError: `bad_request`, with the server's words.
            UserError: the server wants another key, or there is no such API at its address.
        """
        try:
            data = await self.send(self.form, request_body(request, self.form, self.model, self.extras))
        except Refused as refused:
            if refused.status in _ROW_STATUS:
                raise RowError("bad_request", str(refused)) from refused
            if not self.answers:
                raise UserError(
                    f"{self.url}{self.form} answers no request ({refused}); give base URLs that end in /v1, of servers"
                    " that have this API (generate.endpoint_api)"
                ) from refused
            raise NoAnswer("gone", str(refused)) from refused
        reply = read_reply(self.form, data)
        tokens = max(len(reply.token_ids or ()), reply.completion_tokens or 0)
        if tokens > request.max_new_tokens + _END_TOKEN:
            raise NoAnswer("broken", f"{tokens} tokens came back and {request.max_new_tokens} were asked for")
        return reply

    async def send(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON that comes back from `path`; POST with a body, else GET.

        Raises:
            NoAnswer, Refused.
            UserError: the key is wrong or missing.
        """
        root = self.url.removesuffix("/v1") if path == GENERATE else self.url
        try:
            method = "GET" if body is None else "POST"
            async with self._session.request(method, root + path, json=body, allow_redirects=False) as response:
                text = await response.text(errors="replace")
                status, retry_after = response.status, response.headers.get("Retry-After")
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            slow = isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError)
            raise NoAnswer("slow" if slow else "gone", first_line(error)) from error
        except TimeoutError as error:
            raise NoAnswer("slow", "no answer within generate.endpoint_timeout_s") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise NoAnswer("broken", first_line(error)) from error
        if status == 200:
            try:
                return json.loads(text)
            except (ValueError, RecursionError) as error:
                raise NoAnswer("broken", "what came back is no JSON") from error
        self._raise_for(status, _words(text), retry_after)

    def _raise_for(self, status: int, words: str, retry_after: str | None) -> NoReturn:
        seconds = float(retry_after) if retry_after and retry_after.isdecimal() else None
        if status in (401, 403):
            raise UserError(
                f"{self.url} refuses the key ({status}: {words}); set {' or '.join(KEY_VARIABLES)} in the environment"
                " of this command and of every Ray node"
            )
        kinds = {408: "slow", 429: "busy", 502: "away", 503: "away", 504: "away"}
        if status in kinds or status >= 500:
            raise NoAnswer(kinds.get(status, "broken"), f"{status}: {words}", seconds)
        raise Refused(status, words)


class Endpoints:
    """The servers of `spec`. Made and used on one event loop.

    Args:
        check: proves that a server serves the target; run before its first request and after it was gone.
    """

    def __init__(self, spec: EndpointSpec, check: Callable[[Endpoints, Endpoint], Awaitable[None]]) -> None:
        self.spec = spec
        key = endpoint_key()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=spec.timeout_s, sock_connect=_CONNECT_S),
            headers={"Authorization": f"Bearer {key}"} if key else None,
        )
        self.all = [Endpoint(url, spec, self._session) for url in spec.urls]
        self._door = asyncio.Lock()  # those who wait come in in their order
        self._changed = asyncio.Event()
        self._fault: BaseException | None = None
        self._silent_since: float | None = None  # no server has answered since
        self._last_answer = time.monotonic()
        self._last_words = ""
        self._keepers = [asyncio.create_task(self._keep(e, check)) for e in self.all]

    async def close(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await self._session.close()

    @property
    def silence(self) -> str | None:
        """That no server answers and since when, in words; from any thread."""
        since = self._silent_since
        if since is None:
            return None
        return f"servers: none has answered for {time.monotonic() - since:.0f} s ({self._last_words})"

    async def ready(self) -> None:
        """Wait until a server was checked.

        Raises:
            UserError: none answers, or one serves something else.
        """
        while not any(e.is_checked for e in self.all):
            await self._wait()

    async def answer(self, request: Request) -> Reply:
        """The answer to `request` of any server, however often it takes.

        Raises:
            RowError: the row is at fault: `bad_request`, or `endpoint_fails` where it failed time and again while
                the same server answered others.
            UserError: no server answers.
        """
        own_faults = 0
        answers: dict[str, int] = {}  # of each server, when this request last failed there
        while True:
            endpoint, leave = await self._enter()
            before = answers.get(endpoint.url, endpoint.answers)
            try:
                return await self._through(endpoint, leave, endpoint.ask(request))
            except NoAnswer as fault:
                own_faults += fault.kind in ("slow", "broken") and endpoint.answers > before
                answers[endpoint.url] = endpoint.answers
                if own_faults >= OWN_FAULTS:
                    raise RowError(
                        "endpoint_fails", f"{own_faults} times while others were answered: {fault}"
                    ) from fault

    async def patiently(self, endpoint: Endpoint, request: Request) -> Reply:
        """The answer of this very server, asked again while it is busy; for the check.

        Raises:
            NoAnswer: it does not answer for another reason.
            RowError, UserError: as `Endpoint.ask`.
        """
        while True:
            leave = endpoint.gate.enter(time.monotonic())
            try:
                return await self._through(endpoint, leave, endpoint.ask(request))
            except NoAnswer as fault:
                if fault.kind != "busy":
                    raise
                self._stop_if_silent()
                await asyncio.sleep(max(0.0, endpoint.gate.rest_until - time.monotonic()))

    async def _through(self, endpoint: Endpoint, leave: Pass, call: Awaitable[Reply]) -> Reply:
        """Await a call that entered the gate, and keep the books."""
        try:
            reply = await call
        except NoAnswer as fault:
            self._note_failure(endpoint, leave, fault)
            raise
        except RowError:
            self._note_answer(endpoint, leave, 0)
            raise
        except UserError as fault:
            endpoint.gate.leave(leave)
            self._fault = fault
            raise
        except BaseException:
            endpoint.gate.leave(leave)
            raise
        finally:
            self._changed.set()
        self._note_answer(endpoint, leave, reply.completion_tokens or len(reply.token_ids or reply.text))
        return reply

    def _note_answer(self, endpoint: Endpoint, leave: Pass, tokens: int) -> None:
        endpoint.answers += 1
        endpoint.gate.answered(leave, time.monotonic(), tokens)
        self._silent_since, self._last_answer = None, time.monotonic()

    def _note_failure(self, endpoint: Endpoint, leave: Pass, fault: NoAnswer) -> None:
        now, before = time.monotonic(), endpoint.gate.fails
        endpoint.gate.failed(leave, now, fault.kind in ("busy", "slow"), fault.retry_after_s)
        # Whatever comes back may be another server; and where requests fail one after the other, the check tells
        # whether it is the server that fails or these requests.
        if endpoint.is_checked and (fault.kind == "gone" or endpoint.gate.fails > 1) and fault.kind != "busy":
            endpoint.is_checked = False
            endpoint.lost.set()
        if before == 0 and endpoint.gate.fails and fault.kind != "busy":
            log.warning("generate: %s does not answer (%s); it is rested and tried again", endpoint.url, fault)
        self._note_silence(endpoint, fault, leave.started)

    def _note_silence(self, endpoint: Endpoint, fault: NoAnswer, started: float) -> None:
        if self._silent_since is None:
            self._silent_since = max(started, self._last_answer)
        self._last_words = f"{endpoint.url}: {fault}"

    async def _enter(self) -> tuple[Endpoint, Pass]:
        async with self._door:
            while True:
                now = time.monotonic()
                free = [e for e in self.all if e.is_checked and e.gate.is_free(now)]
                if free and self._fault is None:
                    endpoint = min(free, key=lambda e: e.gate.in_flight / e.gate.limit)
                    return endpoint, endpoint.gate.enter(now)
                await self._wait()

    async def _wait(self) -> None:
        """Wait for a change, or a moment.

        Raises:
            UserError: nothing answers, or a check failed.
        """
        if isinstance(self._fault, UserError):
            raise UserError(str(self._fault)) from self._fault
        if self._fault is not None:
            raise self._fault
        self._stop_if_silent()
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):  # asyncio.wait_for of Python 3.11 can swallow a cancellation
                await self._changed.wait()

    def _stop_if_silent(self) -> None:
        patience = self.spec.patience_s
        if self._silent_since is None or time.monotonic() - self._silent_since < patience:
            return
        raise UserError(
            f"no server of generate.endpoints has answered for {patience:g} s (the last to fail:"
            f" {self._last_words}); no row was skipped for it: see to the servers and run the same command again, or"
            " raise generate.endpoint_patience_s"
        )

    async def _keep(self, endpoint: Endpoint, check: Callable[[Endpoints, Endpoint], Awaitable[None]]) -> None:
        """Check a server at the start, and again whenever it was gone."""
        fails = 0
        while True:
            try:
                await check(self, endpoint)
            except NoAnswer as fault:
                fails += 1
                self._note_silence(endpoint, fault, time.monotonic())
                if fails == 1:
                    log.warning("generate: %s cannot be checked yet (%s); it is tried again", endpoint.url, fault)
                await asyncio.sleep(rest_s(fails))
                continue
            except Exception as error:
                self._fault = error
                self._changed.set()
                return
            fails, endpoint.is_checked = 0, True
            self._changed.set()
            await endpoint.lost.wait()
            endpoint.lost.clear()


def _words(text: str) -> str:
    """What an error response says, in short."""
    try:
        data = json.loads(text)
        error = data.get("error", data)
        said = str((error.get("message") or error.get("detail") if isinstance(error, dict) else error) or text)
    except (ValueError, AttributeError, RecursionError):
        said = text
    lines = said.encode(errors="replace").decode().strip().splitlines()
    return lines[0][:200] if lines else "no words"
