"""Further nodes of a running cluster on this machine, each with its own raylet, ports and resources."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.ray_head import RAY, free_port, running_head


@dataclass(frozen=True)
class Node:
    """One node. `raylet` is the process that its engines are children of."""

    raylet: int
    name: str  # Ray's id of it
    started: float  # time.time(), before it was there

    def holds(self, pid: int) -> bool:
        """Whether a living process is this node's worker or agent."""
        return parent_of(pid) == self.raylet

    def kill(self) -> None:
        """As a machine that loses power: raylet, workers and agents at once."""
        running = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        for pid in [self.raylet, *(pid for pid in running if self.holds(pid))]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def terminate(self) -> None:
        """As `ray stop`, and as a machine that is told to go."""
        os.kill(self.raylet, signal.SIGTERM)


@dataclass(frozen=True)
class Nodes:
    """A head without GPUs, and what joins it."""

    address: str  # HOST:PORT, of Ray
    env: dict[str, str]  # that reaches it

    @property
    def env_without_address(self) -> dict[str, str]:
        """For what is told the address, or must not take it from here."""
        return {k: v for k, v in self.env.items() if k != "RAY_ADDRESS"}

    def add(self, gpus: int = 0, cpus: int = 1, *options: str) -> Node:
        """Start a node with so many logical GPUs, which are numbers to Ray and nothing else."""
        port = free_port()
        line = [
            RAY, "start", f"--address={self.address}", f"--num-cpus={cpus}", f"--num-gpus={gpus}",
            f"--node-manager-port={port}", f"--dashboard-agent-listen-port={free_port()}", "--min-worker-port=0",
            "--max-worker-port=0", "--object-store-memory=100000000", "--disable-usage-stats",
            f"--temp-dir={self.env['RAY_TMPDIR']}/{port}",  # in one folder the end of one removes packages of all
            *options,
        ]  # fmt: skip
        started = time.time()
        subprocess.run(line, env=self.env_without_address, check=True, capture_output=True, timeout=180)
        return Node(*_raylet_at(port), started)


@contextmanager
def running_nodes(*options: str) -> Iterator[Nodes]:
    """A head of its own; every node ends with it."""
    port = free_port()
    with running_head(f"--port={port}", "--min-worker-port=0", "--max-worker-port=0", *options) as env:
        yield Nodes(f"127.0.0.1:{port}", env)


def parent_of(pid: int) -> int | None:
    """Its parent's pid; None: it has ended."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state == "Z" else int(parent)


def _raylet_at(port: int) -> tuple[int, str]:
    """Its pid and its node's id."""
    name = f"--node_manager_port={port}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[0].endswith(b"raylet") and name in words:
                [node] = [w.partition(b"=")[2].decode() for w in words if w.startswith(b"--node_id=")]
                return int(entry.name), node
    raise AssertionError(f"no raylet has port {port}")
