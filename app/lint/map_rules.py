"""Rules for the vocabulary map by content (CONTRACTS section 4): `d2t` [Vd] offsets, `t2d` [V]."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from app.draft_config import DraftConfig
from app.lint.difference import ENGINES, Difference
from app.lint.subject import Subject


def map_differences(d: Subject, draft: DraftConfig) -> Iterator[Difference]:
    """The one reason why the map is wrong, where its shape is right."""
    d2t, t2d = d.by_root.get("d2t"), d.by_root.get("t2d")
    size, vocab = draft.draft_vocab_size, draft.vocab_size
    if not draft.has_vocab_map or d2t is None or tuple(d2t.shape) != (size,) or d2t.is_floating_point():
        return
    if t2d is not None and tuple(t2d.shape) != (vocab,):
        t2d = None
    offsets = d2t.long()
    kept = torch.arange(size) + offsets  # [Vd] target ids
    if _is_kept(kept, vocab, t2d):
        usable = min(d.target.tokenizer_len, vocab) if d.target is not None else vocab
        yield from _choice_differences(kept, offsets, usable)
    elif _is_kept(offsets, vocab, t2d):
        yield _fault("offsets: target id = i + d2t[i]", "absolute target ids", "write d2t[i] = id - i")
    elif bool(((kept < 0) | (kept >= vocab)).any()):
        outside = (kept < 0) | (kept >= vocab)
        first = int(outside.nonzero()[0])
        found = f"{int(outside.sum())} outside; d2t[{first}] = {int(offsets[first])}"
        yield _fault(f"0 <= i + d2t[i] < {vocab}", found, "build the map anew")
    else:
        yield from _order_differences(kept)
        yield from _t2d_differences(kept, t2d, vocab)


def _fault(expected: str, found: str, fix: str, name: str = "d2t", warning: bool = False) -> Difference:
    return Difference(f"tensor {name}", expected, found, fix, ENGINES, "warning" if warning else "error")


def _choice_differences(kept: Tensor, offsets: Tensor, usable: int) -> Iterator[Difference]:
    size = len(kept)
    if not offsets.any() and size < usable:
        found = f"all zero: just the ids below {size}"
        yield _fault(f"a choice among {usable} usable ids", found, "build the map from token counts")
    elif int(kept[-1]) >= usable:
        found = f"{int((kept >= usable).sum())} at or above it"
        fix = "leave out what is never emitted; it costs rows of the head alone"
        yield _fault(f"ids below the tokenizer's length {usable}", found, fix, warning=True)


def _order_differences(kept: Tensor) -> Iterator[Difference]:
    if bool((kept[1:] > kept[:-1]).all()):
        return
    if repeated := len(kept) - len(kept.unique()):
        yield _fault("every target id once", f"{repeated} ids twice", "build the map anew: one row of the two is lost")
        return
    first = int((kept[1:] <= kept[:-1]).nonzero()[0])
    found = f"{int(kept[first])} then {int(kept[first + 1])} at row {first}"
    fix = "sort the kept ids, and the rows of lm_head with them; engines take any order, trainers do not"
    yield _fault("target ids strictly increasing", found, fix, warning=True)


def _t2d_differences(kept: Tensor, t2d: Tensor | None, vocab: int) -> Iterator[Difference]:
    if t2d is None:
        return
    wanted = torch.zeros(vocab, dtype=torch.bool)
    wanted[kept] = True
    if wrong := int((wanted != t2d.bool()).sum()):
        fix = "rebuild t2d from d2t, if d2t is the map the head was trained with"
        yield _fault(f"true exactly at the {len(kept)} ids of d2t", f"{wrong} entries differ", fix, "t2d")


def _is_kept(ids: Tensor, vocab: int, t2d: Tensor | None) -> bool:
    """True where `ids` are strictly increasing target ids and `t2d`, if known, is true exactly there."""
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or not bool((ids[1:] > ids[:-1]).all()):
        return False
    return t2d is None or torch.equal(t2d.bool().nonzero().squeeze(-1), ids)
