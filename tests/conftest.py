"""Session fixtures: the tiny targets every test shares."""

from __future__ import annotations

import gc
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import fsspec
import pytest
import requests
from torch import Tensor

from app import cli
from app.checkpoint import write_checkpoint
from app.cluster import connect, disconnect
from app.config import RayConfig
from app.target import TargetInfo, inspect_target, load_target_head
from tests.drafts import draft_config, random_tensors
from tests.runs import Command
from tests.tiny import make_tiny


def pytest_collection_finish() -> None:
    """What the imports made lives as long as the process: no collection has to look through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def ray_train_looks_often() -> Iterator[None]:
    """Ray Train asks its workers every two seconds whether they are done: several seconds of waiting a training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
        yield


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One local cluster for the tests of a module that run in this process."""
    connect(RayConfig(num_cpus=2, dashboard=False, object_store_gib=0.1))
    yield
    disconnect()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the base TINY target."""
    return make_tiny(tmp_path_factory.mktemp("targets") / "tiny")


@pytest.fixture(scope="session")
def tiny_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY whose output head is its embedding."""
    return make_tiny(tmp_path_factory.mktemp("targets") / "tiny-tied", "tied")


@pytest.fixture(scope="session")
def tiny_5l(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY with five layers, where the default auxiliary layer ids collapse."""
    return make_tiny(tmp_path_factory.mktemp("targets") / "tiny-5l", "5L")


@pytest.fixture(scope="session")
def tiny_llama3rope(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY with a scaled rotary embedding."""
    return make_tiny(tmp_path_factory.mktemp("targets") / "tiny-llama3rope", "llama3rope")


@pytest.fixture(scope="session")
def tiny_target(tiny: Path) -> TargetInfo:
    """What the product knows of TINY."""
    return inspect_target(str(tiny))


@pytest.fixture(scope="session")
def tiny_embed(tiny_target: TargetInfo) -> Tensor:
    """TINY's embedding [V, H] bf16."""
    return load_target_head(tiny_target).embed_tokens


@pytest.fixture
def tiny_draft(tiny_target: TargetInfo, tiny_embed: Tensor, tmp_path: Path) -> Path:
    """A right draft checkpoint for TINY, to break."""
    config = draft_config(tiny_target)
    return write_checkpoint(tmp_path / "draft", config, random_tensors(config), tiny_embed, tiny_target)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty bucket on a local moto server, reached by the standard environment."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    for name, value in {
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLEEXAMPLE00",
        "AWS_SECRET_ACCESS_KEY": "a-secret-of-this-test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
    }.items():
        monkeypatch.setenv(name, value)
    requests.post(f"{url}/moto-api/reset", timeout=10)  # its buckets are the process's
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # those there are know another address
    boto3.client("s3").create_bucket(Bucket="runs")
    yield "s3://runs"
    server.stop()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of the test's own, empty."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture(autouse=True)
def log_left_as_found() -> Iterator[None]:
    """Pytest adds a handler of its own to a logger that does not propagate, and a later test sees every line twice."""
    log = logging.getLogger("draftmill")
    handlers = list(log.handlers)
    yield
    log.handlers, log.propagate = handlers, True


@pytest.fixture
def quiet_log() -> Iterator[None]:
    """For tests that call the command line in this process: its log handler, made for their stderr, goes with them."""
    log = logging.getLogger("draftmill")
    handlers, propagate, level = list(log.handlers), log.propagate, log.level
    log.handlers, log.propagate = [], True  # pytest adds its own to a logger that does not propagate
    yield
    log.handlers, log.propagate = handlers, propagate
    log.setLevel(level)


@pytest.fixture
def draftmill_here(capsys: pytest.CaptureFixture[str], quiet_log: None) -> Command:
    """The command line in this process: without the seconds in which one of its own imports everything."""

    def run(*args: str) -> CompletedProcess[str]:
        capsys.readouterr()
        status = cli.run(list(args))
        said = capsys.readouterr()
        return CompletedProcess(args, status, said.out, said.err)

    return run
