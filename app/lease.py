"""One driver at a time holds a run folder, by a heartbeat lease."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from app.errors import UserError
from app.storage import Store

log = logging.getLogger("draftmill")
_PATH = "lease.json"


def host_identity() -> str:
    """Host name and boot, so that a reused name or a rebooted host is not the same host."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        boot += os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()}:{boot}"


def process_start(pid: int) -> str | None:
    """Start time of a process as the kernel counts it, or None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]


class Lease:
    """Holds `lease.json` of a run folder until `release`.

    A holder that died on this host is replaced at once; one on another host after `timeout_s` seconds of silence.
    """

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._token = uuid.uuid4().hex
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost = False

    def acquire(self) -> None:
        """Take the lease and keep it alive from a thread.

        Raises:
            UserError: a living driver holds the folder.
        """
        current = self._store.read_json(_PATH)
        if isinstance(current, dict) and str(current.get("pid", "")).isdigit():
            self._refuse_if_alive(current)
            log.info("took over the run folder from a driver that ended (pid %s)", current.get("pid"))
        self._write()
        # Two drivers that start together both write; the one whose write stayed goes on.
        time.sleep(0.2)
        current = self._store.read_json(_PATH) or {}
        if current.get("token") != self._token:
            raise UserError(
                f"{self._store.url}: another driver (pid {current.get('pid')}) took the run folder just now"
            )
        self._thread = threading.Thread(target=self._beat, name="draftmill-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises UserError when another driver has taken the folder over."""
        if self.lost:
            raise UserError(f"{self._store.url}: another driver took the run folder over; this one stops")

    def release(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
        with contextlib.suppress(Exception):
            current = self._store.read_json(_PATH) or {}
            if current.get("token") == self._token:
                self._store.delete(_PATH)

    def _refuse_if_alive(self, current: dict[str, Any]) -> None:
        pid, host = int(current.get("pid", 0)), str(current.get("host", ""))
        age = time.time() - float(current.get("heartbeat", 0))
        if host == host_identity():
            alive = process_start(pid) is not None and process_start(pid) == current.get("started")
            wait = ""
        else:
            alive = age < float(current.get("timeout_s", self._timeout_s))
            wait = f"; if it is dead, wait {max(1, int(self._timeout_s - age))} s"
        if alive:
            raise UserError(
                f"{self._store.url} is held by a running driver (pid {pid} on {host.split(':')[0]},"
                f" last heartbeat {age:.0f} s ago); stop it or use another run_dir{wait}"
            )

    def _write(self) -> None:
        self._store.write_json(
            _PATH,
            {
                "token": self._token,
                "pid": os.getpid(),
                "started": process_start(os.getpid()),
                "host": host_identity(),
                "heartbeat": time.time(),
                "timeout_s": self._timeout_s,
            },
        )

    def _beat(self) -> None:
        while not self._stop.wait(self._timeout_s / 4):
            try:
                current = self._store.read_json(_PATH)
                if current is not None and current.get("token") != self._token:
                    self.lost = True
                    return
                self._write()
            except Exception as error:
                log.warning("the lease of %s could not be renewed: %s", self._store.url, error)
