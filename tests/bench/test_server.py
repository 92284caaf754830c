"""The bench against running servers, faked: concurrency, streams, counters, and every sentence that may be said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from app.bench.measure import Ask, Job, Templates, do
from app.bench.server import RunningServer
from app.bench.settings import compare, cost, intervals
from app.doctor.measured import counter_differences
from app.errors import UserError
from app.report.speed import length_interval
from tests.bench.fake_server import FakeDraftServer

ASKS = [Ask([n * 10], 9) for n in range(1, 8)]
TEMPLATES = Templates("", False, None, {}, 100, 9, 0.0, 0)
Start = Callable[..., FakeDraftServer]


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[FakeDraftServer] = []

    def one(size: int = 2, kind: str = "vllm") -> FakeDraftServer:
        running.append(FakeDraftServer(size, kind).start())
        return running[-1]

    yield one
    for server in running:
        server.stop()


def words(text: str) -> list[int]:
    return [int(w) for w in text.split()]


def service(server: FakeDraftServer, model: str | None = None) -> RunningServer:
    return RunningServer(server.url, "bench.server", model, words)


def test_a_pass_is_counted_and_timed(start: Start) -> None:
    server = start(size=2)
    done = do(service(server), Job(ASKS, (3,), 2, TEMPLATES))
    served = done.cells[0]
    assert server.most == 3
    assert served.outputs == [[n * 10 + i for i in range(9)] for n in range(1, 8)]
    assert served.pass_tokens == [63, 63] and len(served.seconds) == 2
    assert (served.drafts, served.draft_tokens, served.accepted) == (2 * 7 * 4, 2 * 2 * 7 * 4, 2 * 7 * 4)  # no warm-up
    assert served.accepted_per_position == [56, 0]
    assert served.streamed == [[8, 8]] * 7
    assert len(served.ttft) == len(served.inter_token) == 14 and len(served.gaps) == 14 * 4
    assert served.foreign_tokens == 0 and served.gauges is None
    told = compare(None, served, 2)
    assert told["acceptance_length"] == 2 and told["acceptance_rate"] == 0.5 and told["speedup"] is None
    found = intervals(served, [str(n) for n in range(7)], 100, 0)
    assert found == {"interval": [2, 2], "interval_per_position": [[1, 1], [0, 0]]}
    body = server.bodies[-1]
    assert body["stream"] and body["stream_options"] == {"include_usage": True} and body["temperature"] == 0


def test_f75_earlier_traffic_counts_for_nothing(start: Start) -> None:
    """The same numbers, by one definition, of a fresh server and of one that answered others before."""
    told = []
    for earlier in (0, 5):
        server = start(size=3)
        if earlier:
            do(service(server), Job([Ask([400 + n], 30) for n in range(earlier)], (2,), 1, TEMPLATES))
        served = do(service(server), Job(ASKS, (3,), 2, TEMPLATES)).cells[0]
        told.append({k: v for k, v in compare(None, served, 3).items() if k.startswith(("acc", "dra", "num"))})
    assert server.drafts > told[0]["drafts"] > 0 and told[0] == told[1]
    assert told[0]["acceptance_length"] == 1 + told[0]["accepted"] / told[0]["drafts"]
    assert told[0]["acceptance_rate"] == told[0]["accepted"] / told[0]["draft_tokens"]


def test_without_counters_by_position_the_answers_give_the_width(start: Start) -> None:
    served = do(service(start(size=2)), Job(ASKS, (3,), 2, TEMPLATES)).cells[0]
    served.accepted_per_position = []  # as a vLLM that does not count them
    found = intervals(served, [str(n) for n in range(7)], 100, 0)
    assert found == {"interval": [2, 2], "interval_per_position": None}
    counts = compare(None, served, 2) | found
    assert counts["acceptance_per_position"] == [] and length_interval(counts, None) == (2, 2)
    facts: Any = SimpleNamespace(manifest=lambda stage: SimpleNamespace(counts=counts))
    assert counter_differences(facts).state == "passed"


def test_with_and_without_the_draft(start: Start) -> None:
    base, draft = start(size=0), start(size=3)
    draft.wrong = 4
    cells = []
    plain = do(service(base), Job(ASKS, (2, 4), 1, TEMPLATES))
    drafted = do(service(draft), Job(ASKS, (2, 4), 1, TEMPLATES))
    for a, b in zip(plain.cells, drafted.cells, strict=True):
        assert a.drafts == 0
        cells.append(compare(a, b, 3) | {"concurrency": a.concurrency})
    assert cells[0]["output_mismatches"] == 7
    assert cells[0]["mismatch_examples"][0] == {
        "prompt": 0, "first_difference": 4, "baseline": [14, 15, 16, 17, 18], "draft": [501, 15, 16, 17, 18]
    }  # fmt: skip
    found = cost(cells)
    assert found is not None
    assert {(p["draft_tokens"], p["concurrency"]) for p in found["points"]} == {(3, 2), (3, 4)}
    assert len(found["lines"]) == 3 and found["lines"][0].startswith("At 2 at once")


def test_sglang_tells_by_gauges_and_text(start: Start) -> None:
    served = do(service(start(size=2, kind="sglang")), Job(ASKS, (3,), 1, TEMPLATES)).cells[0]
    assert served.outputs[0] == list(range(10, 19))  # tokenised again
    assert served.tokens == 63  # as its usage says
    told = compare(None, served, 2)
    assert 1.5 < told["acceptance_length"] <= 2 and told["drafts"] == 0 and told["acceptance_per_position"] == []
    assert intervals(served, [str(n) for n in range(7)], 100, 0)["interval"] is None  # sizes are not told


def test_groups_are_passes_of_their_own(start: Start) -> None:
    done = do(service(start(size=2)), Job(ASKS, (3,), 1, TEMPLATES, groups={"a": ASKS[:2], "b": ASKS[2:]}))
    assert {name: g.drafts for name, g in done.groups.items()} == {"a": 8, "b": 20}


def test_work_of_others_makes_speeds_incomparable(start: Start) -> None:
    base, draft = start(size=0), start(size=2)
    draft.other_tokens = 5
    plain, drafted = (do(service(s), Job(ASKS, (3,), 1, TEMPLATES)).cells[0] for s in (base, draft))
    assert drafted.foreign_tokens == 35
    assert not compare(plain, drafted, 2)["comparable"]


@pytest.mark.parametrize(
    ("refusal", "said"),
    [((401, "no"), "refuses the key"), ((400, "too long by 3"), "refuses a prompt .400: .*too long by 3"),
     ((503, "away"), "fails while it is measured .503")],
)  # fmt: skip
def test_a_server_that_refuses(start: Start, refusal: tuple[int, str], said: str) -> None:
    server = start()
    server.refuse = refusal
    with pytest.raises(UserError, match=said):
        do(service(server), Job(ASKS, (3,), 1, TEMPLATES))


def test_what_is_said_before_anything_is_asked(start: Start) -> None:
    server = start()
    with pytest.raises(UserError, match="serves no model 'other'"):
        service(server, "other")
    with pytest.raises(UserError, match="does not answer"):
        RunningServer("http://127.0.0.1:9/v1", "bench.server", None, words)
    with pytest.raises(UserError, match="answers with 404"):
        RunningServer(server.url.removesuffix("/v1") + "/v2/v1", "bench.server", None, words)
    server.kind, server.size = "other", 0
    with pytest.raises(UserError, match="vLLM drafted nothing"):
        compare(None, do(service(server), Job(ASKS, (3,), 1, TEMPLATES)).cells[0], 3)
