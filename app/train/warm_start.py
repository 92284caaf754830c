"""`train.init_from`: training starts from an earlier draft, ours or a published one, and keeps its vocabulary map.

The draft is read once, by the driver, and laid into the training folder (`initial.safetensors`, `initial.json`), where
every worker finds it; its digest is part of what the stages vocab and train were made from. Nothing is picked up that
the configuration does not name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.checkpoint import CONFIG_FILE, read_checkpoint
from app.clean import INITIAL
from app.config import TrainConfig, load_config
from app.draft_config import NORM_FLAGS, DraftConfig
from app.errors import UserError
from app.pipeline import StageContext
from app.runfolder import RunFolder, digest_of
from app.storage import Store
from app.target import TargetHead, load_target_head
from app.train.draft import Eagle3Draft
from app.train.state import read_weights

log = logging.getLogger("draftmill")

_WEIGHTS, _ABOUT = INITIAL  # in the training folder
_EMBEDDING = "embed_tokens.weight"
# Both must have the same: the target and the captured states say it.
_OF_THE_TARGET = ("hidden_size", "vocab_size", "target_hidden_size", "aux_layer_ids", *NORM_FLAGS)
# The draft's own: its weights were trained with them. The first four can be named in the configuration too.
_SHAPE_KEYS = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_OWN = (*_SHAPE_KEYS, "rms_norm_eps", "rope_theta", "rope_scaling")
_MENDED_BY = {"aux_layer_ids": "capture.layers", **{name: f"train.{name}" for name in NORM_FLAGS}}


@dataclass(frozen=True)
class InitialDraft:
    """A draft to start from."""

    config: DraftConfig
    tensors: dict[str, Tensor]  # by root name, fp32 or as stored; `d2t` with a reduced vocabulary
    digest: str  # of its content

    @property
    def kept_ids(self) -> Tensor:
        """Target ids of its vocabulary, ascending [Vd] int64."""
        rows = torch.arange(self.config.draft_vocab_size)
        return rows + self.tensors["d2t"].long() if self.config.has_vocab_map else rows


def read_draft(where: str, options: dict[str, Any], num_layers: int) -> InitialDraft:
    """The draft at `where`, a local path or fsspec URL: a run folder or a checkpoint in any layout we read.

    num_layers: of the target; settles layer ids that the checkpoint leaves out.

    Raises:
        UserError: there is none, or it does not fit its own config.
    """
    store = Store(where, options if "://" in where else {})
    if store.exists("config.yaml"):
        return _of_run(store)
    if not store.exists(CONFIG_FILE):
        raise UserError(
            f"train.init_from {where} is no draft: it holds neither {CONFIG_FILE} (a checkpoint) nor config.yaml (a run"
            " folder); of a hub model give the folder it was downloaded to"
        )
    with store.open_folder() as folder:
        config, tensors = read_checkpoint(folder, num_layers)
        files = sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin") or p.name == CONFIG_FILE)
        digest = digest_of([[p.name, Store(str(folder)).sha256(p.name)] for p in files])
    return InitialDraft(config, tensors, digest)


def _of_run(store: Store) -> InitialDraft:
    """The fp32 weights of the checkpoint that a finished run exports."""
    run = RunFolder(store.url, store.options)
    done = run.manifest("train")
    if done is None or "draft_config" not in done.extra:
        raise UserError(f"train.init_from {store.url}: this run has no finished training; give it time, or another")
    export = load_config(str(store.local("config.yaml")), []).export
    tensors, state = read_weights(store.sub("train"), export.checkpoint)
    return InitialDraft(DraftConfig(**done.extra["draft_config"]), tensors, digest_of([state["step"], state["sha256"]]))


def initial_draft(ctx: StageContext) -> InitialDraft | None:
    """The draft that `train.init_from` names, or None where it names none.

    Raises:
        UserError: there is no readable draft.
    """
    where = ctx.config.train.init_from
    return None if where is None else read_draft(where, ctx.config.storage.options, ctx.target.num_layers)


_digests: dict[str, str] = {}  # by place: asked for several times in one invocation


def outside(ctx: StageContext) -> dict[str, str]:
    """Digest of the draft to start from: an input of the stages vocab and train."""
    where = ctx.config.train.init_from
    if where is None:
        return {}
    if where not in _digests:
        initial = initial_draft(ctx)
        assert initial is not None
        _digests[where] = initial.digest
    return {"initial draft": _digests[where]}


def kept_vocabulary(ctx: StageContext) -> Tensor | None:
    """Target ids [Vd] that the vocab stage must keep, since the head's rows were trained with them; None: choose.

    Raises:
        UserError: the draft's vocabulary is not this target's.
    """
    initial, config = initial_draft(ctx), ctx.config
    if initial is None:
        return None
    if initial.config.vocab_size != ctx.target.vocab_size:
        raise UserError(_refusal("vocab_size", initial.config.vocab_size, ctx.target.vocab_size))
    size = initial.config.draft_vocab_size
    if config.train.new_vocabulary:
        log.warning("vocab: train.new_vocabulary is set: rows of the head whose token is new lose what they learnt")
        return None
    if config.vocab.size is not None and config.vocab.size != size:
        log.info("vocab: vocab.size %d gives way to the %d ids of train.init_from", config.vocab.size, size)
    return initial.kept_ids


def warm_config(fresh: DraftConfig, initial: DraftConfig, train: TrainConfig) -> DraftConfig:
    """The shape of a draft that goes on from `initial`, where a new one would get `fresh`.

    Raises:
        UserError: they cannot go together; it names the field, both values and what to set.
    """
    for name in (*_OF_THE_TARGET, "draft_vocab_size"):
        ours, its = getattr(fresh, name), getattr(initial, name)
        if ours != its:
            raise UserError(_refusal(name, its, ours))
    for name in _SHAPE_KEYS:
        wanted, its = getattr(train, name), getattr(initial, name)
        if wanted is not None and wanted != its:
            raise UserError(f"train.init_from: its {name} is {its} and train.{name} is {wanted}; leave that key out")
    return DraftConfig(**{**fresh.model_dump(), **{name: getattr(initial, name) for name in _OWN}})


def _refusal(name: str, its: Any, ours: Any) -> str:
    its, ours = (list(v) if isinstance(v, tuple) else v for v in (its, ours))
    said = f"train.init_from: the draft's {name} is {its} and this run's is {ours}; "
    if name in _MENDED_BY:
        return f"{said}set {_MENDED_BY[name]}={str(its).lower() if isinstance(its, bool) else its}"
    if name == "draft_vocab_size":
        return f"{said}set vocab.size={its}: a new vocabulary must be as large as the old one"
    return f"{said}it was made for another target"


def place(initial: InitialDraft, store: Store) -> None:
    """Lay `initial` into training folder `store`, where workers find it; the embedding is the target's own."""
    tensors = {n: t.contiguous() for n, t in initial.tensors.items() if n != _EMBEDDING}
    with store.staged(_WEIGHTS) as path:
        save_file(tensors, path)
    store.write_json(_ABOUT, {"digest": initial.digest, "config": initial.config.model_dump(mode="json")})


def is_placed(store: Store) -> bool:
    """Whether training folder `store` holds what `place` lays down."""
    return store.exists(_WEIGHTS) and store.exists(_ABOUT)


def placed(store: Store) -> InitialDraft:
    """What `place` laid down.

    Raises:
        UserError: it is gone.
    """
    about = store.read_json(_ABOUT)
    if about is None or not is_placed(store):
        raise UserError(f"{store.url}: {_WEIGHTS} is gone; run the train stage again")
    return InitialDraft(DraftConfig(**about["config"]), load_file(store.local(_WEIGHTS)), about["digest"])


def warm_draft(initial: InitialDraft, shape: DraftConfig, head: TargetHead, kept_ids: Tensor) -> Eagle3Draft:
    """A draft of `shape` with the weights of `initial`, speaking `kept_ids` [Vd]; where these are not its own the
    head's rows of shared tokens move along and new tokens take the target's rows."""
    draft = Eagle3Draft(shape)
    draft.load_exported({**initial.tensors, _EMBEDDING: head.embed_tokens})
    if not torch.equal(draft.kept_ids, kept_ids):
        shared = int(torch.isin(kept_ids, draft.kept_ids).sum())
        log.warning("train: a new vocabulary: %d of %d tokens keep their rows of the head", shared, len(kept_ids))
        draft.remap_vocabulary(kept_ids, head)
    draft.check_loaded()
    return draft


def check(ctx: StageContext, fresh: Callable[[int], DraftConfig]) -> None:
    """Before a run begins: whether its draft can go on from `train.init_from`, and what differs and does not matter.

    fresh: the shape of a new draft by the size of its vocabulary.

    Raises:
        UserError: it cannot; see `warm_config`.
    """
    initial, config = initial_draft(ctx), ctx.config
    if initial is None:
        if config.train.new_vocabulary:
            raise UserError("train.new_vocabulary is set without train.init_from; every first vocabulary is new")
        return
    size = initial.config.draft_vocab_size
    if config.train.new_vocabulary and config.vocab.size is not None:
        size = min(config.vocab.size, ctx.target.vocab_size)
    warm_config(fresh(size), initial.config, config.train)
    embedding = initial.tensors.get(_EMBEDDING)
    ours = load_target_head(ctx.target).embed_tokens
    if embedding is not None and not torch.equal(embedding, ours.to(embedding.dtype)):
        log.warning("train: the embedding in %s is not the target's; the target's is used", config.train.init_from)
