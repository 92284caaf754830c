"""What ingest does with sources: draws, failures, repeats, benchmarks, personal data, tools, thinking, real files."""

import gzip
import hashlib
import json
import random
import shutil
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from app import rows as row_work
from app.captured import part_keys
from app.config import Config
from app.conversations import canonical
from app.errors import UserError
from app.parts import ingest_part_path, read_ingest_part
from app.pipeline import run_stage, stage_state
from app.pipelines import ingest
from app.sources.shapes import to_raw
from app.target import load_tokenizer
from tests import templates
from tests.pipelines.finished import stage, template_file
from tests.runs import context, prompts, tiny_config, write_rows

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
Row = dict[str, Any]


def config_of(tiny: Path, folder: Path, *sources: Row, **changes: Any) -> Config:
    return tiny_config(tiny, folder / "run", folder, sources=[dict(s) for s in sources], **changes)


def run(config: Config) -> tuple[Row, list[Row], list[Row]]:
    """counts, kept rows, rejects; the counts must add up, in all and in each source."""
    ctx = context(config)
    counts = ingest.run(ctx).counts
    kept = [r for p in range(counts["parts"]) for r in read_ingest_part(ctx.run.store, p)]
    rejects = [json.loads(x) for x in ctx.run.store.read_bytes(ingest.REJECTS).decode().splitlines()]
    for part in (counts, *counts["sources"].values()):
        assert part["rows_in"] == part["kept"] + sum(part["rejected"].values()) + part["not_drawn"]
    assert len(kept) == counts["kept"] and len(rejects) == sum(counts["rejected"].values())
    for name, source in counts["sources"].items():
        assert source["kept"] == sum(r["source"] == name for r in kept)
        assert sum(source["rejected"].values()) == sum(r["source"] == name for r in rejects)
    return counts, kept, rejects


def template(folder: Path, text: str) -> str:
    path = folder / "template.jinja"
    path.write_text(text)
    return str(path)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr("app.pipelines.ingest.log.propagate", True)
    caplog.set_level("INFO", "draftmill")
    return caplog


@pytest.fixture
def roomy(tiny: Path, tmp_path: Path) -> Path:
    """The tiny target with room for long conversations."""
    folder = tmp_path / "roomy"
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32768}))
    return folder


# Draws


@pytest.mark.parametrize(("draw", "asked"), [({"count": 12}, 12), ({"share": 0.25}, 10), ({"count": 99}, 99)])
def test_a_draw_is_the_seeds_and_adds_up(
    tiny: Path, tmp_path: Path, said: pytest.LogCaptureFixture, draw: Row, asked: int
) -> None:
    rows = [*prompts(40), *prompts(5), {"messages": []}]
    source = {"path": str(write_rows(tmp_path / "rows.jsonl", rows)), **draw}
    counts, kept, _ = run(config_of(tiny, tmp_path, source))
    mine = counts["sources"]["rows"]
    assert (mine["asked"], mine["kept"]) == (asked, min(asked, 40))
    assert mine["rejected"]["no_turns"] == 1
    # Repeats of what was drawn are repeats; repeats of what was not are not drawn either.
    assert mine["not_drawn"] + mine["rejected"].get("duplicate", 0) == 46 - 1 - mine["kept"]
    assert ("99 asked and only 40 found" in said.text) == (asked == 99)
    again = [r["id"] for r in run(config_of(tiny, tmp_path, source))[1]]
    assert again == [r["id"] for r in kept]
    other = [r["id"] for r in run(config_of(tiny, tmp_path, {**source, "seed": 1}))[1]]
    assert (set(other) != set(again)) == (asked < 40)


def test_a_draw_does_not_depend_on_the_order_of_files_or_on_other_sources(tiny: Path, tmp_path: Path) -> None:
    rows = prompts(60)
    drawn = []
    for number, (first, second) in enumerate([(rows[:30], rows[30:]), (rows[30:], rows[:30])]):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_rows(folder / "a.jsonl", first)
        write_rows(folder / "b.jsonl", second)
        other = {"path": str(write_rows(folder / "other.txt", ["one more"]))} if number else None
        draw = {"name": "rows", "path": f"{folder}/*.jsonl", "count": 15}
        _, kept, _ = run(config_of(tiny, folder, draw, *([other] if other else [])))
        drawn.append({r["id"] for r in kept if r["source"] == "rows"})
    assert drawn[0] == drawn[1] and len(drawn[0]) == 15


def test_what_an_earlier_source_gave_is_not_drawn_again(tiny: Path, tmp_path: Path) -> None:
    first = {"path": str(write_rows(tmp_path / "first.jsonl", prompts(10)))}
    second = {"path": str(write_rows(tmp_path / "second.jsonl", prompts(20))), "count": 10}
    counts, _, _ = run(config_of(tiny, tmp_path, first, second))
    assert counts["sources"]["second"]["kept"] == 10
    assert counts["sources"]["second"]["rejected"] == {"duplicate": 10}


def long_and_short(short: int, long: int) -> list[Row]:
    """Usable prompts among others that only their tokens show to be too long."""
    rows = [*prompts(short), *({"prompt": f"{i} {'a ' * 400}"} for i in range(long))]
    random.Random(7).shuffle(rows)
    return rows


@pytest.mark.parametrize("use", ["regenerate", "as_is"])
def test_a_draw_gives_what_was_asked_where_so_many_are_usable(
    tiny: Path, tmp_path: Path, said: pytest.LogCaptureFixture, use: str
) -> None:
    rows = long_and_short(40, 60)
    if use == "as_is":
        answer = {"role": "assistant", "content": "It is so."}
        rows = [{"messages": [{"role": "user", "content": r["prompt"]}, answer]} for r in rows]
    path = str(write_rows(tmp_path / "rows.jsonl", rows))
    source = {"name": "s", "path": path, "use": use, "max_reject_share": 1}
    everything = {r["id"] for r in run(config_of(tiny, tmp_path, source))[1]}
    assert len(everything) == 40
    for draw, expected in (({"count": 25}, 25), ({"share": 0.5}, 20), ({"count": 40}, 40), ({"count": 41}, 40)):
        counts, kept, _ = run(config_of(tiny, tmp_path, {**source, **draw}))
        assert len(kept) == expected and {r["id"] for r in kept} <= everything
        assert counts["sources"]["s"]["not_drawn"] == 40 - expected
        ranked = sorted(everything, key=lambda i: hashlib.sha256(f"0:{i}".encode()).digest()[:8])
        assert {r["id"] for r in kept} == set(ranked[:expected])
        assert [r["where"] for r in kept] == sorted((r["where"] for r in kept), key=lambda w: int(w.split(":")[1]))
    assert "s: 41 asked and only 40 found" in said.text and said.text.count("asked and only") == 1


def test_a_draw_tops_up_for_repeats_and_benchmark_prompts(tiny: Path, tmp_path: Path) -> None:
    text = "The mill stands by the river and the wheel turns whenever the water is high, so count the sacks of day"
    near = [{"prompt": f"{text} {i}"} for i in range(30)]
    benchmark = [{"prompt": f"Why is mill {i} slow?"} for i in range(30)]
    plain = [{"prompt": " ".join(random.Random(i).choices("abcdefghijklmnop", k=40))} for i in range(12)]
    source = {"name": "s", "path": str(write_rows(tmp_path / "r.jsonl", [*near, *benchmark, *plain])), "count": 13}
    sets = [str(write_rows(tmp_path / "set.jsonl", benchmark))]
    rules = {"near_duplicates": 0.7, "benchmark_sets": sets, "drop_overlap": True}
    made = []
    for workers in (1, 2):
        counts, kept, rejects = run(config_of(tiny, tmp_path, source, ingest={**rules, "workers": workers}))
        made.append((counts, kept, rejects))
        assert counts["kept"] == 13 and counts["rejected"]["benchmark_overlap"] == 30
        assert sum(json.loads(r["messages"])[0]["content"].startswith(text) for r in kept) == 1
        known = {r["id"] for r in kept}
        assert all(r["detail"].split()[-1] in known for r in rejects if r["reason"] == "near_duplicate")
    assert made[0] == made[1]


def test_a_source_that_changes_between_its_readings_is_named(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", prompts(20))
    read = ingest.read_rows

    def shrinking(*args: Any) -> Any:
        yield from read(*args)
        write_rows(path, prompts(3))

    monkeypatch.setattr(ingest, "read_rows", shrinking)
    with pytest.raises(UserError, match="source rows: it changed between two readings"):
        run(config_of(tiny, tmp_path, {"path": str(path), "count": 10}))


@pytest.mark.parametrize("draw", [{}, {"count": 70}])
def test_the_number_of_workers_changes_no_byte(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draw: Row
) -> None:
    rows: list[Any] = [*prompts(90), "{broken", {"prompt": "a " * 600}, *prompts(20)]
    talk = [
        {"messages": [{"role": "user", "content": f"Count {i}"}, {"role": "assistant", "content": f"{i}, {i + 1}."}]}
        for i in range(40)
    ]
    sources = (
        {"path": str(write_rows(tmp_path / "rows.jsonl", rows)), **draw},
        {"path": str(write_rows(tmp_path / "talk.jsonl", talk)), "use": "as_is"},
    )
    monkeypatch.setattr(row_work, "CHUNK", 16)
    monkeypatch.setattr(row_work, "_ALONE_S", -1.0)
    made = []
    for workers in (1, 2):
        config = config_of(tiny, tmp_path, *sources, ingest={"workers": workers})
        counts, _, _ = run(config)
        store = context(config).run.store
        files = [*(ingest_part_path(p) for p in range(counts["parts"])), ingest.REJECTS]
        made.append((counts, {f: store.read_bytes(f) for f in files}))
    assert made[0] == made[1]
    assert made[0][0]["parts"] > 5


# Sources that fail


def broken_sources(folder: Path) -> dict[str, Row]:
    lines = [json.dumps({"prompt": random.Random(i).randbytes(200).hex()}).encode() + b"\n" for i in range(900)]
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(b"".join(lines))[:150_000])
    (folder / "cut.parquet").write_bytes(b"PAR1 and no more")
    return {
        "missing": {"name": "bad", "path": str(folder / "absent.jsonl")},
        "cut_parquet": {"name": "bad", "path": str(folder / "cut.parquet")},
        "rejects": {"name": "bad", "path": str(write_rows(folder / "odd.jsonl", ["{broken", "{", *prompts(3, "Odd")]))},
        "empty": {"name": "bad", "path": str(write_rows(folder / "empty.jsonl", []))},
        "cut_gzip": {"name": "bad", "path": str(folder / "cut.jsonl.gz"), "max_reject_share": 0.0},
    }


@pytest.mark.parametrize("kind", ["missing", "cut_parquet", "rejects", "empty", "cut_gzip"])
def test_a_source_that_fails_stops_the_run_or_is_skipped_loudly(
    tiny: Path, tmp_path: Path, said: pytest.LogCaptureFixture, kind: str
) -> None:
    bad = broken_sources(tmp_path)[kind]
    good = {"path": str(write_rows(tmp_path / "good.jsonl", prompts(12)))}
    with pytest.raises(UserError, match="source bad: ") as stopped:
        run(config_of(tiny, tmp_path, good, bad))
    assert "\n" not in str(stopped.value)
    config = config_of(tiny, tmp_path, bad, good, ingest={"on_source_error": "skip"})
    counts, kept, rejects = run(config)
    assert list(counts["skipped_sources"]) == ["bad"]
    assert counts["skipped_sources"]["bad"] == str(stopped.value)
    assert list(counts["sources"]) == ["good"] and len(kept) == 12 and not rejects
    assert f"ingest: SKIPPED {stopped.value}" in [r.getMessage() for r in said.records if r.levelname == "WARNING"]
    ctx = context(config)
    run_stage(stage("ingest"), ctx)
    assert stage_state(stage("ingest"), ctx).state == "done"


def test_when_every_source_fails_the_run_stops(tiny: Path, tmp_path: Path) -> None:
    bad = broken_sources(tmp_path)["missing"]
    with pytest.raises(UserError, match="every source failed; the last one: source bad: nothing is found"):
        run(config_of(tiny, tmp_path, bad, ingest={"on_source_error": "skip"}))


def test_the_rejects_are_there_when_ingest_stops(tiny: Path, tmp_path: Path) -> None:
    odd = broken_sources(tmp_path)["rejects"]
    with pytest.raises(UserError, match=r"2 of 5 rows are rejected .*max_reject_share"):
        run(config_of(tiny, tmp_path, odd))
    lines = (tmp_path / "run" / ingest.REJECTS).read_text().splitlines()
    assert [(r["where"], r["reason"]) for r in map(json.loads, lines)] == [
        ("odd.jsonl:1", "bad_json"),
        ("odd.jsonl:2", "bad_json"),
    ]


def test_a_file_that_is_cut_keeps_what_it_gave(tiny: Path, tmp_path: Path) -> None:
    cut = broken_sources(tmp_path)["cut_gzip"]
    few = {"max_length": 500, "max_new_tokens": 8}
    with pytest.raises(
        UserError, match=r"damaged and only a part of it was read .*cut.jsonl.gz.*max_reject_share to 1"
    ):
        run(config_of(tiny, tmp_path, {**cut, "max_reject_share": 0.5}, generate=few))
    cut = {**cut, "max_reject_share": 1}
    counts, kept, rejects = run(config_of(tiny, tmp_path, cut, generate=few))
    assert 300 < len(kept) < 800
    assert counts["rejected"].get("cut_file") == 1
    assert rejects[-1]["reason"] == "cut_file" and rejects[-1]["where"] == "cut.jsonl.gz"


# Repeats, benchmarks, personal data


def test_near_repeats_are_rejected_and_name_the_first(tiny: Path, tmp_path: Path) -> None:
    text = "The mill stands by the river and the wheel turns whenever the water is high, so count the sacks of day"
    rows = [
        {"prompt": f"{text} one."},
        {"prompt": "When one sack of grain gives three quarters of a sack of flour, how many are needed for twelve?"},
        {"prompt": f"{text.upper()} one"},
        {"prompt": f"{text} one, please."},
        {"prompt": "Yes"},
        {"prompt": "No"},
    ]
    source = {"path": str(write_rows(tmp_path / "rows.jsonl", rows)), "max_reject_share": 0}
    counts, kept, rejects = run(config_of(tiny, tmp_path, source, ingest={"near_duplicates": 0.7}))
    assert counts["rejected"] == {"near_duplicate": 2}
    assert all(kept[0]["id"] in r["detail"] for r in rejects)
    assert run(config_of(tiny, tmp_path, source))[0]["rejected"] == {}


def test_f21_benchmark_prompts_are_counted_listed_and_can_be_left_out(
    tiny: Path, tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    benchmark = [{"question_id": i, "turns": [f"Why is mill {i} slow?", "Explain."]} for i in range(80)]
    rows = [
        *prompts(96),
        {"prompt": "Why is mill 3 slow?"},
        {"prompt": "  why is MILL 40   slow ?!"},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is mill 79 slow?"}]},
        {"prompt": "Explain."},  # a benchmark's later turn says nothing
    ]
    source = {"path": str(write_rows(tmp_path / "rows.jsonl", rows))}
    sets = [str(write_rows(tmp_path / "mt_bench.jsonl", benchmark))]
    config = config_of(tiny, tmp_path, source, ingest={"benchmark_sets": sets})
    counts, kept, _ = run(config)
    report = context(config).run.store.read_json(ingest.OVERLAP)
    assert counts["overlap"] == 3 and counts["kept"] == 100
    assert report["prompts"] == 80
    assert report["rows"] == [{"id": r["id"], "where": f"rows.jsonl:{n}"} for n, r in enumerate(kept[96:99], 97)]
    assert "3 kept rows hold a prompt of ingest.benchmark_sets" in said.text

    config = config_of(tiny, tmp_path, source, ingest={"benchmark_sets": sets, "drop_overlap": True})
    counts, kept, rejects = run(config)
    assert counts["rejected"] == {"benchmark_overlap": 3} and counts["overlap"] == 0 and counts["kept"] == 97
    assert [r["id"] for r in rejects] == [r["id"] for r in report["rows"]]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: p / "absent.jsonl", r"nothing is found at .*absent.jsonl .*; check the path"),
        (lambda p: write_rows(p / "set.jsonl", []), r".*set.jsonl holds no prompt"),
        (
            lambda p: write_rows(p / "set.jsonl", [{"messages": [{"role": "system", "content": "x"}]}]),
            "holds no prompt",
        ),
        (lambda p: write_rows(p / "set.jsonl", [{"other": 1}]), r"set.jsonl:1 of .* is no prompt \(unknown_shape\)"),
        (lambda p: write_rows(p / "set.jsonl", ["{broken"]), r"set.jsonl:1 of .* is no prompt \(bad_json\)"),
    ],
)
def test_a_benchmark_set_that_cannot_be_used_is_named_by_its_setting(
    tiny: Path, tmp_path: Path, make: Any, words: str
) -> None:
    source = {"path": str(write_rows(tmp_path / "rows.jsonl", prompts(3)))}
    good = str(write_rows(tmp_path / "good.jsonl", prompts(2)))
    config = config_of(tiny, tmp_path, source, ingest={"benchmark_sets": [good, str(make(tmp_path))]})
    for does in (run, lambda config: run_stage(stage("ingest"), context(config))):
        with pytest.raises(UserError, match=rf"\Aingest\.benchmark_sets: .*{words}") as fault:
            does(config)
        assert "sources[]" not in str(fault.value) and "\n" not in str(fault.value)


def test_a_near_repeat_is_no_kept_row_of_the_overlap(tiny: Path, tmp_path: Path) -> None:
    text = "The mill stands by the river and the wheel turns whenever the water is high, so why is mill 3 slow"
    sets = [str(write_rows(tmp_path / "set.jsonl", [{"prompt": f"{text}?"}]))]
    rows = [{"prompt": f"{text}, say?"}, {"prompt": f"{text}?"}]
    source = {"path": str(write_rows(tmp_path / "rows.jsonl", rows))}
    counts, kept, _ = run(config_of(tiny, tmp_path, source, ingest={"benchmark_sets": sets, "near_duplicates": 0.7}))
    assert len(kept) == 1 and counts["overlap"] == 0


PERSONAL = {
    "email": ["jane.doe+x@mail.example.org", "JANE@EXAMPLE.ORG", "user@münchen.de", "jörg@example.org",
        "用户@例子.公司", "почта@пример.рф", "o'neil+x@example.com",
    ],
    "phone": [
        "+14155550123", "(415) 555-0123", "415-555-0123", "+33 6 12 34 56 78", "06 12 34 56 78", "+49 170 1234567",
        "0228/5551234", "0228 / 555 12 34",
    ],
    "key": [
        "sk-abcdefghijklmnopqrstuv1234", "hf_abcdefghijklmnopqrstuvwx", "AKIAABCDEFGHIJKLMNOP",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0abcdef.SflKxwRJSM", "password: hunter2hunter2hunter2",
        "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg\n-----END PRIVATE KEY-----",
    ],
    "card": ["4111 1111 1111 1111", "4111111111111111", "5500-0000-0000-0004"],
}  # fmt: skip


def rows_with(value: str) -> list[Row]:
    """A personal value in every place a row has, plain and inside JSON text."""
    user, answer = (
        {"role": "user", "content": f"It is\n{value}, they say {value}."},
        {"role": "assistant", "content": "Fine."},
    )
    call = {"name": "send", "arguments": json.dumps({"to": f"\n{value}", "all": [value]})}
    number = int(value) if value.isdigit() else value
    return [
        {"messages": [user, answer]},
        {"prompt": value},
        {"messages": [{"role": "system", "content": f"Mine: {value}"}, {"role": "user", "content": "Hi"}]},
        {
            "messages": [
                {"role": "user", "content": "Send it"},
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
                {"role": "tool", "content": json.dumps({"text": f"one\n{value}\ttwo", "n": number, value: 1})},
                {"role": "assistant", "content": "Sent", "reasoning_content": f"to {value}"},
            ]
        },
        {"prompt": "Hello", "template_kwargs": {"name": value, "number": number, value: 1}, "domain": value},
        {"messages": [{"role": value, "content": "x"}]},
        {"messages": [{"role": "user", "content": f"Call {value}."}], "sampling": {"top_p": 7}},
        {"prompt": f"{value} {'a ' * 300}"},
    ]


@pytest.mark.parametrize("kind", list(PERSONAL))
def test_personal_data_is_in_no_stored_byte(tiny: Path, tmp_path: Path, kind: str) -> None:
    for number, value in enumerate(PERSONAL[kind]):
        folder = tmp_path / str(number)
        folder.mkdir()
        source = {"name": "mine", "path": str(write_rows(folder / "r.jsonl", rows_with(value))), "max_reject_share": 1}
        config = config_of(
            tiny, folder, source, ingest={"redact": [kind], "near_duplicates": 0.9},
            target__chat_template=template(folder, templates.TOOLS),
        )  # fmt: skip
        counts, kept, _ = run(config)
        run_stage(stage("ingest"), context(config))
        assert counts["kept"] == 5, counts
        tokenizer = load_tokenizer(tiny)
        stored = [p.read_bytes().decode("utf-8", "replace") for p in (folder / "run").rglob("*") if p.is_file()]
        stored += [json.dumps(row, ensure_ascii=False) for row in kept]
        stored += [tokenizer.decode(r["prompt_ids"]) for row in kept for r in row["requests"]]
        inner = [v for piece in (value, *value.split("\n")) for v in (piece, json.dumps(piece)[1:-1]) if len(v) > 9]
        for text in stored:
            found = [v for v in inner if v in text and "PRIVATE KEY" not in v]
            assert not found, (value, text[max(0, text.find(found[0]) - 60) :][:200])
        assert f"[{kind}]" in stored[-1] or any(f"[{kind}]" in t for t in stored)
        call = json.loads(kept[3]["messages"])[1]["tool_calls"][0]["function"]
        assert call["arguments"] == {"to": f"\n[{kind}]", "all": [f"[{kind}]"]}
        if not value.isdigit():  # a bare number there has no quotes
            json.loads(json.loads(kept[3]["messages"])[2]["content"])


@pytest.mark.parametrize("kind", list(PERSONAL))
def test_answers_taken_as_they_are_are_redacted_before_masks_are_made(tiny: Path, tmp_path: Path, kind: str) -> None:
    """No id, part or reject says what stood there, and the mask holds the answers as they are stored."""
    for number, value in enumerate(PERSONAL[kind]):
        folder = tmp_path / str(number)
        folder.mkdir()
        talk = [
            {"role": "user", "content": f"Ask {value}"},
            {"role": "assistant", "content": f"I asked {value}, and\n{value} said no."},
            {"role": "user", "content": "Again"},
            {"role": "assistant", "content": value},
        ]
        clean = json.loads(json.dumps(talk, ensure_ascii=False).replace(json.dumps(value)[1:-1], f"[{kind}]"))
        clean = [{**m, "content": str(m["content"]).replace(value, f"[{kind}]")} for m in clean]
        rows: list[Row] = [
            {"messages": talk},
            {"messages": clean},  # the same, once it is redacted
            {"messages": [talk[0], {"role": "assistant", "content": f"{value} {'a ' * 400}"}]},
            {"messages": [*talk[:3], {"role": value, "content": value}]},
            {"messages": talk[:1]},
        ]
        source = {"name": "t", "path": str(write_rows(folder / "r.jsonl", rows)), "use": "as_is", "max_reject_share": 1}
        config = config_of(tiny, folder, source, ingest={"redact": [kind], "over": "drop"})
        _, [kept], rejects = run(config)
        assert [(r["reason"], r["id"] == kept["id"]) for r in rejects] == [
            ("duplicate", True), ("too_long", False), ("unknown_role", False), ("no_target_turn", False),
        ]  # fmt: skip
        assert json.loads(kept["messages"]) == clean
        tokenizer = load_tokenizer(tiny)
        spans = [text for request in kept["requests"] for text in supervised(tokenizer, request)]
        assert spans == [f"{m['content']}<|im_end|>" for m in clean if m["role"] == "assistant"]
        given, made = (canonical(to_raw({"messages": m}, {}), None, "as_is").id("as_is") for m in (talk, clean))
        assert kept["id"] == made != given
        stored = [p.read_bytes().decode("utf-8", "replace") for p in (folder / "run").rglob("*") if p.is_file()]
        stored += [json.dumps(kept, ensure_ascii=False), tokenizer.decode(kept["requests"][0]["prompt_ids"])]
        lines = [v for v in value.split("\n") if "PRIVATE KEY" not in v]
        assert not [(v, text) for v in lines for text in stored if v in text]


def test_what_is_not_personal_stays(tiny: Path, tmp_path: Path) -> None:
    texts = [
        "1234567812345678 is no card", "In 1999-2004 it cost 3,000.50 or 1.618033988749895", "2024-05-17 12:30:45",
        "x = 10 + 200; y = 12345678901234567890", "v1.22.333-4444 of a@b", "192.168.100.100", "tokens: 128", "3-4-5",
    ]  # fmt: skip
    source = {"path": str(write_rows(tmp_path / "r.jsonl", [{"prompt": t} for t in texts]))}
    _, kept, _ = run(config_of(tiny, tmp_path, source, ingest={"redact": list(PERSONAL)}))
    assert [json.loads(r["messages"])[0]["content"] for r in kept] == texts


def test_private_rows_are_stored_as_such(tiny: Path, tmp_path: Path) -> None:
    export = {"uuid": "1", "chat_messages": [{"sender": "human", "text": "Hello there"}]}
    mine = {"path": str(write_rows(tmp_path / "mine.jsonl", prompts(2))), "private": True}
    public = {"path": str(write_rows(tmp_path / "public.jsonl", [*prompts(2, "Another"), export]))}
    _, kept, _ = run(config_of(tiny, tmp_path, mine, public))
    assert [r["private"] for r in kept] == [True, True, False, False, True]


# Turns, thinking, tools


def test_f01_irregular_turns_are_kept_counted_and_told(
    tiny: Path, tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    user, answer = {"from": "human", "value": "What is 6 * 7?"}, {"from": "gpt", "value": "It is 42."}
    again = {"from": "human", "value": "Please."}
    rows = [
        {"conversations": c} for c in ([user, answer], [answer, user, {**answer, "value": "42"}], [user, again, answer])
    ]
    source = {"name": "chat", "path": str(write_rows(tmp_path / "r.jsonl", rows)), "use": "as_is"}
    counts, kept, _ = run(config_of(tiny, tmp_path, source))
    assert counts["kept"] == 3
    assert json.loads(kept[0]["messages"]) == [
        {"role": "user", "content": "What is 6 * 7?"}, {"role": "assistant", "content": "It is 42."},
    ]  # fmt: skip
    notes = counts["sources"]["chat"]["notes"]
    assert (notes["leading_assistant_dropped"], notes["role_repeats"]) == (1, 1)
    assert "chat: 1 conversations opened with an assistant turn, which was dropped" in said.text
    assert "chat: 1 conversations repeat a role" in said.text


def test_f02_rows_without_a_user_turn_are_rejected(tiny: Path, tmp_path: Path) -> None:
    odd: list[Row] = [
        {"messages": []}, {"messages": [{"role": "system", "content": "x"}]}, {"messages": None}, {"other": 1},
    ]  # fmt: skip
    source = {"path": str(write_rows(tmp_path / "r.jsonl", [*odd, *prompts(20)]))}
    counts, _, rejects = run(config_of(tiny, tmp_path, source))
    assert counts["rejected"] == {"no_turns": 3, "unknown_shape": 1}
    assert [r["where"] for r in rejects] == [f"r.jsonl:{i}" for i in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("run_wide", "words"),
    [
        ({}, r"enable_thinking = the template's default \(6 rows\) and false \(3 rows\)"),
        ({"enable_thinking": True}, r"enable_thinking = true \(6 rows\) and false \(3 rows\)"),
    ],
)
def test_f10_two_ways_of_thinking_must_be_meant(tiny: Path, tmp_path: Path, run_wide: Row, words: str) -> None:
    rows = [*prompts(6), *({**p, "template_kwargs": {"enable_thinking": False}} for p in prompts(3, "Briefly"))]
    source = {"path": str(write_rows(tmp_path / "r.jsonl", rows))}
    with pytest.raises(UserError, match=rf"{words}: .*ingest\.allow_mixed_thinking=true"):
        run(config_of(tiny, tmp_path, source, target__template_kwargs=run_wide))
    changes: Row = {"target__template_kwargs": run_wide, "ingest": {"allow_mixed_thinking": True}}
    _, kept, _ = run(config_of(tiny, tmp_path, source, **changes))
    assert [json.loads(r["template_kwargs"]) for r in kept] == [{}] * 6 + [{"enable_thinking": False}] * 3
    alike = {"path": str(write_rows(tmp_path / "alike.jsonl", rows[6:]))}
    assert run(config_of(tiny, tmp_path, alike, target__template_kwargs=run_wide))[0]["kept"] == 3


TOOL = {"type": "function", "function": {"name": "weather_of", "parameters": {"type": "object", "properties": {}}}}
TOOL_TALK = {
    "messages": [
        {"role": "user", "content": "Is it dry?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "weather_of", "arguments": '{"day": 1}'}}],
        },
        {"role": "tool", "content": "dry"},
        {"role": "assistant", "content": "It is."},
    ],
    "tools": [TOOL],
}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Answer me.{% if add_generation_prompt %}<|im_start|>{% endif %}", "renders the same text whatever"),
        (
            templates.PLAIN.replace("m['content']", "m['content'][:4]"),
            "leaves out what the user says",
        ),
        (templates.PLAIN.replace("{% for m in messages %}", "{% for m in messages[-1:] %}"), "the user turns before"),
        (templates.PLAIN.replace("m['content']", "m['content'] | upper"), None),
        (templates.STRICT, None),
        ("{{ raise_exception('never') }}", None),
    ],
)
def test_a_template_that_ignores_the_messages_is_told_of(
    tiny: Path, tmp_path: Path, said: pytest.LogCaptureFixture, text: str, words: str | None
) -> None:
    source = {"path": str(write_rows(tmp_path / "r.jsonl", prompts(3))), "max_reject_share": 1}
    config = config_of(tiny, tmp_path, source, target__chat_template=template(tmp_path, text))
    if "never" in text:
        with pytest.raises(UserError, match="no row of r can be used"):
            run(config)
    else:
        run(config)
    told = [r.getMessage() for r in said.records if "the target's chat template" in r.getMessage()]
    assert len(told) == (words is not None) and (words or "") in "".join(told)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_template_that_ignores_system_prompts_is_told_of_where_there_are_some(
    tiny: Path, tmp_path: Path, said: pytest.LogCaptureFixture, role: str
) -> None:
    text = templates.PLAIN.replace("{% for m in messages %}", "{% for m in messages if m['role'] != '" + role + "' %}")
    rows = [{"messages": [{"role": role, "content": "Be brief."}, {"role": "user", "content": "Hi"}]}]
    for number, given in enumerate((rows, prompts(2))):
        said.clear()
        source = {"name": "t", "path": str(write_rows(tmp_path / "r.jsonl", given))}
        run(config_of(tiny, tmp_path, source, target__chat_template=template(tmp_path, text)))
        words = f"t: the target's chat template leaves out what {role} messages say, and the source has"
        assert (f"{words} 1" in said.text) == (words in said.text) == (number == 0)


@pytest.mark.parametrize("use", ["regenerate", "as_is"])
def test_a_template_that_ignores_tools_is_told_of(
    tiny: Path, tmp_path: Path, said: pytest.LogCaptureFixture, use: str
) -> None:
    rows = [TOOL_TALK, {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}]
    source = {"name": "t", "path": str(write_rows(tmp_path / "r.jsonl", rows)), "use": use, "max_reject_share": 1}
    words = "t: the target's chat template ignores the {} of 1 of 1 conversations that have some"
    run(config_of(tiny, tmp_path, source, target__chat_template=template(tmp_path, templates.PLAIN)))
    assert words.format("tools") in said.text and words.format("tool calls") in said.text
    said.clear()
    _, kept, _ = run(config_of(tiny, tmp_path, source, target__chat_template=template(tmp_path, templates.TOOLS)))
    assert "ignores" not in said.text
    assert json.loads(kept[0]["template_kwargs"]) == {"tools": [TOOL]}


def test_answers_without_reasoning_for_a_target_that_thinks_are_told_of(
    tiny: Path, tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    def talk(number: int, **more: str) -> Row:
        answer = {"role": "assistant", "content": "It is 42.", **more}
        return {"messages": [{"role": "user", "content": f"What is {number}?"}, answer]}

    path = str(write_rows(tmp_path / "r.jsonl", [talk(1), talk(2), talk(3, reasoning_content="Six times seven.")]))
    thinking: Row = {"target__chat_template": template(tmp_path, templates.THINK)}
    run(config_of(tiny, tmp_path, {"name": "t", "path": path, "use": "as_is"}, **thinking))
    assert "t: 2 of 3 conversations have no reasoning although the target is a reasoning model" in said.text
    assert "t: reasoning: 1/1 rendered" in said.text
    said.clear()
    run(config_of(tiny, tmp_path, {"name": "t", "path": path}, **thinking))  # regenerated: the target thinks anew
    assert "no reasoning" not in said.text


# Old rows under a new template


def test_f43_f58_one_character_of_the_template_makes_everything_anew(tiny: Path, tmp_path: Path) -> None:
    source = {"path": str(write_rows(tmp_path / "r.jsonl", prompts(12)))}
    path = template_file(tiny, tmp_path)
    config = config_of(tiny, tmp_path, source, target__chat_template=str(path))
    ctx = context(config)
    run_stage(stage("ingest"), ctx)
    keys = part_keys(ctx)
    assert run_stage(stage("ingest"), context(config))[1]
    assert part_keys(context(config)) == keys
    path.write_text(path.read_text() + " ")
    ctx = context(config)
    state = stage_state(stage("ingest"), ctx)
    assert (state.state, state.reasons) == ("stale", ("target tokenizer and template changed",))
    assert not set(part_keys(ctx).values()) & set(keys.values())  # before and after ingest is done anew
    run_stage(stage("ingest"), ctx)
    assert not set(part_keys(ctx).values()) & set(keys.values())


# Real files

real = pytest.mark.skipif(not DATA.is_dir(), reason=f"the shared data folder {DATA} is not here")
REAL_ROWS = {
    "gsm8k_train.jsonl": 7473, "code_instructions.json": 4535, "instructions_en.json": 999,
    "instructions_zh.json": 1000, "toolcalls_sharegpt.json": 300, "eval/alpaca.jsonl": 80, "eval/gsm8k.jsonl": 80,
    "eval/humaneval.jsonl": 80, "eval/mt_bench.jsonl": 80,
}  # fmt: skip


@real
def test_real_files_load_without_a_mapping(roomy: Path, tmp_path: Path) -> None:
    sources = [{"name": name, "path": str(DATA / name), "max_reject_share": 0} for name in REAL_ROWS]
    config = config_of(
        roomy, tmp_path, *sources, generate={"max_length": 16384, "max_new_tokens": 16}, storage={"rows_per_part": 4096}
    )
    counts, _, rejects = run(config)
    assert {name: s["rows_in"] for name, s in counts["sources"].items()} == REAL_ROWS
    assert set(counts["rejected"]) <= {"duplicate"}  # whatever else is a fault of ours: the files are well formed
    assert all(r["id"] and r["detail"] for r in rejects)
    shapes = {name: {k for k in s["notes"] if k.startswith("shape:")} for name, s in counts["sources"].items()}
    assert shapes["gsm8k_train.jsonl"] == {"shape:question_answer"}
    assert shapes["code_instructions.json"] == {"shape:alpaca"}
    assert shapes["toolcalls_sharegpt.json"] == {"shape:sharegpt"}
    assert shapes["eval/mt_bench.jsonl"] == {"shape:turns"}


@real
def test_real_tool_calls_keep_calls_results_and_tools(roomy: Path, tmp_path: Path) -> None:
    source = {"name": "t", "path": str(DATA / "toolcalls_sharegpt.json"), "use": "as_is", "max_reject_share": 0}
    config = config_of(
        roomy, tmp_path, source, generate={"max_length": 16384, "max_new_tokens": 16},
        target__chat_template=template(tmp_path, templates.TOOLS), storage={"rows_per_part": 300},
    )  # fmt: skip
    counts, kept, _ = run(config)
    given = json.loads((DATA / "toolcalls_sharegpt.json").read_text())
    calling = [r for r in given if any(t["from"] == "function_call" for t in r["conversations"])]
    notes = counts["sources"]["t"]["notes"]
    assert 100 < len(calling) < 200
    repeats = counts["rejected"].get("duplicate", 0)
    assert len(calling) - repeats <= notes["tool_calls"] == notes["tool_calls_rendered"] <= len(calling)
    assert notes["tools"] == notes["tools_rendered"]
    tokenizer = load_tokenizer(roomy)
    by_place = {f"toolcalls_sharegpt.json#{n}": row for n, row in enumerate(given, 1)}
    for row in kept:
        turns = by_place[row["where"]]["conversations"]
        messages = json.loads(row["messages"])
        results = [t["value"] for t in turns if t["from"] == "observation"]
        assert [m["content"] for m in messages if m["role"] == "tool"] == results
        spans = [text for r in row["requests"] for text in supervised(tokenizer, r)]
        expected = [t["value"] for t in turns if t["from"] in ("gpt", "function_call")]
        assert len(spans) == len(expected)
        for span, value, said in zip(spans, expected, [m for m in messages if m["role"] == "assistant"], strict=True):
            assert span.endswith("<|im_end|>")
            if said.get("tool_calls"):
                called = json.loads(span.removeprefix("<tool_call>\n").removesuffix("\n</tool_call><|im_end|>"))
                assert called == json.loads(value)
            else:
                assert span == f"{value}<|im_end|>"
        tools = json.loads(by_place[row["where"]].get("tools") or "[]")
        if tools:
            kept_tools = json.loads(row["template_kwargs"])["tools"]
            assert [t["function"]["name"] for t in kept_tools] == [t["name"] for t in tools]


def supervised(tokenizer: Any, request: Row) -> list[str]:
    """The texts of a request's supervised spans."""
    ids = request["prompt_ids"] + request["answer_ids"]
    spans = groupby(zip(ids, request["loss_mask"], strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([i for i, _ in span]) for mask, span in spans if mask]


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "a", "history": 5},
        {"prompt": "x", "tools": [{"function": 5}]},
        {"prompt": "x", "tools": 5},
        {"messages": {"role": "user"}},
        {"conversations": [5]},
    ],
)
def test_a_value_of_another_kind_is_a_row_rejected_by_name(tiny: Path, tmp_path: Path, row: dict[str, Any]) -> None:
    rows = [{"prompt": f"good {i}"} for i in range(9)] + [row]
    config = tiny_config(tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", rows))
    counts = run_stage(stage("ingest"), context(config))[0].counts
    assert (counts["rows_in"], counts["kept"]) == (10, 9)
    assert sum(counts["rejected"].values()) == 1
