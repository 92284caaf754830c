"""From our specification to vLLM's: engine arguments, and requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.engine.base import EngineSpec, Request
from app.errors import RowError, UserError

# Engine arguments that follow from the specification; others in engine_args would break capture.
OWNED_ARGS = {
    "model": "set target.model",
    "tokenizer": "it is the target's own",
    "revision": "set target.revision",
    "trust_remote_code": "set target.trust_remote_code",
    "dtype": "set target.dtype",
    "max_model_len": "set generate.max_length",
    "max_num_seqs": "set generate.max_num_seqs",
    "seed": "set generate.seed",
    "enforce_eager": "set generate.enforce_eager",
    "gpu_memory_utilization": "set generate.gpu_memory_utilization",
    "kv_cache_memory_bytes": "set generate.kv_cache_gib on CPUs, generate.gpu_memory_utilization on GPUs",
    "tensor_parallel_size": "set generate.tensor_parallel",
    "pipeline_parallel_size": "the captured states would be spread over the ranks; set generate.tensor_parallel",
    "data_parallel_size": "set generate.replicas",
    "enable_prefix_caching": "it stays off, since a cached prefix has no states to capture",
    "worker_cls": "it is the capture's own",
    "worker_extension_cls": "it is the capture's own",
    "additional_config": "it is the capture's own",
    "speculative_config": "the target answers alone; set capture.mode",
    "kv_transfer_config": "it is the capture's own; set capture.mode",
}
_CPU_KV_CACHE_GIB = 2.0


def check_engine_args(spec: EngineSpec) -> None:
    """Refuse engine_args that belong to draftmill.

    Raises:
        UserError: names them.
    """
    refuse_owned_args(spec.engine_args, "generate.engine_args")


def refuse_owned_args(args: Mapping[str, Any], where: str) -> None:
    """Raises UserError where `args`, given as option `where`, holds arguments of ours: what to set instead."""
    owned = [f"{name} ({OWNED_ARGS[name]})" for name in sorted(args) if name in OWNED_ARGS]
    if owned:
        raise UserError(f"{where} may not hold {', '.join(owned)}: draftmill sets this from its own options")


def engine_args(spec: EngineSpec, on_cpu: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's EngineArgs for `spec`."""
    args: dict[str, Any] = {
        "model": spec.model,
        "dtype": spec.dtype,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "distributed_executor_backend": "uni" if spec.tensor_parallel_size == 1 else "mp",
        "enforce_eager": spec.enforce_eager,
        "trust_remote_code": spec.trust_remote_code,
        "seed": spec.seed,
        "gpu_memory_utilization": spec.gpu_memory_utilization,
        "enable_prefix_caching": False,  # a cached prefix is not computed again, so it has no states
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if on_cpu:
        gib = spec.kv_cache_gib if spec.kv_cache_gib is not None else _CPU_KV_CACHE_GIB
        args["kv_cache_memory_bytes"] = int(gib * 2**30)
    layer_ids = [*spec.aux_layer_ids, spec.num_layers]
    if spec.capture_mode == "extract":
        args.update(_extract_args(layer_ids))
    else:
        args["worker_cls"] = "app.engine.capture_worker.CaptureWorker"
        # The worker reads its ids here. vLLM's compile cache is keyed by the configuration, this included:
        # otherwise a graph compiled for plain generation would be loaded, and the outputs would be missing.
        args["additional_config"] = {"draftmill_layer_ids": layer_ids}
    args.update(spec.engine_args)
    return args


def _extract_args(layer_ids: list[int]) -> dict[str, Any]:
    """The fall-back: vLLM's own method, which keeps the states in cache blocks of their own."""
    from vllm.config import KVTransferConfig

    return {
        # vLLM 0.26 with asynchronous scheduling: once a proposed token is accepted (a token that repeats itself),
        # the request emits a token twice and its states are filed one position off.
        "async_scheduling": False,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}},
        },
        "kv_transfer_config": KVTransferConfig(
            kv_connector="ExtractConnector",
            kv_connector_module_path="app.engine.extract_connector",
            kv_role="kv_producer",
        ),
        "worker_extension_cls": "app.engine.capture_store.StoreAccess",
    }


def vllm_request(request: Request, spec: EngineSpec, vocab_size: int) -> tuple[list[int], Any]:
    """Token ids to feed and SamplingParams of `request`.

    Raises:
        RowError: `empty_prompt`, `prompt_too_long`, `answer_too_long`, `bad_token` or `bad_sampling`.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    limit = spec.max_model_len
    prompt = list(request.prompt_ids)
    ids = prompt + list(request.answer_ids or [])
    if not prompt:
        raise RowError("empty_prompt", "the prompt has no tokens")
    if len(prompt) >= limit:
        raise RowError("prompt_too_long", f"{len(prompt)} tokens leave no room for an answer within {limit}")
    if len(ids) > limit:
        raise RowError("answer_too_long", f"prompt and answer have {len(ids)} tokens, the limit is {limit}")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise RowError("bad_token", f"token ids must lie in 0..{vocab_size - 1}")
    common: dict[str, Any] = {"output_kind": RequestOutputKind.FINAL_ONLY, "detokenize": False}
    if request.answer_ids is not None:
        if len(ids) < 2:
            raise RowError("empty_prompt", "prompt and answer together need two tokens")
        # Positions 0..T-2 are wanted, so the last token need not be fed.
        return ids[:-1], SamplingParams(temperature=0.0, max_tokens=1, **common)
    room = min(request.max_new_tokens, limit - len(prompt))
    try:
        params = SamplingParams(**{"temperature": 0.0, **request.sampling, "max_tokens": room, **common})
    except Exception as error:  # vLLM's validation error is a ValueError in some versions only
        raise RowError("bad_sampling", first_line(error)) from error
    if params.n != 1:
        raise RowError("bad_sampling", "n must be 1: a request has one answer")
    return prompt, params


def first_line(error: BaseException) -> str:
    """What an exception of vLLM says, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Validation errors open with a count and say what is wrong on the next line.
    line = " ".join(lines[:3]) if lines and "validation error" in lines[0] else " ".join(lines[:1])
    return line[:300] or type(error).__name__
