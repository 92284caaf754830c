"""Engines without a model, for measurements of what stands around them: each works on one part at a time, by sleeping.

Nothing here imports torch, so that dozens of actors fit a small machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import RowError
from app.storage import Store


def outcome_of(part: int, key: str, rows: int = 64) -> dict[str, Any]:
    """An entry as a committed part of `rows` answers has it."""
    name = f"part-{part:05d}"
    files = {
        "rows": {"name": f"{name}-00000000.parquet", "size": 0, "sha256": "0" * 64},
        "states": {"name": f"{name}-11111111.safetensors", "size": 0, "sha256": "1" * 64},
    }
    return {
        "part": part, "key": key, "rows_in": rows, "conversations": rows, "samples": rows, "rejects": [],
        "cut_short": [], "tokens": {"prompt": 80 * rows, "answer": 500 * rows, "supervised": 500 * rows},
        "finish_reasons": {"stop": rows}, "files": files, "layers": [2, 15, 27], "dtype": "bfloat16",
        "hidden_size": 4096, "seconds": 30.0,
    }  # fmt: skip


def _log(path: str, begun: float) -> None:
    """A line for a stretch of work: who, from, to."""
    with open(path, "a") as file:
        file.write(f"{os.getpid()} {begun} {time.time()}\n")


@dataclass(frozen=True)
class LightConfig:
    """Stands in for WorkerConfig."""

    run_url: str
    part_s: float
    log: str
    board: Any = None


class LightWorker:
    """Stands in for PartWorker: the same actor to Ray, with the small files of a part and none of its data."""

    def __init__(self, config: LightConfig) -> None:
        self._config = config
        self._store = Store(config.run_url)
        self._engine = threading.Lock()

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        outcomes = []
        for part, key in zip(batch["part"], batch["key"], strict=True):
            attempts = f"generate/attempts/{part}.json"
            self._store.read_json(attempts)
            self._store.write_json(attempts, {"under_way": []})
            with self._engine:
                begun = time.time()
                time.sleep(self._config.part_s)
                _log(self._config.log, begun)
            outcome = outcome_of(int(part), str(key))
            self._store.write_json(f"generate/parts/part-{int(part):05d}.json", outcome)
            self._store.delete(attempts)
            outcomes.append(json.dumps(outcome))
        return {"outcome": outcomes}


class SimulatedEngine:
    """An engine for PartWorker that takes SIM_PART_S seconds for SIM_ROWS requests, one after the other.

    engine_args: SIM_PART_S, SIM_ROWS, SIM_LOG (a file that gets a line for each stretch of work); SIM_FAST: a file,
    requests take no time once it is there; SIM_REFUSES: text
    in a conversation that is rejected; SIM_HANGS_ONCE: a file, the engine answers nothing any more from its third
    request on where that file is absent, after making it.
    """

    def __init__(self, spec: Any) -> None:
        args = spec.engine_args
        self._seconds, self._path = float(args["SIM_PART_S"]) / int(args["SIM_ROWS"]), str(args["SIM_LOG"])
        self._refused, self._hangs_once = args.get("SIM_REFUSES"), args.get("SIM_HANGS_ONCE")
        self._fast = Path(args.get("SIM_FAST", "/nonexistent"))
        self._busy = asyncio.Lock()
        self._waiting = self._steps = 0
        Path(self._path).touch()

    def load(self) -> Any:
        from app.engine.board import Load

        return Load(self._steps, min(self._waiting, 1), max(0, self._waiting - 1), 0.25)

    async def complete(self, request: Any) -> Any:
        from app.engine.base import Completion
        from tests.stubs import answer_of, states_of

        if request.answer_ids is None:
            self._waiting += 1
            async with self._busy:
                await self._hang_once()
                begun = time.time()
                await asyncio.sleep(0 if self._fast.exists() else self._seconds)
                _log(self._path, begun)
                self._waiting, self._steps = self._waiting - 1, self._steps + 1
            if self._refused is not None and self._refused in str(request.messages):
                raise RowError("simulated", "refused as asked")
        answer = request.answer_ids or answer_of(request.request_id, 12)
        return Completion(list(answer), "stop", states_of(request.prompt_ids + list(answer)))

    async def _hang_once(self) -> None:
        if self._hangs_once is not None and self._steps == 2 and not Path(self._hangs_once).exists():
            Path(self._hangs_once).write_text(str(os.getpid()))
            await asyncio.Event().wait()

    def close(self) -> None:
        pass
