"""The checklist in order: FIELD_CASES, sections A to M, then the parity gates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from app.doctor import labels, measured, parity, served, states, text, weak
from app.doctor.facts import Facts
from app.doctor.finding import DAMAGED, Finding, Line, NotApplicable, failed
from app.errors import UserError, first_line

log = logging.getLogger("draftmill")
BROKE = "the check itself broke"
Check = Callable[[Facts], Finding]

SECTIONS = {
    "A": "served as something else",
    "B": "trained on wrong features",
    "C": "trained on wrong labels or positions",
    "D": "text the server never sees",
    "E": "right but weak",
    "M": "measured wrongly",
    "P": "parity gates",
}
CHECKS: tuple[tuple[str, str, Check], ...] = (
    ("A1", "served as EAGLE-3", served.method_and_class),
    ("A2", "layer ids agree everywhere", served.layer_ids),
    ("A3", "states are of the layers recorded", served.index_convention),
    ("A4", "three layers, low to high", served.layer_order),
    ("A5", "a real vocabulary map", served.vocabulary_map),
    ("A6", "the map the head was trained with", served.map_of_the_head),
    ("A7", "weights and embedding exported", served.exported_weights),
    ("A8", "engine version", served.engine_version),
    ("B1", "states plausible", states.plausible),
    ("B2", "states belong to their row", states.of_their_row),
    ("B3", "prefix caching off at capture", states.prefix_caching),
    ("B4", "final norm once, norms as trained", states.final_norm),
    ("B5", "one target, one numeric form", states.same_target),
    ("B6", "inner language model", states.inner_model),
    ("C1", "mask is the answer's", labels.mask_of_the_answer),
    ("C2", "mask after cutting", labels.mask_after_cutting),
    ("C3", "first draft token in serving order", labels.serving_order),
    ("C4", "later draft tokens in serving order", labels.later_steps),
    ("C5", "rotary settings", labels.rotary),
    ("C6", "context length", labels.context_length),
    ("D1", "same template and arguments", text.same_template),
    ("D2", "think tags", text.think_tags),
    ("D3", "tools rendered", text.tool_turns),
    ("D4", "system prompt", text.system_prompt),
    ("D5", "token ids from the engine", text.ids_of_the_engine),
    ("D6", "answers are the target's own", text.on_policy),
    ("D7", "cut answers stay open", text.cut_answers),
    ("D8", "bench asks as served", text.bench_as_served),
    ("E1", "enough data", weak.enough_data),
    ("E2", "norm weights moved", weak.norms_moved),
    ("E3", "vocabulary covers the held-out", weak.vocabulary_covers),
    ("E4", "resume went on", weak.resumed_right),
    ("E5", "long contexts", weak.long_contexts),
    ("M1", "acceptance from differences", measured.counter_differences),
    ("M2", "against a baseline", measured.baseline),
    ("M3", "benchmark overlap", measured.overlap),
    ("P1", "teacher against emitted tokens", parity.teacher_gives_tokens),
    ("P2", "replay against the engine", parity.replay_against_engine),
)


def walk(facts: Facts) -> Iterator[Line]:
    """Every line of the checklist, in order."""
    for name, title, check in CHECKS:
        yield Line(name, title, _found(facts, check))


def _found(facts: Facts, check: Check) -> Finding:
    try:
        return check(facts)
    except NotApplicable as reason:
        return Finding("not applicable", str(reason))
    except UserError as error:
        return failed(DAMAGED, str(error), "mend that first")
    except FileNotFoundError as error:
        return failed(DAMAGED, f"{error.filename or error} is missing", "run the stage that makes it again")
    except Exception as error:  # a fault of a check must not cost a run; it is told, and shown in the line
        log.warning("doctor: %s broke (%s: %s); please report it", check.__name__, type(error).__name__, error)
        return Finding("not applicable", f"{BROKE} ({type(error).__name__}: {first_line(error)})")
