"""Environment of a process that is about to hold a vLLM engine."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import warnings


def prepare_process(cpu_threads: int | None = None) -> None:
    """Set what vLLM reads at import: the engine core in this process, quiet logs, every core for arithmetic.

    Args:
        cpu_threads: compute threads of a CPU engine; None: every core the process may use.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    settings = {
        # Without GPUs vLLM warns of a dozen things that a CPU cannot have.
        "VLLM_LOGGING_LEVEL": "WARNING" if on_gpu else "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        # For workers in processes of their own: OpenMP reads it when torch is loaded, so here it is too late.
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # tensors from an engine in a process of its own, which is ours
    }
    if importlib.util.find_spec("flashinfer") is None:
        settings["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over the configured size of the cache
    if on_gpu:
        # To ask torch for GPUs, as above, rules out CUDA in forked workers.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        # Beside the thread that drives the GPU many others check, encode and write states: each on one core, and
        # none that holds the interpreter's lock for long.
        torch.set_num_threads(1)
        sys.setswitchinterval(0.0005)  # seconds
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("torch._library").setLevel(logging.ERROR)
    if not on_gpu:
        threads = cpu_threads or len(os.sched_getaffinity(0))
        # Ray gives OMP_NUM_THREADS = CPUs of the task, often one.
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
