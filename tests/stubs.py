"""A fake engine for fault injection: answers and states are known functions of the request."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
from pathlib import Path

import torch
from torch import Tensor

from app.engine.base import Completion, EngineError, EngineSpec, Request
from app.errors import RowError
from app.target import load_tokenizer

HIDDEN = 64  # of the tiny target
END = 2  # answers end with the tiny tokenizer's end token


def answer_of(request_id: str, length: int) -> list[int]:
    """Token ids 300..499, a function of the request alone."""
    digest = hashlib.sha256(request_id.encode()).digest()
    return [300 + digest[i % 32] % 200 for i in range(length - 1)] + [END]


def states_of(tokens: list[int]) -> Tensor:
    """[T-1, 4, H]: a function of token, position and layer, so that a swap, shift or cut shows by equality."""
    count = len(tokens) - 1
    token = torch.tensor(tokens[:-1], dtype=torch.float32).view(-1, 1, 1)
    position = torch.arange(count).view(-1, 1, 1)
    layer = torch.arange(4).view(1, -1, 1)
    channel = torch.arange(HIDDEN).view(1, 1, -1)
    values = torch.sin(token * 0.37 + position * 1.13 + layer * 2.11 + channel * 0.71)
    return values.to(torch.bfloat16)


class StubEngine:
    """Behaviour by engine_args, or by environment where those name none:

    STUB_DELAY: seconds a request; STUB_LENGTH: tokens of an answer; STUB_BAD_STATES: fault of the third request;
    STUB_RAISE: every n-th request is refused, until the
    file STUB_RAISE_UNTIL exists; STUB_DIE_ONCE: SIGKILL itself when this file is absent, after making it;
    STUB_DIE_ALWAYS: the same each time; STUB_ENGINE_ERROR_ONCE: a file, the engine fails once; STUB_LOG: a file that
    gets a line per finished request; STUB_SCRIPT: a JSON file, text at the prompt's end -> text of the answer (cut by
    length where it ends in "...").
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.count = 0
        self.options = {**os.environ, **{k: str(v) for k, v in spec.engine_args.items()}}

    async def complete(self, request: Request) -> Completion:
        self.count += 1
        number = self.count
        # Out of order on purpose: later requests of a part end first.
        await asyncio.sleep(float(self.options.get("STUB_DELAY", "0")) * (1 + (7 - number % 7) / 7))
        once = self.options.get("STUB_DIE_ONCE")
        if once and number == 5 and not Path(once).exists():
            Path(once).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.options.get("STUB_DIE_ALWAYS") and number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        broken = self.options.get("STUB_ENGINE_ERROR_ONCE")
        if broken and number == 5 and not Path(broken).exists():
            Path(broken).touch()
            raise EngineError("the stub engine broke")
        passed = Path(self.options.get("STUB_RAISE_UNTIL", "/nonexistent")).exists()
        if self.options.get("STUB_RAISE") and not passed and number % int(self.options["STUB_RAISE"]) == 0:
            raise RowError("bad_request", "the stub refuses every so many requests")
        if request.answer_ids is not None:
            answer, reason = list(request.answer_ids), "prefill"
        else:
            answer = answer_of(request.request_id, int(self.options.get("STUB_LENGTH", "12")))
            reason = "stop"
            if self.options.get("STUB_SCRIPT"):
                answer, reason = self._scripted(request, Path(self.options["STUB_SCRIPT"]))
        states = states_of(request.prompt_ids + answer)
        fault = self.options.get("STUB_BAD_STATES")
        if fault and number == 3:
            states = states.clone()
            if fault == "nan":
                states[4, 1, 7] = float("nan")
            elif fault == "zero":
                states[:, 2] = 0
            elif fault == "partly_zero":
                states[: int(len(states) * 0.7) + 1, 0] = 0
            elif fault == "short":
                states = states[:-1]
        if self.options.get("STUB_LOG"):
            with open(self.options["STUB_LOG"], "a") as log:
                log.write(f"{request.request_id} {os.getpid()}\n")
        return Completion(answer, reason, states)

    def _scripted(self, request: Request, script: Path) -> tuple[list[int], str]:
        tokenizer = load_tokenizer(self.spec.model)
        prompt = str(tokenizer.decode(request.prompt_ids))
        found = {prompt.rfind(key): text for key, text in json.loads(script.read_text()).items() if key in prompt}
        text = found[max(found)]
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        return (ids, "length") if text.endswith("...") else ([*ids, END], "stop")

    def close(self) -> None:
        pass
