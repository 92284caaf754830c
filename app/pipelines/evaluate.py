"""Evaluate: the acceptance length of the exported draft on the held-out conversations, before it is served."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from typing import Any

import torch

from app.captured import load_entries, require_states
from app.checkpoint import read_checkpoint
from app.errors import UserError
from app.pipeline import StageContext, StageResult
from app.samples import SampleReader, load_split
from app.target import load_target_head
from app.train.draft import Eagle3Draft
from app.train.evaluate import Acceptance, GreedyDraft, SampledDraft, evaluate, evaluate_sampled

log = logging.getLogger("draftmill")

# Sampling settings that leave the target's softmax as it is.
_PLAIN = {"top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}


def run(ctx: StageContext) -> StageResult:
    """Walk the held-out answers with the checkpoint as it will be served; writes `evaluate/evaluate.json`.

    Raises:
        UserError: no conversation is held out.
    """
    config = ctx.config
    entries = load_entries(ctx)
    split = load_split(ctx.run.store, entries, config)
    require_states(ctx, "evaluate", entries, split)
    reader = SampleReader(ctx.run.store, entries, split, ("holdout",))
    if not len(reader):
        raise UserError("evaluate: no conversation is held out; set evaluate.holdout above 0")
    draft = load_draft(ctx)
    acceptance = evaluate(
        (reader[i] for i in range(len(reader))),
        GreedyDraft(draft),
        config.evaluate.num_draft_tokens,
        config.evaluate.bootstrap,
        config.evaluate.holdout_seed,
    )
    counts = {**as_counts(acceptance), "sampled": _sampled(ctx, reader, draft)}
    ctx.run.store.write_json("evaluate/evaluate.json", counts)
    log.info(
        "evaluate: acceptance length %.3f (95 %% %.3f..%.3f) over %d held-out conversations",
        acceptance.length, acceptance.low, acceptance.high, acceptance.conversations,
    )  # fmt: skip
    return StageResult(
        outputs=["evaluate/evaluate.json"],
        counts=counts,
        seeds={"holdout": config.evaluate.holdout_seed},
    )


def _sampled(ctx: StageContext, reader: SampleReader, draft: Eagle3Draft) -> list[dict[str, Any]]:
    """Expected acceptance of both ways of drafting, by temperature of the held-out answers that were sampled."""
    by_temperature: dict[float, list[int]] = defaultdict(list)
    for i in range(len(reader)):
        temperature = plain_temperature(reader.row(i))
        if temperature is not None:
            by_temperature[temperature].append(i)
    config, found = ctx.config.evaluate, []
    for temperature, indices in sorted(by_temperature.items()):
        results = evaluate_sampled(
            (reader[i] for i in indices),
            SampledDraft(draft, load_target_head(ctx.target), temperature),
            config.num_draft_tokens,
            config.bootstrap,
            config.holdout_seed,
        )
        measured: dict[str, Any] = {drafting: as_counts(acceptance) for drafting, acceptance in results.items()}
        found.append({"temperature": temperature, **measured})
        log.info(
            "evaluate: at temperature %g, expected acceptance length %.3f with greedy drafting (vLLM's default), %.3f"
            " with draft_sample_method=probabilistic",
            temperature, results["greedy"].length, results["probabilistic"].length,
        )  # fmt: skip
    return found


def plain_temperature(row: dict[str, Any]) -> float | None:
    """Temperature of an answer that the target sampled from its whole softmax; None for every other answer."""
    sampling = json.loads(row["sampling"] or "{}")
    temperature = float(sampling.get("temperature", 0.0))
    cut = any(sampling.get(key, neutral) != neutral for key, neutral in _PLAIN.items())
    if row["use"] == "as_is" or temperature <= 0 or cut or sampling.get("top_k", 0) > 0:
        return None
    return temperature


def check(ctx: StageContext) -> None:
    """Raises UserError where nothing would be left to measure."""
    if ctx.config.evaluate.holdout == 0:
        raise UserError("evaluate.holdout is 0: nothing would be left to measure the draft on; set it above 0")


def load_draft(ctx: StageContext) -> Eagle3Draft:
    """The exported draft, with the target's embedding where the checkpoint leaves it out."""
    with ctx.run.store.open_folder("export/draft") as folder:
        config, tensors = read_checkpoint(folder)
    draft = Eagle3Draft(config)
    tensors.setdefault("embed_tokens.weight", load_target_head(ctx.target).embed_tokens)
    draft.load_exported(tensors)
    draft.check_loaded()
    if torch.cuda.is_available():
        draft = draft.cuda()
    return draft.eval()


def as_counts(acceptance: Acceptance) -> dict[str, Any]:
    """Plain data under the names the results use."""
    return {
        "drafting": acceptance.drafting,
        "acceptance_length": acceptance.length,
        "interval": [acceptance.low, acceptance.high],
        "acceptance_rate": acceptance.rate,
        "acceptance_per_position": acceptance.per_position,
        "interval_per_position": [list(ends) for ends in acceptance.position_intervals],
        "num_draft_tokens": acceptance.num_draft_tokens,
        "conversations": acceptance.conversations,
        "drafts": acceptance.drafts,
        "accepted": acceptance.accepted,
        "domains": {
            name: {
                "acceptance_length": d.length,
                "interval": [d.low, d.high],
                "acceptance_per_position": d.per_position,
                "interval_per_position": [list(ends) for ends in d.position_intervals],
                "conversations": d.conversations,
                "drafts": d.drafts,
            }
            for name, d in acceptance.by_domain.items()
        },
    }
