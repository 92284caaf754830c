"""What each node of the cluster has: shared memory, memory, object store, free disk, GPU driver, packages, the target.

Nothing heavy is imported here: a worker starts on every node to look.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from app.errors import first_line
from app.versions import package_versions

log = logging.getLogger("draftmill")
SHARED = "/dev/shm"
SHARED_LEAST = 8 * 2**30  # bytes free in it below which an engine's states go through the temporary folder
_ANSWER_S = 10.0  # a node that has not answered by then is not checked
_DRIVER = "/proc/driver/nvidia/version"


@dataclass(frozen=True)
class Space:
    """Bytes of a file system."""

    free: int
    total: int


@dataclass(frozen=True)
class Room:
    """What one node has. Sizes in bytes."""

    host: str
    shared: Space  # /dev/shm
    memory: Space  # of the host, or of the container where that has less
    ray_temp: str
    temp: Space  # where Ray's temporary folder is
    run: Space | None  # where the run folder is; None: it is no local one
    run_there: bool = True  # whether the node has the run folder at all
    object_store: int = 0
    gpus: int = 0
    cpus: float = 0.0
    resources: dict[str, float] = field(default_factory=dict)  # all that Ray has there
    driver: str | None = None  # version of NVIDIA's; None: there is none
    packages: dict[str, str] = field(default_factory=dict)  # versions of those that must be the same everywhere
    target_there: bool = True  # whether the node has the target's folder
    node: str = ""  # Ray's id of it


def look_at(host: str, ray_temp: str, run_dir: str | None, target: str | None = None) -> Room:
    """What this machine has, as seen from this process."""
    return Room(
        host=host,
        shared=space_of(SHARED),
        memory=memory_of_host(),
        ray_temp=ray_temp,
        temp=space_of(ray_temp),
        run=None if run_dir is None else space_of(run_dir),
        run_there=run_dir is None or os.path.isdir(run_dir),
        driver=_driver(),
        packages=package_versions(),
        target_there=target is None or os.path.isfile(os.path.join(target, "config.json")),
    )


def look_at_cluster(
    run_dir: str | None, target: str | None = None, nodes: list[dict[str, Any]] | None = None
) -> list[Room]:
    """What each node of the connected Ray cluster has; a node that does not answer within ten seconds is told of and
    left out.

    Args:
        run_dir: a local run folder; None: the run is in another store.
        target: folder of the target on the driver's node.
        nodes: only these of `ray.nodes()`.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from app.cluster import is_local

    nodes = [n for n in ray.nodes() if n.get("Alive")] if nodes is None else nodes
    temps = [_ray_temp(n) for n in nodes]
    if is_local() and len(nodes) == 1:
        return [_with_resources(look_at(socket.gethostname(), temps[0], run_dir, target), nodes[0])]
    task: Any = ray.remote(num_cpus=0, max_retries=1)(look_at)
    asked = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(n["NodeID"], soft=False)).remote(
            n["NodeManagerHostname"], temp, run_dir, target
        )
        for n, temp in zip(nodes, temps, strict=True)
    ]
    ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_S)
    rooms = []
    for node, answer in zip(nodes, asked, strict=True):
        try:
            rooms.append(_with_resources(ray.get(answer, timeout=0.1), node))
        except Exception as error:
            log.warning(
                "generate: node %s does not say what it has and is not checked (%s)",
                node["NodeManagerHostname"], first_line(error),
            )  # fmt: skip
    return rooms


def _ray_temp(node: dict[str, Any]) -> str:
    """Ray's temporary folder on a node: its sockets lie in SESSION/sockets."""
    socket_name = node.get("RayletSocketName")
    return str(Path(socket_name).parents[2]) if socket_name else "/tmp/ray"


def _with_resources(room: Room, node: dict[str, Any]) -> Room:
    has = node["Resources"]
    store, gpus, cpus = (has.get(name, 0) for name in ("object_store_memory", "GPU", "CPU"))
    return replace(
        room, object_store=int(store), gpus=int(gpus), cpus=float(cpus), resources=dict(has), node=node["NodeID"]
    )


def _driver() -> str | None:
    """Version of NVIDIA's kernel driver here."""
    try:
        found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", Path(_DRIVER).read_text())
    except OSError:
        return None
    return found[1] if found else None


def memory_of_host() -> Space:
    """Memory of this machine, or of the container where its limit is lower."""
    words = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
    kib = {w[0].rstrip(":"): int(w[1]) for w in words if len(w) > 1}
    free, total = kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            most, now = int(Path(limit).read_text()), int(Path(used).read_text())
        except (OSError, ValueError):  # absent, or `max`
            continue
        if most < total:
            total, free = most, min(free, most - now)
    return Space(max(0, free), total)


def space_of(path: str) -> Space:
    """The file system that holds `path`, or will."""
    folder = Path(path)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return Space(usage.free, usage.total)
