"""Datasets of the hub to files; the hub itself is replaced at HfApi."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from app.config import SourceConfig
from app.sources.hub import dataset_files
from app.sources.locate import SourceError

CONVERTED = "refs/convert/parquet"


def refused(kind: Any, status: int) -> Any:
    request = httpx2.Request("GET", "https://hub/api/datasets/o/d")
    return kind("refused", response=httpx2.Response(status, request=request))


def hub(monkeypatch: pytest.MonkeyPatch, files: dict[str, list[str]], name: str = "o/d", fault: Any = None) -> None:
    """A hub with one dataset: revision -> paths; `fault` is raised by every question."""

    class Api:
        def dataset_info(self, repo_id: str, revision: str | None = None, **_: Any) -> Any:
            if fault is not None:
                raise fault
            if revision is not None and revision not in files:
                raise refused(RevisionNotFoundError, 404)
            return SimpleNamespace(id=name, sha={None: "c0ffee", CONVERTED: "converted"}.get(revision, revision))

        def list_repo_files(self, repo_id: str, *, revision: str, **_: Any) -> list[str]:
            revision = CONVERTED if revision == "converted" else revision
            if revision not in files:
                raise refused(RevisionNotFoundError, 404)
            return files[revision]

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)


def paths(**changes: Any) -> list[str]:
    return [file.path.split("/", 3)[-1] for file in dataset_files(source(**changes))]


def source(**changes: Any) -> SourceConfig:
    return SourceConfig(**{"name": "s", "dataset": "o/d", **changes})


def test_the_conversion_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, {CONVERTED: ["en/train/0001.parquet", "en/train/0000.parquet", "en/test/0000.parquet"]})
    assert paths() == ["en/train/0000.parquet", "en/train/0001.parquet"]
    assert paths(split="test") == ["en/test/0000.parquet"]


def test_own_files_that_name_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ["README.md", "data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "test/a.jsonl"]
    hub(monkeypatch, {"c0ffee": own, "v1": ["all.jsonl", "README.md"]})
    assert paths() == ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
    assert paths(split="test") == ["test/a.jsonl"]
    assert paths(revision="v1") == ["all.jsonl"]


def test_a_renamed_dataset_is_followed_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub(monkeypatch, {"c0ffee": ["train.jsonl"]}, name="new/d")
    assert [f.path for f in dataset_files(source())] == ["datasets/new/d@c0ffee/train.jsonl"]
    assert "now called new/d" in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "has the subsets de, en"),
        ({"subset": "fr"}, "has the subsets de, en"),
        ({"subset": "de", "split": "test"}, "no split 'test'; it has train"),
        ({"revision": "v9"}, "no revision 'v9'"),
    ],
)
def test_what_is_not_there(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str) -> None:
    hub(monkeypatch, {CONVERTED: ["de/train/0000.parquet", "en/train/0000.parquet"]})
    with pytest.raises(SourceError, match=words):
        dataset_files(source(**changes))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (refused(GatedRepoError, 403), "gated: accept its terms .* set HF_TOKEN"),
        (refused(RepositoryNotFoundError, 404), "there is no dataset o/d"),
        (OfflineModeIsEnabled("offline mode is enabled"), "offline mode is enabled"),
    ],
)
def test_faults_of_the_hub(monkeypatch: pytest.MonkeyPatch, fault: Exception, words: str) -> None:
    hub(monkeypatch, {}, fault=fault)
    with pytest.raises(SourceError, match=words):
        dataset_files(source())
