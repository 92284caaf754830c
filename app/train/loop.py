"""What a Ray Train worker runs: build the job from the run folder, train, report."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from app.cluster import log_in_worker
from app.config import Config, TrainConfig, parse_config
from app.draft_config import NORM_FLAGS, DraftConfig
from app.parts import PartEntry
from app.pipelines.vocab import load_vocab
from app.record import record_of, refuse_mismatch
from app.runfolder import flat_config
from app.samples import SampleReader, load_split
from app.storage import Store
from app.target import TargetHead, TargetInfo, load_target_head
from app.train.draft import Eagle3Draft
from app.train.feed import Feed
from app.train.guards import AGREEMENT_SAMPLES, INT4_AGREEMENT, Agreement, agreement, agreement_words, require_agreement
from app.train.outside import outside_vocabulary
from app.train.pulse import Pulse, own_name
from app.train.ranks import Ranks
from app.train.trackers import RayMetrics, Tracker, open_trackers
from app.train.trainer import Trainer, TrainJob
from app.train.warm_start import InitialDraft, placed, warm_config, warm_draft

log = logging.getLogger("draftmill")

FOLDER = "train"  # of the run
SUMMARY = "summary.json"  # in FOLDER, written at the end


@dataclass(frozen=True)
class Place:
    """Where a training lives in the run folder, and what share of the training conversations it sees."""

    folder: str = FOLDER
    share: float = 1.0


def train_loop_per_worker(config: dict[str, Any]) -> None:
    """One worker of `ray.train.torch.TorchTrainer`.

    config holds plain, picklable values:
        run_url, run_options: the run folder's Store
        config: the run's Config as JSON
        target: TargetInfo as JSON
        entries: list[PartEntry], the committed parts of the generate stage; None: those of the sealed windows
        place: Place

    Reads `vocab/vocab.safetensors`; writes checkpoints, `metrics.jsonl` and `summary.json` under the place's folder.
    Continues from the newest checkpoint by itself, so a worker group that Ray starts again loses little.

    Raises:
        UserError: training broke, or the data does not fit; see `Trainer`.
    """
    import ray.train
    import ray.train.torch

    log_in_worker()

    def report(values: dict[str, Any]) -> None:
        ray.train.report({k: v for k, v in values.items() if isinstance(v, int | float)})

    device = ray.train.torch.get_device()
    summary = run_worker(
        Store(config["run_url"], config["run_options"]),
        config["config"],
        config["target"],
        config["entries"],
        device[0] if isinstance(device, list) else device,
        report,
        config["place"],
        [RayMetrics(config["run_url"])],
    )
    report(summary)


def run_worker(
    store: Store, config: dict[str, Any], target: dict[str, Any], entries: list[PartEntry] | None,
    device: torch.device, on_validation: Any = lambda values: None, place: Place = Place(),
    trackers: Iterable[Tracker] = (),
) -> dict[str, Any]:  # fmt: skip
    """The worker without Ray: same arguments, in an existing process group or none.

    trackers: of the leading rank, beside those that the configuration names.
    """
    settings = parse_config(config, "the run's configuration")
    info = TargetInfo.from_json(target)
    if device.type == "cpu":
        torch.set_num_threads(min(settings.train.cpus_per_worker, os.cpu_count() or 1))
    vocab, head = load_vocab(store), load_target_head(info)
    ranks, feed = Ranks(), None
    split = nested(load_split(store, entries or [], settings), place.share)
    if entries is None:
        feed = Feed.begin(store, split, lambda e: refuse_mismatch(e, record_of(settings, info)), ranks)
        entries, train, valid = feed.entries, feed.train, feed.valid
    else:
        refuse_mismatch(entries, record_of(settings, info))
        train, valid = (SampleReader(store, entries, split, (name,)) for name in ("train", "valid"))
    own = store.sub(place.folder)
    shape = draft_config(info, settings.train, entries[0].layers, len(vocab.kept_ids))
    initial = placed(own) if settings.train.init_from is not None else None
    limit_s = 60 * settings.train.stall_minutes
    pulse = Pulse(store, place.folder, limit_s, ranks.rank, ranks.gather(own_name()))
    trainer = Trainer(
        TrainJob(
            draft=first_draft(shape, settings.train, initial, head, vocab.kept_ids),
            head=head,
            train=train,
            valid=valid,
            config=settings.train,
            store=own,
            num_draft_tokens=settings.evaluate.num_draft_tokens,
            device=device,
            on_validation=on_validation,
            check=teacher_check(train, head, least_agreement(settings.train, entries)),
            trackers=lambda step: [*_named_trackers(settings, store.url, own, step), *trackers, pulse],
            pulse=pulse.beat,
            initial_digest=None if initial is None else initial.digest,
            windows=feed,
            longest=settings.generate.max_length if feed is not None else None,
        ),
        ranks,
    )
    with pulse:
        summary = trainer.run()
    if ranks.leads and not trainer.stopped:
        temperature = settings.train.temperature
        summary["outside_vocabulary"] = outside_vocabulary(trainer.loss.teacher, train, temperature)
        own.write_json(SUMMARY, summary)
    return summary


def _named_trackers(settings: Config, run_url: str, own: Store, resume_step: int) -> list[Tracker]:
    recorded = flat_config(settings, ("train", "target.model", "vocab.size"))
    return open_trackers(settings.train.trackers, run_url, own, recorded, resume_step)


def nested(split: dict[str, str], share: float) -> dict[str, str]:
    """`split` with only a share of its training conversations: those of the lowest hashes, so that a smaller share is
    a part of every larger one."""
    train = [c for c, name in split.items() if name == "train"]
    train.sort(key=lambda c: hashlib.sha256(f"nested:{c}".encode()).digest())
    kept = set(train[: max(1, round(share * len(train)))])
    return {c: name for c, name in split.items() if name != "train" or c in kept}


def least_agreement(train: TrainConfig, entries: Iterable[PartEntry]) -> float:
    """The threshold of the check before step 1: lower where int4 itself changes first choices."""
    coarse = any(entry.codec == "int4" for entry in entries)
    return min(train.min_teacher_agreement, INT4_AGREEMENT) if coarse else train.min_teacher_agreement


def teacher_check(train: SampleReader, head: TargetHead, least: float) -> Callable[[Ranks], dict[str, Any]]:
    """The check before step 1: do the stored states give the tokens that the target emitted? Each rank looks at its
    share of a few regenerated answers, spread over all parts."""

    def check(ranks: Ranks) -> dict[str, Any]:
        if least == 0:
            return {}
        stride = max(1, len(train) // (4 * AGREEMENT_SAMPLES))  # some are not regenerated
        mine = range(ranks.rank * stride, len(train), ranks.world * stride)
        rows = _regenerated(train, mine, AGREEMENT_SAMPLES // ranks.world + 1)
        found = sum(ranks.gather(agreement(head, train, rows)), Agreement())
        numbers = require_agreement(found, least)
        if ranks.leads:
            log.info("training: %s", agreement_words(numbers))
        return numbers

    return check


def _regenerated(train: SampleReader, indices: Iterable[int], most: int) -> list[tuple[int, float]]:
    """Indices of up to `most` answers that the target gave itself, with their temperatures."""
    rows: list[tuple[int, float]] = []
    for i in indices:
        row = train.row(i)
        if row["use"] == "regenerate":
            rows.append((i, float(json.loads(row["sampling"]).get("temperature", 1.0))))
        if len(rows) == most:
            break
    return rows


def first_draft(
    shape: DraftConfig, train: TrainConfig, initial: InitialDraft | None, head: TargetHead, kept_ids: torch.Tensor
) -> Eagle3Draft:
    """The draft of step 0: untrained, or `initial` going on."""
    if initial is None:
        return new_draft(shape, head, kept_ids, train.seed)
    return warm_draft(initial, warm_config(shape, initial.config, train), head, kept_ids)


def draft_config(target: TargetInfo, train: TrainConfig, layers: list[int], draft_vocab_size: int) -> DraftConfig:
    """The draft's shape: the target's own where the configuration names nothing else.

    `layers` are the captured auxiliary ids k, then n for the teacher's state.
    """
    heads = train.num_attention_heads or target.num_attention_heads
    first, second, third = layers[:3]
    return DraftConfig(
        hidden_size=target.hidden_size,
        intermediate_size=train.intermediate_size or target.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=train.num_key_value_heads or min(target.num_key_value_heads, heads),
        head_dim=train.head_dim or target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
        rope_theta=target.rope_theta,
        rope_scaling=target.rope_scaling,
        max_position_embeddings=target.max_position_embeddings,
        aux_layer_ids=(first, second, third),
        **{name: getattr(train, name) for name in NORM_FLAGS},
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_ids or None,
        pad_token_id=target.pad_token_id,
    )


def new_draft(config: DraftConfig, head: TargetHead, kept_ids: torch.Tensor, seed: int) -> Eagle3Draft:
    """An untrained draft, the same on every worker."""
    torch.manual_seed(seed)
    draft = Eagle3Draft(config)
    draft.init_from_target(head, kept_ids)
    return draft
