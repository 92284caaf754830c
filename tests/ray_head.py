"""A running one-node Ray cluster with its own ports, folders and token, for tests that submit jobs to it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

RAY = str(Path(sys.executable).with_name("ray"))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def running_head(*options: str) -> Iterator[dict[str, str]]:
    """The environment that reaches it: RAY_ADDRESS is its dashboard's URL."""
    ports = {"gcs": free_port(), "dashboard": free_port(), "client": free_port(), "agent": free_port()}
    home = tempfile.mkdtemp(prefix="dm-", dir="/tmp")  # Ray's socket paths must stay short
    env = {
        **os.environ,
        "HOME": home,
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
        "RAY_AUTH_MODE": "token",
        "RAY_TMPDIR": home,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    env.pop("RAY_ADDRESS", None)
    subprocess.run([RAY, "get-auth-token", "--generate"], env=env, check=True, capture_output=True, timeout=120)
    start = [
        RAY, "start", "--head", f"--port={ports['gcs']}", f"--dashboard-port={ports['dashboard']}",
        f"--ray-client-server-port={ports['client']}", f"--dashboard-agent-listen-port={ports['agent']}",
        "--num-cpus=2", "--object-store-memory=200000000", "--disable-usage-stats", f"--temp-dir={home}/ray", *options,
    ]  # fmt: skip
    try:
        subprocess.run(start, env=env, check=True, capture_output=True, timeout=180)
        env["RAY_ADDRESS"] = f"http://127.0.0.1:{ports['dashboard']}"
        yield env
    finally:
        for pid in _processes_of(home):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(home, ignore_errors=True)


def _processes_of(home: str) -> list[int]:
    """Processes that name the cluster's folder in their arguments or environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if home.encode() in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found
