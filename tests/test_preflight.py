"""What the nodes have is told before engines load; what is short is a sentence with the sum, what surely fails ends."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.cluster import connect, disconnect
from app.config import RayConfig, parse_config
from app.errors import UserError
from app.nodes import Room, Space, look_at, look_at_cluster
from app.parts import PARTS
from app.pipeline import run_pipeline
from app.plan.command import lines_of, plan_run
from app.plan.hardware import Described
from app.preflight import Demand, check_nodes, demand_of, node_lines
from app.sizing import Engines
from app.stages import stages_up_to
from tests.runs import ROOT, context, draftmill, prompts, save_config, tiny_config, write_rows
from tests.test_plan import KIMI

GB = 10**9
ROOMY = Room(
    "big", Space(512 * GB, 512 * GB), Space(1000 * GB, 1024 * GB), "/tmp/ray", Space(500 * GB, 1000 * GB),
    Space(900 * GB, 1000 * GB), object_store=200 * GB, gpus=8, cpus=96,
)  # fmt: skip
OWN = Demand(rows=512, at_once=256, row=86e6, gpus=8, processes=8)  # of a trillion-parameter target on eight GPUs
INSIDE = Demand(rows=128, at_once=64, row=10e6, gpus=1)


def short(room: Room, demand: Demand, engines: int = 1) -> list[str]:
    return check_nodes([room], demand, engines, "/runs/mine")


def test_a_roomy_node_has_nothing_to_say() -> None:
    assert short(ROOMY, OWN) == short(ROOMY, INSIDE, 8) == []


def test_f42_a_container_of_64_mb_is_told_the_flag_and_the_sum() -> None:
    small = replace(ROOMY, shared=Space(67_108_864, 67_108_864), object_store=30 * GB)
    states, store = short(small, OWN)
    assert "1 x (256 rows x 86.00 MB + 2.18 GB of vLLM's queues) = 24.20 GB of /dev/shm" in states
    assert "67.11 MB of 67.11 MB are free, so the states go over the disk" in states
    assert states.endswith("start the container with --shm-size=23g")
    assert "Ray's object store of 30.00 GB does not fit into /dev/shm of 67.11 MB" in store
    assert "--shm-size=31g" in store and "/tmp/ray" in store
    assert all(s.startswith("node big: ") and "\n" not in s for s in (states, store))


def test_an_engine_in_its_actors_process_needs_no_shared_memory() -> None:
    small = replace(ROOMY, shared=Space(67_108_864, 67_108_864), object_store=10**7)
    assert short(small, INSIDE, 8) == []


def test_short_memory_names_the_sum_and_what_to_lower() -> None:
    tight = replace(ROOMY, memory=Space(9 * GB, 64 * GB))
    [sentence] = short(tight, INSIDE, 8)
    assert "8 x (128 rows under way x 10.00 MB) = 10.24 GB of memory, and 9.00 GB of 64.00 GB are free" in sentence
    assert "generate.parts_in_flight" in sentence
    assert short(tight, INSIDE, 7) == []
    assert short(replace(tight, gpus=4), INSIDE, 8) == []  # no more engines come to it than it has GPUs


def test_a_full_disk_of_rays_is_told() -> None:
    [sentence] = short(replace(ROOMY, temp=Space(40 * GB, 1000 * GB)), INSIDE)
    assert "the disk of Ray's /tmp/ray is 96% full" in sentence and "--temp-dir" in sentence


def test_many_nodes_that_lack_the_same_are_one_sentence() -> None:
    rooms = [replace(ROOMY, host=f"n{i}", memory=Space(GB, 64 * GB)) for i in range(20)]
    [sentence] = check_nodes(rooms, INSIDE, 20, "/runs/mine")
    assert sentence.startswith("nodes n0, n1, n2 and 17 more: ")
    lines = node_lines(rooms, INSIDE)
    assert len(lines) == 10 and "12 more nodes" in lines[8]
    cpu_head = replace(ROOMY, host="head", gpus=0, memory=Space(0, 1))
    assert check_nodes([ROOMY, cpu_head], INSIDE, 8, "/runs/mine") == []  # no engine comes to a node without a GPU


def test_only_what_surely_fails_is_refused() -> None:
    away = replace(ROOMY, run_there=False)
    with pytest.raises(UserError, match=r"no node that can hold an engine has the run folder /runs/mine \(node big\)"):
        short(away, INSIDE)
    [sentence] = check_nodes([ROOMY, replace(away, host="other")], INSIDE, 8, "/runs/mine")
    assert sentence.startswith("node other: the run folder /runs/mine is not there")
    on_cpu = Demand(rows=64, at_once=8, row=1e6, weights=20e9)
    with pytest.raises(UserError, match=r"2 x 20\.00 GB = 40\.00 GB for weights and KV cache.*is 32\.00 GB; lower"):
        short(replace(ROOMY, gpus=0, memory=Space(30 * GB, 32 * GB)), on_cpu, 2)
    tiny = replace(ROOMY, shared=Space(6 * 10**7, 6 * 10**7), temp=Space(5 * 10**7, 8 * 10**7))
    with pytest.raises(UserError, match=r"states of one row take 86\.00 MB.*temporary folder of big holds 80\.00 MB"):
        short(tiny, OWN)


def test_the_demand_is_that_of_the_settings() -> None:
    config = parse_config(
        {"sources": [{"path": "x"}], "generate": {"max_num_seqs": 256, "kv_cache_gib": 2}}, "test"
    )  # fmt: skip
    own = demand_of(config, KIMI, Engines(1, 8, ""), True, 512, 1500)
    assert (own.rows, own.at_once, own.processes, own.gpus) == (512, 256, 8, 8)
    assert own.row == 1500 * 57_344  # bytes a token of four bf16 states (CONTRACTS.md section 8)
    assert own.memory == 512 * own.row and own.exported == 256 * own.row
    cpu = demand_of(config, KIMI, Engines(1, 1, ""), False, 64, 1500)
    assert cpu.weights == KIMI.target_bytes + 2 * 2**30
    assert (cpu.exported, cpu.queues, cpu.processes) == (0, 0, 0)


def test_this_machine_says_what_it_has(tmp_path: Path) -> None:
    room = look_at("here", "/tmp/ray", str(tmp_path / "not" / "yet"))
    usage = shutil.disk_usage(tmp_path)
    assert room.run is not None and room.run.total == usage.total and not room.run_there
    assert 0 < room.memory.free <= room.memory.total and room.shared.total > 0
    assert look_at("here", "/tmp/ray", None).run_there


@pytest.mark.cluster
def test_every_node_of_a_cluster_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setattr("app.nodes._ANSWER_S", 60.0)  # of a machine that runs other tests
    node: dict[str, Any] = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 10**8}
    nodes = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        nodes.add_node(**{**node, "num_gpus": 0})
        ray.init(address=nodes.address, namespace="draftmill")
        rooms = look_at_cluster(str(tmp_path))
    finally:
        disconnect()
        nodes.shutdown()
    assert sorted(r.gpus for r in rooms) == [0, 1]
    assert all(r.object_store == 10**8 and r.run_there and r.shared.total > 0 for r in rooms)


IN_64_MB = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'


@pytest.mark.cluster
def test_f42_a_run_in_a_container_of_64_mb_goes_on_and_says_the_flag(tiny: Path, tmp_path: Path) -> None:
    """A real /dev/shm of 64 MB, in a mount namespace of its own."""
    inside = ["unshare", "-rm", "sh", "-c", IN_64_MB, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("this host does not let users mount in a namespace of their own")
    config = tiny_config(
        tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(20)), ray__object_store_gib=0.1
    )  # fmt: skip
    path = save_config(config, tmp_path / "c.yaml")
    done = subprocess.run(
        [*inside, sys.executable, "-m", "app", "generate", str(path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [sentence] = [line for line in done.stderr.splitlines() if "--shm-size" in line and " generate: node " in line]
    assert "Ray's object store of 107.37 MB does not fit into /dev/shm of 67.11 MB" in sentence
    assert "an engine needs about" in done.stderr and "memory (20 rows under way x " in done.stderr


@pytest.fixture
def smallest_store() -> Iterator[None]:
    """A cluster whose object store is about the least Ray takes, 75 MiB."""
    connect(RayConfig(num_cpus=2, dashboard=False, object_store_gib=0.0745))
    yield
    disconnect()


def spilled() -> int:
    """Bytes that Ray has written from the object store to the disk."""
    import ray
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return int(get_memory_info_reply(state).store_stats.spilled_bytes_total)


@pytest.mark.cluster
def test_f42_capture_spills_nothing_with_the_smallest_store(tiny: Path, tmp_path: Path, smallest_store: None) -> None:
    import numpy
    import ray

    config = tiny_config(
        tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(50)),
        generate__engine_args={"STUB_LENGTH": 390}, generate__max_length=512, generate__max_new_tokens=400,
        capture__codec="bf16",
    )  # fmt: skip
    run_pipeline(config, stages_up_to("generate"))
    sizes = [p.stat().st_size for p in (tmp_path / "run" / PARTS).glob("*.safetensors")]
    assert context(config).input("generate").counts["kept"] == 50 and sum(sizes) > 50 * 200_000 * 0.9
    assert spilled() == 0
    held = [ray.put(numpy.zeros(30 << 20, dtype=numpy.uint8)) for _ in range(4)]  # the number would tell
    assert spilled() > 0, held


@pytest.mark.cluster
def test_a_store_that_ray_does_not_take_is_a_sentence(tiny: Path, tmp_path: Path) -> None:
    config = tiny_config(
        tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(20)), ray__object_store_gib=0.01
    )  # fmt: skip
    done = draftmill("generate", str(save_config(config, tmp_path / "c.yaml")))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("draftmill: error: Ray does not start with ray.object_store_gib=0.01 (")
    assert "minimum allowed is" in last and "--shm-size" in last


def test_the_plan_shows_this_machine_and_what_an_engine_needs(tiny: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(20)))
    text = "\n".join(lines_of(plan_run(config), config))
    assert "generate     node " in text and "object store 107.37 MB" in text
    assert "memory (20 rows under way x " in text and "none of /dev/shm" in text
    elsewhere = plan_run(config, described=Described(nodes=2, gpus_per_node=8))
    assert len(elsewhere.node) == 1 and elsewhere.node[0].startswith("an engine needs about")
