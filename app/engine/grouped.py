"""Engine actors in placement groups: Ray Data places the actors of its pools by resources and labels alone."""

from __future__ import annotations

from typing import Any

from app.engine.part_worker import PartWorker, WorkerConfig
from app.sizing import inside


class GroupedWorker:
    """Ray Data actor without an engine: hands its calls to a PartWorker in a placement group, which ends with it.

    That actor is to Ray what those of a pool are: one that died is started again, and its calls are made again.
    """

    def __init__(self, config: WorkerConfig, group: Any, calls: int) -> None:
        """
        Args:
            group: a placement group whose first bundle is the engine's.
            calls: most at once.
        """
        import ray

        named = type("generate", (PartWorker,), {})  # as the stage's other actors
        again = {"max_restarts": -1, "max_task_retries": -1}
        actor: Any = ray.remote(named)
        self._engine: Any = actor.options(**inside(group), **again, max_concurrency=calls).remote(config)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """As PartWorker's."""
        import ray

        made: dict[str, list[str]] = ray.get(self._engine.__call__.remote(batch))
        return made
