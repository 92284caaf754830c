"""Start the engine that the configuration names."""

from __future__ import annotations

import importlib

from app.engine.base import Engine, EngineSpec
from app.errors import UserError


def start_engine(name: str, spec: EngineSpec) -> Engine:
    """Start engine `name`: `vllm`, or `module:Class` for an engine of the user's own.

    Raises:
        UserError: the name cannot be imported.
    """
    if name == "vllm":
        from app.engine.vllm_engine import VllmEngine

        return VllmEngine(spec)
    module, _, attribute = name.partition(":")
    try:
        engine_class = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"generate.engine is {name!r}, which cannot be imported ({error}); use 'vllm' or 'module:Class'"
        ) from error
    engine: Engine = engine_class(spec)
    return engine
