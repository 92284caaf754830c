"""What the nodes have and what generate needs of it, looked at before an engine loads.

Each node says its shared memory, memory, object store and free disk; what is short is one sentence with the sum and the
number to change. Only what surely fails is refused: the needs are estimates, and most are of the worst moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from app.config import Config
from app.errors import UserError
from app.nodes import SHARED, SHARED_LEAST, Room, Space
from app.plan.cost import Shape, naive_bytes
from app.plan.text import size_text
from app.sizing import Engines

_FULL_DISK = 0.95  # of Ray's disk in use: beyond it Ray makes no objects any more (local_fs_capacity_threshold)
_LINES = 8  # nodes that get a line of their own
_QUEUES = (160 * 2**20, 240 * 2**20)  # shared memory that vLLM reserves for its queues: an engine, and each process


@dataclass(frozen=True)
class Demand:
    """What an engine takes at its worst moment. Sizes in bytes."""

    rows: int  # whose states wait in memory until their part is committed
    at_once: int  # of them, that the engine works on
    row: float  # four states of every token of a row
    weights: float = 0.0  # in host memory: of an engine on a CPU, with its KV cache
    gpus: int = 0  # 0: on a CPU
    processes: int = 0  # of the engine, beside its actor's; states come from them through shared memory
    resources: Mapping[str, float] = field(default_factory=dict)  # of one's own, that it asks for
    package: str | None = None  # that the engine is made of; None: it is somebody's own
    fetched: float = 0.0  # bytes of the target that a node without it fetches; 0: it can not

    @property
    def memory(self) -> float:
        return self.rows * self.row + self.weights

    @property
    def exported(self) -> float:
        """States on their way from the engine's processes, should all requests of a batch end together."""
        return self.at_once * self.row if self.processes else 0.0

    @property
    def queues(self) -> int:
        return _QUEUES[0] + _QUEUES[1] * self.processes if self.processes else 0


def demand_of(
    config: Config, shape: Shape, engines: Engines, on_gpu: bool, rows: int, tokens: float, fetched: bool = False
) -> Demand:
    """What each of `engines` takes with `rows` rows under way, of `tokens` tokens on average.

    fetched: whether a node that lacks the target fetches it.
    """
    g, n = config.generate, engines.tensor_parallel
    host = shape.target_bytes + g.kv_cache_gib * 2**30 if g.engine == "vllm" and not on_gpu else 0.0
    return Demand(
        rows=max(1, rows),
        at_once=max(1, min(rows, g.max_num_seqs)),
        row=naive_bytes(tokens, shape.hidden, shape.value_bytes),
        weights=host,
        gpus=n if on_gpu else 0,
        processes=int(bool(g.engine_process)) if n == 1 else 1 if engines.spans_nodes else n,
        resources=g.resources,
        package="vllm" if g.engine == "vllm" else None,
        fetched=shape.target_bytes if fetched else 0.0,
    )


def check_nodes(rooms: list[Room], demand: Demand, engines: int, run_dir: str) -> list[str]:
    """What is short on nodes that may hold one of `engines` engines, a sentence each.

    Raises:
        UserError: it surely fails.
    """
    rooms = [r for r in rooms if holds(r, demand)] or rooms
    _refuse(rooms, demand, engines, run_dir)
    hosts: dict[str, list[str]] = {}
    for room in rooms:
        here = _engines_on(room, demand, engines)
        for sentence in (
            *_shared_memory(room, demand, here),
            *_memory(room, demand, here),
            *_disk(room, run_dir),
            *_target(room, demand),
        ):
            hosts.setdefault(sentence, []).append(room.host)
    return [*(f"{_named(names)}: {sentence}" for sentence, names in hosts.items()), *differing(rooms)]


def holds(room: Room, demand: Demand) -> bool:
    """Whether an engine may come to a node: it has GPUs, or CPUs for an engine on CPUs, and what else is asked for.
    GPUs may be fewer than an engine takes, where it spans nodes."""
    own = all(room.resources.get(name, 0.0) >= amount for name, amount in demand.resources.items())
    return own and (room.gpus if demand.gpus else room.cpus) > 0


def differing(rooms: list[Room]) -> Iterator[str]:
    """What is not the same on all nodes, a sentence each."""
    for name in sorted({name for r in rooms for name in r.packages}):
        versions = [(r.host, r.packages.get(name)) for r in rooms]
        yield from _differs(name, versions, "install the same on all")
    drivers = [(r.host, r.driver) for r in rooms]
    yield from _differs("the GPU driver", drivers, "CUDA builds may load on the newer alone")


def _differs(what: str, versions: list[tuple[str, str | None]], advice: str) -> Iterator[str]:
    hosts: dict[str, list[str]] = {}
    for host, version in versions:
        hosts.setdefault(version or "missing", []).append(host)
    if len(hosts) > 1:
        said = "; ".join(f"{version} on {_named(names)}" for version, names in sorted(hosts.items()))
        yield f"{what} is not the same on all nodes ({said}): {advice}"


def node_lines(rooms: list[Room], demand: Demand) -> list[str]:
    """What the nodes have, and what an engine needs of it."""

    def of(space: Space) -> str:
        return f"{size_text(space.free)} of {size_text(space.total)} free"

    said = [
        f"node {r.host}: {SHARED} {of(r.shared)}, memory {of(r.memory)}, object store {size_text(r.object_store)},"
        f" {'' if r.run is None else f'run folder {of(r.run)}, '}{r.ray_temp} {of(r.temp)}"
        for r in rooms[:_LINES]
    ]
    if len(rooms) > _LINES:
        said.append(f"{len(rooms) - _LINES} more nodes are looked at alike, and named where something is short")
    shared = "none" if not demand.processes else f"up to {size_text(demand.exported + demand.queues)}"
    return [
        *said,
        f"an engine needs about {size_text(demand.memory)} of memory ({_sum(demand)}) and {shared} of {SHARED};"
        " states never pass through the object store",
    ]


def _engines_on(room: Room, demand: Demand, engines: int) -> int:
    """The most of the engines that may come to a node."""
    if not demand.gpus:
        return engines
    return min(engines, max(1, room.gpus // demand.gpus))


def _refuse(rooms: list[Room], demand: Demand, engines: int, run_dir: str) -> None:
    if rooms and demand.package is not None and not any(_has(r, demand.package) for r in rooms):
        raise UserError(
            f"generate: no node that can hold an engine has {demand.package} in the environment Ray was started from"
            f" ({_named([r.host for r in rooms])}); install draftmill there with its dependencies, and start Ray anew"
        )
    if rooms and not any(r.run_there for r in rooms):
        raise UserError(
            f"generate: no node that can hold an engine has the run folder {run_dir}"
            f" ({_named([r.host for r in rooms])}); give run_dir a folder that every node has, or a URL such as"
            " s3://bucket/run"
        )
    have = sum(r.memory.total for r in rooms)
    if rooms and demand.weights * engines > have:
        raise UserError(
            f"generate: {engines} engine(s) on CPUs take {engines} x {size_text(demand.weights)} ="
            f" {size_text(engines * demand.weights)} for weights and KV cache, and the memory is {size_text(have)};"
            " lower generate.replicas or generate.kv_cache_gib"
        )
    if rooms and not demand.fetched and not any(r.target_there for r in rooms):
        raise UserError(
            f"generate: no node that can hold an engine has the folder of target.model"
            f" ({_named([r.host for r in rooms])}); put it on every node at the same path, or give a hub id"
        )
    for room in rooms:
        place, space = _exports(room)
        if demand.processes and len(rooms) == 1 and demand.row > space.total:
            raise UserError(
                f"generate: the states of one row take {size_text(demand.row)} on their way from the engine's"
                f" processes, and {place} of {room.host} holds {size_text(space.total)}; {_larger(demand.exported)}"
            )


def _has(room: Room, package: str) -> bool:
    """Whether a node has `package`, or its build for CPUs."""
    return package in room.packages or f"{package}-cpu" in room.packages


def _exports(room: Room) -> tuple[str, Space]:
    """Where states of an engine in other processes go, as app/engine/vllm_engine.py chooses it."""
    if room.shared.free > SHARED_LEAST:
        return SHARED, room.shared
    return "the temporary folder", room.temp


def _shared_memory(room: Room, demand: Demand, engines: int) -> Iterator[str]:
    if demand.processes:
        need = engines * (demand.exported + demand.queues)
        words = (
            f"{engines} engine(s) in processes of their own take up to {engines} x ({demand.at_once} rows x"
            f" {size_text(demand.row)} + {size_text(demand.queues)} of vLLM's queues) = {size_text(need)} of {SHARED},"
            f" and {size_text(room.shared.free)} of {size_text(room.shared.total)} are free"
        )
        if room.shared.free < need:
            slow = "" if room.shared.free > SHARED_LEAST else ", so the states go over the disk, which is slower"
            yield f"{words}{slow}; {_larger(need)}"
    if room.object_store > room.shared.total:
        yield (
            f"Ray's object store of {size_text(room.object_store)} does not fit into {SHARED} of"
            f" {size_text(room.shared.total)} and is kept in {room.ray_temp}, on the disk;"
            f" {_larger(1.1 * room.object_store)}, or lower ray.object_store_gib"
        )


def _larger(need: float) -> str:
    """How a container gets more shared memory."""
    return f"start the container with --shm-size={max(1, -(-int(need) // 2**30))}g"


def _memory(room: Room, demand: Demand, engines: int) -> Iterator[str]:
    need = engines * demand.memory
    if need > room.memory.free:
        yield (
            f"{engines} engine(s) take up to {engines} x ({_sum(demand)}) = {size_text(need)} of memory, and"
            f" {size_text(room.memory.free)} of {size_text(room.memory.total)} are free; lower"
            f" generate.parts_in_flight, storage.rows_per_part or generate.replicas"
        )


def _disk(room: Room, run_dir: str) -> Iterator[str]:
    if not room.run_there:
        yield f"the run folder {run_dir} is not there; give run_dir a folder that every node has, or a URL"
    if room.temp.free < (1 - _FULL_DISK) * room.temp.total:
        yield (
            f"the disk of Ray's {room.ray_temp} is {1 - room.temp.free / room.temp.total:.0%} full, and above"
            f" {_FULL_DISK:.0%} Ray makes no objects any more; free some, or start Ray with --temp-dir on another disk"
        )


def _target(room: Room, demand: Demand) -> Iterator[str]:
    if not room.target_there and demand.fetched:
        yield f"the target is not there yet; it is fetched first, once for the node ({size_text(demand.fetched)})"
    elif not room.target_there:
        yield "the folder of target.model is not there; put it on every node at the same path"


def _sum(demand: Demand) -> str:
    rows = f"{demand.rows} rows under way x {size_text(demand.row)}"
    return f"{rows} + {size_text(demand.weights)} of weights and KV cache" if demand.weights else rows


def _named(hosts: list[str]) -> str:
    more = f" and {len(hosts) - 3} more" if len(hosts) > 3 else ""
    return f"node{'s' if len(hosts) > 1 else ''} {', '.join(hosts[:3])}{more}"
