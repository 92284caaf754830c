"""Reads sources in a process of its own, where HF_ENDPOINT names the hub: settings of sources in, what they gave out.

python -m tests.sources.read_hub < [{"name": ..., "dataset": ...}, ...]
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from app.config import SourceConfig
from app.errors import RowError, UserError
from app.sources.locate import source_digest, source_files
from app.sources.readers import read_rows


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def read(data: dict[str, Any]) -> dict[str, Any]:
    """Rows, digest, log lines and the error of one source."""
    handler = _Kept()
    log = logging.getLogger("draftmill")
    log.addHandler(handler)
    rows: list[Any] = []
    found: dict[str, Any] = {"rows": rows, "said": handler.said}
    try:
        source = SourceConfig(**data)
        files = source_files(source)
        found["digest"] = source_digest(source, files)
        rows += [[w, r.reason if isinstance(r, RowError) else r] for w, r in read_rows(source, files)]
    except UserError as error:
        found["error"] = str(error)
    finally:
        log.removeHandler(handler)
    return found


if __name__ == "__main__":
    json.dump([read(data) for data in json.load(sys.stdin)], sys.stdout)
