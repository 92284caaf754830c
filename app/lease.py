"""One driver at a time holds a run folder, by a heartbeat lease."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Holder:
    """A living driver of a run folder."""

    pid: int
    host: str
    here: bool  # on this host
    age: float  # seconds since its last heartbeat
    stage: str | None  # that it works on


def holder_of(lease: Any) -> Holder | None:
    """Who holds a folder with this content of `lease.json`; None when nobody living does."""
    if not isinstance(lease, dict) or not str(lease.get("pid", "")).isdecimal():
        return None
    pid, host = int(lease["pid"]), str(lease.get("host", ""))
    try:
        age = time.time() - float(lease.get("heartbeat", 0))
        timeout_s = float(lease.get("timeout_s", 60))
    except (TypeError, ValueError, OverflowError):
        return None
    here = host == host_identity()
    start = process_start(pid) if here else None
    alive = (start is not None and start == lease.get("started")) if here else age < timeout_s
    return Holder(pid, host.split(":")[0], here, age, lease.get("stage")) if alive else None


def read_holder(store: Store) -> Holder | None:
    """Who holds the run folder now."""
    return holder_of(store.read_json(_PATH))


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
        self._stage: str | None = None
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

    def announce(self, stage: str) -> None:
        """Tell readers of the folder which stage runs now."""
        self._stage = stage
        self._write()

    def release(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
        with contextlib.suppress(Exception):
            current = self._store.read_json(_PATH) or {}
            if current.get("token") == self._token:
                self._store.delete(_PATH)

    def _refuse_if_alive(self, current: dict[str, Any]) -> None:
        holder = holder_of(current)
        if holder is not None:
            wait = "" if holder.here else f"; if it is dead, wait {max(1, int(self._timeout_s - holder.age))} s"
            raise UserError(
                f"{self._store.url} is held by a running driver (pid {holder.pid} on {holder.host},"
                f" last heartbeat {holder.age:.0f} s ago); stop it or use another run_dir{wait}"
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
                "stage": self._stage,
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
