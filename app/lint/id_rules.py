"""Rules for the auxiliary layer ids: what each engine would capture against what the draft was trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from app.draft_config import NUM_AUX
from app.lint.difference import SGLANG, Difference
from app.lint.layer_ids import default_ids, nested_ids, sglang_captures
from app.lint.names import IDS
from app.lint.subject import Subject


def known_ids(d: Subject) -> list[int] | None:
    """The ids (k) the draft was trained with: said by the run, else the top-level ones, else the nested ones + 1."""
    if d.trained_ids is not None:
        return list(d.trained_ids)
    top, nested = _ids(d.config.get(IDS)), _ids(d.nested.get(IDS))
    return top or ([j + 1 for j in nested] if nested else None)


def id_differences(d: Subject) -> Iterator[Difference]:
    """Every fault of the ids, by engine."""
    top, nested = d.config.get(IDS), d.nested.get(IDS)
    shape = "three whole numbers, ascending"
    if top and _ids(top) is None:
        yield d.key(IDS, shape, top, "write the ids the draft was trained with (k: the state after k layers)")
        return
    if nested is not None and _ids(nested) is None:
        yield d.key(f"eagle_config.{IDS}", shape, nested, "write k - 1 for each id")
        return
    yield from _vllm_differences(d, _ids(top))
    if not d.is_speculators:
        yield from _sglang_differences(d, _ids(nested))


def _vllm_differences(d: Subject, top: list[int] | None) -> Iterator[Difference]:
    known, layers = known_ids(d), d.target.num_layers if d.target is not None else None
    if top is None:
        usual = default_ids(layers)
        guess = f"its default {list(usual)}" if usual else "its default"
        said = f"{d.nested[IDS]} as they stand, or {guess}, by version" if d.nested.get(IDS) else guess
        yield d.key(IDS, known or "the ids trained with", None, f"write them: vLLM would capture {said}")
        return
    if d.trained_ids is not None and top != known:
        yield d.key(IDS, known, top, "write the ids the states were captured and trained with")
    elif layers is not None and not all(1 <= k < layers for k in top):
        yield d.key(IDS, f"ids in 1..{layers - 1}", top, "the target has no such layers; 0 is its embedding")
    elif top[0] < 1:
        yield d.key(IDS, "ids from 1 on", top, "0 is the target's embedding; ids counted from 0 need 1 more")
    elif not top[0] < top[1] < top[2]:
        yield d.key(IDS, "three ascending ids", top, "sort them as the states enter fc: low to high, none twice")


def _sglang_differences(d: Subject, nested: list[int] | None) -> Iterator[Difference]:
    known, where = known_ids(d), f"eagle_config.{IDS}"
    if known is None:
        return  # said of vLLM's ids already
    wanted = nested_ids(known, d.target)
    if wanted is None:
        return  # such ids do not exist: `why_not_sglang`
    if nested is None:
        usual = default_ids(d.target.num_layers if d.target is not None else None)
        right = usual is not None and list(usual) == known
        fix = f"write them: SGLang reads only these, else it captures {list(usual) if usual else 'its default'}"
        yield d.key(where, wanted, None, fix, (SGLANG,), warning=right)
        return
    captured = list(sglang_captures(nested, d.target))
    if captured != known:
        shift = "adds 1 to these" if captured != nested else "takes these as they are for this target's class"
        yield d.key(where, wanted, nested, f"SGLang {shift} and would capture {captured}: write {wanted}", (SGLANG,))


def _ids(value: Any) -> list[int] | None:
    """`value` where it is a list of three whole numbers."""
    if not isinstance(value, list | tuple) or len(value) != NUM_AUX or any(type(k) is not int for k in value):
        return None
    return list(value)
