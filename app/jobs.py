"""Submission to a Ray cluster as a job, and what changes inside one."""

from __future__ import annotations

import json
import logging
import os
import shlex
from pathlib import Path
from typing import Any

from app.config import Config
from app.errors import UserError, first_line

log = logging.getLogger("draftmill")
_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets it in the driver of a submitted job


def in_job() -> bool:
    """Whether this process is the driver of a submitted job."""
    return _JOB_CONFIG in os.environ


def job_env_vars() -> dict[str, str]:
    """Environment the job's own runtime_env sets; setting it again is an error to Ray."""
    try:
        config = json.loads(os.environ.get(_JOB_CONFIG, "{}"))
    except ValueError:
        return {}
    return dict((config.get("runtime_env") or {}).get("env_vars") or {})


def is_relative(run_dir: str) -> bool:
    return "://" not in run_dir and not Path(run_dir).expanduser().is_absolute()


def settle_run_dir(config: Config) -> Config:
    """The configuration with an absolute run folder.

    A submitted job runs in a copy of the working directory that Ray throws away, so a relative folder there means
    one under `~/draftmill` of the head node, where a resubmission finds it again.
    """
    if not is_relative(config.run_dir):
        return config
    base = Path.home() / "draftmill" if in_job() else Path.cwd()
    run_dir = str(base / config.run_dir)
    if in_job():
        log.warning(
            "run_dir %s is relative and this is a submitted job: the run is kept in %s",
            config.run_dir,
            run_dir,
        )
    return config.model_copy(update={"run_dir": run_dir})


def submit(config: Config, config_path: str, overrides: list[str], address: str | None, follow: bool) -> int:
    """Submit `draftmill run` on the working directory; returns the exit status.

    Raises:
        UserError: the cluster cannot be reached or refuses the job, or this is no checkout.
    """
    if not Path("app", "__main__.py").is_file():
        raise UserError(
            "the current folder is what gets submitted, and it is no checkout of draftmill (it has no app/);"
            " run this from the checkout"
        )
    path = Path(config_path).resolve()
    inside = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    if inside.is_absolute():
        print(f"{path} is outside the checkout: the cluster's head node must find it under that name too")
    run_dir = settle_run_dir(config).run_dir
    kept = [o for o in overrides if not o.startswith("run_dir=")]
    command = ["python", "-m", "app", "run", str(inside), *kept, f"run_dir={run_dir}"]
    address = address or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
    client = _client(address)
    address = client.get_address()
    try:
        job = client.submit_job(
            entrypoint=shlex.join(command),
            runtime_env={
                "working_dir": ".",
                "excludes": [".git", ".venv", "runs", ".setup.log", "*.safetensors"],
            },
            metadata={"run_dir": run_dir, "verb": "run"},
        )
    except Exception as error:
        raise UserError(
            f"the cluster at {address} did not take the job ({first_line(error)});"
            " if it names an agent, another Ray on that host may hold its ports: look at dashboard_agent.log there"
        ) from error
    print(f"submitted {job} to {address}; run folder {run_dir}")
    hint = f"RAY_AUTH_MODE=token ray job logs --address {address} --follow {job}"
    if not follow:
        print(f"follow it with: {hint}")
        return 0
    return _follow(client, job, hint)


def _client(address: str | None) -> Any:
    # Ray's clusters ask for a token by default, and its client sends one only in this mode.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except Exception as error:
        raise UserError(
            f"no Ray cluster answers at {address or 'the default address'} ({first_line(error)});"
            " start one with `ray start --head`, or give --address http://HOST:8265"
        ) from error


def _follow(client: Any, job: str, hint: str) -> int:
    import asyncio

    async def tail() -> None:
        async for text in client.tail_job_logs(job):
            print(text, end="", flush=True)

    try:
        asyncio.run(tail())
    except KeyboardInterrupt:
        print(f"\n{job} goes on; follow it again with: {hint}")
        return 0
    status = str(client.get_job_status(job))
    print(f"{job}: {status}")
    return 0 if status == "SUCCEEDED" else 1
