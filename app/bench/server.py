"""A running OpenAI-compatible server that the bench measures: streamed completions, acceptance from its /metrics.

Prompts go as token ids, so the server's chat template plays no part. A server that gives token ids in its stream (vLLM,
`return_token_ids`) is compared token by token; of any other the text is tokenised by the target's tokenizer, and tokens
are counted by the server's `usage`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp

from app.bench.measure import Answer, Ask, Served
from app.bench.metrics import Reading, of_gauges, read_metrics
from app.engine.base import Request
from app.engine.endpoints import KEY_VARIABLES, endpoint_key
from app.engine.server_format import COMPLETIONS, request_body
from app.errors import UserError, first_line

TIMEOUT_S = 1800.0  # of one request
_METRICS_TIMEOUT_S = 10.0
_POLL_S = 0.5  # between two looks at gauges
_SETTLE_S, _SETTLE_TRIES = 0.2, 25  # until the counters of the last step are there


class RunningServer:
    """A server as a Service.

    Args:
        url: ends in /v1.
        setting: the key of the configuration that names it, for messages.
        model: the name it knows the target by; None: the only one it lists.
        tokenise: text to ids, for servers that give none.

    Raises:
        UserError: it does not answer, or lists other models.
    """

    on_cpu = False

    def __init__(self, url: str, setting: str, model: str | None, tokenise: Callable[[str], list[int]]) -> None:
        self.url, self.root = url.rstrip("/"), url.rstrip("/").removesuffix("/v1")
        self._setting, self._tokenise = setting, tokenise
        self._before = Reading()
        self._readings: list[Reading] = []
        self._answered = 0  # tokens, between begin and end
        listed = [str(m.get("id")) for m in self._get_json("/models").get("data", [])]
        if model is not None and model not in listed:
            raise UserError(f"{setting} {url} serves no model {model!r} (bench.server_model); it lists {listed}")
        if model is None and len(listed) != 1:
            raise UserError(f"{setting} {url} lists the models {listed}; name the target in bench.server_model")
        self.model = model or listed[0]

    def answer(self, asks: Sequence[Ask], concurrency: int) -> list[Answer]:
        """Answers in the order of the prompts.

        Raises:
            UserError: the server refuses a prompt, fails or goes away.
        """
        answers = asyncio.run(self._answer(asks, concurrency))
        self._answered += sum(a.tokens for a in answers)
        return answers

    def begin(self) -> None:
        self._before = self._settled()
        self._readings, self._answered = [], 0

    def end(self, into: Served) -> None:
        last = self._settled()
        try:
            found = last.since(self._before)
        except ValueError as error:
            raise UserError(f"{self._setting} {self.url} cannot be measured: {error}; run the bench again") from error
        into.drafts, into.draft_tokens, into.accepted = found.drafts, found.draft_tokens, found.accepted
        into.accepted_per_position = list(found.accepted_per_position)
        into.prefix_hits = found.prefix_hits
        into.foreign_tokens = max(0, found.generated - self._answered)
        into.gauges = of_gauges([*self._readings, last])

    async def _answer(self, asks: Sequence[Ask], concurrency: int) -> list[Answer]:
        answers: list[Answer] = [Answer([], 0.0, [], [], 0) for _ in asks]
        coming = iter(enumerate(asks))
        key = endpoint_key()
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=10),
            headers={"Authorization": f"Bearer {key}"} if key else None,
        ) as session:

            async def work() -> None:
                for number, ask in coming:  # one iterator for all: whoever is free takes the next
                    answers[number] = await self._one(session, ask, number)

            watcher = asyncio.create_task(self._watch(session))
            workers = [asyncio.create_task(work()) for _ in range(min(concurrency, len(asks)))]
            try:
                await asyncio.gather(*workers)
            finally:
                for task in (*workers, watcher):
                    task.cancel()
                await asyncio.gather(*workers, watcher, return_exceptions=True)
        return answers

    async def _one(self, session: aiohttp.ClientSession, ask: Ask, number: int) -> Answer:
        sampling = {"temperature": ask.temperature} | ({"seed": ask.seed} if ask.seed is not None else {})
        request = Request(f"bench {number}", ask.prompt_ids, ask.max_tokens, sampling)
        body = request_body(request, COMPLETIONS, self.model, True)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        answer = Answer([], time.perf_counter(), [], [], 0)
        text: list[str] = []
        try:
            async with session.post(self.url + COMPLETIONS, json=body, allow_redirects=False) as response:
                if response.status != 200:
                    said = (await response.text(errors="replace")).strip()[:200]
                    raise self._refusal(response.status, said)
                async for event in _events(response):
                    self._take(answer, text, event)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise UserError(
                f"{self._setting} {self.url} failed while it was measured ({first_line(error)}); see to the server and"
                " run the same command again"
            ) from error
        if not answer.ids:
            answer.ids = self._tokenise("".join(text))
        answer.tokens = answer.tokens or len(answer.ids)
        return answer

    def _take(self, answer: Answer, text: list[str], event: Any) -> None:
        """One event of the stream into the answer."""
        if not isinstance(event, dict) or "error" in event:
            raise UserError(f"{self._setting} {self.url} broke an answer off: {str(event)[:200]}")
        if event.get("usage"):
            answer.tokens = int(event["usage"].get("completion_tokens") or 0)
        for choice in event.get("choices", []):
            ids, said = choice.get("token_ids") or [], choice.get("text") or ""
            if ids or said:
                answer.arrivals.append(time.perf_counter())
            answer.ids += ids
            answer.sizes += [len(ids)] if ids else []
            text.append(said)

    def _refusal(self, status: int, said: str) -> UserError:
        if status in (401, 403):
            return UserError(
                f"{self._setting} {self.url} refuses the key ({status}); set {' or '.join(KEY_VARIABLES)} in the"
                " environment"
            )
        if status == 429 or status >= 500:
            return UserError(
                f"{self._setting} {self.url} fails while it is measured ({status}: {said}); see to the server, or lower"
                " bench.concurrency, and run the same command again"
            )
        return UserError(
            f"{self._setting} {self.url} refuses a prompt ({status}: {said}); it must serve the target of target.model"
            " with room for generate.max_length tokens"
        )

    async def _watch(self, session: aiohttp.ClientSession) -> None:
        """Look at the gauges of a server that has some, until cancelled; a look that fails is none."""
        while not self._readings or self._readings[-1].gauges:
            await asyncio.sleep(_POLL_S)
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
                timeout = aiohttp.ClientTimeout(total=_METRICS_TIMEOUT_S)
                async with session.get(f"{self.root}/metrics", timeout=timeout) as response:
                    if response.status == 200:
                        self._readings.append(read_metrics(await response.text()))

    def _settled(self) -> Reading:
        """The counters when they stand still: a server counts a step after it has sent its tokens."""
        reading = self._read()
        for _ in range(_SETTLE_TRIES):
            time.sleep(_SETTLE_S)
            before, reading = reading, self._read()
            if before == reading:
                break
        return reading

    def _read(self) -> Reading:
        text = self._get("/metrics", self.root)
        reading = read_metrics(text)
        if not reading.engine:
            raise UserError(
                f"{self._setting} {self.url}: its /metrics is neither vLLM's nor SGLang's; start SGLang with"
                " --enable-metrics, and vLLM without --disable-log-stats"
            )
        return reading

    def _get_json(self, path: str) -> dict[str, Any]:
        try:
            data = json.loads(self._get(path, self.url))
        except ValueError as error:
            raise UserError(f"{self.url}{path} gives no JSON; {self._setting} must be a base URL, .../v1") from error
        return data if isinstance(data, dict) else {}

    def _get(self, path: str, root: str) -> str:
        try:
            status, text = asyncio.run(_fetch(root + path))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UserError(
                f"{self._setting} {self.url} does not answer ({first_line(error)}); start the server, or mend the URL"
            ) from error
        if status in (401, 403):
            raise self._refusal(status, "")
        if status != 200:
            advice = "; start SGLang with --enable-metrics" if path == "/metrics" else ""
            raise UserError(f"{self._setting}: {root}{path} answers with {status}{advice}")
        return text


async def _fetch(url: str) -> tuple[int, str]:
    key = endpoint_key()
    timeout = aiohttp.ClientTimeout(total=_METRICS_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {key}"} if key else None
    async with (
        aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
        session.get(url, allow_redirects=False) as response,
    ):
        return response.status, await response.text(errors="replace")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """The JSON of each `data:` line; a line may be of any length."""
    rest = b""
    async for piece in response.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield json.loads(data)
