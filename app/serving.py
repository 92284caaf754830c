"""The commands that serve a draft: printed, stored beside it and in its card."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.draft_config import DraftConfig
from app.lint.difference import SGLANG, VLLM
from app.lint.layer_ids import why_not_sglang
from app.target import TargetInfo

SERVE_FILE = "serve.json"


def speculative_config(draft_dir: str | Path, k: int) -> dict[str, Any]:
    """vLLM's speculative config for the draft: a server's option, or the argument of `LLM`."""
    return {"method": "eagle3", "model": str(draft_dir), "num_speculative_tokens": k}


def vllm_serve_command(target: str, draft_dir: str | Path, k: int) -> str:
    """Shell command that serves `target` with the draft in vLLM, proposing `k` tokens per step."""
    return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(speculative_config(draft_dir, k))])


def sglang_command(target: str, draft_dir: str | Path, k: int) -> str:
    """Shell command that serves `target` with the draft in SGLang, a chain of `k` tokens per step.

    The algorithm must be EAGLE3: with EAGLE the draft gets one state in place of three, without an error.
    """
    words = ["python", "-m", "sglang.launch_server", "--model-path", target]
    words += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft_dir)]
    words += ["--speculative-num-steps", str(k), "--speculative-eagle-topk", "1"]
    words += ["--speculative-num-draft-tokens", str(k + 1)]  # the chain and the token it hangs on
    return shlex.join(words)


COMMANDS = {VLLM: vllm_serve_command, SGLANG: sglang_command}


def left_out(draft: DraftConfig, target: TargetInfo) -> dict[str, str]:
    """Engines that cannot serve a draft of this kind in the flat layout, with the reason."""
    reason = why_not_sglang(draft.norm_before_residual, draft.aux_layer_ids, target)
    return {} if reason is None else {SGLANG: reason}


def serve_commands(target: str, where: str | Path, k: int, without: Mapping[str, str]) -> dict[str, str]:
    """Shell commands by engine that serve the draft in `where`, proposing `k` tokens per step."""
    return {engine: command(target, where, k) for engine, command in COMMANDS.items() if engine not in without}


def serve_record(target: str, where: str | Path, k: int, without: Mapping[str, str]) -> dict[str, Any]:
    """What the draft's folder says of serving it: the commands, vLLM's JSON, the number of draft tokens."""
    commands = serve_commands(target, where, k, without)
    record: dict[str, Any] = {engine: {"command": command} for engine, command in commands.items()}
    record |= {engine: {"left_out": reason} for engine, reason in without.items()}
    record[VLLM]["speculative_config"] = speculative_config(where, k)
    return {"target": target, "num_draft_tokens": k, **record}


def serving_name(target: TargetInfo) -> str:
    """What an engine is given as the target: the hub id where the user named one, else the local folder."""
    is_hub_id = target.name.count("/") == 1 and not target.name.startswith((".", "/", "~"))
    return target.name if is_hub_id and not Path(target.name).exists() else target.model
