"""What changes where the driver of a run is a submitted job."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from app.config import Config

log = logging.getLogger("draftmill")
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets it in the driver of a submitted job


def in_job() -> bool:
    """Whether this process is the driver of a submitted job."""
    return JOB_CONFIG in os.environ


def job_env_vars() -> dict[str, str]:
    """Environment the job's own runtime_env sets; setting it again is an error to Ray."""
    try:
        config = json.loads(os.environ.get(JOB_CONFIG, "{}"))
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
