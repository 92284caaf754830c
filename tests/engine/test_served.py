"""Answers by servers and states by prefill, against a fake server: faults, forms of answers, other models."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from app.engine import endpoints, gate
from app.engine.base import Completion, EndpointSpec, EngineError, EngineSpec, Request
from app.engine.endpoint_check import QUESTIONS
from app.engine.gate import START, Gate
from app.engine.served import ServedEngine
from app.engine.server_format import CHAT, NoAnswer, Reply, TargetTokens, read_reply, request_body
from app.errors import RowError, UserError
from app.runfolder import RunFolder
from app.target import Renderer, load_tokenizer
from tests.engine.fake_server import FakeCapture, FakeServer, FakeTarget, error_response
from tests.runs import Command, draftmill, prompts, save_config, tiny_config, write_rows
from tests.stubs import END, states_of
from tests.templates import THINK, THINK_OPEN, TOOLS

Start = Callable[..., ServedEngine]


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "FIRST_REST_S", 0.01)
    monkeypatch.setattr(gate, "LONGEST_REST_S", 0.1)
    for name in ("DRAFTMILL_ENDPOINT_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server(tiny: Path) -> Iterator[FakeServer]:
    running = FakeServer(FakeTarget(tiny)).start()
    yield running
    running.stop()


@pytest.fixture
def start(tiny: Path) -> Iterator[Start]:
    """Start an engine on servers; closed at the end."""
    engines: list[ServedEngine] = []

    def one(*urls: str, max_model_len: int = 512, **values: Any) -> ServedEngine:
        servers = EndpointSpec(urls=urls, **{"patience_s": 20.0, "timeout_s": 20.0, **values})
        spec = EngineSpec(str(tiny), (2, 4, 5), 8, max_model_len=max_model_len, endpoints=servers)
        engines.append(ServedEngine(FakeCapture(spec), spec))
        return engines[-1]

    yield one
    for engine in engines:
        engine.close()


def rows(tiny: Path, count: int, limit: int = 200) -> list[Request]:
    renderer = Renderer(load_tokenizer(tiny))
    out = []
    for number in range(count):
        messages = [{"role": "user", "content": f"Please count the sacks of day {number}"}]
        out.append(
            Request(f"row {number}", renderer.render(messages, True), limit, {"temperature": 0.0}, None, messages)
        )
    return out


def run(engine: ServedEngine, requests: list[Request]) -> list[Completion | BaseException]:
    async def all_of() -> list[Completion | BaseException]:
        return await asyncio.gather(*(engine.complete(r) for r in requests), return_exceptions=True)

    return asyncio.run(all_of())


def check_all(tiny: Path, requests: list[Request], done: list[Completion | BaseException]) -> None:
    """Every row has the target's answer, the server's reason and the states of these very tokens."""
    target = FakeTarget(tiny)
    for request, completion in zip(requests, done, strict=True):
        assert isinstance(completion, Completion), completion
        ids, reason = target.answer(request.prompt_ids, request.max_new_tokens)
        assert (completion.answer_ids, completion.finish_reason) == (ids, reason)
        wanted = states_of(request.prompt_ids + ids)
        assert torch.equal(completion.states[:, :3], wanted[:, :3])


# The three ways to know the tokens.


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("ids", [True, False])
def test_answers_come_from_the_server_and_states_from_prefill(
    server: FakeServer, start: Start, tiny: Path, api: str, ids: bool
) -> None:
    server.gives_ids = ids
    engine = start(server.url, api=api)
    requests = [*rows(tiny, 6), *(replace(r, max_new_tokens=9) for r in rows(tiny, 8)[6:])]
    done = run(engine, requests)
    check_all(tiny, requests, done)
    assert {d.finish_reason for d in done if isinstance(d, Completion)} == {"stop", "length"}
    path = "/v1/chat/completions" if api == "chat" else "/v1/completions"
    assert server.seen[path] == len(requests) + len(QUESTIONS) + 1
    load = engine.load()
    assert load.steps >= len(requests) and (load.running, load.queue, load.note) == (0, 0, None)


def test_sglangs_own_api_is_used_where_completions_give_no_ids(server: FakeServer, start: Start, tiny: Path) -> None:
    server.gives_ids, server.native = False, True
    requests = rows(tiny, 4)
    check_all(tiny, requests, run(start(server.url), requests))
    assert server.seen["/generate"] == len(requests) + len(QUESTIONS) + 1


def test_a_strict_server_is_asked_in_openais_fields_alone(server: FakeServer, start: Start, tiny: Path) -> None:
    server.strict = True
    requests = rows(tiny, 4)
    check_all(tiny, requests, run(start(server.url), requests))
    assert "return_token_ids" not in server.bodies[-1]


def test_every_sampling_value_is_sent(server: FakeServer, start: Start, tiny: Path) -> None:
    """A server fills what is missing from the model's generation_config.json."""
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 5}
    run(start(server.url), [replace(rows(tiny, 1)[0], sampling=sampling)])
    body = server.bodies[-1]
    assert {k: body[k] for k in sampling} == sampling
    assert (body["repetition_penalty"], body["min_p"], body["presence_penalty"]) == (1.0, 0.0, 0.0)


def test_a_request_with_its_answer_goes_to_capture_alone(server: FakeServer, start: Start, tiny: Path) -> None:
    engine = start(server.url)
    asked = sum(server.seen.values())
    done = run(engine, [replace(rows(tiny, 1)[0], answer_ids=[300, 301, END])])
    assert isinstance(done[0], Completion) and done[0].finish_reason == "prefill"
    assert sum(server.seen.values()) == asked


# Faults of transport: no row is skipped.


def test_a_server_that_comes_late_is_waited_for(server: FakeServer, start: Start, tiny: Path) -> None:
    server.stop()
    threading.Timer(1.0, server.start).start()
    requests = rows(tiny, 5)
    check_all(tiny, requests, run(start(server.url), requests))


def test_a_server_that_goes_and_comes_back_loses_no_row(server: FakeServer, start: Start, tiny: Path) -> None:
    engine = start(server.url, concurrency=2)
    server.delay_s = 0.05
    requests = rows(tiny, 30)
    checks = server.seen["/v1/completions"]

    def restart() -> None:
        while server.seen["/v1/completions"] < checks + 8:
            time.sleep(0.01)
        server.stop()
        time.sleep(0.5)
        server.start()

    thread = threading.Thread(target=restart)
    thread.start()
    done = run(engine, requests)
    thread.join()
    check_all(tiny, requests, done)
    assert server.seen["/v1/completions"] > checks + len(requests) + len(QUESTIONS), "it was not checked again"


def test_silence_for_ever_stops_by_name_and_skips_nothing(server: FakeServer, start: Start, tiny: Path) -> None:
    engine = start(server.url, patience_s=1.0)
    server.stop()
    done = run(engine, rows(tiny, 8))
    server.start()
    assert [type(d) for d in done] == [UserError] * 8
    assert "no server of generate.endpoints has answered for 1 s" in str(done[0])
    assert "no row was skipped" in str(done[0]) and server.url in str(done[0])


def test_no_server_at_the_start_stops_by_name(server: FakeServer, start: Start) -> None:
    server.stop()
    with pytest.raises(UserError, match=r"no server of .* has answered for 0\.5 s"):
        start(server.url, patience_s=0.5)
    server.start()


def test_a_storm_of_refusals_slows_us_down_and_loses_no_row(server: FakeServer, start: Start, tiny: Path) -> None:
    """Two requests at once are answered, more are refused with 429."""
    engine = start(server.url, concurrency=32)
    server.delay_s = 0.02
    refused = 0

    def busy(path: str, body: dict[str, Any]) -> web.Response | None:
        nonlocal refused
        if server._now > 2:
            refused += 1
            return error_response(429, "too many requests", Retry_After="0")
        return None

    server.override = busy
    requests = rows(tiny, 60)
    check_all(tiny, requests, run(engine, requests))
    assert refused > 0
    assert engine._endpoints is not None
    assert engine._endpoints.all[0].gate.limit < 8


@pytest.mark.parametrize("status", [500, 502, 503])
def test_a_server_that_fails_for_a_while_loses_no_row(
    server: FakeServer, start: Start, tiny: Path, status: int
) -> None:
    engine = start(server.url)
    faults = iter(range(12))
    server.override = lambda path, body: error_response(status, "broken") if next(faults, None) is not None else None
    requests = rows(tiny, 10)
    check_all(tiny, requests, run(engine, requests))
    assert next(faults, None) is None


def test_a_time_out_is_tried_again(server: FakeServer, start: Start, tiny: Path) -> None:
    engine = start(server.url, timeout_s=0.5)
    server.delay_s = 5.0
    threading.Timer(1.2, lambda: setattr(server, "delay_s", 0.0)).start()
    requests = rows(tiny, 3)
    check_all(tiny, requests, run(engine, requests))


def test_one_of_two_servers_is_enough(server: FakeServer, start: Start, tiny: Path) -> None:
    other = FakeServer(FakeTarget(tiny)).start()
    engine = start(server.url, other.url)
    requests = rows(tiny, 20)
    check_all(tiny, requests, run(engine, requests))
    other.stop()
    check_all(tiny, requests, run(engine, requests))
    assert min(server.seen["/v1/completions"], other.seen["/v1/completions"]) > len(QUESTIONS) + 1


@pytest.mark.cluster
def test_the_stage_stops_by_name_and_goes_on_when_the_server_is_back(
    server: FakeServer, tiny: Path, tmp_path: Path, draftmill_here: Command
) -> None:
    """A gateway whose server has died after a few rows: nothing is rejected, and the same command finishes."""
    source = write_rows(tmp_path / "rows.jsonl", prompts(30))
    config = tiny_config(
        tiny, tmp_path / "run", source, generate__engine="tests.engine.fake_server:FakeCapture",
        generate__endpoints=[server.url], generate__endpoint_patience_s=2, generate__endpoint_concurrency=4,
    )  # fmt: skip
    path = str(save_config(config, tmp_path / "run.yaml"))
    dead = len(QUESTIONS) + 1 + 15
    server.override = lambda p, b: error_response(503, "no upstream") if server.seen[p] > dead else None
    result = draftmill("generate", path)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "no server of generate.endpoints has answered for 2 s" in result.stderr
    assert "no upstream" in result.stderr and "no row was skipped" in result.stderr
    server.override = None
    result = draftmill_here("generate", path)
    assert result.returncode == 0, result.stderr[-3000:]
    manifest = RunFolder(str(tmp_path / "run")).manifest("generate")
    assert manifest is not None
    assert (manifest.counts["kept"], manifest.counts["rejected"]) == (30, {})
    assert set(manifest.counts["finish_reasons"]) <= {"stop", "length"}


# Faults of one row.


def test_a_refused_row_is_a_row_error_with_the_servers_words(server: FakeServer, start: Start, tiny: Path) -> None:
    engine = start(server.url)
    requests = rows(tiny, 6)
    bad = requests[3].prompt_ids

    def refuse(path: str, body: dict[str, Any]) -> web.Response | None:
        return error_response(400, "this prompt is not to our taste") if body["prompt"] == bad else None

    server.override = refuse
    done = run(engine, requests)
    fault = done.pop(3)
    assert isinstance(fault, RowError) and fault.reason == "bad_request"
    assert "this prompt is not to our taste" in fault.detail
    check_all(tiny, requests[:3] + requests[4:], done)


def test_a_row_that_breaks_the_server_each_time_is_given_up(server: FakeServer, start: Start, tiny: Path) -> None:
    """Only because others are answered meanwhile, at the last the check's own; else it would be waited for."""
    engine = start(server.url)
    requests = rows(tiny, 10)
    bad = requests[0].prompt_ids
    server.override = lambda path, body: error_response(500, "poison") if body["prompt"] == bad else None
    done = run(engine, requests)
    fault = done.pop(0)
    assert isinstance(fault, RowError) and fault.reason == "endpoint_fails" and "poison" in fault.detail
    check_all(tiny, requests[1:], done)


def test_text_that_is_not_the_tokens_is_rejected_by_name(server: FakeServer, start: Start, tiny: Path) -> None:
    server.gives_ids = False
    engine = start(server.url)
    requests = rows(tiny, 3)
    texts = {0: ("a \ufffd", 5, "stop"), 1: ("The mill stands", 40, "stop"), 2: ("The mill stands", None, "length")}

    def wrong(path: str, body: dict[str, Any]) -> web.Response | None:
        number = next(i for i, r in enumerate(requests) if r.prompt_ids == body["prompt"])
        text, count, reason = texts[number]
        usage = {"completion_tokens": count} if count else {}
        return web.json_response({"choices": [{"text": text, "finish_reason": reason}], "usage": usage})

    server.override = wrong
    done = run(engine, requests)
    assert [getattr(d, "reason", "") for d in done] == ["tokens_unknown", "tokens_unknown", ""]
    assert isinstance(done[2], Completion)
    assert END not in done[2].answer_ids, "an answer cut by length gets no invented end token"


ANSWER = {"text": "The mill", "token_ids": [300, 301, END], "finish_reason": "stop"}
GARBAGE: dict[str, str] = {
    "nested": "[" * 200_000,
    "infinite_id": json.dumps({"choices": [ANSWER]}).replace("300", "1e999"),
    "negative_id": json.dumps({"choices": [{**ANSWER, "token_ids": [-1, END]}]}),
    "huge_id": json.dumps({"choices": [{**ANSWER, "token_ids": [2**70, END]}]}),
    "ids_of_text": json.dumps({"choices": [{**ANSWER, "token_ids": ["300", "2"]}]}),
    "half_ids": json.dumps({"choices": [{**ANSWER, "token_ids": [300.5, END]}]}),
    "ids_are_an_object": json.dumps({"choices": [{**ANSWER, "token_ids": {"300": 1}}]}),
    "count_of_text": json.dumps({"choices": [ANSWER], "usage": {"completion_tokens": "x"}}),
    "infinite_count": json.dumps({"choices": [ANSWER], "usage": {"completion_tokens": 7}}).replace("7", "1e999"),
    "negative_count": json.dumps({"choices": [ANSWER], "usage": {"prompt_tokens": -5}}),
    "usage_is_a_list": json.dumps({"choices": [ANSWER], "usage": [1]}),
    "half_a_surrogate": json.dumps({"choices": [{"text": "\ud800 hi", "finish_reason": "stop"}]}),
    "no_text": json.dumps({"choices": [{"text": None, "finish_reason": "stop"}]}),
    "reason_is_a_list": json.dumps({"choices": [{**ANSWER, "finish_reason": [1]}]}),
    "more_than_asked": json.dumps({"choices": [{**ANSWER, "token_ids": [300] * 202, "finish_reason": "length"}]}),
    "counts_more_than_asked": json.dumps({"choices": [ANSWER], "usage": {"completion_tokens": 400}}),
}
ODD_MESSAGES: dict[str, Any] = {
    "text": "hello", "content_of_parts": {"content": [{"text": "a"}]}, "half_a_surrogate": {"content": "\ud800"},
    "calls_of_text": {"content": "a", "tool_calls": ["x"]}, "arguments_are_an_object": {
        "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
    "half_a_name": {"content": "", "tool_calls": [{"function": {"name": "\udc00", "arguments": "{}"}}]},
}  # fmt: skip


@pytest.fixture
def two_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two failures make a row at fault."""
    monkeypatch.setattr(endpoints, "OWN_FAULTS", 2)


def said_to(prompts: list[Any], replies: list[tuple[int, str]]) -> Callable[[str, dict[str, Any]], web.Response | None]:
    """Status and body for the prompts, or messages, in their order; the target's own answers for others."""

    def answer(path: str, body: dict[str, Any]) -> web.Response | None:
        asked = body.get("prompt") or body["messages"]
        if asked not in prompts:
            return None
        status, text = replies[prompts.index(asked)]
        return web.Response(text=text, status=status, content_type="application/json")

    return answer


def test_garbage_is_asked_for_again_and_then_that_row_is_given_up(
    server: FakeServer, start: Start, tiny: Path, two_faults: None
) -> None:
    engine = start(server.url)
    requests = rows(tiny, len(GARBAGE) + 3)
    prompts = [r.prompt_ids for r in requests[3:]]
    server.override = said_to(prompts, [(200, text) for text in GARBAGE.values()])
    done = run(engine, requests)
    check_all(tiny, requests[:3], done[:3])
    words = {"more_than_asked": "202 tokens came back and 200 were", "counts_more_than_asked": "400 tokens came back"}
    for name, prompt, fault in zip(GARBAGE, prompts, done[3:], strict=True):
        assert isinstance(fault, RowError) and fault.reason == "endpoint_fails", (name, fault)
        assert words.get(name, "what came back is no") in fault.detail, name
        assert sum(b["prompt"] == prompt for b in server.bodies) >= 2, name


def test_a_message_of_another_form_is_garbage_too(
    server: FakeServer, start: Start, tiny: Path, two_faults: None
) -> None:
    engine = start(server.url, api="chat")
    requests = rows(tiny, len(ODD_MESSAGES) + 3)
    replies = [json.dumps({"choices": [{"message": m, "finish_reason": "stop"}]}) for m in ODD_MESSAGES.values()]
    server.override = said_to([r.messages for r in requests[3:]], [(200, text) for text in replies])
    done = run(engine, requests)
    check_all(tiny, requests[:3], done[:3])
    faults = {name: getattr(fault, "reason", fault) for name, fault in zip(ODD_MESSAGES, done[3:], strict=True)}
    assert faults == dict.fromkeys(ODD_MESSAGES, "endpoint_fails")


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a": "\\ud800"}'])
def test_arguments_that_are_no_json_reject_the_row(tiny: Path, arguments: str) -> None:
    tokens, request = chat_tokens(tiny, TOOLS, QUESTION)
    calls = [{"id": "1", "type": "function", "function": {"name": "count", "arguments": arguments}}]
    with pytest.raises(RowError, match=r"tokens_unknown: the arguments .* no JSON"):
        tokens.answer(chat_reply({"content": None, "tool_calls": calls}, "tool_calls"), request)


def test_garbage_of_a_refusal_is_a_sentence_that_can_be_stored(
    server: FakeServer, start: Start, tiny: Path, two_faults: None
) -> None:
    engine = start(server.url)
    texts = ["[" * 200_000, '{"error": {"message": "\\ud800 boom"}}', '{"error": {"message": 5}}', "[5]"]
    replies = [(status, text) for status in (400, 500) for text in texts]
    requests = rows(tiny, len(replies) + 3)
    server.override = said_to([r.prompt_ids for r in requests[3:]], replies)
    done = run(engine, requests)
    check_all(tiny, requests[:3], done[:3])
    for (status, _), fault in zip(replies, done[3:], strict=True):
        assert isinstance(fault, RowError)
        assert fault.reason == ("bad_request" if status == 400 else "endpoint_fails")
        assert fault.detail.encode() and len(fault.detail) < 400


def test_a_list_of_models_that_is_garbage_stops_by_name(server: FakeServer, start: Start) -> None:
    server.models_text = "[" * 200_000
    with pytest.raises(UserError, match=r"no server of .* has answered for 1 s .*is no JSON"):
        start(server.url, patience_s=1.0)


def test_an_address_without_this_api_stops_at_once(server: FakeServer, start: Start) -> None:
    server.override = lambda path, body: error_response(404, "Not Found")
    with pytest.raises(UserError, match=r"/v1/completions answers no request .404: Not Found.; give base URLs"):
        start(server.url)


def test_a_404_of_a_server_that_has_answered_is_waited_out(server: FakeServer, start: Start, tiny: Path) -> None:
    """A gateway that has lost its backend for a moment."""
    engine = start(server.url)
    faults = iter(range(5))
    server.override = lambda path, body: error_response(404, "gone") if next(faults, None) is not None else None
    requests = rows(tiny, 3)
    check_all(tiny, requests, run(engine, requests))


# A server of something else is noticed before the first row.


def test_another_model_is_refused(server: FakeServer, start: Start, tiny: Path) -> None:
    server.target = FakeTarget(tiny, seed=1)
    with pytest.raises(UserError, match=r"does not serve .* greedy tokens .* serve the target of target.model"):
        start(server.url)


def test_tokens_the_target_does_not_have_stop_the_run_and_reject_no_row(server: FakeServer, start: Start) -> None:
    choice = {"text": "", "token_ids": [9999, END], "finish_reason": "stop"}
    server.override = lambda path, body: web.json_response({"choices": [choice]})
    with pytest.raises(UserError, match=r"does not serve .*bad_token"):
        start(server.url)


def test_requests_under_way_are_told_when_the_engine_is_closed(server: FakeServer, start: Start, tiny: Path) -> None:
    engine = start(server.url)
    server.delay_s = 5.0
    threading.Timer(0.3, engine.close).start()
    done = run(engine, rows(tiny, 3))
    assert [type(d) for d in done] == [EngineError] * 3, done
    server.delay_s = 0.0


def test_a_cancelled_request_gives_its_place_back(server: FakeServer, start: Start, tiny: Path) -> None:
    engine = start(server.url, concurrency=1)
    requests = rows(tiny, 2)
    server.delay_s = 5.0

    async def cancel() -> None:
        task = asyncio.create_task(engine.complete(requests[0]))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    server.delay_s = 0.0
    check_all(tiny, requests, run(engine, requests))


def test_a_server_that_changes_its_model_is_refused_when_it_comes_back(
    server: FakeServer, start: Start, tiny: Path
) -> None:
    engine = start(server.url)
    server.stop()
    server.target = FakeTarget(tiny, seed=1)
    threading.Timer(0.3, server.start).start()
    done = run(engine, rows(tiny, 3))
    assert [type(d) for d in done] == [UserError] * 3
    assert "does not serve" in str(done[0])


@pytest.mark.parametrize(
    ("changes", "values", "words"),
    [
        ({"models": ("a", "b")}, {}, "lists the models a, b; name the target in generate.endpoint_model"),
        ({}, {"model": "big"}, "serves no model 'big' .generate.endpoint_model.; it lists tiny"),
        ({"max_model_len": 64}, {}, "serves up to 64 tokens and generate.max_length is 512"),
        ({"key": "secret"}, {}, "refuses the key .401: no such key.; set DRAFTMILL_ENDPOINT_KEY or OPENAI_API_KEY"),
    ],
)
def test_what_does_not_fit_is_one_sentence(
    server: FakeServer, start: Start, changes: dict[str, Any], values: dict[str, Any], words: str
) -> None:
    for name, value in changes.items():
        setattr(server, name, value)
    with pytest.raises(UserError, match=words):
        start(server.url, **values)


def test_another_template_is_refused(server: FakeServer, start: Start) -> None:
    server.target.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(UserError, match=r"prompt_differs.*chat template"):
        start(server.url, api="chat")


def test_text_of_no_use_is_refused(server: FakeServer, start: Start) -> None:
    server.gives_ids = False
    server.override = lambda path, body: web.json_response(
        {"choices": [{"text": "\ufffd", "finish_reason": "stop"}], "usage": {}}
    )
    with pytest.raises(UserError, match=r"8 of 8 check prompts failed .tokens_unknown.*vLLM, or SGLang"):
        start(server.url)


@pytest.mark.parametrize("name", ["DRAFTMILL_ENDPOINT_KEY", "OPENAI_API_KEY"])
def test_the_key_comes_from_the_environment(
    server: FakeServer, start: Start, tiny: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "secret")
    server.key = "secret"
    requests = rows(tiny, 2)
    check_all(tiny, requests, run(start(server.url), requests))


# How many requests a server gets.


def test_the_gate_doubles_then_halves_once_per_incident_then_grows_slowly() -> None:
    it = Gate(64)
    now = 0.0
    for wanted in (8, 16, 32):
        passes = [it.enter(now) for _ in range(int(it.limit))]
        full = int(it.limit)
        assert not it.is_free(now)
        for leave in passes:
            it.answered(replace(leave, full=True), now + 1, 10)
        now += 1
        assert it.limit == min(wanted, 2 * full)
    passes = [it.enter(now) for _ in range(32)]
    for leave in passes:
        it.failed(leave, now + 1, crowded=True)
    assert it.limit == 16 and it.fails == 1 and it.in_flight == 0
    now = it.rest_until
    assert not it.is_free(now - 1e-6) and it.is_free(now)
    trial = it.enter(now)
    assert not it.is_free(now), "one request tries whether it is back"
    it.answered(trial, now + 1, 10)
    passes = [it.enter(now + 1) for _ in range(16)]
    for leave in passes:
        it.answered(replace(leave, full=True), now + 2, 10)
    assert 16.9 < it.limit < 17.1


def test_the_gate_does_not_grow_while_answers_get_slower_nor_above_its_most() -> None:
    it = Gate(6)
    for step in range(20):
        it.answered(replace(it.enter(step), full=True), step + 1, 10)
    assert it.limit == 6
    slow = Gate(64)
    slow.answered(replace(slow.enter(0), full=True), 1, 10)
    for step in range(20):
        slow.answered(replace(slow.enter(step), full=True), step + 100, 10)
    assert slow.limit == START + 1


def test_a_request_that_leaves_the_gate_gives_its_place_back() -> None:
    it = Gate(1)
    it.failed(it.enter(0.0), 0.0, crowded=False)
    leave = it.enter(it.rest_until)
    it.leave(leave)
    assert it.in_flight == 0 and it.is_free(it.rest_until)


# Tokens of a chat answer that comes as fields.


def chat_reply(message: dict[str, Any], reason: str = "stop", **values: Any) -> Reply:
    choice = {"message": {"role": "assistant", **message}, "finish_reason": reason}
    return read_reply(CHAT, {"choices": [choice], **values})


def chat_tokens(
    tiny: Path, template: str, messages: list[dict[str, Any]], **kwargs: Any
) -> tuple[TargetTokens, Request]:
    tokenizer = load_tokenizer(tiny)
    tokenizer.chat_template = template
    prompt = Renderer(tokenizer, kwargs).render(messages, True)
    return TargetTokens(tokenizer, (END,), 512), Request("row", prompt, 99, {}, None, messages, kwargs)


QUESTION = [{"role": "user", "content": "How many sacks?"}]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("template", [THINK, THINK_OPEN])
def test_reasoning_is_part_of_the_answer(tiny: Path, template: str, name: str) -> None:
    tokens, request = chat_tokens(tiny, template, QUESTION)
    ids = tokens.answer(chat_reply({"content": "Sixteen.", name: "twelve by three quarters"}), request)
    text = "twelve by three quarters\n</think>\n\nSixteen.<|im_end|>"
    assert tokens.tokenizer.decode(ids) == text if template is THINK_OPEN else f"<think>\n{text}"


def test_tool_calls_are_part_of_the_answer(tiny: Path) -> None:
    tokens, request = chat_tokens(tiny, TOOLS, QUESTION, tools=[{"type": "function", "function": {"name": "count"}}])
    calls = [{"id": "1", "type": "function", "function": {"name": "count", "arguments": '{"day": 3}'}}]
    ids = tokens.answer(chat_reply({"content": None, "tool_calls": calls}, "tool_calls"), request)
    wanted = '<tool_call>\n{"name": "count", "arguments": {"day": 3}}\n</tool_call><|im_end|>'
    assert tokens.tokenizer.decode(ids) == wanted


def test_the_servers_ids_win_over_a_render(tiny: Path) -> None:
    tokens, request = chat_tokens(tiny, THINK, QUESTION)
    reply = replace(chat_reply({"content": "Sixteen."}), token_ids=[300, 301, END])
    assert tokens.answer(reply, request) == [300, 301, END]


def test_a_render_of_another_length_than_was_emitted_is_unknown(tiny: Path) -> None:
    tokens, request = chat_tokens(tiny, THINK, QUESTION)
    with pytest.raises(RowError, match="tokens_unknown"):
        tokens.answer(chat_reply({"content": "Sixteen."}, usage={"completion_tokens": 3}), request)


def test_earlier_turns_do_not_become_the_answer(tiny: Path) -> None:
    history = [*QUESTION, {"role": "assistant", "content": "Ten."}, {"role": "user", "content": "Sure?"}]
    for template in (THINK, load_tokenizer(tiny).chat_template):
        tokens, request = chat_tokens(tiny, template, history)
        text = tokens.tokenizer.decode(tokens.answer(chat_reply({"content": "Yes."}), request))
        assert text.endswith("Yes.<|im_end|>") and "Ten" not in text


def test_an_answer_cut_by_length_is_not_closed(tiny: Path) -> None:
    tokens, request = chat_tokens(tiny, load_tokenizer(tiny).chat_template, QUESTION)
    ids = tokens.answer(chat_reply({"content": "Sixteen and"}, "length"), request)
    assert tokens.tokenizer.decode(ids) == "Sixteen and"


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ({"token_ids": [300, 301, END]}, [300, 301, END]),
        ({"token_ids": [300, 301], "matched_stop": 7}, [300, 301, 7]),
        ({"token_ids": [300, 301, 7], "stop_reason": 7}, [300, 301, 7]),
        ({"token_ids": [300, 301]}, "end_token_unknown"),
        ({"text": "The mill", "stop_reason": 0}, "The mill<|endoftext|>"),
        ({"text": "The mill"}, "end_token_unknown"),
    ],
)
def test_the_end_token_is_added_only_where_it_is_known(tiny: Path, told: dict[str, Any], wanted: Any) -> None:
    """A target with two end tokens: which one was emitted is not to be guessed."""
    tokens = TargetTokens(load_tokenizer(tiny), (END, 0), 512)
    reply = read_reply("/completions", {"choices": [{"text": "", "finish_reason": "stop", **told}]})
    request = Request("row", [5, 6], 99)
    if wanted == "end_token_unknown":
        with pytest.raises(RowError, match=wanted):
            tokens.answer(reply, request)
        return
    ids = tokens.answer(reply, request)
    assert (tokens.tokenizer.decode(ids) if isinstance(wanted, str) else ids) == wanted


@pytest.mark.parametrize("data", [{}, {"choices": []}, [], {"choices": [{"text": "a", "finish_reason": "abort"}]}])
def test_what_is_no_answer_is_no_fault_of_the_row(data: Any) -> None:
    with pytest.raises(NoAnswer):
        read_reply("/completions", data)


def test_chat_sends_arguments_as_text_and_the_templates_arguments(tiny: Path) -> None:
    call = {"type": "function", "function": {"name": "count", "arguments": {"day": 3}}}
    messages = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
    request = Request("row", [5], 9, {}, None, messages, {"tools": [{"x": 1}], "enable_thinking": False})
    body = request_body(request, CHAT, "tiny", True)
    assert body["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"day": 3}'
    assert body["tools"] == [{"x": 1}] and body["chat_template_kwargs"] == {"enable_thinking": False}
