"""The end of a run under way, wherever its driver is: a submitted job, or a process on this host."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app import job_server
from app.config import load_config
from app.errors import UserError
from app.job_server import Cluster, follow_line, running_jobs
from app.jobs import JOB_CONFIG, settle_run_dir
from app.lease import Holder, read_holder
from app.storage import Store
from app.submit import STOP_WAIT_S

_PATIENCE_S = STOP_WAIT_S + 30.0  # until what was told to end has ended


def stop(run: str, address: str | None) -> list[str]:
    """End what works on a run, as SIGTERM ends it: what is committed stays, and the same command resumes.

    Args:
        run: run folder, its URL, or the YAML file of the run; or the id of a submitted job.
        address: of the cluster; None: RAY_ADDRESS, or where the driver on this host is a job of.

    Returns:
        What was done, in lines.

    Raises:
        UserError: the cluster cannot be reached, or what runs cannot be ended from here.
    """
    job_server.use_token()
    if run.startswith("raysubmit_"):
        return [_stop_job(job_server.find(address), run)]
    run_dir = _run_dir_of(run)
    holder = _holder(run_dir)
    known = address or job_server.address_of_environment()
    if known is None and holder is not None and holder.here:
        known = _address_of_driver(holder.pid)
    if known is not None:
        cluster = job_server.find(known)
        client = job_server.client(cluster)
        with job_server.explained(cluster):
            jobs = [j for j in running_jobs(client) if _works_on(j, run_dir, holder)]
            ended = None if jobs else _last_of(client, run_dir)
        if jobs:
            return [_stop_job(cluster, j.submission_id) for j in jobs]
    if holder is None and known is None:
        return [f"nothing runs on {run_dir}"]
    if holder is None:
        told = f"nothing runs on {run_dir}, and no job of {known} does"
        if ended is None:
            return [told]
        log = follow_line(cluster, ended.submission_id)
        return [f"{told}; its last, {ended.submission_id}, ended: {ended.status}; its log: {log}"]
    if not holder.here:
        raise UserError(
            f"{run_dir} is held by pid {holder.pid} on {holder.host}, which is no job of"
            f" {known or 'a cluster that is known here'}; give --address of its cluster, or run this on that host"
        )
    return [_stop_process(run_dir, holder)]


def _works_on(job: Any, run_dir: str, holder: Holder | None) -> bool:
    """By its metadata; a job of plain `ray job submit` has none, and is known by its driver's process."""
    if (named := (job.metadata or {}).get("run_dir")) is not None:
        return bool(named == run_dir)
    driver, ours = job.driver_info, "-m app" in job.entrypoint or "draftmill" in job.entrypoint
    return ours and holder is not None and driver is not None and str(driver.pid) == str(holder.pid)


def _last_of(client: Any, run_dir: str) -> Any | None:
    """The job of a run that was submitted last, though it has ended."""
    ours = [j for j in client.list_jobs() if (j.metadata or {}).get("run_dir") == run_dir]
    return max(ours, key=lambda j: j.start_time or 0, default=None)


def _run_dir_of(run: str) -> str:
    """As `submit` writes it into a job's metadata."""
    if run.endswith((".yaml", ".yml")) and Path(run).is_file():
        return settle_run_dir(load_config(run, [])).run_dir
    return run.rstrip("/") if "://" in run else str(Path.cwd() / Path(run).expanduser())


def _holder(run_dir: str) -> Holder | None:
    """The driver that holds the folder; None too where the folder is not to be seen from here."""
    try:
        return read_holder(Store(run_dir))
    except (UserError, OSError):
        return None


def _address_of_driver(pid: int) -> str | None:
    """The cluster that a process on this host is a submitted job of."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    env = dict(word.split("=", 1) for word in words if "=" in word)
    return env.get("RAY_ADDRESS") if JOB_CONFIG in env else None


def _stop_job(cluster: Cluster, job: str) -> str:
    client = job_server.client(cluster)
    with job_server.explained(cluster):
        found = next((j for j in client.list_jobs() if j.submission_id == job), None)
        if found is None:
            raise UserError(f"there is no job {job} at {cluster.url}; `ray job list` there shows those that are")
        if found.status.is_terminal():
            return f"{job} had ended already: {found.status}"
        client.stop_job(job)
        if not _wait(lambda: client.get_job_status(job).is_terminal()):
            raise UserError(f"{job} has not ended within {_PATIENCE_S:g} s; its log: {follow_line(cluster, job)}")
        status = client.get_job_status(job)
    return f"{job}: {status}; what is committed stays, and submitting the run again resumes it"


def _stop_process(run_dir: str, holder: Holder) -> str:
    try:
        os.kill(holder.pid, signal.SIGTERM)
    except ProcessLookupError:
        return f"nothing runs on {run_dir}"
    except PermissionError as error:
        raise UserError(f"pid {holder.pid}, which holds {run_dir}, is another user's; stop it as that user") from error
    if not _wait(lambda: _holder(run_dir) is None):
        raise UserError(f"pid {holder.pid} has not ended within {_PATIENCE_S:g} s; it still holds {run_dir}")
    return f"stopped pid {holder.pid}; what is committed stays, and the same command resumes"


def _wait(done: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _PATIENCE_S
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True
