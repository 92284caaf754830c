"""A run folder: resolved configuration, one manifest per stage, parts, logs and results."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from app.config import Config
from app.redact import redact
from app.storage import Store

MANIFEST_VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """What a finished stage was made from and what it made."""

    stage: str
    code_version: int
    config: dict[str, Any]  # dotted key -> value, only what shapes the stage's output
    inputs: dict[str, str]  # input stage or outside thing -> content digest
    outputs: dict[str, dict[str, Any]]  # path -> size, sha256
    digest: str  # of the content of all outputs
    counts: dict[str, Any]
    seeds: dict[str, int]
    versions: dict[str, str]
    git_revision: str | None
    started: str  # ISO 8601, UTC
    seconds: float
    manifest_version: int = MANIFEST_VERSION
    extra: dict[str, Any] = field(default_factory=dict)


_MANIFEST_TYPES: dict[str, Any] = {
    "stage": str, "config": dict, "inputs": dict, "outputs": dict, "digest": str, "counts": dict, "seeds": dict,
    "versions": dict, "started": str, "seconds": int | float,
}  # fmt: skip


class RunFolder:
    """Files of one run at a local path or fsspec URL."""

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        self.store = Store(url, options)

    @property
    def url(self) -> str:
        return self.store.url

    def manifest(self, stage: str) -> Manifest | None:
        """The manifest of a finished stage; None where there is none, a damaged one, or one of another version."""
        data = unsealed(self.store.read_json(f"{stage}/manifest.json"))
        if data is None or data.get("manifest_version") != MANIFEST_VERSION or not has_types(data, _MANIFEST_TYPES):
            return None
        if not all(is_file_record(output) for output in data["outputs"].values()):
            return None
        try:
            return Manifest(**data)
        except TypeError:
            return None

    def write_manifest(self, manifest: Manifest) -> None:
        self.store.write_json(f"{manifest.stage}/manifest.json", sealed(asdict(manifest)))

    def write_config(self, config: Config) -> None:
        self.store.write_bytes("config.yaml", redact(config.to_yaml()).encode())

    def describe_outputs(self, paths: list[str]) -> dict[str, dict[str, Any]]:
        """Size and checksum of files of this folder."""
        return {p: {"size": self.store.size(p), "sha256": self.store.sha256(p)} for p in paths}

    def output_fault(self, manifest: Manifest, verify: str) -> str | None:
        """Why the outputs of `manifest` no longer are what it says, in words; None when they are."""
        for path, expected in manifest.outputs.items():
            size = self.store.size(path)
            if size is None:
                return f"{path} is missing"
            if size != expected["size"]:
                return f"{path} has {size} bytes instead of {expected['size']}"
            if verify == "checksum" and self.store.sha256(path) != expected["sha256"]:
                return f"{path} does not match its checksum"
        return None


def sealed(data: dict[str, Any]) -> dict[str, Any]:
    """Plain data with a checksum of itself, so that what was damaged or changed by hand is not taken for true."""
    plain = json.loads(json.dumps(data))
    return {**plain, "checksum": digest_of(plain)}


def unsealed(data: Any) -> dict[str, Any] | None:
    """What `sealed` was given, or None where the checksum does not fit."""
    if not isinstance(data, dict):
        return None
    plain = {k: v for k, v in data.items() if k != "checksum"}
    try:
        return plain if data.get("checksum") == digest_of(plain) else None
    except (ValueError, RecursionError):  # half a surrogate pair, or nested too deep to be ours
        return None


def has_types(data: dict[str, Any], types: dict[str, Any]) -> bool:
    """Whether `data` has every key of `types` with a value of that type: what is sealed may still be another's."""
    return all(isinstance(data.get(key), kind) for key, kind in types.items())


def is_file_record(value: Any) -> bool:
    """Whether `value` tells a file's size in bytes and its sha256."""
    return isinstance(value, dict) and has_types(value, {"size": int, "sha256": str})


def digest_of(value: Any) -> str:
    """Short content hash of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:24]


def flat_config(config: Config, keys: tuple[str, ...], without: tuple[str, ...] = ()) -> dict[str, Any]:
    """The values of `keys` (sections or single keys) as dotted key -> value, less the keys in `without`."""
    data = config.model_dump(mode="json")
    flat: dict[str, Any] = {}
    for key in keys:
        node: Any = data
        for part in key.split("."):
            node = node[part]
        if isinstance(node, dict) and key.count(".") == 0:
            flat |= {f"{key}.{k}": v for k, v in node.items()}
        else:
            flat[key] = node
    return {k: v for k, v in flat.items() if k not in without}


def flat_defaults(config: Config, keys: tuple[str, ...], without: tuple[str, ...] = ()) -> dict[str, Any]:
    """What `flat_config` gives where nothing but the sources is set."""
    return flat_config(Config(sources=config.sources), keys, without)


@functools.cache
def git_revision() -> str | None:
    """Revision of the code that runs, `+changes` where the tree differs from it; None outside a checkout."""
    folder = Path(__file__).resolve().parent

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *args], capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        revision = git("rev-parse", "HEAD")
        return f"{revision}+changes" if git("status", "--porcelain", "--untracked-files=no", ".") else revision
    except (OSError, subprocess.SubprocessError):
        return None


class RedactingFilter(logging.Filter):
    """Keeps secrets out of log lines."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        clean = redact(message)
        if clean != message:
            record.msg, record.args = clean, None
        return True
