"""The job server of a Ray cluster: where it is, the token it asks for, and what it says of its cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import UserError, first_line

RAY_LEAST = (2, 50)
PYTHONS = ((3, 11), (3, 12))
_ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # Ray's client takes them over what it is told
_TIMEOUT = (5.0, 15.0)  # seconds to connect, and to wait for an answer
_TALKATIVE = (  # loggers of Ray that tell of each folder they pack and each address they read
    "ray._private.runtime_env.packaging",
    "ray._private.runtime_env.working_dir",
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
)
_TOKEN_FILE = "~/.ray/auth_token"


@dataclass(frozen=True)
class Cluster:
    """A cluster as its job server tells it."""

    url: str
    ray: str
    python: str | None  # None: it does not say
    gpus: tuple[float, float] | None  # in use, and all; None: it does not say


def use_token() -> None:
    """Have Ray send this machine's token, where it has one; before Ray is imported, which reads its mode once."""
    if token() is not None:
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def find(address: str | None) -> Cluster:
    """The cluster at an address: a dashboard's URL, Ray's host:port, `auto`; None: RAY_ADDRESS, or one on this host.

    Raises:
        UserError: nothing answers there, or no Ray, or it refuses the token.
    """
    url = _url_of(address or address_of_environment())
    version = _get(url, "/api/version")
    if not isinstance(version.get("ray_version"), str):
        raise _no_ray(url, "it gives no Ray version")
    metadata, status = (_get(url, path, needed=False) for path in ("/api/v0/cluster_metadata", "/api/cluster_status"))
    return Cluster(url, version["ray_version"], _at(metadata, "data", "pythonVersion"), _gpus(status))


def address_of_environment() -> str | None:
    """The address of a cluster that Ray's variables name."""
    return next((os.environ[name] for name in _ADDRESSES if os.environ.get(name)), None)


def client(cluster: Cluster) -> Any:
    """Ray's client for jobs of the cluster."""
    from ray.job_submission import JobSubmissionClient

    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    with _own_address(), explained(cluster):
        return JobSubmissionClient(cluster.url, headers=_headers())


@contextlib.contextmanager
def explained(cluster: Cluster) -> Iterator[None]:
    """Raises UserError for what Ray's client cannot do in the block."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"the job server at {cluster.url} answers with an error ({_said(error)}); if it names an agent, another Ray"
            " on that host may hold its ports: look at dashboard_agent.log there"
        ) from error


def check_versions(cluster: Cluster) -> list[str]:
    """What is different there, in words.

    Raises:
        UserError: draftmill does not run on that Ray or Python.
    """
    here = f"Ray {_ray_here()} on Python {platform.python_version()}"
    there = f"Ray {cluster.ray}" + (f" on Python {cluster.python}" if cluster.python else "")
    python = _numbers(cluster.python)[:2] if cluster.python else None
    if _numbers(cluster.ray)[:2] < RAY_LEAST or (python is not None and python not in PYTHONS):
        raise UserError(
            f"the cluster at {cluster.url} runs {there}, and draftmill needs Ray {_dotted(RAY_LEAST)} or newer on"
            f" Python {' or '.join(map(_dotted, PYTHONS))}; start Ray from draftmill's own environment on every node"
            " (docs/cluster.md)"
        )
    if cluster.ray == _ray_here() and (python is None or cluster.python == platform.python_version()):
        return []
    return [f"the cluster runs {there}, this machine {here}: the job runs with the cluster's"]


def gpu_words(cluster: Cluster) -> list[str]:
    """What there is to say of the cluster's GPUs."""
    if cluster.gpus is None:
        return []
    used, total = cluster.gpus
    if total and total - used < 1:
        return [
            f"no GPU of the cluster is free ({used:g} of {total:g} are in use): the job starts and waits for them;"
            " see who holds them with `ray job list`, or stop the job and submit it later"
        ]
    return []


def running_jobs(client: Any) -> list[Any]:
    """The submitted jobs that have not ended."""
    return [j for j in client.list_jobs() if j.submission_id is not None and not j.status.is_terminal()]


def follow_line(cluster: Cluster, job: str) -> str:
    """The command that follows a job's log."""
    return f"RAY_AUTH_MODE=token ray job logs --address {cluster.url} --follow {job}"


def token() -> str | None:
    """The token this machine has for Ray, from where Ray itself looks for it; None: it has none."""
    if value := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return value
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or _TOKEN_FILE).expanduser()
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def _headers() -> dict[str, str]:
    value = token()
    return {"Authorization": f"Bearer {value}"} if value else {}


def _url_of(address: str | None) -> str:
    if address is not None and address.startswith(("http://", "https://")):
        return address.rstrip("/")
    host, _, port = (address or "").rpartition(":")
    if address is not None and "://" not in address and port.isdigit():
        _require_open(address, host, int(port))
        if _speaks_http(f"http://{address}"):
            return f"http://{address}"
    return _url_from_ray(address)


def _require_open(address: str, host: str, port: int) -> None:
    """Ray itself would try for half a minute."""
    try:
        with socket.create_connection((host, port), timeout=_TIMEOUT[0]):
            pass
    except OSError as error:
        raise _nobody(address, error.strerror or str(error)) from error


def _speaks_http(url: str) -> bool:
    import requests

    try:
        requests.get(f"{url}/api/version", timeout=_TIMEOUT)
    except requests.RequestException:
        return False
    return True


def _url_from_ray(address: str | None) -> str:
    """The dashboard of a cluster that is named as `ray.init` names it."""
    from ray.dashboard.utils import get_address_for_submission_client

    try:
        with _own_address():
            return str(get_address_for_submission_client(None if address == "auto" else address)).rstrip("/")
    except Exception as error:
        raise _nobody(address or "this host", _said(error)) from error


def _get(url: str, path: str, needed: bool = True) -> dict[str, Any]:
    """What the job server answers, as JSON; nothing where that is not `needed`."""
    import requests

    try:
        answer = requests.get(url + path, headers=_headers(), timeout=_TIMEOUT, allow_redirects=False)
        if answer.status_code in (401, 403) and needed:
            raise _refused(url, answer.status_code)
        data = answer.json() if answer.ok else None
    except requests.JSONDecodeError:
        data = None
    except (requests.RequestException, ValueError) as error:  # ValueError: of an address that is none
        if not needed:
            return {}
        raise _nobody(url, _reason(error)) from error
    if isinstance(data, dict):
        return data
    if needed:
        raise _no_ray(url, f"HTTP {answer.status_code}")
    return {}


def _nobody(address: str, why: str) -> UserError:
    return UserError(
        f"no Ray cluster answers at {address} ({why}); give its dashboard, --address http://HOST:8265, or start one"
        " with `ray start --head`"
    )


def _no_ray(url: str, why: str) -> UserError:
    return UserError(f"what answers at {url} is no Ray dashboard ({why}); give --address http://HOST:8265")


def _refused(url: str, status: int) -> UserError:
    if token() is None:
        return UserError(
            f"the cluster at {url} asks for a token and this machine has none; copy {_TOKEN_FILE} of its head node to"
            " the same place here, or set RAY_AUTH_TOKEN"
        )
    return UserError(
        f"the cluster at {url} refuses this machine's token (HTTP {status}); copy {_TOKEN_FILE} of its head node to the"
        " same place here, and unset RAY_AUTH_TOKEN and RAY_AUTH_TOKEN_PATH where they name another"
    )


@contextlib.contextmanager
def _own_address() -> Iterator[None]:
    """Ray's client prefers the environment's address to the one it is given."""
    kept = {name: os.environ.pop(name) for name in _ADDRESSES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def _gpus(status: dict[str, Any]) -> tuple[float, float] | None:
    """GPUs in use and all of them, of the autoscaler's report."""
    usage = _at(status, "data", "clusterStatus", "loadMetricsReport", "usage")
    if not isinstance(usage, dict):
        return None
    match usage.get("GPU", [0.0, 0.0]):
        case [int() | float() as used, int() | float() as total]:
            return float(used), float(total)
    return None


def _at(data: Any, *keys: str) -> Any:
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _reason(error: BaseException) -> str:
    """What went wrong with a connection, without the libraries' names around it."""
    if "BadStatusLine" in str(error) or "line too long" in str(error).lower():
        return "it does not speak HTTP"
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            return seen.strerror
        seen = seen.__cause__ or seen.__context__
    return "no answer in time" if "timed out" in str(error).lower() else first_line(error)


def _said(error: BaseException) -> str:
    """The last line of a server's traceback, which holds its words, or the first of what else was said."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines and "Traceback" in str(error) else first_line(error, 300)


def _ray_here() -> str:
    import ray

    return str(ray.__version__)


def _numbers(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
