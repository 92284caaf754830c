"""The target that the bench serves against the one whose states were captured, each in its numeric form."""

from __future__ import annotations

from typing import Any

from app.config import Config
from app.parts import PartEntry
from app.target import TargetInfo


def other_form(config: Config, target: TargetInfo, entry: PartEntry) -> str | None:
    """In words, where an engine of ours serves another numeric form than part `entry` was captured in: a draft learns
    one form's states. None where the forms are one, and for a running server, which does not tell its own."""
    if config.bench.server is not None:
        return None
    captured = _form(config, target, config.generate.engine_args)
    captured |= {"dtype": entry.dtype} | {k: entry.record[k] for k in ("quantization",) if k in entry.record}
    served = _form(config, target, config.bench.engine_args)
    differs = [key for key in served if served[key] != captured[key]]
    if not differs:
        return None
    ours, theirs = (", ".join(f"{key} {form[key] or 'none'}" for key in differs) for form in (served, captured))
    said = f"the bench serves another form of the target ({ours}) than was captured ({theirs})"
    return f"{said}: its acceptance is that form's"


def _form(config: Config, target: TargetInfo, engine_args: dict[str, Any]) -> dict[str, Any]:
    """As vLLM would run the target with these arguments."""
    given = {key: None if value == "auto" else value for key, value in engine_args.items()}
    return {
        "dtype": given.get("dtype") or config.target.dtype,
        "quantization": target.quantization or given.get("quantization"),
        "kv_cache_dtype": given.get("kv_cache_dtype"),
    }
