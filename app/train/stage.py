"""The train stage: Ray Train over the committed parts; checkpoints live in the run folder, not in Ray's."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from app.captured import load_entries, require_states
from app.cluster import cause_of, connect, gpu_count, is_local
from app.config import Config
from app.draft_config import DraftConfig
from app.errors import UserError
from app.live import Live, forget, tell
from app.node_target import target_here
from app.parts import PartEntry
from app.pipeline import StageContext, StageResult
from app.pipelines.vocab import load_vocab
from app.runfolder import digest_of, flat_config, flat_defaults
from app.sizing import engine_cpus, see_cluster
from app.storage import Store
from app.target import TargetInfo
from app.train import trainer, warm_start
from app.train.loop import FOLDER, SUMMARY, Place, draft_config, train_loop_per_worker
from app.train.pulse import FAULT
from app.train.state import StopRequest, ask_to_stop
from app.train.trackers import require_trackers
from app.windows import Windows, read_windows, windows_of, write_windows

log = logging.getLogger("draftmill")

EXECUTION_KEYS = tuple(f"train.{key}" for key in trainer.EXECUTION_KEYS)
_INPUTS = "inputs.json"  # what the checkpoints were made from
_RAY = "ray"
_MAX_FAILURES = 3  # worker groups started again after a dead worker
_STOP_PATIENCE_S = 120.0  # for the checkpoint of a training that is stopped
_LONGER_STOP_S = 600.0  # where it goes to an object store


def run(ctx: StageContext) -> StageResult:
    """Train to the end, from the newest checkpoint made from these very inputs if there is one.

    Raises:
        UserError: training broke, the cluster has too little, or the settings do not fit the data.
    """
    config, store = ctx.config, ctx.run.store
    if _best_is_damaged(ctx):
        store.delete(FOLDER)
    begun = ctx.ahead.finish() if ctx.ahead is not None else None
    trained, earlier_s = begun if begun is not None else (train_in(ctx, Place(), windowed=close_windows(ctx)), 0.0)
    summary, shape = trained
    outputs = [f"{FOLDER}/{SUMMARY}", f"{FOLDER}/metrics.jsonl"]
    weights = [f"{FOLDER}/checkpoints/step-{summary['steps']:08d}/weights.safetensors"]
    if store.exists(f"{FOLDER}/best/state.json"):
        weights.append(f"{FOLDER}/best/weights.safetensors")
    outputs += [*weights, *(path.replace("weights.safetensors", "state.json") for path in weights)]
    return StageResult(
        outputs=outputs,
        # What is trained, not when: a training done again to the same weights changes nothing after it.
        digest=digest_of([shape.model_dump(mode="json"), *(store.sha256(path) for path in weights)]),
        counts={k: v for k, v in summary.items() if k != "validation"},
        seeds={"train": config.train.seed},
        extra={"draft_config": shape.model_dump(mode="json")},
        earlier_s=earlier_s,
    )


def check(ctx: StageContext) -> None:
    """Before any stage begins: the trackers' packages, and whether `train.init_from` fits.

    Raises:
        UserError: a package is missing, or there is no such draft, or it is another target's.
    """
    require_trackers(ctx.config.train.trackers)
    warm_start.check(ctx, lambda size: draft_config(ctx.target, ctx.config.train, list(ctx.layers), size))


def close_windows(ctx: StageContext) -> bool:
    """Whether a training that went by sealed windows is to go on; no window comes to them any more."""
    entries = load_entries(ctx)
    windows = windows_under_way(ctx, entries)
    if windows is None or windows.closed:
        return windows is not None
    fresh = windows.unsealed_of({e.part: e for e in entries})
    require_states(ctx, "train", fresh)
    write_windows(ctx.run.store, windows.closed_with(fresh))
    return True


def train_in(ctx: StageContext, place: Place, windowed: bool = False) -> tuple[dict[str, Any], DraftConfig]:
    """Train in folder `place.folder` of the run; its summary and the draft's shape.

    windowed: by the sealed windows, which may still be coming, in place of all parts.

    Raises:
        UserError: as `run`.
    """
    config, store = ctx.config, ctx.run.store
    own = store.sub(place.folder)
    entries = None if windowed else load_entries(ctx)
    if entries is not None:
        require_states(ctx, "train", entries)
    shape = draft_config(ctx.target, config.train, list(ctx.layers), len(load_vocab(store).kept_ids))
    initial = warm_start.initial_draft(ctx)
    if initial is not None:
        shape = warm_start.warm_config(shape, initial.config, config.train)
    if windowed:
        inputs = _windowed_inputs(ctx)
    else:
        inputs = {
            "generate": ctx.input("generate").digest,
            "vocab": ctx.input("vocab").digest,
            "settings": digest_of([_shaping(config), shape.model_dump(mode="json")]),
        }
        if initial is not None:
            inputs["initial draft"] = initial.digest
        if place.share != 1.0:
            inputs["share"] = str(place.share)
    _prepare(store, place.folder, inputs, initial)
    own.delete(FAULT)
    own.delete(StopRequest.PATH)
    connect(config.ray)
    loop_config = {
        "run_url": ctx.run.url,
        "run_options": config.storage.options,
        "config": config.model_dump(mode="json"),
        "target": ctx.target.to_json(),
        "entries": entries,
        "place": place,
        "beside": windowed and not _is_generated(ctx),  # engines run meanwhile
    }
    _fit(config, store, loop_config)
    summary = own.read_json(SUMMARY)
    own.delete(_RAY)
    if summary is None:
        raise UserError(
            "train: the workers ended without a summary; look at their logs, then run the same command again"
        )
    forget(store, place.folder)
    return summary, shape


def _shaping(config: Config) -> dict[str, Any]:
    """The settings that checkpoints depend on. Values at their default are left out: a key that a later version adds
    must not end a training under way."""
    keys = ("train", "evaluate.holdout", "evaluate.holdout_seed")
    defaults = flat_defaults(config, keys, EXECUTION_KEYS)
    return {k: v for k, v in flat_config(config, keys, EXECUTION_KEYS).items() if v != defaults[k]}


def _windowed_inputs(ctx: StageContext) -> dict[str, str]:
    """What checkpoints of a training by windows were made from, beside the windows: these tell of the parts, and the
    map follows from the first of them."""
    return {
        "generate": "sealed windows",
        "vocab": digest_of(flat_config(ctx.config, ("vocab",))),
        "settings": digest_of([_shaping(ctx.config)]),
        **warm_start.outside(ctx),
    }


def _prepare(store: Store, folder: str, inputs: dict[str, str], initial: warm_start.InitialDraft | None) -> None:
    """Empty the training's folder unless all in it was made from `inputs`: checkpoints of other settings must never be
    taken for this training's, as the newest one is exported."""
    own = store.sub(folder)
    if own.read_json(_INPUTS) != inputs:
        store.delete(folder)
        if initial is not None:
            warm_start.place(initial, own)
        own.write_json(_INPUTS, inputs)  # last: what it stands for is there
    elif initial is not None and not warm_start.is_placed(own):
        warm_start.place(initial, own)  # cleaned since


def prepare_windowed(ctx: StageContext) -> None:
    """Make the folder ready for a training by windows; one of these very settings keeps what is in it."""
    _prepare(ctx.run.store, FOLDER, _windowed_inputs(ctx), warm_start.initial_draft(ctx))


def windows_under_way(ctx: StageContext, entries: list[PartEntry]) -> Windows | None:
    """The windows of a training by today's settings, where they are of `entries`."""
    windows = windows_of(ctx.run.store, ctx.config, entries)
    known = windows is not None and ctx.run.store.sub(FOLDER).read_json(_INPUTS) == _windowed_inputs(ctx)
    return windows if known else None


def _is_generated(ctx: StageContext) -> bool:
    """Whether no engine is at work any more."""
    windows = read_windows(ctx.run.store)
    return windows is not None and windows.closed


def _best_is_damaged(ctx: StageContext) -> bool:
    """Whether the weights of the best validation are no longer what training wrote: only training makes them again."""
    done = ctx.run.manifest("train")
    if done is None:
        return False
    best = {path: output for path, output in done.outputs.items() if path.startswith(f"{FOLDER}/best/")}
    fault = ctx.run.output_fault(replace(done, outputs=best), "checksum")
    if fault is not None:
        log.warning("train: %s; the training is done again", fault)
    return fault is not None


def _fit(config: Config, store: Store, loop_config: dict[str, Any]) -> None:
    """Run the worker group to its end; `store` is the run folder."""
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig

    own = store.sub(loop_config["place"].folder)
    use_gpu = config.train.use_gpu if config.train.use_gpu is not None else gpu_count() > 0
    resources = _resources(config, use_gpu, loop_config["beside"])
    filesystem = None
    if not store.is_local:
        from pyarrow.fs import FSSpecHandler, PyFileSystem

        filesystem = PyFileSystem(FSSpecHandler(store.fs))
    group = _trainer_class()(
        _worker,
        train_loop_config=loop_config,
        scaling_config=ScalingConfig(num_workers=config.train.workers, use_gpu=use_gpu, resources_per_worker=resources),
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo", timeout_s=1800),
        run_config=RunConfig(
            name="draftmill-train",
            storage_path=own.full(_RAY),
            storage_filesystem=filesystem,
            logging_config=LoggingConfig(log_level="WARNING"),  # type: ignore[call-arg]
            failure_config=FailureConfig(max_failures=_MAX_FAILURES),
        ),
    )
    log.info("train: %d worker(s) with %s", config.train.workers, resources)
    waits = f"{config.train.workers} worker(s) with {resources}: Ray starts them when these are free"
    tell(store, loop_config["place"].folder, Live("no worker has begun yet", waiting_for=waits))
    try:
        group.fit()
    except KeyboardInterrupt:
        save_and_leave(own)
        raise
    except Exception as error:
        fault = own.read_json(FAULT)
        if fault is not None:
            raise UserError(fault["message"]) from error
        cause = cause_of(error)
        if isinstance(cause, UserError):
            raise cause from error
        raise


def save_and_leave(store: Store) -> bool:
    """An interrupt (SIGTERM is one): the workers save where they are, so that the next run goes on there; whether they
    did."""
    log.info("train: stopping; the workers save first (interrupt again to leave without)")
    saved = ask_to_stop(store, _STOP_PATIENCE_S if store.is_local else _LONGER_STOP_S)
    log.info("train: %s", "saved" if saved else "no checkpoint was made; the next run goes on from the one before")
    return saved


def _trainer_class() -> Any:
    """Ray's trainer, less two habits of its driver side."""
    from ray.train.torch import TorchTrainer

    class Trainer(TorchTrainer):
        def _register_sigint_handler(self, controller: Any) -> None:
            """None: Ctrl-C ends the run as it does in every other stage, and Ray's exits with 1."""

        def _create_default_callbacks(self) -> list[Any]:
            """Without the cleaner of placement groups on a cluster that ends with us: it looks for the cluster by
            name, and fails with a traceback where another one runs on the host."""
            callbacks: list[Any] = super()._create_default_callbacks()  # type: ignore[misc]
            return [c for c in callbacks if not (is_local() and "PlacementGroupCleaner" in type(c).__name__)]

    return Trainer


def _resources(config: Config, use_gpu: bool, beside: bool) -> dict[str, float]:
    """What one worker asks for; CPU workers make do with what a small machine has, `beside` engines with the rest."""
    workers, own = config.train.workers, config.train.resources
    cluster = see_cluster(own)
    have = f"the nodes with {own} have" if own else "the cluster has"
    if own and not cluster.cpus:
        raise UserError(f"no node has what train.resources asks for, {own}; start nodes with it or leave it out")
    if use_gpu:
        if cluster.engines(1) < workers:
            raise UserError(
                f"train.workers is {workers} and {have} {cluster.engines(1)} GPUs; lower train.workers"
                " or set train.use_gpu=false"
            )
        return {"GPU": 1, "CPU": 1, **own}
    cpus = int(cluster.cpus - (engine_cpus(config, cluster) if beside else 0)) // workers
    if cpus < 1:
        raise UserError(f"train.workers is {workers} and {have} {cluster.cpus:g} CPUs; lower it")
    return {"CPU": min(config.train.cpus_per_worker, cpus), **own}


def _worker(loop_config: dict[str, Any]) -> None:
    """The loop, with a fault that a person can mend kept where the driver finds it and no restart repeats it."""
    for name in list(logging.root.manager.loggerDict):
        if "/ray/train/" in name:  # Ray Train names a logger after its file; our own lines say what is reported
            logging.getLogger(name).setLevel(logging.WARNING)
    store = Store(loop_config["run_url"], loop_config["run_options"]).sub(loop_config["place"].folder)
    fault = store.read_json(FAULT)
    if fault is not None:
        raise UserError(fault["message"])
    try:
        target = target_here(TargetInfo.from_json(loop_config["target"]))
        train_loop_per_worker({**loop_config, "target": target.to_json()})
    except UserError as error:
        store.write_json(FAULT, {"message": str(error)})
        raise
