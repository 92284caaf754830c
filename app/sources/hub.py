"""Hugging Face datasets as source files, without the datasets library: their Parquet form, read over HTTP."""

from __future__ import annotations

import logging
import re
from typing import Any

from app.config import SourceConfig
from app.errors import first_line
from app.sources.locate import SourceError, SourceFile

log = logging.getLogger("draftmill")
_PARQUET = "refs/convert/parquet"  # the hub's own conversion of every public set: SUBSET/SPLIT/0000.parquet
_DATA = (".parquet", ".jsonl", ".json", ".csv", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".csv.gz")
_SPLITS = ("train", "test", "validation", "valid", "dev")


def dataset_files(source: SourceConfig) -> list[SourceFile]:
    """The files of a dataset's subset and split.

    Without a revision the hub's Parquet conversion is preferred, since its paths name subset and split; else the
    repository's own files whose paths do.

    Raises:
        SourceError: the dataset is missing, gated or renamed, cannot be reached, or has no such subset or split.
    """
    from huggingface_hub import HfApi, HfFileSystem

    assert source.dataset is not None
    api = HfApi()
    info = _asked(source, lambda: api.dataset_info(source.dataset, revision=source.revision))
    name = str(info.id or source.dataset)
    if name != source.dataset:
        log.warning("source %s: the dataset %s is now called %s", source.label, source.dataset, name)
    if source.revision is None:
        revision = _conversion(source, api, name)
        if revision is not None:
            converted = _asked(source, lambda: api.list_repo_files(name, repo_type="dataset", revision=revision))
            paths = _of_conversion(source, converted)
            if not any("/partial-" in p for p in paths):
                return _files(HfFileSystem(), name, revision, paths)
            log.info("source %s: the hub has converted only a part of %s; its own files are read", source.label, name)
    own = _asked(source, lambda: api.list_repo_files(name, repo_type="dataset", revision=str(info.sha)))
    return _files(HfFileSystem(), name, str(info.sha), _of_repository(source, own))


def _conversion(source: SourceConfig, api: Any, name: str) -> str | None:
    """The commit of the hub's Parquet conversion; None where there is none (private sets, unusual forms)."""
    from huggingface_hub.errors import RevisionNotFoundError

    def ask() -> str | None:
        try:
            return str(api.dataset_info(name, revision=_PARQUET).sha)
        except RevisionNotFoundError:
            return None

    return _asked(source, ask)


def _files(fs: Any, name: str, commit: str, paths: list[str]) -> list[SourceFile]:
    return [SourceFile(fs, f"datasets/{name}@{commit}/{path}") for path in sorted(paths)]


def is_hub_error(error: Exception) -> bool:
    """Whether an exception is the hub's answer, or none: other faults are of the file that was read."""
    return type(error).__module__.partition(".")[0] in ("huggingface_hub", "httpx", "httpx2")


def fault_of(source: SourceConfig, error: Exception) -> SourceError:
    """What the hub refused, as a sentence. A gated set may show its page and its files' names and refuse the files."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        said = f"the dataset {source.dataset} is gated: accept its terms on its page, then set HF_TOKEN"
    elif isinstance(error, RevisionNotFoundError):
        said = f"the dataset {source.dataset} has no revision {source.revision!r}"
    elif isinstance(error, RepositoryNotFoundError):
        said = f"there is no dataset {source.dataset} on the hub, or it is private; check the id, or set HF_TOKEN"
    else:
        said = (
            f"the dataset {source.dataset} cannot be reached ({first_line(error, 150)});"
            " check the network, or give a local copy as `path`"
        )
    return SourceError(source.label, said)


def _asked(source: SourceConfig, ask: Any) -> Any:
    try:
        return ask()
    except Exception as error:
        raise fault_of(source, error) from error


def _of_conversion(source: SourceConfig, paths: list[str]) -> list[str]:
    """Parquet files under SUBSET/SPLIT/."""
    found = [p.split("/") for p in paths if p.endswith(".parquet") and p.count("/") == 2]
    subsets = sorted({p[0] for p in found})
    subset = source.subset
    if subset is None:
        subset = "default" if "default" in subsets else subsets[0] if len(subsets) == 1 else None
    if subset not in subsets:
        raise SourceError(
            source.label, f"the dataset {source.dataset} has the subsets {', '.join(subsets)}; name one in `subset`"
        )
    splits = sorted({p[1].removeprefix("partial-") for p in found if p[0] == subset})
    if source.split not in splits:
        raise SourceError(
            source.label,
            f"the subset {subset} of {source.dataset} has no split {source.split!r}; it has {', '.join(splits)}",
        )
    return ["/".join(p) for p in found if p[0] == subset and p[1].removeprefix("partial-") == source.split]


def _of_repository(source: SourceConfig, paths: list[str]) -> list[str]:
    """The repository's own data files whose path names the split; all of them where none names any."""
    data = [
        p for p in paths if p.lower().endswith(_DATA) and not p.rsplit("/", 1)[-1].startswith((".", "dataset_info"))
    ]
    if source.subset is not None:
        data = [p for p in data if source.subset in re.split(r"[/.]", p)]
    if not data:
        raise SourceError(
            source.label,
            f"the dataset {source.dataset} has no data file"
            f"{f' of the subset {source.subset}' if source.subset else ''} (it holds {', '.join(sorted(paths)[:5])})",
        )
    named = {p: {w for w in re.split(r"[^a-z0-9]+", p.lower()) if w} for p in data}
    splits = sorted({s for words in named.values() for s in words if s in _SPLITS})
    if not splits and source.split == "train":
        return data
    word = re.compile(rf"(?<![a-z0-9]){re.escape(source.split.lower())}(?![a-z0-9])")  # train_sft is one, of two
    chosen = [p for p in data if word.search(p.lower())]
    if not chosen:
        raise SourceError(
            source.label,
            f"the dataset {source.dataset} has no split {source.split!r};"
            f" its files name {', '.join(splits) if splits else 'none'}",
        )
    return chosen
