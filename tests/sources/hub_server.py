"""A hub for tests: datasets and models over HTTP, as much of the hub's API as huggingface_hub asks when it reads."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

PAGE = 2  # entries of one page of a listing
CONVERTED = "refs/convert/parquet"  # where the hub keeps its conversion of a dataset


def commit(name: str) -> str:
    """A commit as the hub writes it: 40 hex digits."""
    return hashlib.sha1(name.encode()).hexdigest()


def parquet(rows: list[Any]) -> bytes:
    """A Parquet file with row groups of a hundred."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=100)
    return bytes(sink.getvalue().to_pybytes())


def jsonl(rows: list[Any]) -> bytes:
    return "".join(json.dumps(r) + "\n" for r in rows).encode()


@dataclass
class Repo:
    """One dataset or model: reference -> commit, commit -> path -> bytes."""

    refs: dict[str, str]
    files: dict[str, dict[str, bytes]]
    status: int = 200  # of every answer about it
    files_status: int = 200  # of the files alone: a gated set shows its page and keeps its files
    code: str = ""  # X-Error-Code beside such a status
    moved_to: str | None = None


@dataclass
class Hub:
    """What is served, and what was asked: "METHOD path" each."""

    repos: dict[str, Repo]  # by the id of a dataset, or "models/" and the id of a model
    url: str = ""
    asked: list[str] = field(default_factory=list)

    def count(self, part: str) -> int:
        return sum(part in line for line in self.asked)


@contextmanager
def serving(repos: dict[str, Repo]) -> Iterator[Hub]:
    """The hub on a port of its own, in a thread."""
    hub = Hub(repos)

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(b"")

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _answer(self, body: bytes) -> None:
        url = urlsplit(self.path)
        self.served.asked.append(f"{self.command} {unquote(url.path)}")
        pieces = [unquote(p) for p in url.path.strip("/").split("/")]
        api = pieces[0] == "api"
        pieces = pieces[1:] if api else pieces
        if not api and pieces[0] != "datasets":
            pieces = ["models", *pieces]  # a model's files have no such prefix
        if pieces[0] not in ("datasets", "models") or len(pieces) < 3:
            return self._send(404, b"{}")
        name, rest = "/".join(pieces[1:3]), pieces[3:]
        repo = self.served.repos.get(name if pieces[0] == "datasets" else f"models/{name}")
        if repo is None:
            return self._send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
        if repo.moved_to is not None:
            return self._send(307, b"", {"Location": self.path.replace(name, repo.moved_to)})
        status = repo.status if repo.status != 200 or api else repo.files_status
        if status != 200:
            return self._send(status, b'{"error": "refused"}', {"X-Error-Code": repo.code} if repo.code else {})
        revision = rest[1] if len(rest) > 1 else "main"
        sha = repo.refs.get(revision, revision)
        if sha not in repo.files:
            return self._send(404, b'{"error": "Invalid rev id"}', {"X-Error-Code": "RevisionNotFound"})
        files, path = repo.files[sha], "/".join(rest[2:])
        if not api:
            return self._file(files, sha, path)
        if not rest or rest[0] == "revision":
            return self._json({"id": name, "sha": sha, "siblings": [{"rfilename": p} for p in files]})
        if rest[0] == "tree":
            return self._tree(files, path, parse_qs(url.query))
        paths = parse_qs(body.decode()).get("paths", [])  # paths-info
        self._json([_entry(p, files[p]) for p in paths if p in files])

    def _tree(self, files: dict[str, bytes], folder: str, query: dict[str, list[str]]) -> None:
        """A listing page by page, the next one named in the Link header."""
        start = f"{folder}/" if folder else ""
        deep = query.get("recursive", ["false"])[0].lower() == "true"
        inside = {p: data for p, data in files.items() if p.startswith(start)}
        folders = {p.rsplit("/", n)[0] for p in inside for n in range(1, p.count("/") - start.count("/") + 1)}
        found: list[dict[str, Any]] = [
            {"type": "directory", "path": f, "oid": commit(f), "size": 0} for f in sorted(folders)
        ]
        found += [_entry(p, data) for p, data in sorted(inside.items())]
        found = [e for e in found if deep or "/" not in e["path"].removeprefix(start)]
        if not found:
            return self._send(404, b'{"error": "no entry"}', {"X-Error-Code": "EntryNotFound"})
        at = int(query.get("cursor", ["0"])[0])
        more = {}
        if at + PAGE < len(found):
            path = urlsplit(self.path).path
            url = f"{self.served.url}{path}?recursive={deep}&cursor={at + PAGE}"
            more = {"Link": f'<{url}>; rel="next"'}
        self._json(found[at : at + PAGE], more)

    def _file(self, files: dict[str, bytes], sha: str, path: str) -> None:
        data = files.get(path)
        if data is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": sha, "ETag": f'"{commit(path)}"', "Accept-Ranges": "bytes"}
        asked = self.headers.get("Range")
        if asked is None:
            return self._send(200, data, headers)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        begin, end = int(first), min(int(last or len(data) - 1), len(data) - 1)
        headers["Content-Range"] = f"bytes {begin}-{end}/{len(data)}"
        self._send(206, data[begin : end + 1], headers)

    def _json(self, value: Any, headers: dict[str, str] | None = None) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(path: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "oid": commit(path), "size": len(data)}
