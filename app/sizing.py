"""How many engines, and how many GPUs for each: from the cluster's GPUs and the target's weights."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from app.config import Config
from app.errors import UserError
from app.plan.cost import Shape, shape_of
from app.plan.hardware import GIB, Hardware, known_gpu
from app.target import TargetInfo

log = logging.getLogger("draftmill")
_AT_ONCE = 8  # requests of full length whose keys and values an engine should hold
_GROUP_WAIT_S = 60.0
_FREE_WAIT_S = 30.0
_WORKSPACE = 2 * GIB  # activations, CUDA graphs, captured states under way, on each GPU


@dataclass(frozen=True)
class Need:
    """What a target asks of the GPUs. `heads` 0: unknown, every number of GPUs divides them."""

    weights: int  # bytes
    kv_bytes: float  # keys and values of one token, all layers
    kv_heads: int  # 0: the cache is one latent vector, which every GPU holds whole
    heads: int
    max_length: int  # tokens of a request
    at_once: int = _AT_ONCE

    def bytes_of(self, gpus: int, requests: int | None = None) -> float:
        """Bytes on each of an engine's `gpus` GPUs with room for so many requests of full length."""
        held = self.kv_bytes * self.max_length * (self.at_once if requests is None else requests)
        return self.weights / gpus + held / min(gpus, max(1, self.kv_heads)) + _WORKSPACE

    def divides(self, gpus: int) -> bool:
        """Whether the attention heads can be spread evenly over `gpus` GPUs."""
        kv = self.kv_heads
        return self.heads % gpus == 0 and (kv == 0 or kv % gpus == 0 or gpus % kv == 0)


@dataclass(frozen=True)
class Cluster:
    """What Ray has. `memory` is of one GPU, the smallest, in bytes; None: unknown."""

    gpus: tuple[int, ...]  # of each node that has some
    memory: float | None
    cpus: float
    gpu_name: str | None = None
    most: tuple[int, ...] = ()  # engines that resources of one's own allow on each of these nodes; empty: any number

    @cached_property
    def total(self) -> int:
        return sum(self.gpus)

    @cached_property
    def widest(self) -> int:
        return max(self.gpus, default=0)

    def engines(self, gpus: int) -> int:
        """Engines of `gpus` GPUs that the cluster holds: each on one node, or where none is wide enough, on whole
        nodes side by side."""
        if gpus <= self.widest:
            most = self.most or self.gpus
            return sum(min(n // gpus, allowed) for n, allowed in zip(self.gpus, most, strict=True))
        return self.total // gpus


@dataclass(frozen=True)
class Engines:
    """The choice, and why, in one sentence. `tensor_parallel` 1 and no GPU: engines on CPUs."""

    replicas: int
    tensor_parallel: int
    why: str
    spans_nodes: bool = False
    most: int = 0  # that it may become as nodes join; 0: it stays as it is

    @property
    def engine_args(self) -> dict[str, Any]:
        """What vLLM is told of it: Ray starts the workers of an engine on several nodes."""
        return {"distributed_executor_backend": "ray"} if self.spans_nodes else {}


def see_cluster(resources: Mapping[str, float] | None = None) -> Cluster:
    """The connected Ray cluster.

    Args:
        resources: of one's own, that an engine or worker asks for: only nodes that have them count.
    """
    import ray

    own = resources or {}
    nodes = [n["Resources"] for n in ray.nodes() if n.get("Alive")]
    nodes = [n for n in nodes if all(n.get(name, 0.0) >= amount for name, amount in own.items())]
    with_gpus = sorted((n for n in nodes if n.get("GPU", 0) >= 1), key=lambda n: -int(n["GPU"]))
    names = [k.partition(":")[2] for n in with_gpus for k in n if k.startswith("accelerator_type:")]
    known = [gpu.memory_gib * GIB for name in names if (gpu := known_gpu(name)) is not None]
    return Cluster(
        gpus=tuple(int(n["GPU"]) for n in with_gpus),
        memory=min(known) if known and len(known) == len(with_gpus) else None,
        cpus=sum(n.get("CPU", 0.0) for n in nodes),
        gpu_name=names[0] if names else None,
        most=tuple(min(int(n[name] / amount) for name, amount in own.items()) for n in with_gpus) if own else (),
    )


def described(hardware: Hardware) -> Cluster:
    """The cluster a plan is made for."""
    memory = hardware.gpu_memory_gib * GIB if hardware.gpu_memory_gib is not None else None
    gpus = (hardware.gpus_per_node,) * hardware.nodes if hardware.gpus_per_node else ()
    return Cluster(gpus, memory, float(hardware.nodes * hardware.cpus_per_node), hardware.gpu_name)


def settled(config: Config, shape: Shape, hardware: Hardware) -> Config:
    """`config` with numbers for `auto`, as generate would choose them on `hardware`."""
    cluster = described(hardware)
    if config.train.start_after is not None:
        with contextlib.suppress(UserError):  # the plan says by itself that there is too little for both
            cluster = beside_training(config, cluster)
    engines = choose(config, need_of(shape, config), cluster)
    numbers = {"replicas": engines.replicas, "tensor_parallel": engines.tensor_parallel}
    return config.model_copy(update={"generate": config.generate.model_copy(update=numbers)})


def numbers(config: Config) -> tuple[int, int]:
    """`generate.replicas` and `generate.tensor_parallel` of a settled configuration; auto counts as one."""
    g = config.generate
    return 1 if g.replicas == "auto" else g.replicas, 1 if g.tensor_parallel == "auto" else g.tensor_parallel


def need_of(shape: Shape, config: Config) -> Need:
    """What the target asks for at the run's context length."""
    return Need(
        weights=shape.target_bytes,
        kv_bytes=shape.kv_bytes,
        kv_heads=shape.kv_heads,
        heads=shape.heads,
        max_length=config.generate.max_length,
        at_once=min(_AT_ONCE, config.generate.max_num_seqs),
    )


def choose(config: Config, need: Need, cluster: Cluster, parts: int | None = None) -> Engines:
    """Settle `generate.replicas` and `generate.tensor_parallel`; what was given stays as given.

    Args:
        parts: of work; more engines than these would idle.
    """
    g = config.generate
    if not cluster.total:
        tensor_parallel, why = (
            (1, "no GPU: engines on CPUs") if g.tensor_parallel == "auto" else (g.tensor_parallel, "")
        )
        replicas = 1 if g.replicas == "auto" else g.replicas
    else:
        tensor_parallel, why = _tensor_parallel(g.tensor_parallel, need, cluster, g.gpu_memory_utilization)
        replicas = max(1, cluster.engines(tensor_parallel)) if g.replicas == "auto" else g.replicas
    wanted, replicas = replicas, min(replicas, parts or replicas)
    spans = tensor_parallel > cluster.widest > 0
    grows = g.replicas == "auto" and cluster.total > 0 and not spans
    unit = "GPU" if cluster.total else "CPU engine"
    words = f"{replicas} engine(s) of {tensor_parallel} {unit}{'s' if tensor_parallel > 1 else ''}"
    if wanted > replicas:
        words += f", since there are only {parts} parts to make"
    most = max(replicas, parts or 0) if grows else 0
    return Engines(replicas, tensor_parallel, f"{words} ({why or 'as configured'})", spans, most)


def _tensor_parallel(given: int | Literal["auto"], need: Need, cluster: Cluster, utilization: float) -> tuple[int, str]:
    """GPUs for an engine, and why."""
    if given != "auto":
        return given, f"generate.tensor_parallel as given, {_seen(cluster)}"
    if cluster.memory is None:
        return 1, f"{_seen(cluster)} of unknown memory, which must hold {need.weights / GIB:.1f} GiB of weights"
    room = utilization * cluster.memory
    candidates = _candidates(need, cluster)
    fitting = [n for n in candidates if need.bytes_of(n) <= room] or [n for n in candidates if _holds(need, n, room)]
    if not fitting:
        return max(candidates), f"{_seen(cluster)}, and no number of them holds the target"
    best = max(fitting, key=lambda n: (cluster.engines(n), n))  # of as many engines, those with more memory
    return best, (
        f"{_seen(cluster)} of {cluster.memory / GIB:.0f} GiB; {best} {'hold' if best > 1 else 'holds'}"
        f" {need.weights / GIB:.1f} GiB of weights and the KV cache of {need.at_once} requests of {need.max_length}"
        " tokens"
    )


def _candidates(need: Need, cluster: Cluster) -> list[int]:
    """Numbers of GPUs one engine may have: within a node, else whole nodes of one size."""
    within = [n for n in range(1, cluster.widest + 1) if need.divides(n)]
    nodes = cluster.gpus.count(cluster.widest)
    across = [k * cluster.widest for k in range(2, nodes + 1) if need.divides(k * cluster.widest)]
    return [*within, *across]


def _holds(need: Need, gpus: int, room: float) -> bool:
    """Whether the weights and a single request of full length fit."""
    return need.bytes_of(gpus, 1) <= room


def _seen(cluster: Cluster) -> str:
    name = f"{cluster.gpu_name} " if cluster.gpu_name else ""
    on = f" on {len(cluster.gpus)} nodes" if len(cluster.gpus) > 1 else ""
    return f"{cluster.total} {name}GPU{'s' if cluster.total > 1 else ''}{on}"


def train_gpus(config: Config, on_gpu: bool) -> int:
    """GPUs that training holds, on a cluster with GPUs or without."""
    use_gpu = config.train.use_gpu if config.train.use_gpu is not None else on_gpu
    return config.train.workers if use_gpu else 0


def engine_cpus(config: Config, cluster: Cluster) -> float:
    """CPUs that the engines hold: none where they run on GPUs."""
    return 0.0 if cluster.total else config.ray.engine_cpus * numbers(config)[0]


def beside_training(config: Config, cluster: Cluster, elsewhere: int = 0) -> Cluster:
    """What engines may have of `cluster` while training runs too (`train.start_after`): the smallest nodes go first.

    elsewhere: GPUs of other nodes, which training may have.

    Raises:
        UserError: nothing is left for an engine.
    """
    wanted = train_gpus(config, cluster.total > 0)
    if not wanted:
        return replace(cluster, cpus=cluster.cpus - config.train.workers)
    taken, left = max(0, wanted - elsewhere), list(cluster.gpus)
    for node in reversed(range(len(left))):
        here = min(taken, left[node])
        left[node], taken = left[node] - here, taken - here
    if not sum(left):
        raise UserError(
            f"train.start_after lets training run beside generate, and train.workers, {wanted}, leaves none of"
            f" {cluster.total + elsewhere} GPUs for an engine; lower it, bring more GPUs, or leave start_after out"
        )
    kept = [node for node, gpus in enumerate(left) if gpus]
    most = tuple(cluster.most[node] for node in kept) if cluster.most else ()
    return replace(cluster, gpus=tuple(left[node] for node in kept), most=most)


def sized(config: Config, need: Need, parts: int | None, beside: bool) -> tuple[Engines, bool]:
    """The engines of generate on the connected cluster for `parts` parts, and whether they run on GPUs.

    beside: training runs meanwhile, and has its own; then no engine is added as nodes join, since it could take them.

    Raises:
        UserError: the cluster cannot hold them.
    """
    cluster = see_cluster(config.generate.resources)
    if not beside:
        engines = choose(config, need, cluster, parts)
        check_engines(config, engines, need, cluster)
        return engines, cluster.total > 0
    own = config.train.resources
    elsewhere = see_cluster(own).total - see_cluster({**own, **config.generate.resources}).total
    room = beside_training(config, cluster, elsewhere)
    engines = choose(config, need, room, parts)
    unit = "GPUs" if train_gpus(config, cluster.total > 0) else "CPUs at least"
    words = f"training has {config.train.workers} {unit} beside them"
    try:
        check_engines(config, engines, need, room)
    except UserError as error:
        raise UserError(
            f"{error}; {words} (train.workers), as train.start_after asks: without it all are free"
        ) from error
    return replace(engines, most=0, why=f"{engines.why}; {words}"), cluster.total > 0


def check_engines(config: Config, engines: Engines, need: Need, cluster: Cluster) -> None:
    """Refuse what the cluster cannot hold, before anything is loaded.

    Raises:
        UserError: with the sum and the number to change.
    """
    r, n = engines.replicas, engines.tensor_parallel
    own = config.generate.resources
    have = f"the cluster's nodes with {own} have" if own else "the cluster has"
    if own and not cluster.cpus and not cluster.total:
        raise UserError(f"no node has what generate.resources asks for, {own}; start nodes with it or leave it out")
    if own and engines.spans_nodes:
        raise UserError("generate.resources holds an engine on one node, and the target needs several; leave it out")
    if not cluster.total:
        if n > 1:
            raise UserError("generate.tensor_parallel is above 1 and the cluster has no GPU; set it to 1")
        need_cpus = config.ray.engine_cpus * r
        if need_cpus > cluster.cpus:
            raise UserError(
                f"generate needs {r} x {config.ray.engine_cpus:g} = {need_cpus:g} CPUs and {have}"
                f" {cluster.cpus:g}; lower generate.replicas or ray.engine_cpus"
            )
        return
    if r * n > cluster.total:
        raise UserError(
            f"generate needs {r} x {n} = {r * n} GPUs and {have} {cluster.total};"
            " lower generate.replicas or generate.tensor_parallel"
        )
    if r > cluster.engines(n):
        nodes = " + ".join(map(str, cluster.gpus))
        raise UserError(
            f"generate needs {r} x {n} = {r * n} GPUs, and the nodes' {nodes} GPUs hold only {cluster.engines(n)}"
            f" engine(s) of {n}, each on one node; lower generate.replicas or generate.tensor_parallel"
        )
    if not need.divides(n):
        raise UserError(
            f"generate.tensor_parallel is {n} and the target has {need.heads} attention heads"
            f" ({need.kv_heads or need.heads} of keys); give a number that divides them"
        )
    room = config.generate.gpu_memory_utilization * cluster.memory if cluster.memory is not None else None
    if room is not None and not _holds(need, n, room):
        raise UserError(_too_large(config, need, n, room))


def _too_large(config: Config, need: Need, gpus: int, room: float) -> str:
    return (
        f"the target's weights of {need.weights / GIB:.1f} GiB over {gpus} GPU(s) take"
        f" {need.weights / gpus / GIB:.1f} GiB each, with one request of {need.max_length} tokens"
        f" {need.bytes_of(gpus, 1) / GIB:.1f} GiB, and {config.generate.gpu_memory_utilization:g} of a GPU is"
        f" {room / GIB:.1f} GiB; raise generate.tensor_parallel, bring more or larger GPUs, or take a quantised target"
    )


@contextlib.contextmanager
def placed(engines: Engines) -> Iterator[list[Any]]:
    """A placement group for each engine that needs more GPUs than a node has; none for others. They are ours: vLLM
    finds the one its process sits in and makes none of its own, and they are gone when the block ends.

    Raises:
        UserError: other jobs hold the GPUs.
    """
    if not engines.spans_nodes:
        yield []
        return
    from ray.util.placement_group import placement_group, remove_placement_group

    n = engines.tensor_parallel
    bundles: list[dict[str, float]] = [{"CPU": 1, "GPU": 1}, *({"GPU": 1.0} for _ in range(n - 1))]
    groups: list[Any] = []
    try:
        for number in range(engines.replicas):
            groups.append(placement_group(bundles, strategy="PACK"))
            if not groups[-1].wait(_GROUP_WAIT_S):
                raise UserError(
                    f"generate: {n} GPUs for engine {number + 1} of {engines.replicas} were not free within"
                    f" {_GROUP_WAIT_S:g} s; end the jobs that hold them or lower generate.replicas"
                )
        yield groups
    finally:
        for group in groups:
            remove_placement_group(group)


def inside(group: Any) -> dict[str, Any]:
    """Ray's arguments of an engine actor in its placement group: its workers take the group's GPUs."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    place = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    return {"num_cpus": 1, "scheduling_strategy": place}


def gpus_in_use() -> float:
    """GPUs of the cluster that somebody holds."""
    import ray

    return float(ray.cluster_resources().get("GPU", 0) - ray.available_resources().get("GPU", 0))


def wait_until_free(held: float) -> None:
    """Wait for the GPUs of ended engines, so that the next stage finds them; says so where they do not come back.

    Args:
        held: GPUs that were in use before the engines began.
    """
    deadline = time.monotonic() + _FREE_WAIT_S
    while (still := gpus_in_use() - held) > 0:
        if time.monotonic() > deadline:
            log.warning("generate: %g GPUs are not back %g s after the engines ended", still, _FREE_WAIT_S)
            return
        time.sleep(0.2)


def serving_gpus(target: TargetInfo, config: Config) -> int:
    """GPUs of the one engine that bench serves with, chosen as for generate; 1 where there are none.

    Raises:
        UserError: the cluster, or one node of it, cannot hold it.
    """
    cluster, need = see_cluster(), need_of(shape_of(target, config), config)
    engine = choose(config, need, cluster, parts=1)
    check_engines(config, engine, need, cluster)
    if engine.spans_nodes:
        raise UserError(
            f"bench: the target needs {engine.tensor_parallel} GPUs and the largest node has {cluster.widest}; bench"
            " serves on one node"
        )
    return engine.tensor_parallel
