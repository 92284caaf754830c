"""What test_served.py runs beside a real vLLM server: `python -m tests.engine.served_scenario MODEL URL OUT`."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from app.engine.base import Completion, EndpointSpec, Engine, Request
from app.engine.process import prepare_process
from app.engine.served import ServedEngine
from app.engine.vllm_engine import VllmEngine
from app.errors import RowError, UserError
from app.target import Renderer, load_tokenizer
from tests.engine.helpers import errors, spec_for, tiny_prompts
from tests.tiny import LAYERS, make_tiny

CHATS = 6


def requests_for(model: str) -> list[Request]:
    """Chat prompts, then prompts of random tokens of which some stop early."""
    renderer = Renderer(load_tokenizer(model))
    out = []
    for number in range(CHATS):
        messages = [{"role": "user", "content": f"Please count the sacks of day {number}"}]
        prompt = renderer.render(messages, True)
        out.append(Request(f"chat {number}", prompt, 40, {"temperature": 0.0}, None, messages))
    prompts = [*tiny_prompts(5, 150, 61, 33), *([number] for number in range(3, 120))]
    return out + [Request(f"row {i}", p, 40, {"temperature": 0.0}) for i, p in enumerate(prompts)]


def complete(engine: Engine, requests: list[Request]) -> list[Completion]:
    async def all_of() -> list[Completion]:
        return list(await asyncio.gather(*(engine.complete(r) for r in requests)))

    return asyncio.run(all_of())


def fault(engine: Engine, request: Request) -> str:
    try:
        complete(engine, [request])
    except RowError as error:
        return "prompt_too_long or bad_request" if error.reason in ("prompt_too_long", "bad_request") else error.reason
    return "Completion"


def other_weights(own: Engine, spec: Any) -> str:
    """What is said where the server has other weights than the target: here the target's folder is another's."""
    with tempfile.TemporaryDirectory() as folder:
        make_tiny(Path(folder), seed=1)
        try:
            ServedEngine(own, replace(spec, model=folder))
        except UserError as error:
            return str(error)
    return "passed"


def main(model: str, url: str) -> dict[str, Any]:
    spec = spec_for(model, (2, 4, 5), LAYERS)
    own = VllmEngine(spec)
    requests = requests_for(model)
    wanted = complete(own, requests)
    out: dict[str, Any] = {
        "own": {"answers": [d.answer_ids for d in wanted], "reasons": [d.finish_reason for d in wanted]},
    }
    for api, asked in (("completions", requests), ("chat", requests[:CHATS])):
        servers = EndpointSpec((url,), api=api, concurrency=8)
        served = ServedEngine(own, replace(spec, endpoints=servers))
        done = complete(served, asked)
        assert served._endpoints is not None
        out[api] = {
            "answers": [d.answer_ids for d in done],
            "reasons": [d.finish_reason for d in done],
            "errors": [max(errors(d.states, w.states.float())) for d, w in zip(done, wanted[: len(done)], strict=True)],
            "gives_ids": served._endpoints.all[0].gives_ids,
        }
        if api == "completions":
            warm = replace(requests[0], sampling={"temperature": 1.0, "seed": 11})
            out["sampled twice"] = [d.answer_ids for d in complete(served, [warm, warm])]
            out["too long"] = fault(served, replace(requests[0], prompt_ids=[5] * 600))
    # The last, as it ends by closing the engine it was given.
    out["other weights"] = other_weights(own, replace(spec, endpoints=servers))
    served.close()
    del served
    out["threads"] = [t.name for t in threading.enumerate() if t.name in ("draftmill-engine", "draftmill-finish")]
    return out


if __name__ == "__main__":
    prepare_process()
    torch.save(main(sys.argv[1], sys.argv[2]), sys.argv[3])
