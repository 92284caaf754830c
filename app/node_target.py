"""The target's files on whatever node an engine or a trainer comes to: those of the driver's path, else fetched there.

A hub id is fetched once per node, by whichever process comes first; the others wait for it and read what it made.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from app.errors import UserError
from app.packaged import PACKAGED, cache_root, locked
from app.target import TargetInfo, has_weights, resolve_model, weights_digest

_ALIVE_S = 10.0


def target_here(target: TargetInfo, alive: Callable[[], None] = lambda: None) -> TargetInfo:
    """`target` with the folder that holds it on this node.

    Args:
        target: as the driver knows it.
        alive: called every few seconds while this waits or fetches.

    Raises:
        UserError: it is not here and cannot be fetched, or what is here are other weights.
    """
    if _is_whole(Path(target.model)):
        return target
    host, commit = socket.gethostname(), _commit_of(target.model)
    if not is_fetched(target):
        raise UserError(
            f"node {host} has no {target.model}, the folder of target.model; put it on every node at that path, or give"
            " a shared folder or a hub id, which each node fetches by itself"
        )
    with _telling(alive), locked(cache_root() / "locks" / f"{target.name.replace('/', '--')}.lock"):
        folder = resolve_model(target.name, commit)
        found = weights_digest(folder)
    if found != target.weights_digest:
        raise UserError(
            f"node {host} has other weights of {target.name} in {folder} than the driver's node has in {target.model};"
            " delete the wrong ones, and give target.revision where the model has moved on"
        )
    return replace(target, model=str(folder))


def _is_whole(folder: Path) -> bool:
    """Whether the target's files are there; a plan fetches a hub's target without its weights."""
    if not (folder / "config.json").is_file():
        return False
    return _commit_of(str(folder)) is None or has_weights(folder)


def is_fetched(target: TargetInfo) -> bool:
    """Whether a node without the target fetches it: it is of the hub, or packaged."""
    return _commit_of(target.model) is not None or target.name in PACKAGED


def _commit_of(folder: str) -> str | None:
    """The commit of a folder in the hub's cache (.../snapshots/COMMIT), so that every node takes the same; None: the
    folder is a person's own."""
    path = Path(folder)
    return path.name if path.parent.name == "snapshots" else None


@contextlib.contextmanager
def _telling(alive: Callable[[], None]) -> Iterator[None]:
    """Call `alive` now and then while the block runs: a fetch of an hour is no engine that hangs."""
    done = threading.Event()

    def tell() -> None:
        while not done.wait(_ALIVE_S):
            alive()

    threading.Thread(target=tell, name="draftmill-fetch", daemon=True).start()
    try:
        yield
    finally:
        done.set()
