"""Checksums of a part's data files: BLAKE3, made and checked at several times the speed of SHA-256 (`b3sum FILE`).

A record of a file names its checksum by kind: {"name": .., "size": .., "blake3": "hex"}. Entries of format versions 1
and 2 have `sha256` there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

from blake3 import blake3

KIND = "blake3"  # of what is written today
KINDS = (KIND, "sha256")


class Hasher(Protocol):
    """What hashlib's objects do."""

    def update(self, data: Any, /) -> Any: ...
    def hexdigest(self) -> str: ...


def hasher(kind: str = KIND) -> Hasher:
    made: Hasher = blake3() if kind == "blake3" else hashlib.new(kind)
    return made


def kind_of(record: Mapping[str, Any]) -> str:
    """Which checksum a file's record has.

    Raises:
        KeyError: none that is known.
    """
    for kind in KINDS:
        if isinstance(record.get(kind), str):
            return kind
    raise KeyError(f"no checksum among {', '.join(record)}")


def checksum_of(record: Mapping[str, Any]) -> str:
    """The checksum of a file's record, hex."""
    digest: str = record[kind_of(record)]
    return digest
