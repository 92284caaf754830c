"""What a Ray Train worker runs: build the job from the run folder, train, report."""

from __future__ import annotations

import os
from typing import Any

import torch

from app.cluster import log_in_worker
from app.config import TrainConfig, parse_config
from app.draft_config import DraftConfig
from app.parts import PartEntry
from app.pipelines.vocab import load_vocab
from app.record import record_of, refuse_mismatch
from app.samples import SampleReader, load_split
from app.storage import Store
from app.target import TargetHead, TargetInfo, load_target_head
from app.train.draft import Eagle3Draft
from app.train.ranks import Ranks
from app.train.trainer import Trainer, TrainJob

FOLDER = "train"  # of the run
SUMMARY = "summary.json"  # in FOLDER, written at the end


def train_loop_per_worker(config: dict[str, Any]) -> None:
    """One worker of `ray.train.torch.TorchTrainer`.

    config holds plain, picklable values:
        run_url, run_options: the run folder's Store
        config: the run's Config as JSON
        target: TargetInfo as JSON
        entries: list[PartEntry], the committed parts of the generate stage

    Reads `vocab/vocab.safetensors`; writes checkpoints, `metrics.jsonl` and `summary.json` under `train/`.
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
    )
    report(summary)


def run_worker(
    store: Store, config: dict[str, Any], target: dict[str, Any], entries: list[PartEntry],
    device: torch.device, on_validation: Any = lambda values: None,
) -> dict[str, Any]:  # fmt: skip
    """The worker without Ray: same arguments, in an existing process group or none."""
    settings = parse_config(config, "the run's configuration")
    info = TargetInfo.from_json(target)
    if device.type == "cpu":
        torch.set_num_threads(min(settings.train.cpus_per_worker, os.cpu_count() or 1))
    vocab, head = load_vocab(store), load_target_head(info)
    refuse_mismatch(entries, record_of(settings, info))
    split = load_split(store, entries, settings)
    shape = draft_config(info, settings.train, entries[0].layers, len(vocab.kept_ids))
    draft = new_draft(shape, head, vocab.kept_ids, settings.train.seed)
    ranks = Ranks()
    trainer = Trainer(
        TrainJob(
            draft=draft,
            head=head,
            train=SampleReader(store, entries, split, ("train",)),
            valid=SampleReader(store, entries, split, ("valid",)),
            config=settings.train,
            store=store.sub(FOLDER),
            num_draft_tokens=settings.evaluate.num_draft_tokens,
            device=device,
            on_validation=on_validation,
        ),
        ranks,
    )
    summary = trainer.run()
    if ranks.leads:
        store.write_json(f"{FOLDER}/{SUMMARY}", summary)
    return summary


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
        norm_before_residual=train.norm_before_residual,
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
