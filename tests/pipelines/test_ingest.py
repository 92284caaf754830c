"""Ingest: every row kept or rejected with a reason, stable ids, masks checked after the cut."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.conversations import canonical
from app.errors import RowError, UserError
from app.masks import MaskRule, tokenise_as_is
from app.parts import read_ingest_part
from app.pipelines import ingest
from app.sources.shapes import to_raw
from app.target import Renderer, load_tokenizer
from tests.runs import context, prompts, tiny_config, write_rows


def run_ingest(config: Any) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """counts, kept rows, rejects."""
    ctx = context(config)
    result = ingest.run(ctx)
    rows = [r for p in range(result.counts["parts"]) for r in read_ingest_part(ctx.run.store, p)]
    rejects = [json.loads(x) for x in ctx.run.store.read_bytes("ingest/rejects.jsonl").decode().splitlines()]
    return result.counts, rows, rejects


def test_every_row_ends_kept_or_rejected_with_a_reason(tiny: Path, tmp_path: Path) -> None:
    rows: list[Any] = [
        {"prompt": "What is 17 + 25?"},
        {"messages": [{"role": "user", "content": "What is 9 * 8?"}]},
        {"prompt": "What is 17 + 25?"},
        {
            "messages": [
                {"role": "user", "content": "What is 17 + 25?"},
                {"role": "assistant", "content": "42"},
            ]
        },
        {"messages": []},
        {"messages": [{"role": "system", "content": "Be brief."}]},
        {"messages": None},
        {"text": "no known shape"},
        {"prompt": ""},
        {"prompt": 5},
        5,
        "{broken",
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is 6 * 7?"}]}]},
        {"prompt": "a " * 400},
        {"prompt": "x", "sampling": {"temperature": -1}},
        {"prompt": "x", "sampling": {"heat": 1}},
    ]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    counts, kept, rejects = run_ingest(
        tiny_config(tiny, tmp_path / "run", source, sources=[{"path": str(source), "max_reject_share": 1}])
    )
    assert counts["rows_in"] == len(rows) == counts["kept"] + sum(counts["rejected"].values())
    assert len(kept) == counts["kept"] == 3
    assert counts["rejected"] == {
        "duplicate": 2, "no_turns": 3, "unknown_shape": 1, "empty_prompt": 2, "not_an_object": 1, "bad_json": 1,
        "unknown_role": 1, "multimodal_not_supported": 1, "prompt_too_long": 1, "bad_sampling": 2,
    }  # fmt: skip
    assert {r["where"] for r in rejects} == {
        f"rows.jsonl:{i}" for i in (3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 16, 17, 18)
    }
    assert all(r["reason"] and r["detail"] for r in rejects)


def test_ids_and_parts_depend_on_the_rows_alone(tiny: Path, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", prompts(25))
    _, first, _ = run_ingest(tiny_config(tiny, tmp_path / "one", source))
    _, second, _ = run_ingest(tiny_config(tiny, tmp_path / "two", source))
    assert first == second
    longer = write_rows(tmp_path / "b.jsonl", prompts(31))
    config = tiny_config(tiny, tmp_path / "three", longer)
    run_ingest(config)
    one, three = context(tiny_config(tiny, tmp_path / "one", source)).run, context(config).run
    for part in (0, 1):  # full parts are the same bytes: what was generated for them stays
        same = {"id", "messages", "requests"}
        pairs = zip(read_ingest_part(one.store, part), read_ingest_part(three.store, part), strict=True)
        assert all({k: a[k] for k in same} == {k: b[k] for k in same} for a, b in pairs)


def test_bom_crlf_and_blank_lines(tiny: Path, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_bytes(
        b"\xef\xbb\xbf" + b'{"prompt": "one"}\r\n\r\n  \n{"prompt": "zwei \xc3\xbc"}\r\n{"prompt": "bad \xff"}\n'
    )
    config = tiny_config(tiny, tmp_path / "run", source, sources=[{"path": str(source), "max_reject_share": 1}])
    counts, kept, rejects = run_ingest(config)
    assert [json.loads(r["messages"])[0]["content"] for r in kept] == ["one", "zwei ü"]
    assert [r["where"] for r in kept] == ["rows.jsonl:1", "rows.jsonl:4"]
    assert [r["reason"] for r in rejects] == ["bad_encoding"]
    assert counts["rows_in"] == 3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: p / "absent.jsonl", "nothing is found"),
        (lambda p: p / "*.nothing", "nothing is found"),
        (lambda p: write_rows(p / "empty.jsonl", []), "holds no rows"),
        (lambda p: write_rows(p / "bad.jsonl", ["{"] * 60 + prompts(40)), "max_reject_share"),
    ],
)
def test_a_source_that_cannot_be_used_is_one_sentence(tiny: Path, tmp_path: Path, make: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        run_ingest(tiny_config(tiny, tmp_path / "run", make(tmp_path)))


def test_f28_one_long_prompt_and_one_bad_value_cost_two_rows(tiny: Path, tmp_path: Path) -> None:
    rows = [*prompts(98), {"prompt": "a " * 400}, {"prompt": "x", "sampling": {"temperature": -1}}]
    counts, _, _ = run_ingest(tiny_config(tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", rows)))
    assert (counts["kept"], counts["rejected"]) == (98, {"prompt_too_long": 1, "bad_sampling": 1})
    rows = [*prompts(40), *({"prompt": "a " * (400 + i)} for i in range(60))]
    with pytest.raises(UserError, match=r"60 of 100 rows .*prompt_too_long 60.*max_reject_share 0\.2"):
        run_ingest(tiny_config(tiny, tmp_path / "run2", write_rows(tmp_path / "r2.jsonl", rows)))


PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TALK = [
    {"role": "user", "content": "What is 17 + 25?"},
    {"role": "assistant", "content": "It is 42."},
    {"role": "user", "content": "And 9 * 8?"},
    {"role": "assistant", "content": "It is 72."},
]


def as_is_config(target: Path, tmp_path: Path, rows: list[Any], **changes: Any) -> Any:
    source = write_rows(tmp_path / "talk.jsonl", rows)
    return tiny_config(
        target,
        tmp_path / "run",
        source,
        sources=[{"name": "talk", "path": str(source), "use": "as_is"}],
        **changes,
    )


def test_f12_forced_tags_without_tags_stop_before_capture(tiny: Path, tmp_path: Path) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text(PLAIN)
    rows = [{"messages": TALK}]
    config = as_is_config(tiny, tmp_path, rows, target__chat_template=str(template), capture__mask="generation_tags")
    with pytest.raises(UserError, match=r"no \{% generation %\} tags.*empty"):
        run_ingest(config)


def test_f12_an_all_ones_mask_must_be_asked_for(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.pipelines.ingest.log.propagate", True)
    caplog.set_level("INFO", "draftmill")
    template = tmp_path / "plain.jinja"
    template.write_text(PLAIN)
    config = as_is_config(tiny, tmp_path, [{"messages": TALK}], target__chat_template=str(template))
    _, kept, _ = run_ingest(config)
    assert kept[0]["mask_method"] == "prefix"
    assert not all(kept[0]["requests"][0]["loss_mask"])
    config = as_is_config(
        tiny, tmp_path, [{"messages": TALK}], target__chat_template=str(template), capture__mask="all"
    )
    _, kept, _ = run_ingest(config)
    assert kept[0]["mask_method"] == "all"
    assert all(kept[0]["requests"][0]["loss_mask"])
    assert "100.0 % of the tokens taken as they are are supervised" in caplog.text
    assert "the user's too" in caplog.text


@pytest.mark.parametrize("method", ["generation_tags", "prefix"])
def test_the_mask_decodes_to_the_assistants_text(tiny: Path, method: str) -> None:
    tokenizer = load_tokenizer(tiny)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    (tokens,), _ = tokenise_as_is(Renderer(tokenizer), TALK, MaskRule(method, 256, end_ids=frozenset({end})))
    assert tokens.answer_ids is not None
    ids = tokens.prompt_ids + tokens.answer_ids
    assert tokens.loss_mask is not None and len(tokens.loss_mask) == len(ids)
    text = tokenizer.decode([i for i, m in zip(ids, tokens.loss_mask, strict=True) if m])
    assert text == "It is 42.<|im_end|>It is 72.<|im_end|>"
    assert ids == Renderer(tokenizer).render(TALK, False)[: len(ids)]


def test_f14_a_prompt_that_fills_the_length_is_rejected_after_the_cut(tiny: Path, tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "a " * 300}, {"role": "assistant", "content": "b " * 20}]}
    short = [{"messages": [{"role": "user", "content": f"Count {i}"}, TALK[1]]} for i in range(9)]
    counts, _, rejects = run_ingest(as_is_config(tiny, tmp_path, [*short, long]))
    assert counts["kept"] == 9
    assert [r["reason"] for r in rejects] == ["no_target_tokens_left"]
    with pytest.raises(UserError, match="no_target_tokens_left"):
        run_ingest(as_is_config(tiny, tmp_path, [long]))


def test_a_template_that_drops_earlier_answers_makes_a_sample_of_each(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' or loop.last %}{{ m['role'] }}: {{ m['content'] }}\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    samples, _ = tokenise_as_is(Renderer(tokenizer), TALK, MaskRule("auto", 256))
    texts = [(tokenizer.decode(t.prompt_ids), tokenizer.decode(t.answer_ids)) for t in samples]
    assert texts == [
        ("user: What is 17 + 25?\nassistant: ", "It is 42.\n"),
        ("user: What is 17 + 25?\nuser: And 9 * 8?\nassistant: ", "It is 72.\n"),
    ]


def test_a_template_without_a_boundary_is_named(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ messages | length }}>{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}answer: {% endif %}"
    )
    with pytest.raises(RowError) as fault:
        tokenise_as_is(Renderer(tokenizer), TALK, MaskRule("auto", 256))
    assert fault.value.reason == "no_mask_method"


def test_a_system_prompt_is_added_where_there_is_none() -> None:
    def first(row: Any) -> str:
        return str(canonical(to_raw(row, {}), "Be brief.", "regenerate").messages[0]["content"])

    assert first({"prompt": "x"}) == "Be brief."
    assert first({"messages": [{"role": "system", "content": "Mine."}, {"role": "user", "content": "x"}]}) == "Mine."
