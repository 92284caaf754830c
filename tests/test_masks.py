"""From conversation to tokens: one render, and a mask that decodes to exactly what the target said."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from app.conversations import canonical
from app.errors import RowError
from app.masks import MaskRule, Tokenised, tokenise_as_is
from app.packaged import packaged_target
from app.sources.raw import RawConversation
from app.target import Renderer, load_tokenizer
from tests import templates


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(packaged_target("smollm2-135m"))


def renderer(tokenizer: PreTrainedTokenizerBase, template: str, **kwargs: Any) -> Renderer:
    made = Renderer(tokenizer, kwargs)
    made.template = template
    return made


def spans(sample: Tokenised) -> list[list[int]]:
    """Token ids of each supervised span."""
    assert sample.answer_ids is not None and sample.loss_mask is not None
    ids = [*sample.prompt_ids, *sample.answer_ids]
    assert len(ids) == len(sample.loss_mask)
    found: list[list[int]] = []
    for i, (token, on) in enumerate(zip(ids, sample.loss_mask, strict=True)):
        if on and (i == 0 or not sample.loss_mask[i - 1]):
            found.append([])
        if on:
            found[-1].append(token)
    return found


def rule(tokenizer: PreTrainedTokenizerBase, **changes: Any) -> MaskRule:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return MaskRule(**{"method": "auto", "max_length": 100_000, "end_ids": frozenset({end}), **changes})


TEXT = st.text(
    st.characters(max_codepoint=0x1F9FF, exclude_categories=("Cs", "Cc", "Cn", "Co"), include_characters="\n\t"),
    min_size=1,
    max_size=40,
).filter(lambda t: t.strip() == t and "<|" not in t)
TALK = st.lists(st.tuples(TEXT, TEXT, st.one_of(st.none(), TEXT)), min_size=1, max_size=4)


def said(name: str, turn: tuple[str, str, str | None], last: bool) -> str:
    """What the assistant's turn must decode to."""
    _, answer, thought = turn
    if name == "think" and last:
        answer = f"<think>\n{thought or ''}\n</think>\n\n{answer}"
    if name == "think_open":
        answer = f"{thought or ''}\n</think>\n\n{answer}"
    return f"{answer}<|im_end|>"


@pytest.mark.parametrize("name", sorted(templates.ALL))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(talk=TALK)
def test_spans_decode_to_exactly_the_assistants_turns(
    name: str, tokenizer: PreTrainedTokenizerBase, talk: list[tuple[str, str, str | None]]
) -> None:
    messages: list[dict[str, Any]] = []
    for question, answer, thought in talk:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer, **({"reasoning_content": thought} if thought else {})})
    made = renderer(tokenizer, templates.ALL[name])
    try:
        samples, _ = tokenise_as_is(made, messages, rule(tokenizer))
    except RowError as error:
        assert error.reason == "no_mask_method" and "a token lies across" in error.detail
        reject()
    found = [tokenizer.decode(span) for sample in samples for span in spans(sample)]
    if name == "think" and len(talk) > 1:
        # Earlier answers lose their thinking once later turns follow: each is a sample of its own.
        assert len(samples) == len(talk)
        assert found == [said(name, turn, True) for turn in talk]
        return
    assert len(samples) == 1
    assert found == [said(name, turn, i == len(talk) - 1) for i, turn in enumerate(talk)]
    whole = made.render(messages, add_generation_prompt=False)
    ids = [*samples[0].prompt_ids, *(samples[0].answer_ids or [])]
    assert ids == whole[: len(ids)]


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def test_f04_f05_tool_turns_stay_and_only_the_targets_are_supervised(tokenizer: PreTrainedTokenizerBase) -> None:
    raw = RawConversation(
        [
            {"role": "user", "content": "Go"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "result-7"},
            {"role": "assistant", "content": "It is seven."},
        ],
        "messages",
        tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
    )
    talk = canonical(raw, None, "as_is")
    made = renderer(tokenizer, templates.TOOLS, **talk.template_kwargs)
    (sample,), _ = tokenise_as_is(made, talk.messages, rule(tokenizer))
    first, second = (tokenizer.decode(s) for s in spans(sample))
    assert first == '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>'
    assert second == "It is seven.<|im_end|>"
    text = made.text(talk.messages, add_generation_prompt=False)
    assert "# Tools" in text and "result-7" in text and "None" not in text


def test_f06_parallel_results_are_one_turn_as_the_server_renders_them(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "Both."},
    ]
    made = renderer(tokenizer, templates.TOOLS)
    (sample,), _ = tokenise_as_is(made, messages, rule(tokenizer))
    ids = [*sample.prompt_ids, *(sample.answer_ids or [])]
    assert ids == made.render(messages, add_generation_prompt=False)[: len(ids)]
    assert tokenizer.decode(ids).count("<|im_start|>user") == 2  # the question, and both results together


def test_f08_f09_thinking_is_rendered_and_supervised(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A", "reasoning_content": "abc"},
    ]
    (sample,), method = tokenise_as_is(renderer(tokenizer, templates.THINK), messages, rule(tokenizer))
    assert method == "prefix"
    assert [tokenizer.decode(s) for s in spans(sample)] == ["<think>\nabc\n</think>\n\nA<|im_end|>"]


def test_f16_a_prefix_the_template_refuses_is_named(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "B"},
    ]
    with pytest.raises(RowError) as fault:
        tokenise_as_is(renderer(tokenizer, templates.STRICT), messages, rule(tokenizer))
    assert fault.value.reason == "template_rejects_prefix"
    assert "No user query found" in fault.value.detail
    with pytest.raises(RowError) as fault:
        tool_first = [{"role": "tool", "content": "r"}, *messages[2:]]
        renderer(tokenizer, templates.STRICT).render(tool_first, add_generation_prompt=True)
    assert fault.value.reason == "template_rejects"
    assert "must start with a user query" in fault.value.detail


def turns_of(tokenizer: PreTrainedTokenizerBase, turns: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for i in range(turns):
        messages += [
            {"role": "user", "content": f"q{i} " + "x " * 20},
            {"role": "assistant", "content": f"a{i} " + "y " * 60 + "z"},
        ]
    return messages


def test_f15_the_three_ways_over_the_limit(tokenizer: PreTrainedTokenizerBase) -> None:
    made, messages = renderer(tokenizer, templates.PLAIN), turns_of(tokenizer, 3)
    (whole,), _ = tokenise_as_is(made, messages, rule(tokenizer))
    total = len(whole.loss_mask or [])
    limit = total * 5 // 6
    (cut,), _ = tokenise_as_is(made, messages, rule(tokenizer, max_length=limit))
    assert cut.truncated and len(cut.loss_mask or []) == limit
    assert len(spans(cut)) == 3
    (at_turn,), _ = tokenise_as_is(made, messages, rule(tokenizer, max_length=limit, over="cut_at_turn"))
    assert at_turn.truncated
    assert [tokenizer.decode(s).split()[0] for s in spans(at_turn)] == ["a0", "a1"]
    assert tokenizer.decode(spans(at_turn)[-1]).endswith("<|im_end|>")
    with pytest.raises(RowError) as fault:
        tokenise_as_is(made, messages, rule(tokenizer, max_length=limit, over="drop"))
    assert fault.value.reason == "too_long"
    (fits,), _ = tokenise_as_is(made, messages, rule(tokenizer, max_length=total, over="drop"))
    assert not fits.truncated


def test_f14_masks_are_checked_after_the_cut(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "x " * 300}, {"role": "assistant", "content": "y " * 20 + "z"}]
    made = renderer(tokenizer, templates.PLAIN)
    for over in ("cut_end", "cut_at_turn"):
        with pytest.raises(RowError) as fault:
            tokenise_as_is(made, messages, rule(tokenizer, max_length=256, over=over))
        assert fault.value.reason == "no_target_tokens_left"
    with pytest.raises(RowError) as fault:
        tokenise_as_is(made, messages, rule(tokenizer, min_supervised=100))
    assert fault.value.reason == "no_target_tokens_left"


def test_f18_text_parts_are_flattened_and_others_rejected(tokenizer: PreTrainedTokenizerBase) -> None:
    def ids(content: Any) -> list[int]:
        talk = canonical(RawConversation([{"role": "user", "content": content}], "messages"), None, "regenerate")
        return renderer(tokenizer, templates.PLAIN).render(talk.messages, add_generation_prompt=True)

    assert ids([{"type": "text", "text": "hi"}]) == ids("hi")
    with pytest.raises(RowError) as fault:
        ids([{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "x"}}])
    assert fault.value.reason == "multimodal_not_supported"


def test_f10_template_arguments_of_the_row_reach_the_render(tokenizer: PreTrainedTokenizerBase) -> None:
    template = (
        templates.PLAIN
        + "{% if add_generation_prompt and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    )
    messages = [{"role": "user", "content": "Q"}]
    default = renderer(tokenizer, template).text(messages, add_generation_prompt=True)
    off = renderer(tokenizer, template, enable_thinking=False).text(messages, add_generation_prompt=True)
    assert off == f"{default}<think>\n\n</think>\n\n"


def test_a_span_never_begins_inside_a_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """ "assistant: " and " yes" share a token when the answer opens with a space: no engine would emit it so."""
    template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": ":) yes"}]
    made = renderer(tokenizer, template)
    text = made.text(messages, add_generation_prompt=False)
    _, places = made.tokens(text, [])
    begin = text.index(":) yes")
    crosses = any(a < begin < b for a, b in places)
    assert crosses, "the example no longer has a token across the boundary"
    assert all(a <= b for (a, _), (b, _) in pairwise(places))
    with pytest.raises(RowError) as fault:
        tokenise_as_is(made, messages, rule(tokenizer))
    assert fault.value.reason == "no_mask_method"
