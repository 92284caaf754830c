"""Submission of a run to a Ray cluster as a job, and following its log."""

from __future__ import annotations

import logging
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from app import job_server
from app.config import Config
from app.errors import UserError, first_line
from app.job_package import Package, measure
from app.job_server import Cluster, follow_line, running_jobs
from app.jobs import settle_run_dir
from app.redact import find_secrets
from app.units import size_text

log = logging.getLogger("draftmill")
STOP_WAIT_S = 120  # between Ray's SIGTERM and its SIGKILL; Ray's own 3 s cut the end of a run off
ENV_VARS = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)}
_RETRY_S = 5.0  # between two tries to reach a cluster whose connection broke while its job was followed
_RETRIES = 12
_FIRST_S = 10.0  # of a job that nobody follows, in which its failure is waited for


@dataclass(frozen=True)
class Submission:
    """What to submit."""

    config: Config
    config_path: str
    overrides: list[str]
    stage: str | None = None  # the last one to do; None: all
    runtime_env: str | None = None  # YAML file with more of Ray's runtime environment


def submit(submission: Submission, address: str | None, follow: bool) -> int:
    """Submit a run of the checkout in the current folder; returns the exit status.

    Raises:
        UserError: this is no checkout or too large a one, the cluster cannot be reached, or it refuses the job.
    """
    job_server.use_token()
    root = Path.cwd()
    if not Path("app", "__main__.py").is_file():
        raise UserError(
            "the current folder is what gets submitted, and it is no checkout of draftmill (it has no app/);"
            " run this from the checkout"
        )
    added = _read_runtime_env(submission.runtime_env)
    package = measure(root, submission.config, Path(submission.config_path).resolve(), added.get("excludes") or [])
    runtime_env = _runtime_env(added, package, submission.runtime_env)
    run_dir = settle_run_dir(submission.config).run_dir
    cluster = job_server.find(address)
    notes = [*job_server.check_versions(cluster), *job_server.gpu_words(cluster)]
    client = job_server.client(cluster)
    with job_server.explained(cluster):
        _refuse_second(client, cluster, run_dir)
    for line in (*_package_lines(package), *notes):
        print(line)
    with job_server.explained(cluster):
        job = client.submit_job(
            entrypoint=shlex.join(_command(submission, run_dir)),
            runtime_env=runtime_env,
            metadata={"run_dir": run_dir, "stage": submission.stage or "all"},
        )
    print(f"submitted {job} to {cluster.url}; run folder {run_dir}")
    print(f"stop it with: draftmill stop {shlex.quote(run_dir)} --address {cluster.url}")
    if not follow:
        print(f"follow it with: {follow_line(cluster, job)}", flush=True)
        if not _fails_at_once(client, job):
            return 0
    return _follow(client, cluster, job)


def _fails_at_once(client: Any, job: str) -> bool:
    """Whether the job fails in its first seconds, as one does whose nodes lack a package or the configuration."""
    deadline = time.monotonic() + _FIRST_S
    try:
        while time.monotonic() < deadline:
            status = client.get_job_status(job)
            if status.is_terminal():
                return str(status) == "FAILED"
            time.sleep(_FIRST_S / 20)
    except (Exception, KeyboardInterrupt) as error:  # it is submitted, and can be asked for later
        log.debug("%s was not looked at to the end: %r", job, error)
    return False


def _command(submission: Submission, run_dir: str) -> list[str]:
    path = Path(submission.config_path).resolve()
    inside = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    if inside.is_absolute():
        print(f"{path} is outside the checkout: the cluster's head node must find it under that name too")
    kept = [o for o in submission.overrides if not o.startswith("run_dir=")]
    return ["python", "-m", "app", submission.stage or "run", str(inside), *kept, f"run_dir={run_dir}"]


def _package_lines(package: Package) -> list[str]:
    return [
        f"the package has {len(package.files)} files, {size_text(package.size)}",
        *(
            f"{folder} ({size_text(size)}) stays here for its size: the configuration names nothing in it"
            for folder, size in package.left_out.items()
        ),
    ]


def _read_runtime_env(path: str | None) -> dict[str, Any]:
    """What the file at `path` adds to Ray's runtime environment."""
    if path is None:
        return {}
    try:
        added = yaml.safe_load(Path(path).read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as YAML ({first_line(error)})") from error
    kinds = {"env_vars": dict, "excludes": list}
    if (
        not isinstance(added, dict)
        or "working_dir" in added
        or any(not isinstance(added.get(name) or kind(), kind) for name, kind in kinds.items())
    ):
        raise UserError(
            f"{path} is no runtime environment for a job: it must be a mapping such as env_vars: {{NAME: value}} and"
            " pip: [package], without working_dir, which is the current folder"
        )
    if secrets := find_secrets(added):
        raise UserError(
            f"{path} holds what looks like a secret ({', '.join(secrets)}), and Ray shows a job's runtime environment"
            " on its dashboard; set it in the environment of `ray start` on the nodes instead"
        )
    return added


def _runtime_env(added: dict[str, Any], package: Package, path: str | None) -> dict[str, Any]:
    """Ray's runtime environment: the package, our variables, and what is added from the file at `path`."""
    from ray.runtime_env import RuntimeEnv

    env_vars = {**ENV_VARS, **{k: str(v) for k, v in (added.get("env_vars") or {}).items()}}
    env = {**added, "excludes": list(package.excludes), "env_vars": env_vars}
    try:
        RuntimeEnv(**env)
    except Exception as error:
        raise UserError(f"Ray does not take the runtime environment of {path} ({first_line(error)})") from error
    return {**env, "working_dir": "."}


def _refuse_second(client: Any, cluster: Cluster, run_dir: str) -> None:
    for job in running_jobs(client):
        if (job.metadata or {}).get("run_dir") == run_dir:
            raise UserError(
                f"{job.submission_id} works on {run_dir} already ({job.status}); follow it with"
                f" `{follow_line(cluster, job.submission_id)}`, or end it with `draftmill stop {run_dir}"
                f" --address {cluster.url}`"
            )


def _follow(client: Any, cluster: Cluster, job: str) -> int:
    """Print the job's log until it ends; what breaks the connection only interrupts it."""
    printed = failures = 0
    try:
        while failures < _RETRIES:
            printed, status = _print_log(client, job, printed)
            if status is not None and status.is_terminal():
                return _ended(client, job)
            failures = failures + 1 if status is None else 0
            time.sleep(_RETRY_S)
    except KeyboardInterrupt:
        print(f"\n{job} goes on; follow it again with: {follow_line(cluster, job)}")
        return 0
    raise UserError(
        f"the connection to {cluster.url} is lost, and {job} goes on as long as its cluster does; follow it again with:"
        f" {follow_line(cluster, job)}"
    )


def _print_log(client: Any, job: str, printed: int) -> tuple[int, Any]:
    """Print what follows the first `printed` characters of a log until its stream ends.

    Returns:
        The characters printed so far, and the job's status; None: the cluster cannot be asked.
    """
    import asyncio

    async def tail() -> int:
        told, seen = printed, 0
        try:
            async for text in client.tail_job_logs(job):
                seen += len(text)
                if seen > told:
                    print(text[told - seen :], end="", flush=True)
                    told = seen
        except Exception as error:  # of the connection
            log.debug("the log of %s broke off: %s", job, error)
        return told

    printed = asyncio.run(tail())
    try:
        return printed, client.get_job_status(job)
    except Exception:
        return printed, None


def _ended(client: Any, job: str) -> int:
    info = client.get_job_info(job)
    began = getattr(info, "driver_exit_code", None) is not None or str(info.status) != "FAILED"
    why = "" if began else f" before it began ({' '.join((info.message or '').split())[:500]})"
    print(f"{job}: {info.status}{why}")
    return 0 if str(info.status) == "SUCCEEDED" else 1
