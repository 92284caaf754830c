"""What the checks look at, each thing read once and only when a check asks for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from app.captured import part_keys, recorded_shape
from app.checkpoint import check_checkpoint
from app.checkpoint_files import read_config, read_tensors
from app.config import Config
from app.doctor.finding import NotApplicable
from app.doctor.layers import Match, match_layers
from app.doctor.recompute import recompute
from app.doctor.replay import compare_orders
from app.draft_config import DraftConfig
from app.errors import UserError
from app.lint import Difference, canonical_name, errors_of
from app.parts import OTHER_INPUTS, PartEntry, committed_parts
from app.pipeline import STALE, StageContext
from app.pipelines.vocab import VocabMap, load_vocab
from app.runfolder import Manifest
from app.samples import Sample, SampleReader, conversation_ids, load_split
from app.storage import Store
from app.target import Renderer, TargetHead, TargetInfo, load_target_head, load_tokenizer
from app.train.data import cut
from app.train.state import read_weights

DRAFT = "export/draft"
PARTS_LOOKED_AT = 8
SAMPLES_LOOKED_AT = 24
ROWS_LOOKED_AT = 64  # states of a sample, in STRETCHES
STRETCHES = 4  # read at once each: an object store answers a request as slowly for one row as for many
SAMPLES_RECOMPUTED = 3
TOKENS_RECOMPUTED = 256  # of a sample at most
SAMPLES_REPLAYED = 8
TOKENS_REPLAYED = 512


@dataclass(frozen=True)
class Look:
    """One sample that is looked at: its part's entry, its Parquet row, and its place in the reader."""

    entry: PartEntry
    row: dict[str, Any]
    index: int

    @property
    def ids(self) -> list[int]:
        return [*self.row["prompt_ids"], *self.row["answer_ids"]]

    @property
    def temperature(self) -> float:
        return temperature_of(self.row)


class Facts:
    """A run as the doctor sees it. What is not there raises NotApplicable with the reason in words.

    Args:
        ctx: the run.
        stages: those whose output is looked at; what others left is of an older run.
    """

    def __init__(self, ctx: StageContext, stages: Sequence[str]) -> None:
        self.ctx, self._stages = ctx, frozenset(stages)
        self._samples: dict[int, Sample] = {}
        self._copies = ExitStack()

    def close(self) -> None:
        """Remove what was copied from an object store."""
        self._copies.close()

    @property
    def config(self) -> Config:
        return self.ctx.config

    @property
    def store(self) -> Store:
        return self.ctx.run.store

    @property
    def target(self) -> TargetInfo:
        return self.ctx.target

    def has(self, stage: str) -> bool:
        """Whether `stage` has run, and its output counts here."""
        return stage in self._stages and self.ctx.run.manifest(stage) is not None

    def manifest(self, stage: str) -> Manifest:
        """The manifest of `stage`; a bench counts only for the export that there is."""
        found = self.ctx.run.manifest(stage) if stage in self._stages else None
        if found is None:
            raise NotApplicable(f"{stage} has not run yet")
        export = self.ctx.run.manifest("export")
        if stage == "bench" and export is not None and found.inputs.get("export") != export.digest:
            raise NotApplicable("the bench is of an older export; run it again")
        return found

    @cached_property
    def entries(self) -> list[PartEntry]:
        """Every part of the generate stage, in order: as it finished, or so far as it goes by today's settings.

        Captures of other settings and of other rows are left out.

        Raises:
            NotApplicable: there is none.
            UserError: files of a finished stage are missing or cut.
        """
        if "generate" not in self._stages or self.ctx.run.manifest("ingest") is None:
            raise NotApplicable("no part is generated yet")
        done = self.ctx.run.manifest("generate")
        finished = done is not None and STALE not in done.extra
        keys = part_keys(self.ctx, recorded_shape(done) if done is not None and finished else None)
        valid, faults = committed_parts(self.store, keys, "size")
        damaged = [f"part {part} of generate: {why}" for part, why in faults.items() if why != OTHER_INPUTS]
        if damaged and finished:
            raise UserError(damaged[0])
        entries = [valid[part] for part in sorted(valid) if valid[part].samples]
        if not entries:
            raise NotApplicable("no part is generated yet from these rows and settings")
        return entries

    @cached_property
    def some_entries(self) -> list[PartEntry]:
        """A few parts, spread over the run."""
        return [self.entries[i] for i in spread(len(self.entries), PARTS_LOOKED_AT)]

    @cached_property
    def split(self) -> dict[str, str]:
        """Conversation id -> train, valid or holdout."""
        try:
            return load_split(self.store, self.entries, self.config)
        except UserError as error:
            raise NotApplicable(str(error)) from error

    @cached_property
    def reader(self) -> SampleReader:
        """The samples of `some_entries`."""
        every = dict.fromkeys(conversation_ids(self.store, self.some_entries), "looked at")
        return SampleReader(self.store, self.some_entries, every, ("looked at",))

    @cached_property
    def looks(self) -> list[Look]:
        """A few samples of every part in `some_entries`, spread over it; rows alone, no states."""
        entries = [entry for entry in self.some_entries for _ in range(entry.samples)]
        chosen = spread(len(self.reader), SAMPLES_LOOKED_AT)
        return [Look(entries[i], self.reader.row(i), i) for i in chosen]

    @property
    def own_share(self) -> float:
        """Of `looks`, those whose answer the target wrote anew."""
        return sum(look.row["use"] == "regenerate" for look in self.looks) / len(self.looks)

    @cached_property
    def captured(self) -> list[Look]:
        """Those of `looks` whose states are still there."""
        held = [look for look in self.looks if not look.entry.cleaned]
        if not held:
            raise NotApplicable("the states were cleaned (draftmill clean)")
        return held

    def sample(self, index: int) -> Sample:
        """Sample `index` of `reader` with ROWS_LOOKED_AT of its states at most, spread over it."""
        if index not in self._samples:
            self._samples[index] = self.reader.some_rows(index, ROWS_LOOKED_AT, STRETCHES)
        return self._samples[index]

    def holdout(self) -> SampleReader:
        """The held-out samples of the whole run, with states."""
        if any(entry.cleaned for entry in self.entries):
            raise NotApplicable("states were cleaned (draftmill clean)")
        reader = SampleReader(self.store, self.entries, self.split, ("holdout",))
        if not len(reader):
            raise NotApplicable("no conversation is held out")
        return reader

    @cached_property
    def head(self) -> TargetHead:
        """The target's embedding, final norm and output head."""
        try:
            return load_target_head(self.target)
        except UserError as error:
            raise NotApplicable(str(error)) from error

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        t = self.config.target
        return load_tokenizer(self.target.model, t.trust_remote_code, t.chat_template)

    def renderer(self, row: dict[str, Any]) -> Renderer:
        """The target's template with today's arguments of the run, and those that are the row's own."""
        stored, today = json.loads(row["template_kwargs"] or "{}"), self.config.target.template_kwargs
        manifest = self.ctx.run.manifest("generate")
        then = manifest.config.get("target.template_kwargs", today) if manifest is not None else today
        own = {key: value for key, value in stored.items() if key not in then or then[key] != value}
        try:
            return Renderer(self.tokenizer, {**today, **own})
        except UserError as error:
            raise NotApplicable(str(error)) from error

    @cached_property
    def vocab(self) -> VocabMap:
        """The map of the vocab stage."""
        self.manifest("vocab")
        return load_vocab(self.store)

    @cached_property
    def trained(self) -> DraftConfig:
        """The draft's shape as it was trained."""
        return DraftConfig(**self.manifest("train").extra["draft_config"])

    @cached_property
    def trained_weights(self) -> dict[str, Tensor]:
        """The fp32 weights that export takes, by root name."""
        self.manifest("train")
        return read_weights(self.store.sub("train"), self.config.export.checkpoint)[0]

    @cached_property
    def draft_folder(self) -> Path:
        """The exported draft's folder; of an object store a copy, until `close`."""
        self.manifest("export")
        return self._copies.enter_context(self.store.open_folder(DRAFT))

    @cached_property
    def exported_config(self) -> dict[str, Any]:
        """config.json of the exported draft as it is."""
        return read_config(self.draft_folder)

    @cached_property
    def exported(self) -> dict[str, Tensor]:
        """The exported tensors by root name."""
        return {canonical_name(n): t for n, t in read_tensors(self.draft_folder).items()}

    @cached_property
    def lint(self) -> list[Difference]:
        """The errors that lint finds in the exported draft."""
        folder = self.draft_folder
        try:
            embed: Tensor | None = self.head.embed_tokens
        except NotApplicable:
            embed = None
        layers = self.trained.aux_layer_ids if self.has("train") else None
        return errors_of(check_checkpoint(folder, self.target, embed, layers))

    def lint_of(self, *starts: str) -> list[Difference]:
        """The lint errors whose subject begins with one of `starts` ("config rope", "tensor d2t")."""
        return [d for d in self.lint if d.what.startswith(starts)]

    @cached_property
    def draft_config(self) -> DraftConfig:
        """The exported draft's shape as engines read it."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.exported.items()}
        try:
            return DraftConfig.from_hf_config(self.exported_config, shapes, self.target.num_layers)
        except UserError as error:
            raise NotApplicable(f"the exported config is none of a draft ({error})") from error

    @cached_property
    def draft_tensors(self) -> dict[str, Tensor]:
        """The exported tensors, the embedding included, for the shape of `draft_config`."""
        tensors = dict(self.exported)
        if "embed_tokens.weight" not in tensors:
            tensors["embed_tokens.weight"] = self.head.embed_tokens
        for name, (shape, _) in self.draft_config.tensor_shapes(embed_tokens=True).items():
            if name not in tensors or tuple(tensors[name].shape) != shape:
                raise NotApplicable(f"the exported {name} is missing or of another shape (A7)")
        return tensors

    @cached_property
    def orders(self) -> tuple[list[int], list[int]]:
        """`compare_orders` of the exported draft on a few held-out samples."""
        config, tensors, reader = self.draft_config, self.draft_tensors, self.holdout()
        samples = [_beginning(reader, i, TOKENS_REPLAYED) for i in range(min(len(reader), SAMPLES_REPLAYED))]
        return compare_orders(config, tensors, samples, self.config.evaluate.num_draft_tokens)

    @cached_property
    def recomputed(self) -> list[tuple[Sample, list[Tensor]]]:
        """Some short samples, cut to TOKENS_RECOMPUTED, with s_0 .. s_n [T-1, H] of each made anew by the target."""
        taught = [look for look in self.captured if look.row["teacher_rows"]]
        taught.sort(key=lambda look: look.row["num_tokens"])
        samples = [_beginning(self.reader, x.index, TOKENS_RECOMPUTED) for x in taught[:SAMPLES_RECOMPUTED]]
        if not samples:
            raise NotApplicable("no sample looked at has a teacher state")
        limit, remote = self.config.doctor.recompute_gib, self.config.target.trust_remote_code
        states = recompute(self.target, [s.token_ids for s in samples], limit, remote)
        return list(zip(samples, states, strict=True))

    @cached_property
    def matches(self) -> list[Match]:
        """For each of the three auxiliary states and the teacher's, which layer of the target it really is."""
        entry = self.captured[0].entry
        return match_layers(self.recomputed, [*entry.layers[:3], self.target.num_layers], self.head)


def _beginning(reader: SampleReader, index: int, tokens: int) -> Sample:
    """The first `tokens` tokens of a sample with their states, and no others read."""
    beginning: Sample = cut(reader.some_rows(index, tokens), tokens)
    return beginning


def temperature_of(row: dict[str, Any]) -> float:
    """At which the answer of a Parquet row was sampled; 0 is greedy."""
    return float(json.loads(row["sampling"] or "{}").get("temperature", 1.0))


def spread(count: int, most: int) -> list[int]:
    """Up to `most` of the numbers 0 .. count-1, evenly apart."""
    return torch.linspace(0, max(0, count - 1), min(count, most)).round().long().unique().tolist()
