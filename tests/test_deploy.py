"""What reads `cluster.yaml` and `deploy/`, and what it makes of them.

`ray up` and the autoscaler are Ray's own code. Pods are checked against Kubernetes' own schemas, unknown fields refused
(kubernetes-validate), the container file by hadolint. KubeRay's definitions are in no package that Python installs: the
fields of a RayCluster and a RayJob that we use are written down below. They were compared, name by name and type by
type, with enums and what is required, with the API reference of KubeRay 1.6.2 and the operator's Go types; the rules of
`test_what_the_operator_refuses` and the lengths of names with its validation (1.4.2, and a main branch after 1.6). A
field that is not written down is refused, though KubeRay may know it. No operator has read the files here.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version
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


# KubeRay: the fields used, with the types that the ray.io/v1 definitions give them

TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
TEXTS = {"type": "object", "additionalProperties": TEXT}
POD = {"type": "object"}  # Kubernetes' own, checked below


def mapping(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


def listing(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


CLUSTER_SPEC = mapping(
    ("rayVersion", "headGroupSpec", "workerGroupSpecs"),
    rayVersion=TEXT,
    authOptions=mapping(("mode",), mode={"enum": ["disabled", "token"]}),
    enableInTreeAutoscaling={"type": "boolean"},
    autoscalerOptions=mapping(idleTimeoutSeconds=COUNT),
    headGroupSpec=mapping(("rayStartParams", "template"), rayStartParams=TEXTS, template=POD),
    workerGroupSpecs=listing(
        mapping(
            ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
            groupName=TEXT,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            rayStartParams=TEXTS,
            template=POD,
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
    longest = {"RayCluster": 53, "RayJob": 47}[kind]  # the operator adds to it for the names of services
    name = {"type": "string", "pattern": r"^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": longest}
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
def test_what_the_operator_refuses(name: str) -> None:
    """Its rules beyond the types of single fields, as far as fields that we use come into them."""
    spec = cluster_specs()[name]
    assert Version(spec["rayVersion"]) >= Version("2.52.0")  # for authOptions.mode: token
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    for group in groups:
        assert group["template"]["spec"]["containers"] and "labels" not in group["rayStartParams"]
        assert "restartPolicy" not in group["template"]["spec"]  # the autoscaler of Ray 2.47 and newer wants it so
    for group in groups[1:]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert len({group["groupName"] for group in groups[1:]}) == len(groups) - 1
    job = read(DEPLOY / "kuberay" / "rayjob.yaml")["spec"]
    assert job["shutdownAfterJobFinishes"] and job["ttlSecondsAfterFinished"] > 0  # the second needs the first
    assert job["submissionMode"] != "InteractiveMode" and job["backoffLimit"] > 0


@pytest.mark.parametrize("version", ["1.25", "1.37"])
@pytest.mark.parametrize("name", ["raycluster", "rayjob"])
def test_kubernetes_knows_every_field_of_a_pod(name: str, version: str) -> None:
    """By the schemas of its oldest and newest version at hand, which refuse unknown fields, values and kinds."""
    metadata = read(DEPLOY / "kuberay" / f"{name}.yaml")["metadata"]
    spec = cluster_specs()[name]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata, "template": group["template"]}
        assert kubernetes_validate.validate(pod, version, strict=True) == version
        for wrong in misspelt(pod):
            with pytest.raises(kubernetes_validate.ValidationError):
                kubernetes_validate.validate(wrong, version, strict=True)


def misspelt(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod with one thing wrong, a field at each depth."""
    found = []
    for change in (
        lambda p: p["metadata"].update(nam="x"),
        lambda p: p["template"]["spec"].update(terminationGracePeriodSecond=60),
        lambda p: p["template"]["spec"].update(terminationGracePeriodSeconds="a minute"),
        lambda p: p["template"]["spec"]["containers"][0].pop("name"),
        lambda p: p["template"]["spec"]["containers"][0]["resources"].update(limit={}),
        lambda p: p["template"]["spec"]["containers"][0]["volumeMounts"][0].pop("mountPath"),
        lambda p: p["template"]["spec"]["volumes"][0]["persistentVolumeClaim"].pop("claimName"),
        lambda p: p["template"]["spec"]["volumes"][1]["emptyDir"].update(size="8Gi"),
    ):
        wrong = copy.deepcopy(pod)
        change(wrong)
        found.append(wrong)
    return found


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


def test_the_files_name_the_locked_versions() -> None:
    lock = (ROOT / "requirements" / "lock-linux-x86_64-py311-cpu.txt").read_text().splitlines()
    assert f"ray=={RAY_VERSION}" in lock
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (engine,) = map(Requirement, project["optional-dependencies"]["gpu"])
    (tested,) = map(Requirement, project["optional-dependencies"]["cpu"])
    assert engine.specifier.contains(next(iter(tested.specifier)).version)
    files = [path.read_text() for path in DEPLOY.rglob("*") if path.is_file()]
    assert {tag for text in files for tag in re.findall(r"REGISTRY/draftmill:(\S+)", text)} == {project["version"]}


# Debian's packages and those of the index are the newest that fit: the image is built for their fixes as well.
UNPINNED = ("DL3008", "DL3013")


def hadolint(text: str) -> subprocess.CompletedProcess[str]:
    """The linter's reading of a container file, ShellCheck's of its commands included; exit 0: nothing to say."""
    program = Path(sys.executable).parent / "hadolint"
    ignored = [word for rule in UNPINNED for word in ("--ignore", rule)]
    return subprocess.run(
        [program, "--no-color", "--failure-threshold", "style", *ignored, "-"],
        input=text, capture_output=True, text=True, check=False, env={},
    )  # fmt: skip


def test_the_container_file_is_sound() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    done = hadolint(text)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DL3066" in hadolint(text.replace("USER 1000", "USER ray")).stdout
    assert "SC1072" in hadolint(text.replace('".[gpu,s3]"', '".[gpu,s3]')).stdout  # a quote that is not closed
    assert hadolint(text.replace("WORKDIR /opt", "WORKDR /opt")).returncode != 0


STAND_INS = """#!{python}
import os, subprocess, sys
name, *words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
if name == "pip" and words[0] == "install":
    build = "-m pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir".split()
    subprocess.check_call([sys.executable, *build, "{out}", "."])
"""


def test_the_image_installs_the_code_that_was_copied(tmp_path: Path) -> None:
    """Its copying and builds in their order, without packages that are not ours: the last wheel is whole."""
    stage, programs, out = (tmp_path / name for name in ("stage", "bin", "wheels"))
    for folder in (stage, programs, out):
        folder.mkdir()
    for name in ("pip", "chown"):
        (programs / name).write_text(STAND_INS.format(python=sys.executable, out=out))
        (programs / name).chmod(0o755)
    for word, rest in instructions():
        if word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, stage / target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy2(ROOT / source, stage / target)
        elif word == "RUN" and "pip " in rest:
            path = f"{programs}:{os.environ['PATH']}"
            subprocess.run(["sh", "-ec", rest], cwd=stage, env={**os.environ, "PATH": path}, check=True)
    (wheel,) = out.glob("draftmill-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        for path in (ROOT / "app").rglob("*.py"):
            assert packed.read(str(path.relative_to(ROOT))) == path.read_bytes(), path
