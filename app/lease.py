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
_MOST_AHEAD_S = 86_400.0  # no two clocks are further apart: a heartbeat of a later time was never written by a driver
_END_OF_TIME = 1e12  # seconds; neither a time nor a time-out


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
    age: float  # seconds since its last heartbeat; below 0 where its clock is ahead of this one
    timeout_s: float  # seconds of silence after which it counts as dead, where it is not on this host
    stage: str | None  # that it works on

    @property
    def heartbeat(self) -> str:
        """When it gave its last sign, in words."""
        if self.age < -1:
            return f"last heartbeat {-self.age:.0f} s ahead of this clock"
        return f"last heartbeat {max(0.0, self.age):.0f} s ago"


def holder_of(lease: Any) -> Holder | None:
    """Who holds a folder with this content of `lease.json`; None when nobody living does."""
    if lease_fault(lease) is not None:
        return None
    pid, host, timeout_s = lease["pid"], str(lease.get("host", "")), float(lease.get("timeout_s", 60))
    age = time.time() - lease["heartbeat"]
    here = host == host_identity()
    start = process_start(pid) if here else None
    alive = (start is not None and start == lease.get("started")) if here else age < timeout_s
    stage = lease.get("stage")
    if not alive:
        return None
    return Holder(pid, host.split(":")[0], here, age, timeout_s, stage if isinstance(stage, str) else None)


def lease_fault(lease: Any) -> str | None:
    """Why no driver can have written this content of `lease.json`, in words; None where one can."""
    if not isinstance(lease, dict):
        return "it is no JSON object"
    if not isinstance(lease.get("pid"), int) or not 0 < lease["pid"] < 2**31:
        return f"its pid is {str(lease.get('pid'))[:40]!r}"
    for name in ("heartbeat", "timeout_s"):
        value = lease.get(name, 60 if name == "timeout_s" else None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _END_OF_TIME:
            return f"its {name} is {str(value)[:40]!r}"
    ahead = lease["heartbeat"] - time.time()
    if ahead > _MOST_AHEAD_S:
        return f"its heartbeat is {ahead:.0f} s in the future"
    return None


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
        self._refuse_if_alive(current)
        if self._store.exists(_PATH):
            if (fault := lease_fault(current)) is not None:
                log.warning("%s/%s counts as left over: %s", self._store.url, _PATH, fault)
            else:
                log.info("took over the run folder from a driver that ended (pid %s)", current["pid"])
        self._write()
        # Two drivers that start together both write; the one whose write stayed goes on.
        time.sleep(0.2)
        current = self._current()
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
            if self._current().get("token") == self._token:
                self._store.delete(_PATH)

    def _current(self) -> dict[str, Any]:
        current = self._store.read_json(_PATH)
        return current if isinstance(current, dict) else {}

    def _refuse_if_alive(self, current: Any) -> None:
        holder = holder_of(current)
        if holder is not None:
            wait = "" if holder.here else f"; if it is dead, wait {max(1, int(holder.timeout_s - holder.age))} s"
            raise UserError(
                f"{self._store.url} is held by a running driver (pid {holder.pid} on {holder.host},"
                f" {holder.heartbeat}); stop it or use another run_dir{wait}"
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
                if isinstance(current, dict) and current.get("token") != self._token:
                    self.lost = True
                    return
                self._write()
            except Exception as error:
                log.warning("the lease of %s could not be renewed: %s", self._store.url, error)
