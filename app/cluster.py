"""The Ray cluster a run works on: a running one, or a local one of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

from app.config import RayConfig
from app.engine.warden import OWNER
from app.errors import UserError, first_line
from app.jobs import job_env_vars
from app.redact import is_secret_name

log = logging.getLogger("draftmill")

# Threads fight with the control plane on small machines unless they are limited (two cores: gloo time-outs), and
# OpenMP's default of spinning while it waits costs other processes on the same cores up to ten times their time.
_WORKER_ENV = {
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "PASSIVE",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
}


def connect(config: RayConfig) -> None:
    """Connect this process to Ray; nothing happens where it is connected. Signal handlers stay as they are.

    Raises:
        UserError: the address named cannot be reached.
    """
    import ray

    if ray.is_initialized():
        return
    with _own_signal_handlers():
        _init(config)


def _init(config: RayConfig) -> None:
    import ray

    named = os.environ.get("RAY_ADDRESS", "")
    if config.address is None and named.startswith(("http://", "https://")):
        raise UserError(
            f"RAY_ADDRESS is {named}, the dashboard that `draftmill submit` talks to; to run from here set"
            " ray.address=HOST:6379 (the address that `ray start --head` printed), or ray.address=local"
        )
    address = config.address or ("auto" if named else None)
    env_vars = {k: v for k, v in {**_WORKER_ENV, **_passed_on()}.items() if k not in job_env_vars()}
    common: dict[str, Any] = {
        "log_to_driver": True,
        "logging_level": logging.WARNING,
        "runtime_env": {"env_vars": env_vars},
        "namespace": "draftmill",
    }
    os.environ.update({k: v for k, v in _WORKER_ENV.items() if k not in os.environ})
    if address is not None and address != "local":
        _check_answers(address)
        try:
            ray.init(address=address, **common)
        except Exception as error:
            if (differing := _versions(error)) is not None:
                raise UserError(f"the Ray cluster at {address} {differing}") from error
            raise UserError(
                f"the Ray cluster at {address} cannot be reached ({first_line(error)});"
                " check ray.address, or set ray.address=local for a cluster of your own"
            ) from error
        at = ray.get_runtime_context().gcs_address if address == "auto" else address
        log.info("connected to the Ray cluster at %s", at)
        return
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # that a token is asked for
    try:
        ray.init(
            address="local",
            num_cpus=config.num_cpus,
            object_store_memory=int(config.object_store_gib * 2**30),
            include_dashboard=config.dashboard,
            **common,
        )
    except ValueError as error:  # of the store: too small, or larger than the memory or /dev/shm
        raise UserError(
            f"Ray does not start with ray.object_store_gib={config.object_store_gib:g} ({first_line(error)}); give"
            " another number, or a container more shared memory (--shm-size)"
        ) from error
    url = ray.get_runtime_context().gcs_address
    dashboard = getattr(ray._private.worker._global_node, "webui_url", None)
    log.info("started a local Ray cluster (%s)%s", url, f", dashboard http://{dashboard}" if dashboard else "")


def _versions(error: Exception) -> str | None:
    """What Ray says of a cluster of other versions, in a sentence; None: it says something else."""
    found = re.findall(r"Ray: (\S+)\s+Python: (\S+)", str(error)) if "Version mismatch" in str(error) else []
    if len(found) != 2:
        return None
    there, here = (f"Ray {ray} on Python {python}" for ray, python in found)
    return (
        f"runs {there}, and this process {here}; start draftmill from the environment in which the cluster's nodes run,"
        " or submit it as a job (draftmill submit), which runs in that environment"
    )


def _check_answers(address: str) -> None:
    """Raises UserError where nothing listens: Ray itself would try for half a minute, deaf to signals."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdigit():
        return
    try:
        with socket.create_connection((host, int(port)), timeout=5):
            pass
    except OSError as error:
        raise UserError(
            f"no Ray cluster answers at {address} ({error.strerror or error}); check ray.address, or set"
            " ray.address=local for a cluster of your own"
        ) from error


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Ray's driver ends the process on SIGTERM where it stands; ours gives the run folder back first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    except SystemExit as stop:
        raise KeyboardInterrupt from stop  # a signal that came while Ray's handler was in place
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def is_local() -> bool:
    """Whether the connected cluster is one this process started."""
    import ray

    node = ray._private.worker._global_node
    return bool(node is not None and node.head)


def log_in_worker() -> None:
    """Our log lines from a Ray worker, once, with their time."""
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False  # Ray's own handlers would print every line a second time


def is_connected() -> bool:
    """Whether this process is connected to Ray; does not import it."""
    ray = sys.modules.get("ray")
    return bool(ray is not None and ray.is_initialized())


def disconnect() -> None:
    """Leave the cluster; a local one ends with it."""
    if is_connected():
        import ray

        ray.shutdown()


def gpu_count() -> int:
    """GPUs of the connected cluster."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0))


def ray_fault(error: BaseException) -> str | None:
    """Ray's own words where Ray itself failed (a node, an actor, its control plane), not what ran on it."""
    if "ray" not in sys.modules or isinstance(cause_of(error), UserError):
        return None
    from ray.exceptions import RayError, RayTaskError

    if not isinstance(error, RayError) or isinstance(error, RayTaskError):
        return None
    return first_line(error)


def cause_of(error: BaseException) -> BaseException:
    """The fault of a person's making inside Ray's wrappers, or the error itself."""
    seen: set[int] = set()
    queue: list[BaseException | None] = [error]
    while queue:
        current = queue.pop(0)
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, UserError):
            return current
        queue += [getattr(current, "cause", None), current.__cause__, current.__context__]
        queue += list(getattr(current, "worker_failures", {}).values())
    return error


def _passed_on() -> dict[str, str]:
    """Environment that workers need as the driver has it. Credentials stay out: Ray shows these values."""
    names = (
        "XDG_CACHE_HOME",
        "HF_HOME",
        "HF_HUB_OFFLINE",
        "AWS_ENDPOINT_URL",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
    )
    ours = {k: v for k, v in os.environ.items() if k.startswith(("DRAFTMILL_", "VLLM_")) or k in names}
    ours.pop(OWNER, None)  # of an engine in this process; its own children alone are its
    return {k: v for k, v in ours.items() if not is_secret_name(k.lower())}
