"""Vocab: count the supervised tokens of the training split and choose the ids the draft can say."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from app.captured import load_entries
from app.errors import UserError
from app.parts import PARTS, PartEntry
from app.pipeline import StageContext, StageResult
from app.samples import load_split
from app.storage import Store
from app.target import load_tokenizer
from app.train.warm_start import kept_vocabulary
from app.windows import entries_of, windows_of

log = logging.getLogger("draftmill")

VOCAB_FILE = "vocab/vocab.safetensors"
_BYTE_FALLBACK = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_MARKUP = re.compile(r"[<\[][/|]*\w*(think|tool|function)\w*[|]*[>\]]", re.IGNORECASE)


@dataclass(frozen=True)
class VocabMap:
    """The target ids a draft can say (CONTRACTS section 4). Vd draft ids, V target ids."""

    kept_ids: Tensor  # [Vd] int64, strictly ascending target ids
    vocab_size: int  # V

    def __post_init__(self) -> None:
        ids = self.kept_ids
        ascending = ids.dtype == torch.int64 and bool((ids[1:] > ids[:-1]).all())
        if not len(ids) or not ascending or int(ids[0]) < 0 or int(ids[-1]) >= self.vocab_size:
            raise UserError(f"kept ids must ascend strictly within 0..{self.vocab_size - 1}; rebuild the map")

    @property
    def d2t(self) -> Tensor:
        """Offsets [Vd] int64: target id = i + d2t[i]."""
        return self.kept_ids - torch.arange(len(self.kept_ids))

    @property
    def t2d(self) -> Tensor:
        """[V] bool, true at the kept ids."""
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[self.kept_ids] = True
        return mask

    @property
    def is_full(self) -> bool:
        """True where the draft speaks the target's whole vocabulary, so that no map is exported."""
        return len(self.kept_ids) == self.vocab_size

    @classmethod
    def from_d2t(cls, d2t: Tensor, vocab_size: int) -> VocabMap:
        """The map of a trained draft's offsets [Vd]; a draft keeps the map its head was trained with."""
        return cls(d2t.long() + torch.arange(len(d2t)), vocab_size)

    def save(self, path: Path) -> None:
        """Write `kept_ids`, `d2t` and `t2d` as safetensors."""
        save_file({"kept_ids": self.kept_ids, "d2t": self.d2t, "t2d": self.t2d}, path)

    @classmethod
    def load(cls, path: Path) -> VocabMap:
        """Read what `save` wrote.

        Raises:
            UserError: the parts of the file contradict each other.
        """
        tensors = load_file(path)
        found = cls(tensors["kept_ids"], len(tensors["t2d"]))
        if not torch.equal(found.d2t, tensors["d2t"]) or not torch.equal(found.t2d, tensors["t2d"]):
            raise UserError(f"{path}: kept_ids, d2t and t2d contradict each other; run the vocab stage again")
        return found


def run(ctx: StageContext) -> StageResult:
    """Write `vocab/vocab.safetensors` and count what the map covers.

    Raises:
        UserError: nothing is supervised, or the draft vocabulary cannot hold the tokens that must be kept.
    """
    config, target, store = ctx.config, ctx.target, ctx.run.store
    entries = load_entries(ctx)
    split = load_split(store, entries, config)
    windows = windows_of(store, config, entries)
    first = entries_of(store, windows.sealed[0]) if windows is not None else entries
    counted = _count_parts(store, first, split, target.vocab_size)
    vocab, keep = _choose(ctx, counted["train"])
    others = [e for e in entries if e.part not in {f.part for f in first}]
    more = _count_parts(store, others, split, target.vocab_size)
    counts = {name: count + more[name] for name, count in counted.items()}
    size = len(vocab.kept_ids)
    shares = {name: coverage(count, vocab.kept_ids) for name, count in counts.items()}
    log.info(
        "vocab: %d of %d ids kept; supervised tokens covered: %s",
        size,
        target.vocab_size,
        ", ".join(f"{name} {100 * share:.2f} %" for name, share in shares.items() if share is not None),
    )
    held_out = shares["holdout"] if shares["holdout"] is not None else shares["valid"]
    if held_out is not None and held_out < 0.95:
        seen = int((counts["train"] > 0).sum())
        log.warning(
            "vocab: %.1f %% of the held-out tokens cannot be drafted; %s",
            100 - 100 * held_out,
            "raise vocab.size" if seen > size else f"bring more prompts (the answers so far use {seen} tokens)",
        )
    with store.staged(VOCAB_FILE) as path:
        vocab.save(path)
    return StageResult(
        outputs=[VOCAB_FILE],
        counts={
            "target_vocab_size": target.vocab_size,
            "draft_vocab_size": size,
            "always_kept": sum(1 for i in keep if i < target.tokenizer_len),
            "distinct_train_tokens": int((counts["train"] > 0).sum()),
            "supervised_tokens": {name: int(count.sum()) for name, count in counts.items()},
            "coverage": shares,
        },
        extra={} if windows is None else {"counted_from": [e.part for e in first]},
    )


def freeze(ctx: StageContext, entries: list[PartEntry]) -> None:
    """Write the map that the stage will choose when its turn comes: of `entries`, the first sealed window, alone.

    Raises:
        UserError: as `run`.
    """
    store = ctx.run.store
    split = load_split(store, entries, ctx.config)
    vocab, _ = _choose(ctx, _count_parts(store, entries, split, ctx.target.vocab_size)["train"])
    log.info("vocab: %d ids kept, counted from the first %d parts", len(vocab.kept_ids), len(entries))
    with store.staged(VOCAB_FILE) as path:
        vocab.save(path)


def _choose(ctx: StageContext, counts: Tensor) -> tuple[VocabMap, set[int]]:
    """The map by counts [V] of the training split, or that of the draft to go on from; and the ids always kept.

    Raises:
        UserError: nothing is supervised, or the draft vocabulary cannot hold the tokens that must be kept.
    """
    config, target = ctx.config, ctx.target
    if not int(counts.sum()):
        raise UserError("vocab: the training split has no supervised token; look at the loss masks")
    size = _draft_vocab_size(config.vocab.size, target.vocab_size, target.tokenizer_len)
    tokenizer = load_tokenizer(target.model, config.target.trust_remote_code, config.target.chat_template)
    keep = always_keep_ids(tokenizer) | set(target.eos_token_ids)
    kept = kept_vocabulary(ctx)
    if kept is not None:
        return VocabMap(kept, target.vocab_size), keep
    return build_vocab_map(counts, size, keep, target.tokenizer_len), keep


def load_vocab(store: Store) -> VocabMap:
    """The map of a run's finished vocab stage."""
    return VocabMap.load(store.local(VOCAB_FILE))


def count_tokens(token_ids: Tensor, loss_mask: Tensor, vocab_size: int) -> Tensor:
    """How often each target id is supervised: token_ids [N] int, loss_mask [N] bool -> [V] int64.

    Raises:
        UserError: an id is not one of the target's V.
    """
    ids = token_ids[loss_mask].long()
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        raise UserError(
            f"token ids {int(ids.min())}..{int(ids.max())} do not fit the target's {vocab_size} ids; "
            "these samples were made with another tokenizer"
        )
    return torch.bincount(ids, minlength=vocab_size)


def build_vocab_map(
    counts: Tensor, draft_vocab_size: int, always_keep: Collection[int], tokenizer_len: int
) -> VocabMap:
    """Choose the draft vocabulary (CONTRACTS section 4).

    Args:
        counts: [V] int64, supervised occurrences of each target id.
        draft_vocab_size: Vd; equal to V means the whole vocabulary, also ids no tokenizer entry has.
        always_keep: kept whatever their count; ids at or above `tokenizer_len` are not.
        tokenizer_len: ids at or above it are never emitted and never kept.

    The rest goes to the most frequent ids, ties and then unseen ids in ascending order.

    Raises:
        UserError: Vd is larger than the usable ids or too small for those always kept.
    """
    vocab_size = len(counts)
    if draft_vocab_size == vocab_size:
        return VocabMap(torch.arange(vocab_size), vocab_size)
    usable = min(tokenizer_len, vocab_size)
    if not 0 < draft_vocab_size <= usable:
        raise UserError(
            f"a draft vocabulary of {draft_vocab_size} does not fit the {usable} ids the target can emit; "
            f"choose at most {usable}, or {vocab_size} for all"
        )
    keep = sorted({i for i in always_keep if 0 <= i < usable})
    if len(keep) > draft_vocab_size:
        raise UserError(
            f"a draft vocabulary of {draft_vocab_size} cannot hold the {len(keep)} special, tag and byte "
            "tokens that are always kept; raise vocab.size"
        )
    order = torch.sort(counts[:usable], descending=True, stable=True).indices  # ties: lower id first
    forced = torch.zeros(usable, dtype=torch.bool)
    forced[keep] = True
    frequent = order[~forced[order]][: draft_vocab_size - len(keep)]
    forced[frequent] = True
    return VocabMap(forced.nonzero().squeeze(-1), vocab_size)


def coverage(counts: Tensor, kept_ids: Tensor) -> float | None:
    """Share of the counted tokens that are kept: counts [V], kept_ids [Vd]; None where none were counted."""
    total = int(counts.sum())
    return int(counts[kept_ids].sum()) / total if total else None


def always_keep_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids every draft must be able to say.

    Special and added tokens (among them end-of-turn), think and tool tags that are ordinary entries, and
    what any text can be spelt with: byte-fallback entries `<0xNN>`, or the single bytes of a byte-level BPE.
    """
    vocab = tokenizer.get_vocab()
    ids = {int(i) for i in tokenizer.all_special_ids} | {int(i) for i in tokenizer.added_tokens_decoder}
    ids |= {i for token, i in vocab.items() if _BYTE_FALLBACK.fullmatch(token) or _MARKUP.fullmatch(token)}
    single_bytes = {vocab[char] for char in ByteLevel.alphabet() if char in vocab}
    # Other tokenizers hold letters of this alphabet too, but never nearly all of its 256 stand-ins.
    if len(single_bytes) > 200:
        ids |= single_bytes
    return ids


def _draft_vocab_size(wanted: int | None, vocab_size: int, tokenizer_len: int) -> int:
    """Vd from vocab.size: V where it is null or not smaller, never ids the tokenizer does not have."""
    if wanted is None or wanted >= vocab_size:
        return vocab_size
    if wanted > tokenizer_len:
        log.info("vocab: vocab.size %d is lowered to the tokenizer's %d ids", wanted, tokenizer_len)
    return min(wanted, tokenizer_len)


def _count_parts(store: Store, entries: list[PartEntry], split: dict[str, str], vocab_size: int) -> dict[str, Tensor]:
    """Supervised counts [V] per split, one part in memory at a time."""
    totals = {name: torch.zeros(vocab_size, dtype=torch.int64) for name in ("train", "valid", "holdout")}
    columns = ["conversation_id", "prompt_ids", "answer_ids", "loss_mask"]
    for entry in entries:
        table = pq.read_table(store.local(f"{PARTS}/{entry.files['rows']['name']}"), columns=columns)
        pieces: dict[str, list[Any]] = {name: [] for name in totals}
        prompts, answers, masks = (table.column(name).combine_chunks() for name in columns[1:])
        for row, conversation in enumerate(table.column("conversation_id").to_pylist()):
            ids = np.concatenate([prompts[row].values.to_numpy(), answers[row].values.to_numpy()])  # [T]
            mask = masks[row].values.to_numpy(zero_copy_only=False)  # [T]
            pieces[split[conversation]].append((ids, mask))
        for name, parts in pieces.items():
            if parts:
                ids = torch.from_numpy(np.concatenate([p[0] for p in parts]))
                mask = torch.from_numpy(np.concatenate([p[1] for p in parts]))
                totals[name] += count_tokens(ids, mask, vocab_size)
    return totals
