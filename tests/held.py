"""Engines that answer some prompts only when training has done a step: what runs beside what does not hang on time."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.engine.base import Completion, EngineSpec, Request
from app.engine.vllm_engine import VllmEngine
from app.errors import UserError
from app.target import load_tokenizer
from tests.stubs import StubEngine

_MOST_S = 400.0


class _Held:
    """engine_args: HELD_TEXT, of the prompts to hold; HELD_UNTIL, the training's metrics.jsonl, which must have a step;
    HELD_FAILS, a file: where it is absent the stage fails then."""

    def __init__(self, spec: EngineSpec) -> None:
        args = dict(spec.engine_args)
        self._text, self._until = str(args.pop("HELD_TEXT")), Path(args.pop("HELD_UNTIL"))
        self._fails = Path(args.pop("HELD_FAILS", self._until.parent))
        self._words = load_tokenizer(spec.model)
        super().__init__(replace(spec, engine_args=args))  # type: ignore[call-arg]

    async def complete(self, request: Request) -> Completion:
        if self._text in str(self._words.decode(request.prompt_ids, skip_special_tokens=True)):
            deadline = time.monotonic() + _MOST_S
            while not (self._until.exists() and '"loss"' in self._until.read_text()):
                if time.monotonic() > deadline:
                    raise UserError("no step of training came beside generate")
                await asyncio.sleep(0.1)
            if not self._fails.exists():
                raise UserError("generate: the held engine gives up")
        answer: Any = await super().complete(request)  # type: ignore[misc]
        assert isinstance(answer, Completion)
        return answer


class HeldStub(_Held, StubEngine):
    """Of the stub."""


class HeldVllm(_Held, VllmEngine):
    """Of the real engine."""
