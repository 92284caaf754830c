"""Where the numbers of a training go beside `metrics.jsonl`: TensorBoard, MLflow, W&B, Ray's own metrics.

Each package is imported only where the configuration names it. A tracker that fails later is left out with one
warning: no dashboard is worth a training.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from app.errors import UserError, first_line
from app.metrics import Meter, run_name
from app.runfolder import digest_of
from app.storage import Store

log = logging.getLogger("draftmill")

# Any one of the modules serves; the first name is the package to install.
_MODULES = {"tensorboard": ("tensorboard", "tensorboardX"), "mlflow": ("mlflow",), "wandb": ("wandb",)}
_PROJECT = "draftmill"
_IDS = "trackers.json"  # in the training folder: runs to go on with


class Tracker(Protocol):
    def log(self, values: Mapping[str, float], step: int) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def flat_numbers(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a line of the log by name: `loss`, `loss_by_step/0`, `validation/acceptance_length`."""
    flat: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, bool) or value is None:
            continue
        if isinstance(value, int | float):
            flat[prefix + name] = float(value)
        elif isinstance(value, Mapping):
            flat |= flat_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            flat |= flat_numbers({str(i): v for i, v in enumerate(value)}, f"{prefix}{name}/")
    return flat


def require_trackers(names: Sequence[str]) -> None:
    """Raises UserError where the package of a tracker is not installed."""
    for name in names:
        if not any(_has(module) for module in _MODULES[name]):
            raise UserError(
                f"train.trackers names {name} and its package is not installed: pip install {_MODULES[name][0]}"
                " where the workers run, or take it out of the list"
            )


def open_trackers(
    names: Sequence[str], run_url: str, store: Store, settings: Mapping[str, Any], resume_step: int
) -> list[Tracker]:
    """Trackers by name, each with the run's name (the folder's), the run folder and the settings recorded.

    store: the training folder. A training that is resumed goes on in the tracker's same run.

    Raises:
        UserError: a package is missing, or refuses to begin.
    """
    require_trackers(names)
    makers: dict[str, Callable[..., Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}
    opened: list[Tracker] = []
    for name in names:
        try:
            opened.append(_Careful(name, makers[name](run_url, store, settings, resume_step)))
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"train.trackers: {name} does not begin ({first_line(error)}); look at its settings"
            ) from error
    return opened


class _Careful:
    """A tracker whose faults end it, not the training."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name, self.tracker = name, tracker
        self.works = True

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._do(lambda: self.tracker.log(values, step))

    def flush(self) -> None:
        self._do(self.tracker.flush)

    def close(self) -> None:
        self._do(self.tracker.close)

    def _do(self, what: Callable[[], None]) -> None:
        if not self.works:
            return
        try:
            what()
        except Exception as error:
            self.works = False
            log.warning("training: %s fails (%s) and gets no more numbers", self.name, first_line(error))


class TensorBoard:
    """Event files in `tensorboard/` of the training folder; on an object store they go up with every checkpoint."""

    def __init__(self, run_url: str, store: Store, settings: Mapping[str, Any], resume_step: int) -> None:
        self.store = store
        self.folder = Path(store.full("tensorboard") if store.is_local else tempfile.mkdtemp(prefix="draftmill-tb-"))
        module = "torch.utils.tensorboard" if _has("tensorboard") else "tensorboardX"
        writer = importlib.import_module(module).SummaryWriter
        # Steps after the checkpoint come again.
        self.writer = writer(str(self.folder), purge_step=resume_step + 1 if resume_step else None)
        rows = "\n".join(f"{k}: {v}" for k, v in _record(run_url, settings).items())
        self.writer.add_text("run", rows, resume_step)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self.writer.flush()  # a thread of tensorboardX may still hold the last values: they come with the next flush
        self._upload()

    def close(self) -> None:
        self.writer.close()  # waits for all
        self._upload()

    def _upload(self) -> None:
        if not self.store.is_local:
            for path in self.folder.iterdir():
                self.store.write_bytes(f"tensorboard/{path.name}", path.read_bytes())


class MLflow:
    """A run of the experiment `draftmill`, at MLFLOW_TRACKING_URI or in `mlruns/` of the training folder."""

    def __init__(self, run_url: str, store: Store, settings: Mapping[str, Any], resume_step: int) -> None:
        import os

        self.mlflow = importlib.import_module("mlflow")
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            if not store.is_local:
                raise UserError("train.trackers: mlflow needs MLFLOW_TRACKING_URI where the run folder is not local")
            self.mlflow.set_tracking_uri(f"file://{store.full('mlruns')}")
        self.mlflow.set_experiment(_PROJECT)
        known = _known_id(store, "mlflow") if resume_step else None
        run = self.mlflow.start_run(run_id=known, run_name=None if known else run_name(run_url))
        if known is None:
            _keep_id(store, "mlflow", run.info.run_id)
            self.mlflow.set_tags({"run_folder": run_url})
            self.mlflow.log_params({k: str(v)[:500] for k, v in settings.items()})

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.mlflow.log_metrics(dict(values), step=step)

    def flush(self) -> None:
        """Nothing: it is sent at once."""

    def close(self) -> None:
        self.mlflow.end_run()


class WandB:
    """A run of the project `draftmill`; its id follows from the run folder, so a resumed one goes on."""

    def __init__(self, run_url: str, store: Store, settings: Mapping[str, Any], resume_step: int) -> None:
        wandb = importlib.import_module("wandb")
        known = _known_id(store, "wandb") if resume_step else None
        folder = store.full("") if store.is_local else tempfile.mkdtemp(prefix="draftmill-wandb-")
        self.run = wandb.init(
            project=_PROJECT, name=run_name(run_url), id=known, resume="allow", dir=folder,
            config=_record(run_url, settings),
        )  # fmt: skip
        _keep_id(store, "wandb", self.run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def flush(self) -> None:
        """Nothing: its own process sends."""

    def close(self) -> None:
        self.run.finish()


class RayMetrics:
    """Metrics for Ray's dashboard and Prometheus (app/metrics.py), told by the leading worker."""

    def __init__(self, run_url: str) -> None:
        self.meter = Meter(run_url, "train", "worker 0")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.meter.set_known(values)

    def flush(self) -> None:
        """Nothing: Ray collects by itself."""

    def close(self) -> None:
        """Nothing."""


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # a module without a spec, as one put in sys.modules
        return True


def _record(run_url: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"run_folder": run_url, "settings_digest": digest_of(dict(settings)), **settings}


def _known_id(store: Store, tracker: str) -> str | None:
    ids = store.read_json(_IDS)
    return ids.get(tracker) if isinstance(ids, dict) else None


def _keep_id(store: Store, tracker: str, identity: str) -> None:
    ids = store.read_json(_IDS)
    store.write_json(_IDS, {**(ids if isinstance(ids, dict) else {}), tracker: identity})
