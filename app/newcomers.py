"""Nodes that join and leave while generate runs: told of, and looked at as those that were there at the start.

Ray Data itself starts engines on nodes that join and gives the parts of lost ones to others.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from app.errors import UserError, first_line
from app.nodes import Room, look_at_cluster
from app.preflight import Demand, check_nodes, differing, holds
from app.storage import Store

log = logging.getLogger("draftmill")
_EVERY_S = 5.0


class Newcomers:
    """Looks every few seconds while its block runs. Of a node that lacks what an engine surely needs it holds the GPUs,
    so that no engine comes to it and ends a run that goes well without.

    Args:
        rooms: the nodes at the start.
        demand: of an engine.
        store: the run folder.
        target: folder of the target on the driver's node.
    """

    def __init__(self, rooms: list[Room], demand: Demand, store: Store, target: str) -> None:
        self._rooms, self._demand, self._store, self._target = rooms, demand, store, target
        self._known: dict[str, str] | None = None  # nodes that live, by id: their names
        self._draining: set[str] = set()
        self._held: list[Any] = []  # actors that hold the GPUs of unfit nodes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="draftmill-nodes", daemon=True)

    def __enter__(self) -> Newcomers:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        import ray

        self._stop.set()
        self._thread.join(timeout=15)
        while self._held:
            ray.kill(self._held.pop())

    def _watch(self) -> None:
        import ray

        told = None
        while True:
            try:
                self.look([n for n in ray.nodes() if n.get("Alive")], _draining())
            except Exception as error:  # a look that fails must not end the run, nor the looks after it
                if told != (told := first_line(error)):
                    log.warning("generate: the nodes cannot be looked at (%s)", told)
            if self._stop.wait(_EVERY_S):
                return

    def look(self, nodes: list[dict[str, Any]], draining: set[str]) -> None:
        """Tell what has changed.

        Args:
            nodes: those of `ray.nodes()` that live.
            draining: ids of those that are told to go.
        """
        living = {n["NodeID"]: _named(n["NodeManagerHostname"], n["NodeID"]) for n in nodes}
        before, self._known = self._known, living
        if before is None:
            return
        for node in before.keys() - living.keys():
            log.warning("generate: node %s left; its parts in flight are made again by other engines", before[node])
        for node in (draining & living.keys()) - self._draining:
            log.warning("generate: node %s is told to go; it gets no further parts", living[node])
        self._draining = draining
        joined = [n for n in nodes if n["NodeID"] not in before]
        if joined:
            self._greet(joined)

    def _greet(self, nodes: list[dict[str, Any]]) -> None:
        rooms = look_at_cluster(self._store.root if self._store.is_local else None, self._target, nodes)
        for room in rooms:
            name = _named(room.host, room.node)
            log.info("generate: node %s joined with %d GPUs and %g CPUs", name, room.gpus, room.cpus)
            for sentence in self._said_of(room):
                log.warning("generate: %s", sentence)

    def _said_of(self, room: Room) -> list[str]:
        if not holds(room, self._demand):
            return [f"node {room.host} has not what an engine asks for, and gets none"]
        others = [r for r in self._rooms if holds(r, self._demand)]
        engines = max(1, room.gpus // max(1, self._demand.gpus))
        try:
            found = check_nodes([room], self._demand, engines, self._store.url)
        except UserError as error:
            self._hold(room)
            return [f"node {room.host} gets no engine, and its GPUs are held until generate ends: {error}"]
        return [*found, *differing([*others[:1], room])]

    def _hold(self, room: Room) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if self._demand.gpus:
            there = NodeAffinitySchedulingStrategy(room.node, soft=False)
            actor = ray.remote(_Holder).options(num_gpus=room.gpus, num_cpus=0, scheduling_strategy=there)
            self._held.append(actor.remote())


class _Holder:
    """An actor that does nothing."""


def _named(host: str, node: str) -> str:
    """A node as the log tells it: several may have one host name, and a part's entry holds Ray's id."""
    return f"{host} ({node[:8]})"


def _draining() -> set[str]:
    from ray._private.state import state

    return set(state.get_draining_nodes())
