"""Runs the stages in order: reuses what is unchanged, redoes what depends on a change, resumes what was cut off."""

from __future__ import annotations

import contextlib
import datetime
import gc
import logging
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from app.cluster import disconnect, is_connected, ray_fault
from app.config import Config
from app.engine.warden import driving
from app.errors import UserError
from app.forgotten import refuse_half_forgotten
from app.lease import Lease
from app.parts import PartEntry
from app.runfolder import (
    Manifest,
    RedactingFilter,
    RunFolder,
    digest_of,
    flat_config,
    flat_defaults,
    git_revision,
)
from app.sources.locate import Listing
from app.storage import explained
from app.target import TargetInfo, check_aux_layers, default_aux_layers, inspect_target
from app.versions import package_versions

log = logging.getLogger("draftmill")
STALE = "stale"  # in a manifest's `extra`: why its output must not be used again, in words
BESIDE_S = "beside_s"  # likewise: seconds of the stage in which earlier ones ran too


class Ahead(Protocol):
    """Work of a later stage that goes on while generate makes parts (app/train/overlap.py)."""

    @property
    def gpus(self) -> int:
        """GPUs that it holds now."""

    def committed(self, entries: Iterable[PartEntry], parts: int) -> None:
        """Told by generate: these of all `parts` were committed since the last time, at first all that are. Raises what
        that work failed by."""

    def finish(self) -> tuple[Any, float] | None:
        """All parts are there: wait for what comes of it; with the seconds it took before. None: it never began."""


@dataclass
class StageContext:
    """What a stage function is given."""

    config: Config
    run: RunFolder
    lease: Lease | None = None
    ahead: Ahead | None = None

    @cached_property
    def target(self) -> TargetInfo:
        t = self.config.target
        return inspect_target(t.model, t.revision, t.trust_remote_code, t.chat_template)

    @cached_property
    def listing(self) -> Listing:
        """The files of the sources, the same for whoever looks in this invocation."""
        return Listing()

    @property
    def layers(self) -> tuple[int, int, int]:
        """The auxiliary layer ids of this run (k convention)."""
        explicit = self.config.capture.layers
        n = self.target.num_layers
        return default_aux_layers(n) if explicit is None else check_aux_layers(explicit, n)

    def input(self, stage: str) -> Manifest:
        """Manifest of an input stage.

        Raises:
            UserError: it has not run yet.
        """
        manifest = self.run.manifest(stage)
        if manifest is None:
            raise UserError(f"{self.run.url}: stage {stage} has not run yet; run `draftmill {stage}` first")
        return manifest


@dataclass(frozen=True)
class StageResult:
    """What a stage function returns."""

    outputs: list[str]  # paths of finished files in the run folder
    counts: dict[str, Any] = field(default_factory=dict)
    seeds: dict[str, int] = field(default_factory=dict)
    digest: str | None = None  # content digest where `outputs` does not list every file (parts)
    extra: dict[str, Any] = field(default_factory=dict)
    earlier_s: float = 0.0  # spent on it beside earlier stages, before its turn came


@dataclass(frozen=True)
class Stage:
    """One stage: a function, and what its output depends on."""

    name: str
    run: Callable[[StageContext], StageResult]
    inputs: tuple[str, ...] = ()
    config_keys: tuple[str, ...] = ()  # sections or dotted keys that shape the output
    execution_keys: tuple[str, ...] = ()  # keys of those sections that change only speed
    outside: Callable[[StageContext], dict[str, str]] | None = None  # digests of things outside the run folder
    unfinished: Callable[[StageContext], str | None] | None = None  # why finished-looking output is not, in words
    check: Callable[[StageContext], None] | None = None  # raises UserError, before any stage of the run begins
    before: Callable[[StageContext], None] | None = None  # called when the stage is about to be done; may refuse
    after: Callable[[StageContext], None] | None = None  # called when the stage is up to date: what may go then
    ahead: Callable[[StageContext], contextlib.AbstractContextManager[Any]] | None = None  # entered before all stages
    version: int = 1


@dataclass(frozen=True)
class StageState:
    """done | stale | missing, and why."""

    state: str
    reasons: tuple[str, ...] = ()


def stage_state(stage: Stage, ctx: StageContext, stale_inputs: frozenset[str] = frozenset()) -> StageState:
    """Compare a stage's manifest with today's configuration, inputs and files."""
    manifest = ctx.run.manifest(stage.name)
    if manifest is None:
        return StageState("missing", ("not finished yet",))
    if STALE in manifest.extra:
        return StageState("stale", (str(manifest.extra[STALE]),))
    reasons: list[str] = []
    if manifest.code_version != stage.version:
        reasons.append("made by another version of draftmill")
    now = flat_config(ctx.config, stage.config_keys, stage.execution_keys)
    # A key that is newer than the stage had its default's effect then.
    defaults = flat_defaults(ctx.config, stage.config_keys, stage.execution_keys)
    for key in sorted(now.keys() | manifest.config.keys()):
        old, new = manifest.config.get(key, defaults.get(key)), now.get(key)
        if old != new:
            structured = isinstance(old, list | dict) and isinstance(new, list | dict)
            reasons.append(f"{key} changed" if structured else f"{key} changed: {_short(old)} -> {_short(new)}")
    for name in stage.inputs:
        if name in stale_inputs:
            reasons.append(f"{name} is to be redone")
            continue
        upstream = ctx.run.manifest(name)
        if upstream is None or upstream.digest != manifest.inputs.get(name):
            reasons.append(f"output of {name} changed")
    if not reasons and stage.outside is not None:
        for name, digest in stage.outside(ctx).items():
            if manifest.inputs.get(name) != digest:
                reasons.append(f"{name} changed")
    if not reasons:
        fault = ctx.run.output_fault(manifest, ctx.config.storage.verify)
        if fault is None and stage.unfinished is not None:
            fault = stage.unfinished(ctx)
        if fault is not None:
            reasons.append(fault)
    return StageState("stale", tuple(reasons)) if reasons else StageState("done")


def _short(value: Any) -> str:
    text = "unset" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def run_stage(stage: Stage, ctx: StageContext) -> tuple[Manifest, bool]:
    """Run `stage` unless its output is up to date; returns its manifest and whether it was reused."""
    state = stage_state(stage, ctx)
    if state.state == "done":
        log.info("%s: unchanged, reused", stage.name)
        return ctx.input(stage.name), True
    why = "" if state.state == "missing" else f" ({'; '.join(state.reasons[:3])})"
    log.info("%s: begins%s", stage.name, why)
    if ctx.lease is not None:
        ctx.lease.check()
        ctx.lease.announce(stage.name)
    if stage.before is not None:
        stage.before(ctx)
    inputs = {name: ctx.input(name).digest for name in stage.inputs}
    if stage.outside is not None:
        inputs |= stage.outside(ctx)
    began = datetime.datetime.now(datetime.UTC)
    clock = time.monotonic()
    result = stage.run(ctx)
    if ctx.lease is not None:
        ctx.lease.check()
    outputs = ctx.run.describe_outputs(result.outputs)
    manifest = Manifest(
        stage=stage.name,
        code_version=stage.version,
        config=flat_config(ctx.config, stage.config_keys, stage.execution_keys),
        inputs=inputs,
        outputs=outputs,
        digest=result.digest or digest_of({p: o["sha256"] for p, o in outputs.items()}),
        counts=result.counts,
        seeds=result.seeds,
        versions=package_versions(),
        git_revision=git_revision(),
        started=(began - datetime.timedelta(seconds=result.earlier_s)).isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - clock + result.earlier_s, 3),
        extra=result.extra | ({BESIDE_S: round(result.earlier_s, 3)} if result.earlier_s else {}),
    )
    ctx.run.write_manifest(manifest)
    log.info("%s: done in %.1f s", stage.name, manifest.seconds)
    return manifest, False


Timings = dict[str, dict[str, Any]]  # stage -> seconds, reused


def run_pipeline(
    config: Config, stages: list[Stage], after: Callable[[Timings], None] = lambda timings: None
) -> Timings:
    """Run `stages` in order on the run folder of `config`; `after` is called when each is done.

    Raises:
        UserError: something a person can mend; the run resumes from there.
    """
    run = RunFolder(config.run_dir, config.storage.options)
    refuse_foreign_folder(run)
    with terminated_cleanly():
        lease = Lease(run.store, config.storage.lease_timeout_s)
        with explained(run.url):
            lease.acquire()
        connected = is_connected()
        try:
            with _run_log(run), driving(run.url):
                return _run_stages(StageContext(config, run, lease), stages, after)
        except BaseException as error:
            _let_go(error)
            if (fault := ray_fault(error)) is not None:
                raise UserError(
                    f"Ray failed ({fault}); its logs are in /tmp/ray/session_latest/logs of the node. The same command"
                    " resumes from what is committed"
                ) from error
            raise
        finally:
            if not connected:
                disconnect()
            lease.release()


def _run_stages(ctx: StageContext, stages: list[Stage], after: Callable[[Timings], None]) -> Timings:
    with contextlib.ExitStack() as beside:
        for stage in stages:
            if stage.ahead is not None:
                beside.enter_context(stage.ahead(ctx))
        return _run_in_order(ctx, stages, after)


def _run_in_order(ctx: StageContext, stages: list[Stage], after: Callable[[Timings], None]) -> Timings:
    refuse_half_forgotten(ctx.run.store)
    _ = ctx.layers  # the target and its layers are checked before any work
    for stage in stages:
        if stage.check is not None:
            stage.check(ctx)
    removed = ctx.run.store.remove_temporary()
    if removed:
        log.info("removed %d unfinished files of a run that was cut off", removed)
    ctx.run.write_config(ctx.config)
    timings: Timings = {}
    for stage in stages:
        manifest, reused = run_stage(stage, ctx)
        timings[stage.name] = {"seconds": manifest.seconds, "reused": reused}
        if stage.after is not None:
            stage.after(ctx)
        after(timings)
    return timings


def _let_go(error: BaseException | None) -> None:
    """Free what the frames of a stopped stage hold: Ray's iterators must end before their cluster does."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("StreamingExecutor"):  # Ray Data's: one that outlives its cluster ends the process
            thread.join(timeout=15)


def refuse_foreign_folder(run: RunFolder) -> None:
    """A run cleans up after itself, so it must not live among other people's files.

    Raises:
        UserError: the folder holds something and is no run folder.
    """
    names = {*run.store.files(), *run.store.folders()} - {"logs", "tmp", "lease.json", "plan.json"}
    if not names:
        return
    try:
        ours = b"run_dir:" in run.store.read_bytes("config.yaml")
    except FileNotFoundError:
        ours = False
    if not ours:
        raise UserError(
            f"run_dir {run.url} holds other files ({', '.join(sorted(names)[:3])}) and no config.yaml of a run;"
            " give it a folder of its own"
        )


@contextlib.contextmanager
def terminated_cleanly() -> Iterator[None]:
    """SIGTERM ends the run as an interrupt does: the lease is released and committed work stays."""

    def stop(signum: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not cut the clean-up off
        raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def _run_log(run: RunFolder) -> Iterator[None]:
    """Copies log lines into `logs/` of the run folder."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
    name = f"logs/driver-{stamp}-{os.getpid()}.log"
    with explained(run.url):
        if run.store.is_local:
            path = Path(run.store.full(name))
            path.parent.mkdir(parents=True, exist_ok=True)
        else:
            path = Path(tempfile.gettempdir()) / f"draftmill-{os.getpid()}-{stamp}.log"
        handler = logging.FileHandler(path, encoding="utf-8")
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # a full disk is told once, by who writes
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(RedactingFilter())
    log.addHandler(handler)
    try:
        yield
    except BaseException as error:
        said = str(error) if isinstance(error, UserError) else repr(error)
        if isinstance(error, KeyboardInterrupt):
            said = "interrupted (Ctrl-C, SIGTERM or draftmill stop)"
        handler.handle(log.makeRecord(log.name, logging.ERROR, __file__, 0, f"stopped: {said}", (), None))
        raise
    finally:
        log.removeHandler(handler)
        with contextlib.suppress(OSError):  # a full disk
            handler.close()
        if not run.store.is_local:
            with contextlib.suppress(Exception):
                run.store.put(path, name)
