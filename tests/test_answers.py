"""What the target wrote is taken apart, and what cannot be learnt from is rejected by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.answers import calls_in, history_message, read_answer, recorded_calls
from app.engine.part_worker import PartWorker
from app.parts import PARTS
from app.pipeline import run_pipeline
from app.pipelines.generate import _worker_config
from app.sizing import Engines
from app.sources.shapes import WITHHELD
from app.stages import stages_up_to
from app.target import load_tokenizer
from tests import templates
from tests.runs import context, tiny_config, write_rows


@pytest.mark.parametrize(
    ("text", "thinks", "opened", "reasoning", "content", "leftover"),
    [
        ("plain", False, False, None, "plain", False),
        ("a <think> b", False, False, None, "a <think> b", True),
        ("<think>\nabc\n</think>\n\nyes", True, False, "abc", "yes", False),
        ("abc\n</think>\n\nyes", True, True, "abc", "yes", False),
        ("<think>\nnever ends", True, False, "never ends", "", False),
        ("no thinking this time", True, False, None, "no thinking this time", False),
        ("<think>a</think>yes</think>", True, False, "a", "yes</think>", True),
        ("late </think> tag", True, False, None, "late </think> tag", True),
    ],
)
def test_thinking_is_split_from_the_content(
    text: str, thinks: bool, opened: bool, reasoning: str | None, content: str, leftover: bool
) -> None:
    answer = read_answer(text, thinks, opened)
    assert (answer.reasoning, answer.content, answer.leftover_tag) == (reasoning, content, leftover)
    assert answer.thinking_only == (reasoning is not None and not content)


def test_calls_are_found_and_compared_by_value() -> None:
    text = 'Let me look.\n<tool_call>\n{"name": "f", "arguments": {"x": 1, "y": [2]}}\n</tool_call>{"no": "call"}'
    assert calls_in(text) == [("f", {"x": 1, "y": [2]})]
    assert calls_in('{"name": "f", "parameters": "{\\"x\\": 1}"} {broken') == [("f", {"x": 1})]
    recorded = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    assert recorded_calls(recorded) == [("f", {"x": 1})]
    message = history_message(read_answer(text, False, False), recorded, True)
    assert message["content"] == "Let me look."
    assert message["tool_calls"] == recorded["tool_calls"]


@pytest.mark.parametrize("opened", ['{"a":' + "[" * 3000, '{"a":' * 3000, "{" * 3000])
def test_brackets_without_end_are_no_call(opened: str) -> None:
    """What a small model stutters must not end the run."""
    call = '{"name": "f", "arguments": {"x": 1}}'
    assert calls_in(call + opened) == calls_in(opened + "]" + call) == [("f", {"x": 1})]
    deep = json.dumps({"name": "f", "arguments": opened})
    assert calls_in(deep) == [("f", opened)]


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def make(
    tiny: Path, tmp_path: Path, template: str, rows: list[Any], script: dict[str, str], **changes: Any
) -> tuple[Any, Any]:
    """The part's entry and its rows by the scripted engine, without Ray."""
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "template.jinja").write_text(template)
    (tmp_path / "script.json").write_text(json.dumps(script))
    config = tiny_config(
        tiny, tmp_path / "run", write_rows(tmp_path / "rows.jsonl", rows),
        target__chat_template=str(tmp_path / "template.jinja"),
        generate__engine_args={"STUB_SCRIPT": str(tmp_path / "script.json")}, **changes,
    )  # fmt: skip
    run_pipeline(config, stages_up_to("ingest"))
    ctx = context(config)
    worker = PartWorker(_worker_config(ctx, False, Engines(1, 1, "one")))
    outcome = json.loads(worker({"part": [0], "key": ["k"]})["outcome"][0])
    import pyarrow.parquet as pq

    rows_file = tmp_path / "run" / PARTS / outcome["files"]["rows"]["name"]
    return outcome, pq.read_table(rows_file).to_pylist()


def test_f25_every_input_ends_kept_or_rejected_and_the_sums_match(tiny: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"good {i}"} for i in range(7)]
    rows += [{"prompt": "empty"}, {"prompt": "stray"}, {"prompt": "spaces"}]
    script = {"good": "a fine answer", "empty": "", "stray": "a <think> b c", "spaces": "  \n  \n "}
    entry, kept = make(tiny, tmp_path, templates.PLAIN, rows, script)
    assert (entry["rows_in"], entry["conversations"]) == (10, 7)
    assert sorted(r["reason"] for r in entry["rejects"]) == ["empty_answer", "empty_answer", "leftover_tag"]
    assert len(kept) == 7


@pytest.mark.parametrize("private", [False, True])
def test_what_a_server_says_of_a_private_row_is_not_quoted(tiny: Path, tmp_path: Path, private: bool) -> None:
    rows = [{"prompt": f"good {i}"} for i in range(5)]
    source = {"name": "rows", "path": str(write_rows(tmp_path / "in.jsonl", rows)), "private": private}
    config = tiny_config(tiny, tmp_path / "run", Path("x"), sources=[source], generate__engine_args={"STUB_RAISE": 5})
    run_pipeline(config, stages_up_to("ingest"))
    worker = PartWorker(_worker_config(context(config), False, Engines(1, 1, "one")))
    entry = json.loads(worker({"part": [0], "key": ["k"]})["outcome"][0])
    said = WITHHELD if private else "the stub refuses every so many requests"
    assert [(r["reason"], r["detail"]) for r in entry["rejects"]] == [("bad_request", said)]


def test_f23_only_the_finish_reason_says_that_an_answer_was_cut(tiny: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"cut {i}"} for i in range(4)] + [{"prompt": f"whole {i}"} for i in range(6)]
    script = {"cut": "this goes on and on ...", "whole": "done"}
    entry, kept = make(tiny, tmp_path, templates.PLAIN, rows, script)
    assert entry["finish_reasons"] == {"length": 4, "stop": 6}
    end = load_tokenizer(tiny).convert_tokens_to_ids("<|im_end|>")
    for row in kept:
        assert row["truncated"] == (row["finish_reason"] == "length")
        assert (row["answer_ids"][-1] == end) == (row["finish_reason"] == "stop")  # no invented end
    entry, _ = make(tiny, tmp_path / "drop", templates.PLAIN, rows, script, generate__length_stopped="drop")
    assert [r["reason"] for r in entry["rejects"]] == ["stopped_by_length"] * 4


def test_thinking_only_answers_are_their_own_class(tiny: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "ponder"}, {"prompt": "speak"}]
    script = {"ponder": "still at it ...", "speak": "short\n</think>\n\nyes"}
    entry, kept = make(tiny, tmp_path, templates.THINK_OPEN, rows, script)
    assert [r["reason"] for r in entry["rejects"]] == ["thinking_only"]
    assert json.loads(kept[0]["messages"])[-1] == {
        "role": "assistant", "content": "yes", "reasoning_content": "short",
    }  # fmt: skip
    entry, _ = make(tiny, tmp_path / "keep", templates.THINK_OPEN, rows, script, generate__thinking_only="keep")
    assert entry["rejects"] == []


def tool_row(argument: int) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"x": argument})}}
    return {
        "messages": [
            {"role": "user", "content": f"call {argument}"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "result"},
            {"role": "assistant", "content": "old"},
            {"role": "user", "content": "thanks"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    }


def test_a_recorded_result_is_used_only_for_the_call_it_answers(tiny: Path, tmp_path: Path) -> None:
    script = {"call": CALL, "result": "It is a result.", "thanks": "Welcome."}
    entry, kept = make(tiny, tmp_path, templates.TOOLS, [tool_row(1), tool_row(2)], script, generate__max_length=400)
    by_turns: dict[str, int] = {}
    for row in kept:
        by_turns[row["conversation_id"]] = by_turns.get(row["conversation_id"], 0) + 1
    assert sorted(by_turns.values()) == [1, 3]
    assert [r["reason"] for r in entry["cut_short"]] == ["tool_call_differs"]
    last = max(kept, key=lambda r: r["turn"])
    roles = [m["role"] for m in json.loads(last["messages"])]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    prompt = str(load_tokenizer(tiny).decode(last["prompt_ids"]))
    assert prompt.count("<tool_call>") == 1  # the target's own call, written once
    assert "old" not in prompt
