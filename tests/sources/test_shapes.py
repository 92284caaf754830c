"""A row per shape, and what each becomes; the keys alone decide."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.conversations import Conversation, canonical
from app.errors import RowError
from app.sources.shapes import to_raw

U, A, S = "user", "assistant", "system"
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def talk(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


SHAPES: list[tuple[str, Any, list[dict[str, Any]]]] = [
    ("text", "just a line", talk((U, "just a line"))),
    ("prompt", {"prompt": "q"}, talk((U, "q"))),
    ("prompt_response", {"prompt": "q", "response": "a"}, talk((U, "q"), (A, "a"))),
    ("prompt_response", {"query": "q", "completion": "a", "system": "s"}, talk((S, "s"), (U, "q"), (A, "a"))),
    ("prompt_response", {"prompt": talk((S, "s"), (U, "q")), "chosen": talk((U, "q"), (A, "a"))},
     talk((S, "s"), (U, "q"), (A, "a"))),
    ("question_answer", {"question": "q", "answer": "a"}, talk((U, "q"), (A, "a"))),
    ("alpaca", {"instruction": "i", "input": "", "output": "o"}, talk((U, "i"), (A, "o"))),
    ("alpaca", {"instruction": "i", "input": "x", "output": "o", "history": [["p", "r"]]},
     talk((U, "p"), (A, "r"), (U, "i\n\nx"), (A, "o"))),
    ("turns", {"question_id": 1, "category": "c", "turns": ["q1", "q2"]}, talk((U, "q1"), (U, "q2"))),
    ("messages", {"messages": talk((U, "q"), (A, "a"))}, talk((U, "q"), (A, "a"))),
    ("messages", talk((U, "q"), (A, "a")), talk((U, "q"), (A, "a"))),
    ("messages", {"messages": [{"role": U, "content": [{"type": "text", "text": "q"}]}]}, talk((U, "q"))),
    ("sharegpt", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
     talk((U, "q"), (A, "a"))),
    ("sharegpt",
     {"conversations": [{"from": "human", "value": "q"},
                        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                        {"from": "observation", "value": "r"}, {"from": "gpt", "value": "a"}],
      "tools": json.dumps([{"name": "f", "parameters": {}}])},
     [*talk((U, "q")), {"role": A, "content": "", "tool_calls": [CALL]}, *talk(("tool", "r"), (A, "a"))]),
    ("trajectory", {"history": [{"role": "system", "content": "s", "agent": "main"}, {"role": "user", "content": "q"},
                                {"role": "assistant", "content": "a", "thought": "t"}]},
     talk((S, "s"), (U, "q"), (A, "a"))),
    ("trajectory", {"trajectory": [{"role": "system", "system_prompt": "s", "text": None},
                                   {"role": "user", "text": "q"}, {"role": "ai", "text": "a"}]},
     talk((S, "s"), (U, "q"), (A, "a"))),
    ("messages", {"messages": [{"role": U, "content": "q"}, {"role": A, "content": "a", "thinking": "t"}]},
     [*talk((U, "q")), {"role": A, "content": "a", "reasoning_content": "t"}]),
    ("messages", {"messages": [{"role": U, "content": "q"},
                               {"role": A, "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}}]},
     [*talk((U, "q")), {"role": A, "content": "", "tool_calls": [CALL]}]),
]  # fmt: skip


def read(row: Any, columns: dict[str, str] | None = None, use: str = "as_is") -> Conversation:
    raw = to_raw(row, columns or {})
    return canonical(raw, None, use if any(m["role"] == A for m in raw.messages) else "regenerate")


@pytest.mark.parametrize(("shape", "row", "messages"), SHAPES)
def test_each_shape_becomes_messages(shape: str, row: Any, messages: list[dict[str, Any]]) -> None:
    got = read(row)
    assert (got.shape, got.messages) == (shape, messages)


def test_tools_of_the_row_reach_the_template() -> None:
    row = {"messages": talk((U, "q")), "tools": json.dumps([TOOL])}
    assert read(row).template_kwargs == {"tools": [TOOL]}


def test_columns_name_what_is_not_recognised() -> None:
    row = {"meta": {"ask": "q"}, "reply": "a", "topic": "t", "uid": 5}
    got = read(row, {"prompt": "meta.ask", "response": "reply", "domain": "topic"})
    assert (got.messages, got.domain) == (talk((U, "q"), (A, "a")), "t")
    with pytest.raises(RowError) as fault:
        read(row, {"prompt": "meta.asked"})
    assert fault.value.reason == "missing_column" and "meta, reply, topic, uid" in fault.value.detail


def test_columns_do_not_make_a_log_public() -> None:
    """A logged row stays private whatever its columns are called, usable as a log or not; another row is not."""
    chat = {"messages": talk((U, "q"))}
    response = {"choices": [{"message": {"role": A, "content": "a"}}]}
    logs: list[dict[str, Any]] = [
        {"request": {"model": "m", **chat}, "response": response},
        {"model": "m", "temperature": 0.5, **chat},
        {"uuid": "1", "chat_messages": [{"sender": "human", "text": "Hello"}]},
        {"chat_messages": [{"sender": "SECRET", "text": "x"}]},
        {"response": response},
    ]
    for row in logs:
        got = to_raw({**row, "ask": "q"}, {"prompt": "ask"})
        assert got.private and got.messages == talk((U, "q")), row
    assert not to_raw({**chat, "ask": "q"}, {"prompt": "ask"}).private
    with pytest.raises(RowError) as fault:
        to_raw({**logs[0], "ask": [{"role": "SECRET", "content": "x"}]}, {"messages": "ask"})
    assert fault.value.reason == "unknown_role" and "SECRET" not in str(fault.value)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (5, "not_an_object"),
        ({}, "unknown_shape"),
        ({"text": "a document"}, "unknown_shape"),
        ({"messages": []}, "no_turns"),
        ({"messages": None}, "no_turns"),
        ({"messages": talk((S, "s"))}, "no_turns"),
        ({"messages": [None]}, "bad_message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "unknown_role"),
        ({"messages": [{"content": "x"}]}, "unknown_role"),
        ({"messages": [{"role": U, "content": None}]}, "empty_turn"),
        ({"messages": [{"role": U, "content": 5}]}, "bad_content"),
        ({"messages": [*talk((U, "q")), {"role": A, "content": None}]}, "empty_assistant"),
        ({"messages": [*talk((U, "q")), {"role": A, "content": ""}]}, "empty_assistant"),
        ({"messages": [{"role": U, "content": [{"type": "image_url"}]}]}, "multimodal_not_supported"),
        ({"messages": [*talk((U, "q")), {"role": A, "tool_calls": [{"function": {"arguments": "{}"}}]}]},
         "bad_tool_call"),
        ({"messages": [*talk((U, "q")), {"role": A, "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}]},
         "bad_tool_arguments"),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "not json"}]},
         "bad_tool_call"),
        ({"messages": talk((U, "q")), "tools": "[broken"}, "bad_tools"),
        ({"prompt": ""}, "empty_prompt"),
        ({"prompt": None}, "empty_prompt"),
        ({"turns": ["q", None]}, "no_turns"),
        ({"turns": []}, "no_turns"),
        ({"instruction": "", "input": ""}, "empty_prompt"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(row: Any, reason: str) -> None:
    with pytest.raises(RowError) as fault:
        read(row)
    assert fault.value.reason == reason
    assert fault.value.detail


def test_f01_irregular_rows_are_kept_and_counted() -> None:
    normal = read({"messages": talk((U, "q"), (A, "a"))})
    assert not normal.notes
    leading = read({"messages": talk((A, "hello"), (U, "q"), (A, "a"))})
    assert leading.messages == normal.messages
    assert leading.notes["leading_assistant_dropped"] == 1
    repeated = read({"messages": talk((U, "q"), (U, "and"), (A, "a"))})
    assert len(repeated.messages) == 3 and repeated.notes["role_repeats"] == 1


def test_a_logs_faults_do_not_quote_it() -> None:
    row = {"chat_messages": [{"sender": "SECRET", "text": "x"}]}
    with pytest.raises(RowError) as fault:
        to_raw(row, {})
    assert "SECRET" not in str(fault.value)


def test_ids_tell_where_the_target_answers() -> None:
    def identity(*turns: tuple[str, str]) -> str:
        return canonical(to_raw({"messages": talk(*turns)}, {}), None, "regenerate").id("regenerate")

    assert identity((U, "a"), (A, "x"), (U, "b")) == identity((U, "a"), (A, "y"), (U, "b"), (A, "z"))
    assert identity((U, "a"), (A, "x"), (U, "b")) != identity((U, "a"), (U, "b"))
