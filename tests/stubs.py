"""A fake engine for fault injection: answers and states are known functions of the request."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from app.engine.base import Completion, EngineError, EngineSpec, Request
from app.engine.warden import STATES_FOLDER, owner_tag
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
    STUB_RAISE: every n-th request is refused, until the file STUB_RAISE_UNTIL exists; STUB_DIE_ONCE: SIGKILL itself
    when this file is absent, after making it; STUB_DIE_AT_START: SIGKILL itself each time it starts;
    STUB_ENGINE_ERROR_ONCE: a file, the engine fails once; STUB_LOG: a file that gets a line per finished request;
    STUB_SCRIPT: a JSON file, text at the prompt's end -> text of the answer (cut by length where it ends in "...").

    By text in the prompt: STUB_CRASH_ON, SIGKILL itself each time; STUB_SLOW_ON, answers after STUB_SLOW_S seconds, or
    when STUB_LOG has STUB_SLOW_LINES lines. STUB_SWAP: requests two by two get each other's states. STUB_CHILD: "spawn"
    or "fork", a child process that ignores SIGTERM, and a folder of states as vLLM's workers in other processes fill
    it; their names go into the file STUB_LEFT. STUB_CORE: a file; a child process does the work, its pid stands in the
    file, and the engine is dead when it is. The spot check is answered rightly and counts as no request.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.count = 0
        self.options = {**os.environ, **{k: str(v) for k, v in spec.engine_args.items()}}
        self.waiting: asyncio.Future[Tensor] | None = None  # STUB_SWAP: states of the request that came before
        self.core: subprocess.Popen[bytes] | None = None
        if self.options.get("STUB_DIE_AT_START"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.options.get("STUB_CHILD"):
            self._leave_behind(self.options["STUB_CHILD"], Path(self.options["STUB_LEFT"]))
        if self.options.get("STUB_CORE"):
            self.core = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            with open(self.options["STUB_CORE"], "a") as file:
                file.write(f"{self.core.pid}\n")

    def _leave_behind(self, how: str, left: Path) -> None:
        """A child that ignores SIGTERM and a folder of states."""
        if how == "fork":
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                os.setsid()
                while True:
                    signal.pause()
        else:
            code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
            child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True).pid
        folder = tempfile.mkdtemp(prefix=f"{STATES_FOLDER}{owner_tag()}-", dir="/dev/shm")
        Path(folder, "r1").write_bytes(b"states")
        with left.open("a") as file:
            file.write(f"{os.getpid()} {child} {folder}\n")

    async def complete(self, request: Request) -> Completion:
        if request.request_id.endswith("-check"):
            assert request.answer_ids is not None
            return Completion(request.answer_ids, "prefill", states_of(request.prompt_ids + request.answer_ids))
        self.count += 1
        number = self.count
        # Out of order on purpose: later requests of a part end first.
        await asyncio.sleep(float(self.options.get("STUB_DELAY", "0")) * (1 + (7 - number % 7) / 7))
        await self._misbehave(request, number)
        if request.answer_ids is not None:
            answer, reason = list(request.answer_ids), "prefill"
        else:
            answer = answer_of(request.request_id, int(self.options.get("STUB_LENGTH", "12")))
            reason = "stop"
            if self.options.get("STUB_SCRIPT"):
                answer, reason = self._scripted(request, Path(self.options["STUB_SCRIPT"]))
        states = self._spoilt(states_of(request.prompt_ids + answer), number)
        if self.options.get("STUB_SWAP"):
            states = await self._swapped(states)
        if self.options.get("STUB_LOG"):
            with open(self.options["STUB_LOG"], "a") as log:
                log.write(f"{request.request_id} {os.getpid()}\n")
        return Completion(answer, reason, states)

    async def _misbehave(self, request: Request, number: int) -> None:
        """The faults that come before an answer."""
        once = self.options.get("STUB_DIE_ONCE")
        if once and number == 5 and not Path(once).exists():
            Path(once).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        broken = self.options.get("STUB_ENGINE_ERROR_ONCE")
        if broken and number == 5 and not Path(broken).exists():
            Path(broken).touch()
            raise EngineError("the stub engine broke")
        if self.core is not None and self.core.poll() is not None:
            raise EngineError(f"the stub's core process ended ({self.core.returncode})")
        passed = Path(self.options.get("STUB_RAISE_UNTIL", "/nonexistent")).exists()
        if self.options.get("STUB_RAISE") and not passed and number % int(self.options["STUB_RAISE"]) == 0:
            raise RowError("bad_request", "the stub refuses every so many requests")
        if self._asks(request, "STUB_CRASH_ON"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._asks(request, "STUB_SLOW_ON"):
            await asyncio.sleep(float(self.options.get("STUB_SLOW_S", "0")))
            while len(Path(self.options["STUB_LOG"]).read_text().splitlines()) < int(
                self.options.get("STUB_SLOW_LINES", "0")
            ):
                await asyncio.sleep(0.05)

    def _asks(self, request: Request, option: str) -> bool:
        """Whether the prompt holds the text, or one of those separated by `|`, of `option`."""
        if not self.options.get(option):
            return False
        prompt = str(load_tokenizer(self.spec.model).decode(request.prompt_ids, skip_special_tokens=True))
        return any(text in prompt for text in self.options[option].split("|"))

    def _spoilt(self, states: Tensor, number: int) -> Tensor:
        fault = self.options.get("STUB_BAD_STATES")
        if not fault or number != 3:
            return states
        states = states.clone()
        if fault == "nan":
            states[4, 1, 7] = float("nan")
        elif fault == "zero":
            states[:, 2] = 0
        elif fault == "partly_zero":
            states[: int(len(states) * 0.7) + 1, 0] = 0
        elif fault == "short":
            states = states[:-1]
        return states

    async def _swapped(self, states: Tensor) -> Tensor:
        """The states of the request before or after this one."""
        if self.waiting is None:
            self.waiting = asyncio.get_running_loop().create_future()
            self.mine = states
            return await self.waiting
        other, self.waiting = self.waiting, None
        other.set_result(states)
        return self.mine

    def _scripted(self, request: Request, script: Path) -> tuple[list[int], str]:
        tokenizer = load_tokenizer(self.spec.model)
        prompt = str(tokenizer.decode(request.prompt_ids))
        found = {prompt.rfind(key): text for key, text in json.loads(script.read_text()).items() if key in prompt}
        text = found[max(found)]
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        return (ids, "length") if text.endswith("...") else ([*ids, END], "stop")

    def close(self) -> None:
        pass
