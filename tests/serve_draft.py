"""Serves a target with a draft in real vLLM and records what the engine made of them. Run as a script:

python -m tests.serve_draft TARGET DRAFT K TOKENS OUT PROMPT_LENGTH...

Records of the first request's first draft round and the loaded weights go to OUT (torch.save), the rest is
printed as one line of JSON. One engine per process: a crash must not take the tests along.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

FIRST_TOKEN = 20


def prompt(length: int) -> list[int]:
    """The prompt of `length` tokens."""
    return list(range(FIRST_TOKEN, FIRST_TOKEN + length))


def record(worker: Any) -> None:
    """Keep inputs and outputs of the draft's forward passes on the worker."""
    draft = worker.model_runner.drafter.model
    worker.calls, worker.aux = [], []
    combine = draft.combine_hidden_states

    def combine_and_keep(states: Any) -> Any:
        worker.aux.append(states.clone())
        return combine(states)

    def keep(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        worker.calls.append(
            {
                "input_ids": kwargs["input_ids"].clone(),
                "positions": kwargs["positions"].clone(),
                "logits": draft.compute_logits(hidden).clone(),  # [rows, V]
            }
        )

    draft.combine_hidden_states = combine_and_keep
    draft.register_forward_hook(keep, with_kwargs=True)


def collect(worker: Any, k: int, out: str) -> dict[str, Any]:
    """Save the first draft round and the weights to `out`; what the engine resolved."""
    import torch

    runner = worker.model_runner
    draft, inner = runner.drafter.model, runner.drafter.model.model
    layer = inner.layers[0]
    torch.save(
        {
            "aux": worker.aux[0],
            "calls": worker.calls[:k],
            "lm_head": draft.lm_head.weight.detach(),
            "norm": inner.norm.weight.detach(),
            "d2t": draft.draft_id_to_target_id.detach(),
            "cos_sin": layer.self_attn.rotary_emb.cos_sin_cache,
        },
        out,
    )
    return {
        "layers": list(runner._get_eagle3_aux_layers_from_config()),
        "captured": list(runner.model.model.aux_hidden_state_layers),
        "head_dim": layer.self_attn.head_dim,
        "shared_embedding": inner.embed_tokens is runner.model.model.embed_tokens,
    }


def main(target: str, draft: str, k: int, tokens: int, out: str, lengths: list[int]) -> dict[str, Any]:
    """Serve one prompt per length, the first alone."""
    from functools import partial

    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the recorder is a function handed to the worker
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams

    llm = LLM(
        target,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        seed=0,
        disable_log_stats=False,
        speculative_config={"method": "eagle3", "model": draft, "num_speculative_tokens": k},
    )
    llm.collective_rpc(record)
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt(n)} for n in lengths]
    outputs = [*llm.generate(prompts[:1], sampling), *llm.generate(prompts[1:], sampling)]
    result: dict[str, Any] = llm.collective_rpc(partial(collect, k=k, out=out))[0]
    result["tokens"] = [list(output.outputs[0].token_ids) for output in outputs]
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode_num_") and hasattr(metric, "value"):
            result[metric.name.removeprefix("vllm:spec_decode_")] = metric.value
    return result


if __name__ == "__main__":
    words = sys.argv[1:]
    served = main(words[0], words[1], int(words[2]), int(words[3]), words[4], [int(n) for n in words[5:]])
    print("RESULT " + json.dumps(served))
