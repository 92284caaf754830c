"""What Ray and KubeRay read of `cluster.yaml` and `deploy/`: checked by Ray's own readers, and field by field."""

from __future__ import annotations

import copy
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler._private.util import prepare_config, validate_config

from app.config import load_config
from app.job_server import PYTHONS
from app.submit import ENV_VARS
from tests.runs import ROOT

DEPLOY = ROOT / "deploy"
RAY_VERSION = "2.60.0"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def prepared(config: dict[str, Any]) -> dict[str, Any]:
    """As `ray up` reads it."""
    full: dict[str, Any] = prepare_config(copy.deepcopy(config))
    validate_config(full)
    return full


# ray up


@pytest.mark.parametrize("path", [ROOT / "cluster.yaml", DEPLOY / "cluster-aws.yaml"], ids=lambda p: p.stem)
def test_ray_up_reads_the_cluster(path: Path) -> None:
    config = read(path)
    full = prepared(config)
    with pytest.raises(jsonschema.ValidationError):
        prepared({**config, "worker_ips": []})  # the check does look
    assert full["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    for kind in ("head", "worker"):
        start = full[f"{kind}_start_ray_commands"][-1]
        assert "RAY_AUTH_MODE=token ray start" in start
        assert ("--head" in start and "--autoscaling-config" in start) is (kind == "head")
    assert "--dashboard-host=127.0.0.1" in full["head_start_ray_commands"][-1]


def test_nodes_that_are_added_on_premises_are_used() -> None:
    config = read(ROOT / "cluster.yaml")
    for ips in ([], ["10.0.0.2"], ["10.0.0.2", "10.0.0.3"]):
        full = prepared({**config, "provider": {**config["provider"], "worker_ips": ips}})
        (node,) = full["available_node_types"].values()
        assert (node["min_workers"], node["max_workers"], full["max_workers"]) == (len(ips),) * 3


def test_gpu_nodes_in_the_cloud_come_and_go() -> None:
    full = prepared(read(DEPLOY / "cluster-aws.yaml"))
    gpu = full["available_node_types"]["gpu"]
    assert 1 <= gpu["min_workers"] < gpu["max_workers"] <= full["max_workers"]
    assert full["head_node_type"] == "head" and full["available_node_types"]["head"]["max_workers"] == 0
    assert "--gpus all" in full["docker"]["worker_run_options"]
    assert any("--shm-size" in option for option in full["docker"]["run_options"])
    assert not any("pip install" in c for kind in ("head", "worker") for c in full[f"{kind}_setup_commands"])


# KubeRay. The fields used, with the types that the ray.io/v1 definitions of KubeRay 1.5.1 give them.

TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}


def mapping(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


def listing(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


QUANTITIES = {
    "type": "object",
    "additionalProperties": {"type": ["integer", "string"], "pattern": r"^[0-9]+(\.[0-9]+)?(m|[KMGTPE]i?)?$"},
}
CONTAINER = mapping(
    ("name", "image", "resources"),
    name=TEXT,
    image=TEXT,
    ports=listing(mapping(("containerPort",), containerPort=COUNT, name=TEXT)),
    resources=mapping(("limits", "requests"), limits=QUANTITIES, requests=QUANTITIES),
    volumeMounts=listing(mapping(("name", "mountPath"), name=TEXT, mountPath=TEXT)),
)
VOLUME = mapping(
    ("name",),
    name=TEXT,
    persistentVolumeClaim=mapping(("claimName",), claimName=TEXT),
    emptyDir=mapping(medium={"enum": ["Memory"]}, sizeLimit=TEXT),
)
TEMPLATE = mapping(
    ("spec",),
    spec=mapping(
        ("containers",),
        containers=listing(CONTAINER),
        volumes=listing(VOLUME),
        terminationGracePeriodSeconds=COUNT,
    ),
)
CLUSTER_SPEC = mapping(
    ("rayVersion", "headGroupSpec", "workerGroupSpecs"),
    rayVersion=TEXT,
    authOptions=mapping(("mode",), mode={"enum": ["disabled", "token"]}),
    enableInTreeAutoscaling={"type": "boolean"},
    autoscalerOptions=mapping(idleTimeoutSeconds=COUNT),
    headGroupSpec=mapping(("template",), rayStartParams=TEXTS, template=TEMPLATE),
    workerGroupSpecs=listing(
        mapping(
            ("groupName", "minReplicas", "maxReplicas", "template"),
            groupName=TEXT,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            rayStartParams=TEXTS,
            template=TEMPLATE,
        )
    ),
)
JOB_SPEC = mapping(
    ("entrypoint", "rayClusterSpec"),
    entrypoint=TEXT,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode"]},
    backoffLimit=COUNT,
    shutdownAfterJobFinishes={"type": "boolean"},
    ttlSecondsAfterFinished=COUNT,
    metadata=TEXTS,
    runtimeEnvYAML=TEXT,
    rayClusterSpec=CLUSTER_SPEC,
)


def resource(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    name = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
    return mapping(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": "ray.io/v1"}, kind={"const": kind}, metadata=mapping(("name",), name=name), spec=spec,
    )  # fmt: skip


CLUSTER, JOB = resource("RayCluster", CLUSTER_SPEC), resource("RayJob", JOB_SPEC)


@pytest.mark.parametrize(("name", "schema"), [("raycluster", CLUSTER), ("rayjob", JOB)])
def test_kuberay_knows_every_field(name: str, schema: dict[str, Any]) -> None:
    found = read(DEPLOY / "kuberay" / f"{name}.yaml")
    jsonschema.validate(found, schema)
    with pytest.raises(jsonschema.ValidationError, match="shutdownAfterJobFinish"):
        jsonschema.validate({**found, "spec": {**found["spec"], "shutdownAfterJobFinish": True}}, schema)


def cluster_specs() -> dict[str, dict[str, Any]]:
    return {
        "raycluster": read(DEPLOY / "kuberay" / "raycluster.yaml")["spec"],
        "rayjob": read(DEPLOY / "kuberay" / "rayjob.yaml")["spec"]["rayClusterSpec"],
    }


@pytest.mark.parametrize("name", ["raycluster", "rayjob"])
def test_rays_autoscaler_reads_the_cluster(name: str) -> None:
    """What the autoscaler beside the head makes of the resource, by Ray's own schema."""
    spec = cluster_specs()[name]
    derived = _derive_autoscaling_config_from_ray_cr(
        {"metadata": {"name": "draftmill", "namespace": "default"}, "spec": spec}
    )
    head, gpu = derived["available_node_types"]["headgroup"], derived["available_node_types"]["gpu"]
    assert head["resources"]["GPU"] == 0 and gpu["resources"]["GPU"] == 8 and gpu["resources"]["CPU"] == 64
    assert 1 <= gpu["min_workers"] <= gpu["max_workers"] == derived["max_workers"]


@pytest.mark.parametrize("name", ["raycluster", "rayjob"])
def test_pods_mount_what_they_declare_and_authenticate(name: str) -> None:
    spec = cluster_specs()[name]
    assert spec["authOptions"] == {"mode": "token"} and spec["rayVersion"] == RAY_VERSION
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        volumes = {v["name"]: v for v in pod["volumes"]}
        for container in pod["containers"]:
            mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
            assert set(mounts.values()) <= volumes.keys()
            assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"  # a pod's own holds 64 MB
            assert "persistentVolumeClaim" in volumes[mounts["/runs"]]
            limits, requests = container["resources"]["limits"], container["resources"]["requests"]
            assert limits == requests
    images = {c["image"] for g in (spec["headGroupSpec"], *spec["workerGroupSpecs"])
              for c in g["template"]["spec"]["containers"]}  # fmt: skip
    assert len(images) == 1  # Ray and Python are equal on all nodes


def test_the_rayjob_runs_a_recipe_of_ours() -> None:
    spec = read(DEPLOY / "kuberay" / "rayjob.yaml")["spec"]
    program, verb, config, run_dir = spec["entrypoint"].split()
    assert (program, verb) == ("draftmill", "run")
    inside = ROOT / Path(config).relative_to("/opt/draftmill")
    assert load_config(str(inside), [run_dir]).run_dir == spec["metadata"]["run_dir"] == run_dir.partition("=")[2]
    assert yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"] == ENV_VARS


# The image


def instructions() -> list[tuple[str, str]]:
    """Instruction and arguments of each line of the container file, continued lines joined."""
    text = (DEPLOY / "Containerfile").read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in joined]


def test_the_image_copies_what_there_is_and_installs_what_the_package_names() -> None:
    found = instructions()
    known = {"FROM", "RUN", "COPY", "WORKDIR", "USER", "ENV", "CMD"}
    assert {word for word, _ in found} <= known and found[0][0] == "FROM" and found[-1][0] == "CMD"
    for word, rest in found:
        if word == "COPY":
            assert all((ROOT / source).exists() for source in rest.split()[:-1]), rest
    python = re.search(r"python:(\d+)\.(\d+)-", found[0][1])
    assert python is not None and (int(python[1]), int(python[2])) in PYTHONS
    commands = " ".join(rest for word, rest in found if word == "RUN")
    assert '".[gpu,s3]"' in commands and f'"ray[data,default,train]=={RAY_VERSION}"' in commands
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"gpu", "s3"} <= project["optional-dependencies"].keys()
    ray = next(r for r in map(Requirement, project["dependencies"]) if r.name == "ray")
    assert ray.extras == {"data", "default", "train"} and ray.specifier.contains(RAY_VERSION)
