"""The preview is what ingest makes, shown: the same ids, counts and masks, marked, escaped, private text left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app import cli
from app.config import Config
from app.marked import Span, one_line, short, spans_of, terminal_lines, visible
from app.parts import read_ingest_part
from app.pipelines import ingest
from app.preview import SourceView, preview, preview_lines, preview_page
from app.target import Renderer, load_tokenizer
from app.template_probe import additions, default_system
from tests import templates
from tests.runs import context, save_config, tiny_config, write_rows

LOGS = Path(__file__).parent / "sources" / "logs"
TWO_TURNS = {
    "messages": [
        {"role": "user", "content": "What is 9 * 8?"},
        {"role": "assistant", "content": "72"},
        {"role": "user", "content": "And 6 * 7?"},
        {"role": "assistant", "content": "42 it is"},
    ]
}
TOOL = {"type": "function", "function": {"name": "count_sacks", "description": "of flour", "parameters": {}}}


def config_of(tiny: Path, tmp_path: Path, rows: list[Any], **source: Any) -> Config:
    path = write_rows(tmp_path / "rows.jsonl", rows)
    return tiny_config(
        tiny, tmp_path / "run", path, sources=[{"name": "s", "path": str(path), "max_reject_share": 1, **source}]
    )


def text_of(views: list[SourceView], config: Config, colour: bool = False, full: bool = False) -> str:
    return "\n".join(preview_lines(views, config, colour, full))


@pytest.mark.parametrize("use", ["as_is", "regenerate"])
def test_the_preview_shows_what_ingest_makes(tiny: Path, tmp_path: Path, use: str) -> None:
    rows = [TWO_TURNS, {"messages": []}, {"messages": [*TWO_TURNS["messages"][:2]]}, TWO_TURNS, "{broken"]
    config = config_of(tiny, tmp_path, rows, use=use)
    ctx = context(config)
    ingest.run(ctx)
    made = {r["id"]: r for r in read_ingest_part(ctx.run.store, 0)}
    rejects = [json.loads(x)["reason"] for x in ctx.run.store.read_bytes(ingest.REJECTS).decode().splitlines()]
    [view] = preview(config, 10)
    kept = {r.id: r for r in view.rows if r.kept}
    assert kept.keys() == made.keys() and len(kept) == 2
    assert [r.verdict.partition(": ")[2].partition(",")[0] for r in view.rows if not r.kept] == rejects
    tokenizer = load_tokenizer(tiny)
    for identity, row in kept.items():
        for shown, request in zip(row.samples, made[identity]["requests"], strict=True):
            ids = [*request["prompt_ids"], *(request["answer_ids"] or [])]
            assert shown.spans is not None
            assert "".join(s.text for s in shown.spans) == tokenizer.decode(ids)
            assert shown.prompt == len(request["prompt_ids"])
            if use == "as_is":
                assert shown.answer == len(request["answer_ids"])
                assert shown.supervised == sum(request["loss_mask"])


def test_the_mask_is_marked_in_text_and_coloured_in_a_terminal(tiny: Path, tmp_path: Path) -> None:
    config = config_of(tiny, tmp_path, [TWO_TURNS], use="as_is")
    views = preview(config, 1)
    plain = text_of(views, config)
    assert "| ⟦72<|im_end|>⟧" in plain and "| ⟦42 it is<|im_end|>⟧" in plain
    assert "| What is 9 * 8?<|im_end|>" in plain  # special tokens show, the user's words are not marked
    assert plain.count("⟦") == 1 + 2  # the legend, and each answer
    coloured = text_of(views, config, colour=True)
    assert "\x1b[1;32m42 it is<|im_end|>\x1b[0m" in coloured and "⟦" not in coloured
    page = preview_page(views, config, False)
    assert "<mark>42 it is&lt;|im_end|&gt;</mark>" in page


def test_a_regenerated_row_shows_the_prompt_and_what_is_replaced(tiny: Path, tmp_path: Path) -> None:
    config = config_of(tiny, tmp_path, [TWO_TURNS])
    [view] = preview(config, 1)
    [row] = view.rows
    assert row.samples[0].spans is not None
    assert row.samples[0].spans[-1].text.endswith("9 * 8?<|im_end|>\n<|im_start|>assistant\n")
    replaced = [text for label, text in row.facts if label == "replaced"]
    assert replaced == ['the recorded answer of turn 0: "72"', 'the recorded answer of turn 1: "42 it is"']
    assert "the target answers with up to 16, all learnt" in text_of([view], config)


@pytest.mark.parametrize(
    ("name", "messages", "kwargs", "prompt", "system", "words", "left_out"),
    [
        ("plain", TWO_TURNS["messages"], {}, False, None, [], []),
        ("default_system", TWO_TURNS["messages"], {}, False, "You are a tiny model.", [], []),
        ("default_system", [{"role": "system", "content": "a"}, *TWO_TURNS["messages"]], {}, False, None, [], []),
        ("think", TWO_TURNS["messages"], {}, False, None, ["an empty think block"], []),
        ("think_open", TWO_TURNS["messages"][:1], {}, True, None, ["an open think tag for the answer to begin in"], []),
        ("tools", TWO_TURNS["messages"][:1], {"tools": [TOOL]}, True, None, ["text of 1 tools"], []),
        ("plain", TWO_TURNS["messages"][:1], {"tools": [TOOL]}, True, None, [], ["the 1 tools"]),
        (
            "plain",
            [TWO_TURNS["messages"][0], {"role": "assistant", "content": "72", "reasoning_content": "9 * 8 ..."}],
            {}, False, None, [], ["the reasoning of message 1"],
        ),
    ],
)  # fmt: skip
def test_what_the_template_adds_and_leaves_out(
    tiny: Path, name: str, messages: list[Any], kwargs: dict[str, Any], prompt: bool, system: str | None,
    words: list[str], left_out: list[str],
) -> None:  # fmt: skip
    tokenizer = load_tokenizer(tiny)
    tokenizer.chat_template = templates.ALL[name]
    found = additions(Renderer(tokenizer, kwargs), messages, prompt)
    assert found.default_system == system
    assert [w.partition(" (")[0] for w in found.words] == words
    assert found.left_out == left_out


def test_other_text_of_the_template_is_quoted_and_no_text_of_a_message_is(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    tokenizer.chat_template = "Today is Monday.\n" + templates.PLAIN
    found = additions(Renderer(tokenizer), [{"role": "user", "content": "Today is Monday"}], True)
    assert found.words == ['"Today is Monday."']
    assert default_system(Renderer(tokenizer)) is None


def test_the_effective_system_prompt(tiny: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(templates.DEFAULT_SYSTEM)

    def system(row: Any, **source: Any) -> str:
        config = config_of(tiny, tmp_path, [row], **source)
        config = config.model_copy(update={"target": config.target.model_copy(update={"chat_template": str(template)})})
        return dict(preview(config, 1)[0].rows[0].facts)["system"]

    assert system(TWO_TURNS) == 'the template\'s default: "You are a tiny model."'
    assert system(TWO_TURNS, system_prompt="Be brief.") == 'of the source: "Be brief."'
    own = {"messages": [{"role": "system", "content": "Be long."}, *TWO_TURNS["messages"]]}
    assert system(own, system_prompt="Be brief.") == 'of the row: "Be long."'


def test_a_template_that_ignores_what_is_said_is_told_of(tiny: Path, tmp_path: Path) -> None:
    def shown(text: str, row: Any) -> str:
        template = tmp_path / "t.jinja"
        template.write_text(text)
        config = config_of(tiny, tmp_path, [row])
        config = config.model_copy(update={"target": config.target.model_copy(update={"chat_template": str(template)})})
        return text_of(preview(config, 1), config)

    own = {"messages": [{"role": "system", "content": "Be long."}, *TWO_TURNS["messages"]]}
    words = "note: WARNING: the target's chat template renders the same text whatever the messages say"
    assert words in shown("Answer me.", TWO_TURNS)
    without = templates.PLAIN.replace("in messages %}", "in messages if m['role'] != 'system' %}")
    assert "the template leaves out what system messages say" in shown(without, own)
    assert "WARNING" not in shown(without, TWO_TURNS) + shown(templates.PLAIN, own)


def test_private_text_is_not_shown(tiny: Path, tmp_path: Path) -> None:
    row = {
        "messages": [
            {"role": "system", "content": "hidden-a"},
            {"role": "user", "content": "hidden-b"},
            {"role": "assistant", "content": "hidden-c"},
            {"role": "user", "content": "hidden-d"},
            {"role": "assistant", "content": "hidden-e"},
        ]
    }
    broken = {"messages": [{"role": "hidden-f", "content": "x"}]}
    for use in ("as_is", "regenerate"):
        config = config_of(tiny, tmp_path, [row, broken], use=use, private=True)
        views = preview(config, 5)
        assert "hidden" not in text_of(views, config) + preview_page(views, config, True)
        assert "private, not shown" in text_of(views, config) and views[0].rows[0].samples[0].prompt > 0
        shown = preview(config, 5, show_private=True)
        assert "hidden-b" in text_of(shown, config) and "hidden-c" in text_of(shown, config)
        assert "unknown_role" in preview_page(shown, config, True)


def test_a_row_of_a_log_is_private_by_itself(tiny: Path, tmp_path: Path) -> None:
    config = config_of(tiny, tmp_path, [], path=str(LOGS / "openai.jsonl"))
    kept = [r for r in preview(config, 20)[0].rows if r.samples]
    assert kept and all(s.spans is None for r in kept for s in r.samples)


@pytest.mark.parametrize(("private", "shown"), [(False, False), (True, False), ("never", True)])
def test_named_columns_leave_a_log_private_unless_the_person_says_never(
    tiny: Path, tmp_path: Path, private: bool | str, shown: bool
) -> None:
    row = {"request": {"model": "m", "messages": [{"role": "user", "content": "hidden-a"}]}, "ask": "hidden-b"}
    broken = {**row, "ask": [{"role": "hidden-c", "content": "x"}]}
    config = config_of(tiny, tmp_path, [row, broken], columns={"prompt": "ask"}, private=private)
    views = preview(config, 5)
    assert ("hidden-b" in text_of(views, config)) is shown
    assert "hidden-c" not in text_of(views, config) and views[0].rows[1].reason == "unknown_role"
    ctx = context(config)
    ingest.run(ctx)
    assert [r["private"] for r in read_ingest_part(ctx.run.store, 0)] == [not shown]
    assert "hidden" not in ctx.run.store.read_bytes(ingest.REJECTS).decode()
    plain = config_of(tiny, tmp_path, [{"ask": "shown-a"}], columns={"prompt": "ask"}, private=False)
    assert "shown-a" in text_of(preview(plain, 1), plain)


def test_nothing_of_a_row_steers_the_terminal_or_the_page(tiny: Path, tmp_path: Path) -> None:
    config = config_of(tiny, tmp_path, [{"prompt": "a\x1b[2J\u202eb<script>alert(1)</script>"}], name="<b>s</b>")
    views = preview(config, 1)
    text = text_of(views, config)
    assert "\x1b" not in text and "\u202e" not in text and "a␛[2J<U+202E>b" in text
    page = preview_page(views, config, False)
    assert "<script" not in page and "<b>" not in page and "\u202e" not in page
    assert "http://" not in page and "https://" not in page
    assert visible("a\tb\n\x7f\x9b") == "a\tb\n<U+007F><U+009B>"


def test_long_text_is_cut_in_the_middle_unless_asked_for(tiny: Path, tmp_path: Path) -> None:
    assert short("x" * 10, 10) == "x" * 10
    assert short("a" * 20 + "b" * 70 + "c" * 10, 30) == "a" * 20 + " [... 70 characters ...] " + "c" * 10
    assert one_line("a\n b\n") == "a b"
    cut = "\n".join(terminal_lines([Span("word " * 1000, True)], False))
    assert "characters ...]" in cut and len(cut) < 2100
    assert terminal_lines([Span("word " * 1000, True)], False, None) == ["⟦" + "word " * 1000 + "⟧"]


def test_spans_are_cut_out_of_the_whole_text(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    ids = tokenizer("a ü€ story", add_special_tokens=False)["input_ids"]
    for at in range(len(ids) + 1):
        spans = spans_of(tokenizer, ids, [i >= at for i in range(len(ids))])
        assert [s.supervised for s in spans] == [False, True][at == 0 :][: len(spans)]
        if "\ufffd" not in "".join(s.text for s in spans):
            assert "".join(s.text for s in spans) == "a ü€ story"


def test_notes_say_what_a_look_cannot_see(tiny: Path, tmp_path: Path) -> None:
    config = config_of(tiny, tmp_path, [TWO_TURNS, {"prompt": "b"}], count=1)
    [view] = preview(config, 5)
    assert view.notes == ["the first rows as read; ingest draws by count or share from all of them"]


def test_the_command_line(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet_log: None) -> None:
    config = config_of(tiny, tmp_path, [TWO_TURNS, {"prompt": "b"}, {"prompt": "c"}], use="as_is")
    path = str(save_config(config, tmp_path / "c.yaml"))
    assert cli.run(["preview", path, "--rows", "2"]) == 0
    out = capsys.readouterr().out
    assert "row 2" in out and "row 3" not in out and "⟦42 it is<|im_end|>⟧" in out and "\x1b" not in out
    assert cli.run(["preview", path, "--color"]) == 0
    assert "\x1b[1;32m" in capsys.readouterr().out
    assert cli.run(["preview", path, "sources.0.use=regenerate", "--html", str(tmp_path / "p.html")]) == 0
    assert "regenerate" in (tmp_path / "p.html").read_text()
    assert not (tmp_path / "run").exists()  # looking makes no run


@pytest.mark.parametrize("page", [False, True])
def test_it_fails_where_every_row_is_rejected(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet_log: None, page: bool
) -> None:
    bad = [{"text": "a"}, {"messages": []}, {"text": "b"}]
    path = str(save_config(config_of(tiny, tmp_path, bad), tmp_path / "c.yaml"))
    target = tmp_path / "p.html"
    assert cli.run(["preview", path, *(["--html", str(target)] if page else [])]) == 1
    told = capsys.readouterr()
    assert "rejected: no_turns" in (target.read_text() if page else told.out)  # it is shown all the same
    said = "draftmill: error: none of the 3 rows looked at would be kept, 2 of them for unknown_shape; "
    assert told.err.startswith(said) and told.err.count("\n") == 1
    path = str(save_config(config_of(tiny, tmp_path, [*bad, {"prompt": "good"}]), tmp_path / "c.yaml"))
    assert cli.run(["preview", path]) == 0 and not capsys.readouterr().err
    assert cli.run(["preview", path, "--rows", "3"]) == 1  # of those that were looked at


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--source", "nobody"], "there is no source 'nobody'; the sources are s"),
        (["--rows", "0"], "--rows is 0"),
        (["--html", "/nowhere/p.html"], "--html /nowhere/p.html cannot be written"),
        (["sources.0.path=/nowhere/x.jsonl"], "source s: "),
        (["target.model=/nowhere"], "target.model /nowhere"),
        (["capture.mask=engine", "sources.0.use=as_is"], "capture.mask=engine fits regenerated"),
    ],
)
def test_a_fault_is_one_sentence(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet_log: None, args: list[str], words: str
) -> None:
    path = save_config(config_of(tiny, tmp_path, [TWO_TURNS]), tmp_path / "c.yaml")
    assert cli.run(["preview", str(path), *args]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"draftmill: error: {words}")
    assert error.count("\n") == 1


def test_a_source_that_is_skipped_is_named(tiny: Path, tmp_path: Path) -> None:
    config = config_of(tiny, tmp_path, [TWO_TURNS])
    gone = config.sources[0].model_copy(update={"name": "gone", "path": str(tmp_path / "gone.jsonl")})
    skip = config.ingest.model_copy(update={"on_source_error": "skip"})
    config = config.model_copy(update={"sources": [gone, *config.sources], "ingest": skip})
    first, second = preview(config, 1)
    assert first.notes[0].startswith("SKIPPED: source gone") and not first.rows
    assert second.rows
