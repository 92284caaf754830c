"""What the recipes in configs/ read, as small files: datasets in the layout of the real ones, targets without weights.

The columns are those of the datasets' cards and of files of them that others published; of `crownelius/KimiK2.5-2000x`
neither was at hand, and a sister set of the same author stands for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.families import make_kimi_k25
from tests.sources.hub_server import CONVERTED, Repo, commit, jsonl, parquet
from tests.tiny import make_tokenizer

QUESTIONS = ("How many sacks of grain does the mill of day {} need?", "And how many of flour are left on day {}?")
ANSWERS = ("Twelve divided by three quarters is sixteen, so it is {}.", "One sack in four is lost, so three of {}.")


def _turns(names: tuple[str, ...], role: str, content: str, n: int) -> list[dict[str, Any]]:
    """Messages of the roles `names` in their order; row n."""
    text = {"system": "You keep the books of a mill.", "tool": '[{{"sacks": {}}}]'}
    turns = []
    for at, name in enumerate(names):
        asks = name in ("user", "human")
        words = text.get(name) or (QUESTIONS if asks else ANSWERS)[at // 2 % 2]
        turns.append({role: name, content: words.format(n) if "{" in words else words})
    return turns


def _swe_agent(n: int) -> dict[str, Any]:
    """Of every message all fields, the unused ones null: the prompt of the system is in one of its own."""
    empty = {"cutoff_date": "01.01.2023", "mask": False, "system_prompt": None, "text": None}
    system = {**empty, "role": "system", "system_prompt": "SETTING: you work in a shell, one command at a time."}
    roles, texts = ("user", "ai", "user", "ai"), (QUESTIONS[0], ANSWERS[0], "[File: /mill/{}.py (9 lines total)]", "{}")
    turns = [{**empty, "role": r, "text": t.format(n)} for r, t in zip(roles, texts, strict=True)]
    return {
        "instance_id": f"mill__mill-{n}", "model_name": "swe-agent-llama-70b", "target": n % 2 == 0,
        "trajectory": [system, *turns], "exit_status": "submitted", "generated_patch": "diff", "eval_logs": "ok",
    }  # fmt: skip


def _deep_swe(n: int) -> dict[str, Any]:
    """One column; calls are text in the answers, results are user turns. The eighth is longer than 8,192 tokens."""
    turns = _turns(("system", "user", "assistant", "user", "assistant"), "role", "content", n)
    turns[2]["content"] += "\n<function=execute_bash>\n<parameter=cmd>ls</parameter>\n</function>"
    turns[4]["content"] *= 300 if n == 7 else 1
    return {"messages": turns}


def _kimi(n: int) -> dict[str, Any]:
    return {
        "id": f"row_{n}", "problem": QUESTIONS[0].format(n), "thinking": ANSWERS[1].format(n),
        "solution": ANSWERS[0].format(n), "difficulty": "easy", "category": "math",
    }  # fmt: skip


def _toolace(n: int) -> dict[str, Any]:
    """The tools stand in the system prompt, calls in Python's form in the answers."""
    turns = _turns(("user", "assistant", "tool", "assistant"), "from", "value", n)
    turns[1]["value"] = f"[Mill.sacks(day={n})]"
    return {"system": 'You may call [{"name": "Mill.sacks"}]', "conversations": turns}


def _hermes(n: int) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "sacks", "description": "of a day", "parameters": {}}}
    turns = _turns(("system", "human", "gpt", "tool", "gpt"), "from", "value", n)
    turns[2]["value"] = f'<tool_call>\n{{"name": "sacks", "arguments": {{"day": {n}}}}}\n</tool_call>'
    return {
        "id": f"id-{n}", "conversations": turns, "tools": json.dumps([tool]), "category": "Mills",
        "subcategory": "Sacks", "task": "Counting",
    }  # fmt: skip


def _thoughts(n: int) -> dict[str, Any]:
    turns = _turns(("user", "assistant"), "role", "content", n)
    turns[1]["content"] = f"<think>\nLet me count.\n</think>\n\n{turns[1]['content']}"
    return {"messages": turns, "num_tokens": 99, "source": "open-r1/codeforces-cots"}


def _open_thoughts(n: int) -> dict[str, Any]:
    turns = _turns(("user", "assistant"), "from", "value", n)
    turns[1]["value"] = f"<|begin_of_thought|>\nSo.\n<|end_of_thought|>\n\n{turns[1]['value']}"
    return {"system": "Your role as an assistant is to think first.", "conversations": turns}


def _blend(n: int) -> dict[str, Any]:
    return {"conversations": _turns(("human", "gpt"), "from", "value", n), "source": "meta-math/MetaMathQA"}


def _ultrachat(n: int) -> dict[str, Any]:
    turns = _turns(("user", "assistant", "user", "assistant"), "role", "content", n)
    return {"prompt": turns[0]["content"], "prompt_id": f"{n:064x}", "messages": turns}


def _sharegpt(n: int) -> dict[str, Any]:
    """As scraped: a few conversations are empty, or begin with the answer."""
    roles = ("human", "gpt", "human", "gpt") if n % 200 else ()
    roles = ("gpt", *roles) if n % 50 == 1 else roles
    return {"id": f"r{n}_0", "conversations": _turns(roles, "from", "value", n)}


# Dataset -> how a row looks, the file of the repository itself, and the folder of its Parquet conversion where a
# conversion is known.
LAYOUTS: dict[str, tuple[Callable[[int], dict[str, Any]], str, str | None]] = {
    "nebius/SWE-agent-trajectories": (_swe_agent, "data/train-00000-of-00001.parquet", "default/train"),
    "SWE-Factory/DeepSWE-Agent-Kimi-K2-Trajectories-2.8K": (
        _deep_swe,
        "DeepSWE-Agent-Kimi-K2-Trajectories-2.8K.jsonl",
        None,
    ),
    "crownelius/KimiK2.5-2000x": (_kimi, "data/train.jsonl", "default/train"),
    "Team-ACE/ToolACE": (_toolace, "data.json", "default/train"),
    "NousResearch/hermes-function-calling-v1": (_hermes, "func-calling.json", "func_calling/train"),
    "open-r1/Mixture-of-Thoughts": (_thoughts, "all/train-00000-of-00001.parquet", "all/train"),
    "open-thoughts/OpenThoughts-114k": (_open_thoughts, "data/train-00000-of-00001.parquet", "default/train"),
    "mlabonne/open-perfectblend": (_blend, "data/train-00000-of-00001.parquet", "default/train"),
    "HuggingFaceH4/ultrachat_200k": (_ultrachat, "data/train_sft-00000-of-00001.parquet", "default/train_sft"),
    "anon8231489123/ShareGPT_Vicuna_unfiltered": (
        _sharegpt,
        "ShareGPT_V3_unfiltered_cleaned_split.json",
        None,
    ),
}
# Files beside them that must not be taken for rows of the recipe's subset and split.
_BESIDE: dict[str, tuple[str, ...]] = {
    "HuggingFaceH4/ultrachat_200k": ("default/train_gen", "default/test_sft"),
    "open-r1/Mixture-of-Thoughts": ("math/train",),
    "open-thoughts/OpenThoughts-114k": ("metadata/train",),
    "NousResearch/hermes-function-calling-v1": ("func_calling_singleturn/train", "json_mode_agentic/train"),
}
_RAW_BESIDE = {
    "SWE-Factory/DeepSWE-Agent-Kimi-K2-Trajectories-2.8K": (
        "DeepSWE-Agent-Kimi-K2-Trajectories-Rejection-Sampling.jsonl"
    ),
    "anon8231489123/ShareGPT_Vicuna_unfiltered": "ShareGPT_2023.03.23v0_Unfiltered.json",
}


def dataset(name: str, rows: int) -> Repo:
    """The dataset `name` with `rows` rows."""
    layout, path, folder = LAYOUTS[name]
    data = [layout(n) for n in range(rows)]
    writer = {"parquet": parquet, "jsonl": jsonl, "json": lambda r: json.dumps(r).encode()}[path.rpartition(".")[2]]
    own = {"README.md": b"x", ".gitattributes": b"x", path: writer(data)}
    if name in _RAW_BESIDE:
        own[_RAW_BESIDE[name]] = b'{"messages": [{"role": "user", "content": "not of the recipe"}]}\n'
    refs, files = {"main": commit(name)}, {commit(name): own}
    if folder is not None:
        others = {f"{f}/0000.parquet": parquet([{"a": 1}]) for f in _BESIDE.get(name, ())}
        refs[CONVERTED] = commit(f"{name} converted")
        files[refs[CONVERTED]] = {f"{folder}/0000.parquet": parquet(data), **others}
    return Repo(refs, files)


# The published sizes; what a plan does not read is left out.
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
_QWEN = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "tie_word_embeddings": False,
}  # fmt: skip
_KIMI_TEXT = {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 384, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "vocab_size": 163840, "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 50000.0, "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
    },
}  # fmt: skip


def target(folder: Path, config: dict[str, Any]) -> Repo:
    """A model's repository of config and tokenizer."""
    folder.mkdir(parents=True)
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return _model(folder)


def kimi(folder: Path) -> Repo:
    """Kimi-K2.5: the tests' nested layout with the published sizes, its tokenizer Python beside the weights."""
    folder.mkdir(parents=True)
    make_kimi_k25(folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= _KIMI_TEXT
    (folder / "config.json").write_text(json.dumps(config))
    for weights in folder.glob("model*.safetensors*"):
        weights.unlink()
    return _model(folder)


def _model(folder: Path) -> Repo:
    files = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    return Repo({"main": commit(folder.name)}, {commit(folder.name): files})


def repositories(folder: Path, rows: dict[str, int], default: int) -> dict[str, Repo]:
    """All that the recipes name: datasets of `rows[id]` rows, else `default`, and the targets, made under `folder`."""
    return {name: dataset(name, rows.get(name, default)) for name in LAYOUTS} | {
        "models/meta-llama/Llama-3.1-8B-Instruct": target(folder / "llama", _LLAMA),
        "models/Qwen/Qwen3-8B": target(folder / "qwen", _QWEN),
        "models/moonshotai/Kimi-K2.5": kimi(folder / "kimi"),
    }
