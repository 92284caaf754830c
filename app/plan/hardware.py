"""What a run works on, and how fast that is: each rate says where it is from."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from app.config import Config
from app.errors import UserError
from app.nodes import space_of
from app.plan.cost import Shape, train_operations
from app.storage import Store

GIB = 2**30
THIS_MACHINE = "this machine"  # an origin


@dataclass(frozen=True)
class Gpu:
    memory_gib: float
    bandwidth: float  # of its memory, over an H200's: what decoding goes by
    compute: float  # bf16, over an H200's


# Data sheets; an H200 is where our own numbers are from.
GPUS = {
    "B200": Gpu(180, 1.67, 2.3), "H200": Gpu(141, 1.0, 1.0), "H100": Gpu(80, 0.70, 1.0), "H20": Gpu(96, 0.83, 0.15),
    "A100-40": Gpu(40, 0.32, 0.32), "A100": Gpu(80, 0.42, 0.32), "L40S": Gpu(48, 0.18, 0.37),
    "L40": Gpu(48, 0.18, 0.18), "A10": Gpu(24, 0.12, 0.13), "L4": Gpu(24, 0.06, 0.12),
    "4090": Gpu(24, 0.21, 0.17), "A6000": Gpu(48, 0.16, 0.16),
}  # fmt: skip


def known_gpu(name: str | None) -> Gpu | None:
    """The GPU of the table above whose key is in `name`."""
    return next((gpu for key, gpu in GPUS.items() if key in (name or "").upper()), None)


_OF_8B = 8.03e9  # parameters of the shape these were measured with (MEASURED.md)
_BYTES_OF_8B = 2 * _OF_8B
_H200_DECODE = 19_400.0  # answer tokens/s, capturing, 256 requests at once
_H200_PREFILL = 43_254.0  # tokens/s, capturing
_H200_TRAIN = 4.0e14  # operations/s of a compiled EAGLE-3 trainer
_OF_135M = 1.345e8  # parameters of the demo's target
_CPU_DECODE, _CPU_PREFILL = 270.0, 1_100.0  # tokens/s a core, 48 requests at once
_CPU_TRAIN = 1.75e11  # operations/s a core with bf16 arithmetic


@dataclass(frozen=True)
class Hardware:
    """Nodes of one kind. `disk_free` is what the run folder's place has, in bytes; None: unknown."""

    nodes: int
    gpus_per_node: int
    gpu_name: str | None
    gpu_memory_gib: float | None
    cpus_per_node: int
    memory_gib: float | None  # of one node
    disk_free: int | None
    origin: str
    disk_origin: str = ""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def on_gpu(self) -> bool:
        return self.gpus > 0

    @property
    def gpu(self) -> Gpu | None:
        return known_gpu(self.gpu_name)


@dataclass(frozen=True)
class Described:
    """Hardware as the command line gives it; None: look."""

    nodes: int | None = None
    gpus_per_node: int | None = None
    gpu_memory_gib: float | None = None
    disk_free_tb: float | None = None
    gpu_name: str | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            low = 0 if item.name == "gpus_per_node" else 1e-9
            if isinstance(value, int | float) and not low <= value < math.inf:
                option = {"gpu_memory_gib": "gpu-memory", "disk_free_tb": "disk-free"}.get(item.name, item.name)
                raise UserError(f"--{option.replace('_', '-')} is {value:g}; give a number above 0")


def find_hardware(config: Config, given: Described) -> Hardware:
    """The described cluster where the command line describes one, else the one this process would use."""
    store = Store(config.run_dir, config.storage.options)
    free, disk_origin = free_bytes(store), f"free at {store.url}"
    if given.disk_free_tb is not None:
        free, disk_origin = int(given.disk_free_tb * 1e12), "--disk-free"
    elif free is None:
        disk_origin = f"{store.url} does not say what is free; give --disk-free"
    if given.nodes or given.gpus_per_node is not None or given.gpu_name:
        name = given.gpu_name or "H200"
        gpu = known_gpu(name)
        if gpu is None:
            raise UserError(f"--gpu {name} is not known; known are {', '.join(GPUS)} (take the nearest)")
        count = 1 if given.gpus_per_node is None else given.gpus_per_node
        return Hardware(
            nodes=given.nodes or 1,
            gpus_per_node=count,
            gpu_name=name if count else None,
            gpu_memory_gib=given.gpu_memory_gib or gpu.memory_gib,
            cpus_per_node=os.cpu_count() or 1,
            memory_gib=None,
            disk_free=free,
            origin="described" if given.gpu_name or not count else f"described; taken to be {name}",
            disk_origin=disk_origin,
        )
    found = _cluster(config) if config.ray.address not in (None, "local") or os.environ.get("RAY_ADDRESS") else None
    found = found or _this_machine(config)
    return replace(
        found,
        gpu_memory_gib=given.gpu_memory_gib or found.gpu_memory_gib,
        disk_free=free,
        disk_origin=disk_origin,
    )


def free_bytes(store: Store) -> int | None:
    """Free bytes where a local run folder is or will be; None for other stores."""
    if not store.is_local:
        return None
    return space_of(store.root).free


def _this_machine(config: Config) -> Hardware:
    import torch

    gpus = torch.cuda.device_count()
    properties: Any = torch.cuda.get_device_properties(0) if gpus else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    cpus = config.ray.num_cpus or len(os.sched_getaffinity(0))
    return Hardware(
        nodes=1,
        gpus_per_node=gpus,
        gpu_name=properties.name if gpus else None,
        gpu_memory_gib=properties.total_memory / GIB if gpus else None,
        cpus_per_node=cpus,
        memory_gib=memory,
        disk_free=None,
        origin=THIS_MACHINE,
    )


def _cluster(config: Config) -> Hardware | None:
    """The running Ray cluster, its first GPU node standing for all."""
    import ray

    from app.cluster import connect

    connect(config.ray)
    nodes = [n["Resources"] for n in ray.nodes() if n.get("Alive")]
    with_gpus = [n for n in nodes if n.get("GPU")] or nodes
    if not with_gpus:
        return None
    first = with_gpus[0]
    name = next((k.partition(":")[2] for k in first if k.startswith("accelerator_type:")), None)
    found = known_gpu(name)
    return Hardware(
        nodes=len(with_gpus),
        gpus_per_node=int(first.get("GPU", 0)),
        gpu_name=name,
        gpu_memory_gib=found.memory_gib if found else None,
        cpus_per_node=int(first.get("CPU", 1)),
        memory_gib=first.get("memory", 0) / GIB or None,
        disk_free=None,
        origin="the Ray cluster",
    )


@dataclass(frozen=True)
class Rate:
    value: float
    origin: str


@dataclass(frozen=True)
class Rates:
    """Tokens/s are of one engine or one training worker."""

    engine_start_s: Rate
    generate_tokens_per_s: Rate  # answer tokens written and captured
    prefill_tokens_per_s: Rate  # prompts, and answers taken as they are
    train_start_s: Rate
    train_tokens_per_s: Rate
    bench_start_s: Rate  # of one of its two servers
    bench_tokens_per_s: Rate  # without the draft
    draft_tokens_per_s: Rate  # with it
    extract_tokens_per_s: Rate  # a second pass for the states, which draftmill does not make
    extract_samples_per_s: Rate | None = None  # the same by samples; goes first

    def with_values(self, values: Mapping[str, float], origin: str) -> Rates:
        """These rates with some of them known better."""
        known = {f.name for f in fields(self)}
        return replace(self, **{k: Rate(v, origin) for k, v in values.items() if k in known})

    def to_json(self) -> dict[str, Any]:
        return {
            f.name: {"value": r.value, "origin": r.origin}
            for f in fields(self)
            if (r := getattr(self, f.name)) is not None
        }


RATE_KEYS = tuple(f.name for f in fields(Rates))


@dataclass(frozen=True)
class _Speed:
    decode: float
    prefill: float
    operations: float
    engine_start: float
    train_start: float
    bench_start: float
    draft_gain: float
    origin: str = field(default="")


def rough_rates(shape: Shape, config: Config, hardware: Hardware, supervised_share: float) -> Rates:
    """Rates by parameter count from machines we measured; wrong by a factor of two and more on others."""
    if hardware.on_gpu:
        gpu = hardware.gpu
        factor = gpu or GPUS["H200"]
        gpus = 1 if config.generate.tensor_parallel == "auto" else config.generate.tensor_parallel
        size = _OF_8B / shape.target_parameters * gpus
        # A step of many requests chooses nearly every expert, so that all weights are read for it.
        read = _BYTES_OF_8B / shape.target_bytes * gpus if shape.target_bytes else size
        # Decoding needs requests to fill the card: 256 at once gave the measured rate.
        filled = min(1.0, (config.generate.max_num_seqs / 256) ** 0.8)
        speed = _Speed(
            _H200_DECODE * factor.bandwidth * min(size, read) * filled, _H200_PREFILL * factor.compute * size,
            _H200_TRAIN * factor.compute, 90, 60, 90, 1.5,
            f"rough: an 8B target on an H200, by parameters, weights and {hardware.gpu_name or 'as if on an H200'}",
        )  # fmt: skip
    else:
        size = _OF_135M / shape.target_parameters
        cores = hardware.cpus_per_node
        filled = min(1.0, (config.generate.max_num_seqs / 48) ** 0.5)
        speed = _Speed(
            _CPU_DECODE * cores * size * filled, _CPU_PREFILL * cores * size,
            _CPU_TRAIN * min(cores, config.train.cpus_per_worker), 22, 15, 14, 0.55,
            f"rough: a 135M target on 2 cores, by parameters and {cores} cores",
        )  # fmt: skip
    concurrent = min(1.0, (config.bench.concurrencies[0] / config.generate.max_num_seqs) ** 0.5)
    served = speed.decode * concurrent * 1.25 if not hardware.on_gpu else speed.decode * concurrent
    train = speed.operations / train_operations(shape, config.train.unroll_steps, supervised_share)

    def rate(value: float) -> Rate:
        return Rate(value, speed.origin)

    return Rates(
        engine_start_s=rate(speed.engine_start),
        generate_tokens_per_s=rate(speed.decode),
        prefill_tokens_per_s=rate(speed.prefill),
        train_start_s=rate(speed.train_start),
        train_tokens_per_s=rate(train),
        bench_start_s=rate(speed.bench_start),
        bench_tokens_per_s=rate(served),
        draft_tokens_per_s=rate(served * speed.draft_gain),
        extract_tokens_per_s=rate(speed.prefill),
    )
