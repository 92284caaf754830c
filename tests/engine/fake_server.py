"""A fake OpenAI-compatible server, and a fake capture engine that knows what the target behind it would say."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from app.engine.base import Completion, EngineSpec, Request
from app.errors import RowError
from app.target import inspect_target, load_target_head, load_tokenizer
from tests.stubs import END, states_of

SENTENCES = (
    "The mill stands by the river, and the wheel turns whenever the water is high.",
    "Once upon a time there was a keeper of a lighthouse on a small island.",
    "To make bread, mix flour, water, salt and yeast; knead the dough for ten minutes.",
    "A draft model proposes several tokens, and the target model checks them in one step.",
    "Question: what is 17 + 25? Answer: 42.",
)
Override = Callable[[str, dict[str, Any]], web.Response | None]


class FakeTarget:
    """A target whose greedy answer is a sentence chosen by the prompt; `seed` makes it another model."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.tokenizer = load_tokenizer(folder)
        self.seed = seed

    def answer(self, prompt: list[int], limit: int) -> tuple[list[int], str]:
        """Ids with the end token, and "stop" or "length"."""
        digest = hashlib.sha256(str(prompt).encode()).digest()[0]
        sentence = SENTENCES[(digest + self.seed) % len(SENTENCES)]
        ids = [*self.tokenizer(sentence, add_special_tokens=False)["input_ids"], END]
        return (ids, "stop") if len(ids) <= limit else (ids[:limit], "length")

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode([i for i in ids if i != END]))


class FakeCapture:
    """Prefill: known states, whose s_n gives the target's own greedy tokens by the target's real head."""

    def __init__(self, spec: EngineSpec) -> None:
        self.target = FakeTarget(Path(spec.model))
        head = load_target_head(inspect_target(spec.model))
        self.rows = head.lm_head.float() / head.norm_weight  # [V, H], the state that asks for each token
        self.requests: list[Request] = []
        self.closed = False

    async def complete(self, request: Request) -> Completion:
        assert request.answer_ids is not None, "no answer may be made here"
        self.requests.append(request)
        if max(request.answer_ids) >= len(self.rows):
            raise RowError("bad_token", "no such token")
        states = states_of(request.prompt_ids + request.answer_ids)
        own, _ = self.target.answer(request.prompt_ids, 1000)
        wanted = (own + [0] * len(request.answer_ids))[: len(request.answer_ids)]
        states[len(request.prompt_ids) - 1 :, -1] = self.rows[torch.tensor(wanted)].to(states.dtype)
        return Completion(list(request.answer_ids), "prefill", states)

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeServer:
    """Serves `target` on a port of its own; attributes may be changed while it runs."""

    target: FakeTarget
    gives_ids: bool = True
    native: bool = False  # SGLang's /generate
    strict: bool = False  # refuses fields that are not OpenAI's
    key: str | None = None
    models: tuple[str, ...] = ("tiny",)
    max_model_len: int | None = 512
    models_text: str | None = None  # in place of the list of models
    override: Override | None = None  # by path and body: a response in place of the answer
    delay_s: float = 0.0
    port: int = 0
    seen: Counter[str] = field(default_factory=Counter)  # requests by path
    bodies: list[dict[str, Any]] = field(default_factory=list)
    most_at_once: int = 0
    _now: int = 0

    def __post_init__(self) -> None:
        if not self.port:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = probe.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> FakeServer:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        return self

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        for path in ("/v1/completions", "/v1/chat/completions", "/generate"):
            app.router.add_post(path, self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def _close(self) -> None:
        await self._runner.cleanup()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _refusal(self, request: web.Request) -> web.Response | None:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return _error(401, "no such key")
        return None

    async def _models(self, request: web.Request) -> web.Response:
        if self.models_text is not None:
            return web.Response(text=self.models_text)
        listed = [{"id": m, "max_model_len": self.max_model_len} for m in self.models]
        return self._refusal(request) or web.json_response({"data": listed})

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.seen[request.path] += 1
        self.bodies.append(body)
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            await asyncio.sleep(self.delay_s)
            instead = self.override(request.path, body) if self.override else None
            return self._refusal(request) or instead or self._answered(request.path, body)
        finally:
            self._now -= 1

    def _answered(self, path: str, body: dict[str, Any]) -> web.Response:
        if self.strict and body.keys() & {"return_token_ids", "top_k", "repetition_penalty"}:
            return _error(400, "Unrecognized request argument supplied: return_token_ids")
        if path == "/generate":
            return self._native(body) if self.native else _error(404, "Not Found")
        chat = path.endswith("chat/completions")
        prompt = self._rendered(body) if chat else body["prompt"]
        ids, reason = self.target.answer(prompt, body["max_tokens"])
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        text = self.target.text(ids)
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        if self.gives_ids and body.get("return_token_ids"):
            choice |= {"token_ids": ids}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        return web.json_response({"choices": [choice], "usage": usage})

    def _rendered(self, body: dict[str, Any]) -> list[int]:
        text = self.target.tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        return list(self.target.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _native(self, body: dict[str, Any]) -> web.Response:
        ids, reason = self.target.answer(body["input_ids"], body["sampling_params"]["max_new_tokens"])
        finish = {"type": reason, **({"matched": END} if reason == "stop" else {"length": len(ids)})}
        meta = {"finish_reason": finish, "completion_tokens": len(ids), "prompt_tokens": len(body["input_ids"])}
        return web.json_response({"text": self.target.text(ids), "output_ids": ids, "meta_info": meta})


def _error(status: int, words: str) -> web.Response:
    return web.json_response({"error": {"message": words, "type": "error", "code": status}}, status=status)


def error_response(status: int, words: str, **headers: str) -> web.Response:
    """For overrides."""
    response = _error(status, words)
    response.headers.update({k.replace("_", "-"): v for k, v in headers.items()})
    return response
