"""A real vLLM server of the tests' target, in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.runs import ROOT


@contextmanager
def vllm_server(target: Path, log: Path, *options: str) -> Iterator[str]:
    """URL of a vLLM that serves `target` as `tiny`, on the CPU in float32; its output goes to `log`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["--model", str(target), "--dtype", "float32", "--enforce-eager", "--served-model-name", "tiny"]
    words += ["--host", "127.0.0.1", "--port", str(port), *options]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with log.open("w") as out:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
