"""Logs and exports to conversations: a golden file per shape, joined streams, every reason to reject."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from app.errors import RowError
from app.sources import streams
from app.sources.logs import from_log, is_request_line, join_streams
from app.sources.rendered import read_prompt

LOGS = Path(__file__).parent / "logs"
SHAPES = ["openai", "responses", "streams", "chatgpt", "claude", "librechat", "open_webui", "vllm", "sglang"]


def rows_of(path: Path) -> list[Any]:
    text = path.read_text()
    if path.suffix == ".json":
        return json.loads(text)
    return [json.loads(line) if path.suffix == ".jsonl" else line for line in text.splitlines()]


def result_of(row: Any) -> Any:
    """What the golden files hold: the fields that are set, or the reason."""
    try:
        if isinstance(row, RowError):
            raise row
        raw = from_log(row)
    except RowError as error:
        return {"reject": error.reason}
    if raw is None:
        return None
    return {k: v for k, v in asdict(raw).items() if v not in (None, {}, [])}


def reason_of(row: Any) -> str:
    with pytest.raises(RowError) as caught:
        from_log(row)
    assert "secret" not in str(caught.value)
    return caught.value.reason


def joined(rows: list[Any]) -> list[tuple[str, Any]]:
    return list(join_streams((str(number), row) for number, row in enumerate(rows, 1)))


@pytest.mark.parametrize("name", SHAPES)
def test_golden(name: str) -> None:
    path = next(p for p in LOGS.glob(f"{name}.*") if p.suffix != ".expected" and "expected" not in p.name)
    results = {where: result_of(row) for where, row in joined(rows_of(path))}
    assert results == json.loads((LOGS / f"{name}.expected.json").read_text())


def test_request_lines_of_a_server_log() -> None:
    lines = (LOGS / "vllm.log").read_text().splitlines() + (LOGS / "sglang.log").read_text().splitlines()
    found = [is_request_line(line) for line in lines]
    assert found == [False, True, True, False, *[True] * 5, False, True, True]


@pytest.mark.parametrize(
    "row",
    [
        "How do I read a log?",
        "Received request for comments: what is it?",
        {"prompt": "a", "response": "b"},
        {"instruction": "a", "input": "b", "output": "c"},
        {"messages": [{"role": "user", "content": "a"}], "model": "m"},
        {"messages": [{"role": "user", "content": "a"}], "response": "b"},
        {"conversations": [{"from": "human", "value": "a"}]},
        {"request": "a", "response": "b"},
        {"input": "a", "output": "b", "body": "c"},
        {"prompt": "a", "response": {"text": "b"}},
        ["a"],
    ],
)
def test_other_rows_are_none_of_these(row: Any) -> None:
    assert from_log(row) is None


ASKED = {"model": "m", "messages": [{"role": "user", "content": "secret"}]}
FAILED = {"choices": [{"message": {"content": "secret"}, "finish_reason": "content_filter"}]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"request": ASKED, "status": 500, "response": None}, "failed_request"),
        ({"request": ASKED, "response": {"error": {"message": "secret", "code": 429}}}, "failed_request"),
        ({"request": ASKED, "response": {"status_code": 400, "body": {}}}, "failed_request"),
        ({"request": ASKED, "response": {"status_code": 200, "body": {"error": {"message": "x"}}}}, "failed_request"),
        ({**ASKED, "response": {"choices": []}, "status": "failure"}, "failed_request"),
        ({"request": ASKED, "response": FAILED}, "failed_request"),
        ({"request": ASKED, "response": [{"choices": []}, {"error": {"message": "secret"}}]}, "failed_request"),
        ({"request": ASKED, "response": 'data: {"type": "response.failed"}\n\n'}, "failed_request"),
        ({"request": ASKED, "response": {"choices": []}}, "bad_response"),
        ({"request": ASKED, "response": {"unheard": "of"}}, "bad_response"),
        ({"request": ASKED, "response": '{"choices": [{"mess'}, "bad_response"),
        ({"request": ASKED, "response": [{"choices": [{"delta": {"content": "secret"}}]}]}, "cut_stream"),
        ({"request": ASKED, "response": 'data: {"choices": []}\n\ndata: {"choi'}, "cut_stream"),
        ({"response": {"choices": [{"message": {"content": "secret"}}]}}, "no_prompt"),
        ({"request": {**ASKED, "messages": []}}, "no_turns"),
        ({"request": {**ASKED, "messages": ["secret"]}}, "bad_message"),
        ({"request": {**ASKED, "tools": "secret"}}, "bad_tools"),
        ({"request": {**ASKED, "chat_template_kwargs": "secret"}}, "bad_template_kwargs"),
        ({"request": {**ASKED, "continue_final_message": True}}, "continued_message"),
        ({"request": {"model": "m", "prompt": [1, 2]}}, "token_prompt"),
        ({"request": {"model": "m", "prompt": ["secret", "secret"]}}, "several_prompts"),
        ({"request": {"model": "m", "prompt": " "}}, "empty_prompt"),
        ({"request": {"model": "m", "input": "secret", "previous_response_id": "r"}}, "partial_conversation"),
        ({"request": {"model": "m", "input": [{"type": "web_search_call"}]}}, "unsupported_item"),
        ({"mapping": {}, "current_node": "a"}, "no_shown_branch"),
        ({"mapping": {"a": {"parent": "a", "message": None}}, "current_node": "a"}, "no_shown_branch"),
        ({"mapping": {"a": {"parent": None, "message": None}}, "current_node": "a"}, "no_turns"),
        ({"chat_messages": [{"sender": "someone", "text": "secret"}]}, "unknown_role"),
        ({"chat": {"history": {"messages": {"a": {"role": "user", "content": "secret"}}}}}, "no_shown_branch"),
        ({"chat": {"messages": [{"role": "user", "content": None}]}}, "bad_export"),
        (
            {"chat": {"messages": [{"role": "user", "content": "secret", "files": [{"type": "image"}]}]}},
            "multimodal_not_supported",
        ),
        (
            {"messages": [{"messageId": "a", "isCreatedByUser": True, "files": [{"type": "image/png"}]}]},
            "multimodal_not_supported",
        ),
        ("INFO 11-30 06:41:20 [metrics.py:1] Avg generation throughput", "not_a_request"),
        ("Received request a: params: SamplingParams(n=1), lora_request: None.", "no_prompt"),
        ("Request a details: prompt: None, prompt_token_ids: [1]", "token_prompt"),
        ("Request a details: prompt: 'secret", "cut_line"),
        ('Request a JSON body: {"messages":[{"role":"user","content":"sec', "cut_line"),
        ('Request a JSON body: {"model":"m","input":"secret"}', "no_prompt"),
        ("Received request chatcmpl-a: prompt: 'USER: secret ASSISTANT:', params: x", "rendered_prompt"),
        ("Receive: obj=GenerateReqInput(rid='a', text=None, input_ids=[1])", "token_prompt"),
        ("Receive: obj=GenerateReqInput(rid='a')", "no_prompt"),
        ("Receive: obj=EmbeddingReqInput(rid='a', text='secret')", "not_a_request"),
        ("Finish: obj=GenerateReqInput(rid='a', text='sec' ... 'ret')", "cut_line"),
        ("Finish: obj=GenerateReqInput(rid='a', text='secr", "cut_line"),
        ("Receive: obj=GenerateReqInput(rid='a', text='secret', image_data=['x'])", "multimodal_not_supported"),
        (
            "Finish: obj=GenerateReqInput(text='secret'), out={'meta_info': {'finish_reason': {'type': 'abort'}}}",
            "failed_request",
        ),
        ({"event": "request.received", "obj": {"text": "a" * 1024 + "..." + "b" * 1024}}, "cut_line"),
    ],
)
def test_rejected(row: Any, reason: str) -> None:
    assert reason_of(row) == reason


CHATML = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "text",
    [
        CHATML[:-1],
        CHATML + "Hel",
        "x" + CHATML,
        CHATML.replace("Hi", "<|im_start|>"),
        CHATML.replace("Hi", "<tool_response>\n1\n</tool_response>"),
        CHATML.replace("user", "developer"),
        "<|im_start|>assistant\nA<|im_end|>\n" + CHATML,
        "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n<think>B<|im_end|>\n" + CHATML,
        "[INST] <<SYS>>\nA\n<</SYS>>\n\nHi [/INST]",
        "[INST]  Hi [/INST]",
        "[INST] A [/INST] B</s>[INST] C[/INST]",
        "<|system|>\nA</s>\n<|user|>\nHi</s>\n<|assistant|>\n",
        "### Instruction:\nHi\n\n### Response:",
    ],
)
def test_a_rendered_prompt_that_does_not_fit_is_no_conversation(text: str) -> None:
    with pytest.raises(RowError, match="rendered_prompt"):
        read_prompt(text, chat=None)


def test_rendered_prompts_read_back() -> None:
    thinking = "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n<think>\nB\n</think>\n\nC<|im_end|>\n" + CHATML
    assert read_prompt(thinking, True)[0] == [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "C", "reasoning_content": "B"},
        {"role": "user", "content": "Hi"},
    ]
    for text in ("<s> [INST] A [/INST]", "[INST] A[/INST]", "<s>[INST]A[/INST]"):
        assert read_prompt(text, True) == ([{"role": "user", "content": "A"}], {})
    system = read_prompt("<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]A[/INST]B</s>[INST]C[/INST]", True)[0]
    assert [m["content"] for m in system] == ["S", "A", "B", "C"]


def chunk(identity: str, text: str, last: bool) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": "stop" if last else None}
    return {"object": "chat.completion.chunk", "id": identity, "choices": [choice]}


@pytest.mark.parametrize("seed", range(30))
def test_any_interleaving_joins_to_the_same(seed: int) -> None:
    draw = random.Random(seed)
    queues: list[list[Any]] = [[{"plain": n}] for n in range(draw.randrange(5))]
    texts = {}
    for n in range(draw.randint(1, 8)):
        pieces = [f"{n}.{i} " for i in range(draw.randint(1, 6))]
        texts[f"s{n}"] = "".join(pieces)
        queues.append([chunk(f"s{n}", p, i == len(pieces) - 1) for i, p in enumerate(pieces)])
        if draw.random() < 0.5:
            queues[-1].append({"object": "chat.completion.chunk", "id": f"s{n}", "choices": [], "usage": {}})
    expected_rows = sum(len(q) for q in queues)
    rows: list[Any] = []
    while queues:
        queue = draw.choice(queues)
        rows.append(queue.pop(0))
        queues = [q for q in queues if q]
    assert len(rows) == expected_rows
    first: list[Any] = []  # in order of first appearance
    for row in rows:
        key = row.get("id", row)
        if key not in first:
            first.append(key)
    found = joined(rows)
    assert [texts[k] if isinstance(k, str) else k for k in first] == [
        row["response"]["choices"][0]["message"]["content"] if "response" in row else row for _, row in found
    ]
    assert [int(where) for where, _ in found] == sorted(int(where) for where, _ in found)


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_HELD", 10)
    monkeypatch.setattr(streams, "MAX_CHARACTERS", 100)
    taken = 0

    def rows() -> Any:
        nonlocal taken
        yield "first", chunk("cut", "a", False)
        for n in range(50):
            taken += 1
            yield str(n), {"plain": n}
        yield "late", chunk("cut", "b", True)
        yield "long", chunk("long", "x" * 200, False)
        yield "end", {"plain": 50}

    found = join_streams(rows())
    where, row = next(found)
    assert (where, row.reason) == ("first", "cut_stream") and taken == 10
    rest = list(found)
    assert [w for w, _ in rest] == [*map(str, range(50)), "long", "end"]
    assert rest[-2][1].reason == "cut_stream"


def test_an_id_used_again_is_a_new_stream() -> None:
    rows = [chunk("a", "one", True), chunk("a", "two", True)]
    assert [r["response"]["choices"][0]["message"]["content"] for _, r in joined(rows)] == ["one", "two"]


def damaged(row: Any, draw: random.Random) -> Any:
    """The row with one value somewhere in it replaced or removed."""
    junk: list[Any] = [None, 0, "", "secret", [], {}, [None], ["a"], {"a": 1}, [[]], True, 500, [{}]]
    if isinstance(row, str):
        cut = draw.randrange(len(row) + 1)
        return row[:cut] + draw.choice(["", row[cut + 1 :], "'" + row[cut:]])
    if isinstance(row, dict | list) and row and draw.random() < 0.85:
        key = draw.choice(sorted(row) if isinstance(row, dict) else range(len(row)))
        copy: Any = row.copy()
        copy[key] = damaged(row[key], draw)
        return copy
    return draw.choice(junk)


@pytest.mark.parametrize("name", SHAPES)
def test_a_damaged_row_is_a_conversation_or_rejected(name: str) -> None:
    draw = random.Random(3)
    rows = rows_of(next(p for p in LOGS.glob(f"{name}.*") if "expected" not in p.name))
    for _ in range(4000):
        row = damaged(draw.choice(rows), draw)
        for _, one in joined([row]):
            if not isinstance(one, RowError):
                result_of(one)
