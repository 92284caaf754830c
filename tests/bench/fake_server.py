"""A fake of a streaming server with a draft: answers in outputs of known sizes, and counts as vLLM or SGLang does."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

from aiohttp import web


class FakeDraftServer:
    """Answers prompt p with p[0], p[0]+1, ...: the first token alone, then outputs of `size` tokens.

    Args:
        size: tokens of each output; 0: there is no draft, outputs of one token.
        kind: vllm | sglang; SGLang's streams hold text and no ids here.
    """

    def __init__(self, size: int = 2, kind: str = "vllm") -> None:
        self.size, self.kind, self.wrong = size, kind, 0
        self.bodies: list[dict[str, Any]] = []
        self.in_flight = self.most = 0
        self.drafts = self.accepted = self.generated = 0
        self.refuse: tuple[int, str] | None = None
        self.other_tokens = 0  # of other people, for each request

    def start(self) -> FakeDraftServer:
        self._loop = asyncio.new_event_loop()
        started = threading.Event()

        async def serve() -> None:
            app = web.Application()
            app.router.add_get("/v1/models", self._models)
            app.router.add_get("/metrics", self._metrics)
            app.router.add_post("/v1/completions", self._complete)
            self._runner = web.AppRunner(app)
            await self._runner.setup()
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = probe.getsockname()[1]
            await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
            started.set()

        def run() -> None:
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(serve())
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        started.wait(10)
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        if self.kind == "sglang":
            length = 1 + self.accepted / self.drafts if self.drafts else 0.0
            lines = [f"sglang:generation_tokens_total {self.generated}"]
            lines += [f"sglang:spec_accept_length {length}", "sglang:spec_accept_rate 0.9"] if self.size else []
            return web.Response(text="\n".join(lines))
        lines = [f"vllm:generation_tokens_total {self.generated}"]
        if self.size:
            k = self.size
            lines += [
                f"vllm:spec_decode_num_drafts_total {self.drafts}",
                f"vllm:spec_decode_num_draft_tokens_total {k * self.drafts}",
                f"vllm:spec_decode_num_accepted_tokens_total {self.accepted}",
                *(
                    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}} {self.drafts * (i < k - 1)}'
                    for i in range(k)
                ),
            ]
        return web.Response(text="\n".join(lines))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.refuse is not None:
            return web.json_response({"message": self.refuse[1]}, status=self.refuse[0])
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        first, count = body["prompt"][0], body["max_tokens"]
        ids = [(first + i) % 500 for i in range(count)]
        if self.wrong and count > self.wrong:
            ids[self.wrong] = 501
        sizes = [1, *([max(1, self.size)] * ((count - 1) // max(1, self.size)))]
        sizes += [count - sum(sizes)] if sum(sizes) < count else []
        at = 0
        for number, size in enumerate(sizes):
            await asyncio.sleep(0.002)
            part, at = ids[at : at + size], at + size
            choice: dict[str, Any] = {"index": 0, "text": "".join(f" {i}" for i in part)}
            if self.kind == "vllm":
                choice["token_ids"] = part
            event = f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
            await response.write(event[:7])  # a line may come in pieces
            await response.write(event[7:])
            self.drafts += number > 0
            self.accepted += size - 1
        usage = {"choices": [], "usage": {"completion_tokens": count}}
        await response.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
        self.generated += count + self.other_tokens
        self.in_flight -= 1
        return response
