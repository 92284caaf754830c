"""Checkpoints of a training run: all or nothing, the newest whole one wins.

checkpoints/step-00000120/weights.safetensors     fp32 masters by checkpoint name, d2t, t2d; no embedding
checkpoints/step-00000120/optimizer.safetensors   fp32 moments, random states
checkpoints/step-00000120/state.json              written last: without it the folder does not count
best/...                                          weights of the best validation, the same way
metrics.jsonl                                     one JSON object per line
stop.json                                         there while a running training is asked to save and end
"""

from __future__ import annotations

import json
import logging
import re
import signal
import time
from dataclasses import dataclass
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.draft_config import DraftConfig
from app.errors import UserError
from app.runfolder import sealed, unsealed
from app.storage import Store, file_sha256
from app.train.draft import Eagle3Draft
from app.train.eight_bit import MOMENTS, EightBitAdamW
from app.train.sharding import full, like

log = logging.getLogger("draftmill")

FOLDER = "checkpoints"
_STEP = re.compile(r"step-\d{8}")
BEST = "best"


@dataclass(frozen=True)
class SavedState:
    """What `load_latest` found."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    meta: dict[str, Any]


def save_state(
    store: Store,
    step: int,
    weights: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    meta: dict[str, Any],
    keep: int,
) -> None:
    """Commit a checkpoint after `step` steps, then drop all but the newest `keep`."""
    folder = f"{FOLDER}/step-{step:08d}"
    _commit(store, folder, {"weights": weights, "optimizer": optimizer}, {**meta, "step": step})
    for old in [name for name in store.folders(FOLDER) if name <= f"step-{step:08d}"][:-keep]:
        store.delete(f"{FOLDER}/{old}/state.json")
        store.delete(f"{FOLDER}/{old}")


def save_best(store: Store, weights: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Keep `weights` as those of the best validation so far."""
    _commit(store, BEST, {"weights": weights}, meta)


def has_best(store: Store) -> bool:
    """Whether `save_best` once ended well: one that was killed leaves no best."""
    return _meta(store, BEST, ("weights",)) is not None


def load_latest(store: Store, fingerprint: str) -> SavedState | None:
    """The newest whole checkpoint or None; one of other data or settings (`fingerprint`) is not taken."""
    for folder in _checkpoints(store):
        meta = _meta(store, folder, ("weights", "optimizer"))
        if meta is None or not {"fingerprint", "step"} <= meta.keys() or folder != f"{FOLDER}/step-{meta['step']:08d}":
            continue
        if meta["fingerprint"] != fingerprint:
            log.warning("training: %s/%s was made with other data or settings and is not used", store.url, folder)
            continue
        try:
            return SavedState(_read(store, folder, "weights", meta), _read(store, folder, "optimizer", meta), meta)
        except (OSError, ValueError, SafetensorError) as error:
            log.warning(
                "training: checkpoint %s/%s cannot be read (%s); taking an older one",
                store.url,
                folder,
                error,
            )
    return None


def read_weights(store: Store, which: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights (fp32) and state of the "last" or "best" checkpoint in training folder `store`.

    Raises:
        UserError: there is none, or it is damaged.
    """
    for folder in [BEST, *_checkpoints(store)] if which == "best" else _checkpoints(store):
        meta = _meta(store, folder, ("weights",))
        if meta is None:
            if folder == BEST and store.exists(BEST):
                raise UserError(f"{store.url}: the best checkpoint is damaged; remove {store.url} and train again")
            continue
        try:
            return _read(store, folder, "weights", meta), meta
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(
                f"{store.url}: {error}; run again with storage.verify=checksum, which trains on from a whole checkpoint"
            ) from error
    raise UserError(f"{store.url} holds no finished checkpoint; run the train stage")


def load_draft_state(config: DraftConfig, weights: dict[str, Tensor], embed_tokens: Tensor) -> Eagle3Draft:
    """A draft from `read_weights` and the target's embedding [V, H]."""
    draft = Eagle3Draft(config)
    draft.load_exported({**weights, "embed_tokens.weight": embed_tokens})
    draft.check_loaded()
    return draft


def optimizer_tensors(draft: Eagle3Draft, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as named tensors `<parameter>/<key>`; keys exp_avg, exp_avg_sq, step."""
    found: dict[str, Tensor] = {}
    for name, p in draft.named_parameters():
        state = optimizer.tensors(p) if isinstance(optimizer, EightBitAdamW) else optimizer.state[p]
        found |= {f"{name}/{key}": full(value.detach()).clone() for key, value in state.items()}
    return found


def restore_optimizer(draft: Eagle3Draft, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put `optimizer_tensors` back, in the precision that `optimizer` keeps."""
    for name, p in draft.named_parameters():
        if f"{name}/step" not in tensors:  # every step so far was skipped
            continue
        if isinstance(optimizer, EightBitAdamW):
            optimizer.load(p, {key: tensors[f"{name}/{key}"] for key in (*MOMENTS, "step")})
            continue
        for key in MOMENTS:
            optimizer.state[p][key] = like(tensors[f"{name}/{key}"], p)
        step = tensors[f"{name}/step"]
        optimizer.state[p]["step"] = step.to(p.device) if p.is_cuda else step


class Metrics:
    """`metrics.jsonl` of a training run; appended at once in a local folder, else with checkpoints."""

    PATH = "metrics.jsonl"

    def __init__(self, store: Store, resume_step: int) -> None:
        """Lines after `resume_step` belong to steps that will be done again and are dropped."""
        self.store, self.lines = store, list[str]()
        if resume_step and not store.exists(self.PATH):
            log.warning("training: %s/%s is gone; the report will lack what it held", store.url, self.PATH)
        if store.exists(self.PATH):
            for line in store.read_bytes(self.PATH).decode(errors="replace").splitlines():
                try:
                    if json.loads(line)["step"] <= resume_step:
                        self.lines.append(line)
                except (ValueError, KeyError, TypeError):
                    continue  # the last line of a killed run may be cut
        self.flush()

    def write(self, values: dict[str, Any]) -> None:
        self.lines.append(json.dumps(values))
        if self.store.is_local:
            with open(self.store.full(self.PATH), "a", encoding="utf-8") as handle:
                handle.write(self.lines[-1] + "\n")

    def flush(self) -> None:
        self.store.write_bytes(self.PATH, "".join(line + "\n" for line in self.lines).encode())


class StopRequest:
    """Whether this training is to save and end: SIGTERM of this process, or the file `stop.json` in its folder.

    A driver writes the file (`ask_to_stop`), since Ray's workers get no signal; the leading rank removes it when the
    checkpoint is there. A context manager: the signal's handler is ours only inside.
    """

    PATH = "stop.json"

    def __init__(self, store: Store) -> None:
        self.store = store
        self._every = 0.5 if store.is_local else 5.0  # seconds between two looks at the file
        self._signalled, self._next, self._previous = False, 0.0, None

    def __enter__(self) -> Self:
        try:
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)  # type: ignore[assignment]
        except ValueError:  # not the main thread, as in Ray's workers
            self._previous = None
        return self

    def __exit__(self, *error: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)

    def _on_signal(self, number: int, frame: Any) -> None:
        self._signalled = True

    def asked(self, looks: bool) -> bool:
        """Whether somebody asked; only a rank that `looks` reads the folder, now and then."""
        if looks and not self._signalled and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every
            self._signalled = self.store.exists(self.PATH)
        return self._signalled

    def done(self, step: int, total_steps: int, leads: bool) -> None:
        """The checkpoint is there."""
        if leads:
            log.info("training: stopped at step %d of %d as asked; the same command goes on there", step, total_steps)
            self.store.delete(self.PATH)


def ask_to_stop(store: Store, patience_s: float) -> bool:
    """Have the training in `store` save and end; whether it did within `patience_s` seconds."""
    if not store.exists(Metrics.PATH):
        return False  # it has not begun
    store.write_json(StopRequest.PATH, {})
    deadline = time.monotonic() + patience_s
    while store.exists(StopRequest.PATH) and not _is_finished(store):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _is_finished(store: Store) -> bool:
    """Whether the newest checkpoint is that of the last step: nobody looks at a request any more."""
    newest = next((_meta(store, folder, ("weights",)) for folder in _checkpoints(store)), None)
    return newest is not None and newest.get("step") == newest.get("total_steps")


def _checkpoints(store: Store) -> list[str]:
    """Folders of checkpoints, the newest first; others that people put there are none."""
    return [f"{FOLDER}/{name}" for name in sorted(store.folders(FOLDER), reverse=True) if _STEP.fullmatch(name)]


def _commit(store: Store, folder: str, files: dict[str, dict[str, Tensor]], meta: dict[str, Any]) -> None:
    store.delete(f"{folder}/state.json")
    sizes, digests = {}, {}
    for name, tensors in files.items():
        path = f"{folder}/{name}.safetensors"
        with store.staged(path) as local:
            save_file({key: t.detach().cpu().contiguous() for key, t in tensors.items()}, local)
            sizes[name], digests[name] = local.stat().st_size, file_sha256(local)
        if store.size(path) != sizes[name]:
            raise UserError(f"{store.url}/{path} was not written whole; is the storage full?")
    store.write_json(f"{folder}/state.json", sealed({**meta, "sizes": sizes, "sha256": digests}))


def _meta(store: Store, folder: str, names: tuple[str, ...]) -> dict[str, Any] | None:
    """`state.json` of a checkpoint with files `names`; None where it is absent, damaged or does not describe them."""
    meta = unsealed(store.read_json(f"{folder}/state.json"))
    if meta is None:
        return None
    tables = [meta.get("sizes"), meta.get("sha256")]
    return meta if all(isinstance(t, dict) and set(names) <= t.keys() for t in tables) else None


def _read(store: Store, folder: str, name: str, meta: dict[str, Any]) -> dict[str, Tensor]:
    path = f"{folder}/{name}.safetensors"
    if store.size(path) != meta["sizes"][name]:
        raise ValueError(f"{path} has another size than when it was written")
    if file_sha256(store.local(path)) != meta["sha256"][name]:
        raise ValueError(f"{path} does not match its checksum")
    return load_file(store.local(path))
