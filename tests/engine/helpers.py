"""Prompts, references and small targets of the engine tests."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.engine.base import Completion, EngineSpec, Request
from app.engine.vllm_engine import VllmEngine
from tests.tiny import MAX_POSITIONS, TOKENIZER_LEN, VOCAB, make_tokenizer

ROOT = Path(__file__).parents[2]
SMOL_LAYERS = (2, 15, 27)
NEW_TOKENS = 40
TEXTS = (
    "What is the capital of France?",
    "Write a poem about the sea, the wind and the people who live by the water. Begin with the morning.",
    "Explain in three sentences why the sky is blue.",
    "2 + 2 =",
    "Name five animals that live in the forest and say what each of them eats in winter.",
    "def fibonacci(n):",
)


def spec_for(model: str, layers: tuple[int, ...], num_layers: int, **changes: Any) -> EngineSpec:
    values: dict[str, Any] = {
        "dtype": "float32",  # bf16 would hide a fault of one percent in its own noise
        "max_model_len": MAX_POSITIONS,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "kv_cache_gib": 0.5,
        **changes,
    }
    return EngineSpec(model=model, aux_layer_ids=layers, num_layers=num_layers, **values)


def reference(model: str, sequences: list[list[int]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Hugging Face's s_0..s_n of each sequence, [T, n+1, H] fp32; s_n is taken before the final norm."""
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    last: list[Tensor] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        last.append(output[0] if isinstance(output, tuple) else output)

    net.model.layers[-1].register_forward_hook(keep)
    out = []
    for ids in sequences:
        with torch.no_grad():
            hidden = net(torch.tensor([ids]), output_hidden_states=True).hidden_states
        states = [*hidden[:-1], last.pop().reshape(hidden[0].shape)]
        out.append(torch.stack(states, dim=2)[0].float())  # [T, n+1, H]
    return out


def errors(states: Tensor, wanted: Tensor) -> list[float]:
    """Largest relative error of a position, per layer: [N, K, H] against [N, K, H]."""
    off = (states.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)  # [N, K]
    return [float(x) for x in off.amax(0)]


async def all_of(engine: VllmEngine, requests: list[Request]) -> list[Completion | Exception]:
    done = await asyncio.gather(*(engine.complete(r) for r in requests), return_exceptions=True)
    return [d for d in done if isinstance(d, Completion | Exception)]


def answers(engine: VllmEngine, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> list[Completion]:
    requests = [Request(f"row {i}", p, new_tokens) for i, p in enumerate(prompts)]
    done = asyncio.run(all_of(engine, requests))
    assert all(isinstance(d, Completion) for d in done), done
    return [d for d in done if isinstance(d, Completion)]


def prefills(engine: VllmEngine, prompts: list[list[int]], done: list[Completion]) -> list[Completion]:
    requests = [
        Request(f"row {i}", p, 1, answer_ids=d.answer_ids) for i, (p, d) in enumerate(zip(prompts, done, strict=True))
    ]
    again = asyncio.run(all_of(engine, requests))
    assert all(isinstance(d, Completion) for d in again), again
    return [d for d in again if isinstance(d, Completion)]


def tiny_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, TOKENIZER_LEN, (n,), generator=generator).tolist() for n in lengths]


def smol_prompts(model: str) -> list[list[int]]:
    from app.target import Renderer, load_tokenizer

    renderer = Renderer(load_tokenizer(model))
    return [renderer.render([{"role": "user", "content": t}], True) for t in TEXTS]


def leftovers(engine: VllmEngine) -> tuple[int, list[str]]:
    """States still held while idle, and our threads after closing."""
    answers(engine, [[5, 6, 7]], 2)  # one more request, so that the worker hears of those that ended
    assert engine._stores is not None
    held = len(engine._stores.states)
    engine.close()
    return held, [t.name for t in threading.enumerate() if t.name.startswith("draftmill")]


def make_mla(folder: Path) -> Path:
    """A random target of DeepSeek-V3's shape: latent attention, a dense layer, then experts."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    tokenizer = make_tokenizer()
    settings: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model: Any = DeepseekV3ForCausalLM(DeepseekV3Config(**settings))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Scenarios:
    """What scenarios of scenarios.py measure, each run once and in a process of its own. While one is waited for, the
    one after it in `names` runs too: an engine's start fills one core.

    Args:
        names: keys of `scenario`, in the order of the tests.
        scenario: a key -> name of the scenario and folder of its target; called in this thread.
        folder: for what they write.
    """

    def __init__(self, names: Sequence[str], scenario: Callable[[str], tuple[str, Path]], folder: Path) -> None:
        self.names, self.scenario, self.folder = names, scenario, folder
        self.begun: dict[str, Future[dict[str, Any]]] = {}
        self.pool = ThreadPoolExecutor(2)

    def __call__(self, name: str) -> dict[str, Any]:
        at = self.names.index(name)
        for key in self.names[at : at + 2]:
            if key not in self.begun:
                self.begun[key] = self.pool.submit(self._measure, *self.scenario(key), self.folder / f"{key}.pt")
        return self.begun[name].result()

    def _measure(self, scenario: str, model: Path, out: Path) -> dict[str, Any]:
        command = [sys.executable, "-m", "tests.engine.scenarios", scenario, str(model), str(out)]
        env = {
            **os.environ,
            "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads starve on a busy machine
            "VLLM_CPU_KVCACHE_SPACE": "1",  # of someone's shell: it must not win over the configured cache
        }
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, f"{scenario} {model}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        result: dict[str, Any] = torch.load(out, weights_only=False)
        return result

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
