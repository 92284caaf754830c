"""A stand-in for the job server of a Ray cluster: versions, GPUs, token and jobs are what a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import ray


@dataclass
class JobServer:
    """What it answers, and what it was sent."""

    ray_version: str = ray.__version__
    python: str | None = None  # None: it does not tell
    gpus: tuple[float, float] = (0.0, 0.0)  # in use, all
    token: str | None = None
    jobs: list[dict[str, Any]] = field(default_factory=list)
    submitted: list[dict[str, Any]] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    packages: list[int] = field(default_factory=list)  # sizes in bytes
    url: str = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON of the answer."""
        if path == "/api/version":
            return 200, {"version": "4", "ray_version": self.ray_version, "ray_commit": "", "session_name": ""}
        if path == "/api/v0/cluster_metadata" and self.python is not None:
            return 200, {"data": {"rayVersion": self.ray_version, "pythonVersion": self.python}}
        if path == "/api/cluster_status":
            usage = {"CPU": [0.0, 2.0], **({"GPU": list(self.gpus)} if self.gpus[1] else {})}
            return 200, {"data": {"clusterStatus": {"loadMetricsReport": {"usage": usage}}}}
        if path.startswith("/api/packages/") and method == "PUT":
            self.packages.append(len(body))
            return 200, {}
        if path == "/api/jobs/" and method == "POST":
            self.submitted.append(json.loads(body))
            return 200, {"job_id": "raysubmit_new", "submission_id": "raysubmit_new"}
        if path == "/api/jobs/":
            return 200, self.jobs
        return self._of_job(method, path.removeprefix("/api/jobs/"))

    def _of_job(self, method: str, path: str) -> tuple[int, Any]:
        name, _, verb = path.partition("/")
        found = next((j for j in self.jobs if j["submission_id"] == name), None)
        if found is None:
            return 404, {}
        if method == "POST" and verb == "stop":
            self.stopped.append(name)
            found["status"] = "STOPPED"
            return 200, {"stopped": True}
        return 200, found


def job(name: str, status: str = "RUNNING", **fields: Any) -> dict[str, Any]:
    """A job as the server lists it."""
    return {"type": "SUBMISSION", "submission_id": name, "status": status, "entrypoint": "python -m app run", **fields}


@contextmanager
def serving(server: JobServer) -> Iterator[JobServer]:
    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            given = self.headers.get("Authorization")
            if server.token is not None and given != f"Bearer {server.token}":
                self._send(401 if given is None else 403, b"no")
                return
            status, data = server.answer(self.command, self.path, body)
            self._send(status, json.dumps(data).encode())

        def _send(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_POST = _handle

        def log_message(self, format: str, *args: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{httpd.server_port}"
    threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        httpd.shutdown()
        httpd.server_close()
