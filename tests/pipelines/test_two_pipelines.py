"""Two pipelines in one driver, each of which needs every GPU: the second begins, and neither leaves anything."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.cluster import disconnect
from app.pipeline import run_pipeline
from app.stages import stages_up_to
from tests.pipelines.test_generate_faults import check_sums, lives, wait_until
from tests.runs import prompts, tiny_config, write_rows

GPUS = 2  # numbers to Ray and nothing else: the stub engine and the training run on CPUs


@pytest.fixture
def gpus() -> Iterator[None]:
    import ray

    ray.init(
        address="local", num_cpus=2, num_gpus=GPUS, object_store_memory=10**8, include_dashboard=False,
        namespace="draftmill",
    )  # fmt: skip
    yield
    disconnect()


def living_actors() -> list[str]:
    """Classes of the actors that are not dead."""
    from ray._private.state import actors

    return sorted(str(a["ActorClassName"]) for a in actors().values() if a["State"] != "DEAD")


@pytest.mark.cluster
def test_f38_two_pipelines_in_one_driver_leave_nothing(tiny: Path, tmp_path: Path, gpus: None) -> None:
    import ray
    from ray.util import placement_group_table

    before, left = set(os.listdir("/dev/shm")), tmp_path / "left"
    seen = []
    for name in ("one", "two"):
        source = write_rows(tmp_path / f"{name}.jsonl", prompts(40, f"Count the {name} sacks of day"))
        config = tiny_config(
            tiny, tmp_path / name, source, train__use_gpu=False, train__cpus_per_worker=1,
            generate__engine_args={"STUB_CHILD": "spawn", "STUB_LEFT": str(left), "STUB_DELAY": 0.2},
        )  # fmt: skip
        run_pipeline(config, stages_up_to("train"))
        check_sums(config, 40)
        wait_until(lambda: ray.available_resources().get("GPU") == GPUS, 30)
        wait_until(lambda: ray.available_resources().get("CPU") == 2, 30)
        assert [g for g in placement_group_table().values() if g["state"] != "REMOVED"] == []
        wait_until(lambda: not [a for a in living_actors() if "generate" in a or "Train" in a], 30)
        seen.append(living_actors())
    assert seen[0] == seen[1]  # Ray Data's own few, which belong to the cluster: none is added by another pipeline
    engines = [line.split() for line in left.read_text().splitlines()]
    assert len(engines) >= 2  # of each; the actors of both held every GPU
    wait_until(lambda: not any(lives(int(pid)) for engine in engines for pid in engine[:2]), 30)
    assert not [Path(folder) for *_, folder in engines if Path(folder).exists()]
    assert not {n for n in set(os.listdir("/dev/shm")) - before if n.startswith("draftmill")}
