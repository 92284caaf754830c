"""Start the engine that the configuration names."""

from __future__ import annotations

import importlib

from app.config import Config
from app.engine.base import EndpointSpec, Engine, EngineSpec
from app.errors import UserError


def start_engine(name: str, spec: EngineSpec) -> Engine:
    """Start engine `name`: `vllm`, or `module:Class` for an engine of the user's own; where the specification names
    endpoints, servers make the answers and the engine captures them.

    Raises:
        UserError: the name cannot be imported, or no endpoint serves the target.
    """
    engine = _start_capture(name, spec)
    if spec.endpoints is None:
        return engine
    from app.cluster import log_in_worker
    from app.engine.served import ServedEngine

    log_in_worker()
    return ServedEngine(engine, spec)


def endpoint_spec(config: Config) -> EndpointSpec | None:
    """The servers that a run's configuration names, or None."""
    g = config.generate
    if not g.endpoints:
        return None
    return EndpointSpec(
        urls=tuple(g.endpoints),
        model=g.endpoint_model,
        api=g.endpoint_api,
        concurrency=g.endpoint_concurrency,
        timeout_s=g.endpoint_timeout_s,
        patience_s=g.endpoint_patience_s,
        prefill_timeout_s=g.row_timeout_s,
        chat_template=config.target.chat_template,
        template_kwargs=config.target.template_kwargs,
    )


def _start_capture(name: str, spec: EngineSpec) -> Engine:
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
