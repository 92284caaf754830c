"""Engines for a cluster: how many, of how many GPUs, and what is refused with the sum before anything is loaded."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.util.annotations import RayDeprecationWarning

from app.cluster import disconnect
from app.config import Config, parse_config
from app.errors import UserError
from app.pipeline import run_pipeline
from app.pipelines import generate
from app.plan.cost import shape_of
from app.plan.hardware import GIB, Hardware
from app.sizing import (
    Cluster,
    Engines,
    Need,
    check_engines,
    choose,
    described,
    need_of,
    numbers,
    placed,
    see_cluster,
    settled,
)
from app.stages import stages_up_to
from app.target import inspect_target
from tests.runs import context, prompts, tiny_config, write_rows

SMALL = Need(weights=16 * GIB, kv_bytes=128 * 1024, kv_heads=8, heads=32, max_length=4096)
MIDDLE = replace(SMALL, weights=140 * GIB, heads=64, kv_bytes=320 * 1024)
HUGE = Need(weights=595 * GIB, kv_bytes=70_272, kv_heads=0, heads=64, max_length=4096)  # 1T, INT4, a latent cache
H200 = 141 * GIB


def gpus(*nodes: int, memory: float | None = H200, cpus: float = 64) -> Cluster:
    return Cluster(tuple(nodes), memory, cpus, "H200")


def a_config(**generate: object) -> Config:
    return parse_config({"sources": [{"path": "x.jsonl"}], "generate": generate}, "test")


def pair(engines: Engines) -> tuple[int, int]:
    return engines.replicas, engines.tensor_parallel


# The choice


@pytest.mark.parametrize(
    ("need", "cluster", "expected"),
    [
        (SMALL, gpus(8), (8, 1)),
        (HUGE, gpus(8), (1, 8)),
        (MIDDLE, gpus(8), (4, 2)),
        (SMALL, gpus(), (1, 1)),
        (SMALL, gpus(1), (1, 1)),
        (SMALL, gpus(8, 8), (16, 1)),
        (HUGE, gpus(8, 8), (2, 8)),
        (SMALL, gpus(8, memory=24 * GIB), (4, 2)),  # 16 GiB and the cache are too much for one of 24
        (HUGE, gpus(8, 8, memory=80 * GIB), (1, 16)),  # no node holds it: two whole ones do
        (replace(SMALL, weights=300 * GIB, heads=14, kv_heads=14), gpus(8), (1, 7)),  # 4 and 8 do not divide 14 heads
        (replace(MIDDLE, heads=12, kv_heads=12), gpus(8), (4, 2)),
        (SMALL, gpus(8, memory=None), (8, 1)),  # unknown memory
    ],
)
def test_auto_takes_as_many_engines_as_the_gpus_hold(need: Need, cluster: Cluster, expected: tuple[int, int]) -> None:
    engines = choose(a_config(), need, cluster)
    assert pair(engines) == expected
    assert engines.spans_nodes == (engines.tensor_parallel > cluster.widest > 0)
    check_engines(a_config(), engines, need, cluster)  # what is chosen is not refused


def test_of_as_many_engines_those_with_more_memory_are_taken() -> None:
    need = replace(SMALL, weights=300 * GIB, heads=24, kv_heads=24)  # three GPUs would do, and one would idle
    assert pair(choose(a_config(), need, gpus(4))) == (1, 4)


def test_what_is_given_stays_as_given_and_parts_bound_the_engines() -> None:
    assert pair(choose(a_config(replicas=2), SMALL, gpus(8))) == (2, 1)
    assert pair(choose(a_config(tensor_parallel=4), SMALL, gpus(8))) == (2, 4)
    engines = choose(a_config(), SMALL, gpus(8), parts=3)
    assert pair(engines) == (3, 1)
    assert "only 3 parts" in engines.why and "\n" not in engines.why


def test_a_long_context_asks_for_more_room() -> None:
    memory = 24 * GIB
    short = choose(a_config(), replace(SMALL, max_length=512), gpus(8, memory=memory))
    long = choose(a_config(), replace(SMALL, max_length=32_768), gpus(8, memory=memory))
    assert short.tensor_parallel == 1 < long.tensor_parallel


def test_the_need_of_a_target_is_read_from_its_files(tiny: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny, tmp_path / "run", tmp_path / "r.jsonl")
    need = need_of(shape_of(inspect_target(str(tiny)), config), config)
    assert need.weights == sum(p.stat().st_size for p in tiny.glob("*.safetensors"))
    assert (need.heads, need.kv_heads, need.kv_bytes) == (4, 2, 2 * 8 * 2 * 2 * 32)  # bf16, 8 layers, k and v, heads
    assert need.divides(2) and need.divides(4) and not need.divides(3)
    raw = json.loads((tiny / "config.json").read_text())
    latent = tmp_path / "latent"
    latent.mkdir()
    for path in tiny.iterdir():
        (latent / path.name).write_bytes(path.read_bytes())
    (latent / "config.json").write_text(json.dumps({**raw, "kv_lora_rank": 48, "qk_rope_head_dim": 16}))
    need = need_of(shape_of(inspect_target(str(latent)), config), config)
    assert (need.kv_heads, need.kv_bytes) == (0, 2 * 8 * 64)


def test_the_plan_counts_with_the_same_numbers() -> None:
    from tests.test_plan import KIMI

    hardware = Hardware(1, 8, "H200", 141, 64, 2000, None, "test")
    assert numbers(settled(a_config(), KIMI, hardware)) == (1, 8)
    assert numbers(settled(a_config(replicas=3, tensor_parallel=2), KIMI, hardware)) == (3, 2)
    assert described(replace(hardware, gpus_per_node=0)).total == 0


# What is refused


@pytest.mark.parametrize(
    ("need", "cluster", "given", "words"),
    [
        (SMALL, gpus(1), {"tensor_parallel": 2}, r"1 x 2 = 2 GPUs and the cluster has 1; lower"),
        (SMALL, gpus(1), {"replicas": 2}, r"2 x 1 = 2 GPUs and the cluster has 1; lower generate\.replicas"),
        (SMALL, gpus(3, 3), {"replicas": 3, "tensor_parallel": 2}, r"3 x 2 = 6 GPUs, and the nodes' 3 \+ 3 .* only 2"),
        (SMALL, gpus(8), {"tensor_parallel": 3}, r"32 attention heads .*divides them"),
        (replace(SMALL, heads=36), gpus(8), {"tensor_parallel": 8}, r"36 attention heads \(8 of keys\)"),
        (HUGE, gpus(4), {}, r"weights of 595\.0 GiB over 4 GPU.*148\.8 GiB each.*126\.9 GiB; raise generate\.tensor"),
        (SMALL, gpus(cpus=2), {"replicas": 3}, r"3 x 1 = 3 CPUs and the cluster has 2"),
        (SMALL, gpus(), {"tensor_parallel": 2}, r"above 1 and the cluster has no GPU"),
    ],
)
def test_what_cannot_be_held_is_refused_with_the_sum(
    need: Need, cluster: Cluster, given: dict[str, int], words: str
) -> None:
    config = a_config(**given)
    with pytest.raises(UserError, match=words) as fault:
        check_engines(config, choose(config, need, cluster), need, cluster)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"max_model_len": 99}, "max_model_len (set generate.max_length)"),
        ({"trust_remote_code": True}, "trust_remote_code (set target.trust_remote_code)"),
        ({"tensor_parallel_size": 2}, "generate.tensor_parallel"),
        ({"enable_prefix_caching": True}, "a cached prefix has no states"),
    ],
)
def test_engine_arguments_of_ours_are_refused_before_any_stage(
    tiny: Path, tmp_path: Path, args: dict[str, Any], words: str
) -> None:
    source = write_rows(tmp_path / "r.jsonl", prompts(3))
    config = tiny_config(tiny, tmp_path / "run", source, generate__engine="vllm", generate__engine_args=args)
    with pytest.raises(UserError) as fault:
        run_pipeline(config, stages_up_to("generate"))
    assert words in str(fault.value) and "generate.engine_args" in str(fault.value)
    assert not (tmp_path / "run" / "ingest").exists()


def test_other_engine_arguments_reach_vllm_and_prefix_caching_stays_off() -> None:
    from app.engine.base import EngineSpec
    from app.engine.vllm_args import engine_args

    given = {"quantization": "fp8", "max_num_batched_tokens": 4096}
    args = engine_args(EngineSpec("m", (2, 4, 5), 8, engine_args=given), on_cpu=False)
    assert given.items() <= args.items()
    assert args["enable_prefix_caching"] is False


# On a cluster, with GPUs that are only numbers


@pytest.mark.cluster
def test_f39_more_than_the_cluster_has_is_refused_in_seconds(tiny: Path, tmp_path: Path) -> None:
    import ray

    source = write_rows(tmp_path / "r.jsonl", prompts(25))
    ray.init(address="local", num_cpus=2, num_gpus=1, include_dashboard=False, object_store_memory=10**8)
    try:
        for given, words in (
            ({"tensor_parallel": 2}, "1 x 2 = 2 GPUs and the cluster has 1"),
            ({"replicas": 2}, "2 x 1 = 2 GPUs and the cluster has 1"),
        ):
            settings = {f"generate__{key}": value for key, value in given.items()}
            config = tiny_config(tiny, tmp_path / "run", source, **settings)
            with pytest.raises(UserError, match=words):
                run_pipeline(config, stages_up_to("generate"))
    finally:
        disconnect()


@pytest.mark.cluster
def test_f38_pipelines_one_after_the_other_in_one_driver_each_get_both_gpus(tiny: Path, tmp_path: Path) -> None:
    import ray

    ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, object_store_memory=10**8)
    try:
        for name, given in (("one", {"tensor_parallel": 2}), ("two", {"replicas": 2})):
            settings = {f"generate__{key}": value for key, value in given.items()}
            source = write_rows(tmp_path / f"{name}.jsonl", prompts(25, name))
            config = tiny_config(tiny, tmp_path / name, source, **settings)
            generate_on_what_ray_keeps(config)
            assert context(config).input("generate").counts["kept"] == 25
            assert not held_groups()
            assert ray.available_resources()["GPU"] == 2
    finally:
        disconnect()


def generate_on_what_ray_keeps(config: Config) -> None:
    """Run up to generate; nothing of Ray's that it uses is to go."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run_pipeline(config, stages_up_to("generate"))
    assert [str(w.message) for w in told if issubclass(w.category, RayDeprecationWarning)] == []


@pytest.fixture
def two_nodes() -> Iterator[None]:
    """A cluster of two nodes with a GPU each, so that an engine of two spans them."""
    import ray
    from ray.cluster_utils import Cluster as Nodes

    node: dict[str, Any] = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": 10**8}
    nodes = Nodes(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    nodes.add_node(**node)
    ray.init(address=nodes.address, namespace="draftmill")
    yield
    disconnect()
    nodes.shutdown()


def held_groups() -> list[Any]:
    from ray.util import placement_group_table

    return [g for g in placement_group_table().values() if g["state"] != "REMOVED"]


@pytest.mark.cluster
def test_f38_an_engine_over_two_nodes_gives_its_gpus_back(
    tiny: Path, tmp_path: Path, two_nodes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    assert see_cluster().gpus == (1, 1)
    seen: list[Any] = []

    def watch(engines: Engines) -> Any:
        assert engines.spans_nodes and engines.engine_args == {"distributed_executor_backend": "ray"}
        seen.append(engines)
        return placed(engines)

    monkeypatch.setattr(generate, "placed", watch)
    for name in ("a", "b"):  # the second begins only where the first gave its two GPUs back
        source = write_rows(tmp_path / f"{name}.jsonl", prompts(25, name))
        dies = {"STUB_DIE_ONCE": str(tmp_path / "died")}  # the first one; its actor is started again in the group
        config = tiny_config(tiny, tmp_path / name, source, generate__tensor_parallel=2, generate__engine_args=dies)
        generate_on_what_ray_keeps(config)
        assert context(config).input("generate").counts["kept"] == 25
        assert not held_groups()
        assert ray.available_resources()["GPU"] == 2
    assert len(seen) == 2 and (tmp_path / "died").exists()


@pytest.mark.cluster
def test_gpus_that_others_hold_are_told_of_and_no_group_stays(two_nodes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.sizing._GROUP_WAIT_S", 1.0)
    both = Engines(1, 2, "", spans_nodes=True)
    with placed(both):
        assert len(held_groups()) == 1
        with pytest.raises(UserError, match=r"2 GPUs for engine 1 of 1 were not free"), placed(both):
            raise AssertionError("there is no room for it")
        assert len(held_groups()) == 1
    assert not held_groups()


@pytest.mark.parametrize(
    ("max_num_seqs", "rows_per_part", "parts"), [(64, 64, 2), (48, 40, 3), (256, 32, 16), (8, 64, 2)]
)
def test_f31_the_parts_in_flight_hold_rows_for_two_batches(max_num_seqs: int, rows_per_part: int, parts: int) -> None:
    config = parse_config(
        {
            "sources": [{"path": "x"}],
            "generate": {"max_num_seqs": max_num_seqs},
            "storage": {"rows_per_part": rows_per_part},
        },
        "test",
    )
    assert generate.parts_in_flight(config) == parts


def test_the_nodes_of_a_large_cluster_are_counted_once() -> None:
    """The choice asks for the total for every number of nodes an engine may span."""
    counted: list[int] = []

    class Nodes(tuple[int, ...]):
        def __iter__(self) -> Iterator[int]:
            counted.append(len(self))
            return super().__iter__()

    cluster = Cluster(Nodes((8,) * 3000), H200, 64, "H200")
    assert choose(a_config(), HUGE, cluster).tensor_parallel == 8
    assert len(counted) < 100
