"""Generate on an S3 that is slow, that fails, that loses its answers and that is gone: nothing lost, nothing twice."""

from __future__ import annotations

import http.client
import http.server
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from app.captured import load_entries, part_keys
from app.cluster import connect, disconnect
from app.config import Config, RayConfig
from app.engine.crash_search import ATTEMPTS
from app.parts import PARTS, committed_parts, read_entry
from app.pipeline import run_pipeline
from app.stages import stages_up_to
from tests.pipelines.test_generate_faults import lives, made_by, wait_until, worker_of
from tests.runs import ROOT, context, prompts, save_config, tiny_config, write_rows


class Proxy:
    """Passes requests on to a server, each after `delay` seconds; `fails` says which of them get a 503, `cuts` of which
    the answer is lost: they were carried out, and the connection ends."""

    def __init__(self, target: str) -> None:
        self.fails: Callable[[str, str, int], bool] = lambda method, path, number: False
        self.cuts = self.fails
        self.delay, self.failed, self.cut, self.count = 0.0, 0, 0, 0
        proxy, host, lock = self, target.removeprefix("http://"), threading.Lock()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with lock:
                    proxy.count += 1
                    number = proxy.count
                time.sleep(proxy.delay)
                if proxy.fails(self.command, self.path, number):
                    proxy.failed += 1
                    slow = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
                    return self.answer(503, [], slow)
                connection = http.client.HTTPConnection(host, timeout=60)
                headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
                connection.request(self.command, self.path, body, headers)
                response = connection.getresponse()
                status, found, content = response.status, response.getheaders(), response.read()
                connection.close()
                if proxy.cuts(self.command, self.path, number):
                    proxy.cut += 1
                    self.close_connection = True
                    return None
                return self.answer(status, found, content)

            def answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
                self.send_response(status)
                ours = ("connection", "transfer-encoding", "date", "server")
                length = dict((k.lower(), v) for k, v in headers).get("content-length")
                for name, value in headers:
                    if name.lower() not in (*ours, "content-length"):
                        self.send_header(name, value)
                head = self.command == "HEAD"
                self.send_header("Content-Length", length or "0" if head else str(len(body)))
                self.end_headers()
                if not head:
                    self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

            def log_message(self, *words: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    """A bucket `runs` on a local moto server, with the standard environment; its address."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "AKIAEXAMPLEEXAMPLE00",
            "AWS_SECRET_ACCESS_KEY": "a-secret-of-this-test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "2",
        }.items():
            patch.setenv(name, value)
        boto3.client("s3", endpoint_url=url).create_bucket(Bucket="runs")
        yield url
    server.stop()


@pytest.fixture
def s3_proxy(s3_server: str) -> Iterator[Proxy]:
    """The bucket behind a proxy."""
    proxy = Proxy(s3_server)
    yield proxy
    proxy.close()


@pytest.fixture(scope="module")
def s3_cluster(s3_server: str) -> Iterator[None]:
    """One local cluster whose workers have the environment of the server."""
    connect(RayConfig(num_cpus=2, dashboard=False, object_store_gib=0.1))
    yield
    disconnect()


def test_s3_that_is_slow_or_fails_for_a_while_loses_nothing(
    tiny: Path, tmp_path: Path, s3_proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.engine.patience.WAITS_S", (0.01,))
    config = tiny_config(
        tiny, "s3://runs/faults", write_rows(tmp_path / "r.jsonl", prompts(20)),
        storage__options={"client_kwargs": {"endpoint_url": s3_proxy.url}},
    )  # fmt: skip
    worker = worker_of(config)
    store = context(config).run.store

    s3_proxy.delay = 0.05
    s3_proxy.fails = lambda method, path, number: number % 4 == 0
    outcome = made_by(worker, 0)
    assert s3_proxy.failed >= 2
    assert outcome["conversations"] == 10
    assert committed_parts(store, {0: "k", 1: "k"}, "checksum")[0].keys() == {0}

    s3_proxy.delay = 0.0
    s3_proxy.fails = lambda method, path, number: method in ("PUT", "POST") and "/generate/parts/" in path
    fault = made_by(worker, 1)["fault"]
    assert fault.startswith("s3://runs/faults does not answer (") and "the same command resumes" in fault
    assert read_entry(store, 1) is None

    s3_proxy.fails = lambda method, path, number: False
    assert made_by(worker, 1)["conversations"] == 10
    assert committed_parts(store, {0: "k", 1: "k"}, "checksum")[0].keys() == {0, 1}
    rows = [pq.read_table(store.local(f"{PARTS}/{f}")) for f in store.files(PARTS) if f.endswith(".parquet")]
    ids = [i for table in rows for i in table["conversation_id"].to_pylist()]
    assert len(ids) == len(set(ids)) == 20
    assert store.files(ATTEMPTS) == []


# Through the actors of a real run


def writes(method: str, path: str) -> bool:
    """Whether a request is an actor's write of a part or of its attempts."""
    return method in ("PUT", "POST") and ("/generate/parts/" in path or "/generate/attempts/" in path)


class Turns:
    """Numbers the writes among the requests."""

    def __init__(self) -> None:
        self._turns: dict[int, int] = {}

    def of(self, method: str, path: str, number: int) -> int:
        """Of request `number`; 0 for what is no write."""
        return self._turns.setdefault(number, len(self._turns)) if writes(method, path) else 0


def s3_config(tiny: Path, tmp_path: Path, proxy: Proxy, **engine_args: Any) -> Config:
    return tiny_config(
        tiny, f"s3://runs/{tmp_path.name}", write_rows(tmp_path / "r.jsonl", prompts(60)), generate__replicas=2,
        ray__engine_cpus=1, generate__parts_in_flight=2,
        generate__engine_args={"STUB_LOG": str(tmp_path / "log"), "STUB_DELAY": 0.05, **engine_args},
        storage__options={"client_kwargs": {"endpoint_url": proxy.url}},
    )  # fmt: skip


def check_whole(config: Config, rows: int) -> None:
    """Every row of ingest is in one part once, every part is whole, and nothing else is there."""
    ctx = context(config)
    store, keys = ctx.run.store, part_keys(ctx)
    valid, bad = committed_parts(store, keys, "checksum")
    assert valid.keys() == keys.keys() and not bad
    entries = load_entries(ctx)
    found = Counter(
        i
        for entry in entries
        for i in pq.read_table(store.local(f"{PARTS}/{entry.files['rows']['name']}"))["conversation_id"].to_pylist()
    )
    ingested = {
        i
        for name in store.files("ingest/parts")
        for i in pq.read_table(store.local(f"ingest/parts/{name}"))["id"].to_pylist()
    }
    assert found == Counter(ingested) and len(ingested) == rows
    named = {f["name"] for e in entries for f in e.files.values()} | {f"part-{e.part:05d}.json" for e in entries}
    assert set(store.files(PARTS)) == named
    assert store.files(ATTEMPTS) == []
    assert (ctx.input("generate").counts["kept"], ctx.input("generate").counts["rejected"]) == (rows, {})


def requests_made(tmp_path: Path) -> Counter[str]:
    return Counter(line.split()[0] for line in (tmp_path / "log").read_text().splitlines())


@pytest.mark.cluster
def test_actors_lose_nothing_on_an_s3_that_fails_and_loses_answers(
    tiny: Path, tmp_path: Path, s3_proxy: Proxy, s3_cluster: None
) -> None:
    config = s3_config(tiny, tmp_path, s3_proxy)
    s3_proxy.delay = 0.03
    turns = Turns()
    s3_proxy.fails = lambda method, path, number: turns.of(method, path, number) % 4 == 3
    s3_proxy.cuts = lambda method, path, number: turns.of(method, path, number) % 5 == 4
    run_pipeline(config, stages_up_to("generate"))
    assert s3_proxy.failed >= 4 and s3_proxy.cut >= 4
    s3_proxy.fails = s3_proxy.cuts = lambda method, path, number: False
    check_whole(config, 60)
    made = requests_made(tmp_path)
    assert len(made) == 60 and set(made.values()) == {1}  # a write that is tried again answers no row again


@pytest.mark.cluster
def test_an_outage_is_waited_out_and_an_engine_that_dies_in_it_is_replaced(
    tiny: Path, tmp_path: Path, s3_proxy: Proxy, s3_cluster: None
) -> None:
    config = s3_config(tiny, tmp_path, s3_proxy, STUB_DIE_ONCE=str(tmp_path / "died"))
    began: list[float] = []

    def outage(method: str, path: str, number: int) -> bool:
        """Seven seconds from the first write of a part on, nothing of the stage can be read or written."""
        if writes(method, path) and "/generate/parts/" in path and not began:
            began.append(time.monotonic())
        answered = "/generate/" in path or "/ingest/parts/" in path
        return bool(began) and time.monotonic() < began[0] + 7 and answered

    s3_proxy.fails = outage
    run_pipeline(config, stages_up_to("generate"))
    assert s3_proxy.failed >= 4 and (tmp_path / "died").exists()
    check_whole(config, 60)
    again = sum(requests_made(tmp_path).values()) - 60
    assert 0 <= again <= 20  # of the parts in flight on the engine that died, no other


@pytest.mark.cluster
def test_a_driver_killed_in_an_outage_is_resumed_and_makes_only_what_is_missing(
    tiny: Path,
    tmp_path: Path,
    s3_proxy: Proxy,
    s3_cluster: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = s3_config(tiny, tmp_path, s3_proxy)
    path = save_config(config, tmp_path / "c.yaml")
    store = context(config).run.store
    turns = Turns()
    s3_proxy.cuts = lambda method, name, number: turns.of(method, name, number) % 5 == 4
    with subprocess.Popen(
        [sys.executable, "-m", "app", "generate", str(path)], cwd=ROOT, env=os.environ, stderr=subprocess.DEVNULL
    ) as driver:
        try:
            wait_until(lambda: len([n for n in store.files(PARTS) if n.endswith(".json")]) >= 2, 300)
            s3_proxy.fails = lambda method, name, number: "/generate/" in name
            time.sleep(1)
        finally:
            driver.kill()
    engines = {int(line.split()[1]) for line in (tmp_path / "log").read_text().splitlines()}
    wait_until(lambda: not any(map(lives, engines)), 300)  # until then they may still commit
    s3_proxy.fails = s3_proxy.cuts = lambda method, name, number: False
    kept = {n: store.sha256(f"{PARTS}/{n}") for n in store.files(PARTS) if n.endswith(".json")}
    monkeypatch.setattr("app.pipeline.log.propagate", True)
    caplog.set_level(logging.INFO, "draftmill")
    run_pipeline(config, stages_up_to("generate"))
    assert f"resumed, {len(kept)} of 6 parts are committed" in caplog.text
    assert all(store.sha256(f"{PARTS}/{n}") == digest for n, digest in kept.items())
    check_whole(config, 60)
