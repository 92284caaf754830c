"""Quality: the classes of an answer, their shares by source, and the sentence that stops a run; inspect shows them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from app import cli
from app.captured import part_keys
from app.config import Config, QualityConfig
from app.errors import UserError
from app.inspect import Wanted, inspect_lines
from app.judge import Judge, loop_period, script_of
from app.parts import PARTS, read_ingest_part, write_part
from app.pipeline import StageContext, run_stage, stage_state
from app.pipelines.quality import CLASSES, QUALITY, Tally, table_lines
from app.report.page import render
from app.results import collect
from app.target import load_tokenizer
from tests import templates
from tests.pipelines.finished import stage
from tests.pipelines.test_bench_report import report_data
from tests.runs import context, save_config, tiny_config, write_rows
from tests.stubs import END, HIDDEN, states_of

PROMPT = "Please count the sacks of the day"
GOOD = "The miller counts the sacks of grain in the morning."
LOOP = " ".join(["the wheel turns"] * 12)
REJECT = "REJECT "  # an answer of this beginning is rejected for the reason that follows


def finish(config: Config, answers: dict[str, str], later: dict[str, str] | None = None) -> StageContext:
    """Ingest, and parts whose rows are answered by prompt; one that ends in "..." was cut by length."""
    ctx = context(config)
    run_stage(stage("ingest"), ctx)
    tokenizer = load_tokenizer(ctx.target.model)
    for part, key in part_keys(ctx).items():
        rows, rejects, cut_short = [], [], []
        for row in read_ingest_part(ctx.run.store, part):
            messages = json.loads(row["messages"])
            answer = answers[messages[-1]["content"]]
            fault = {"id": row["id"], "where": row["where"], "detail": "as the test says"}
            if answer.startswith(REJECT):
                rejects.append({**fault, "reason": answer.removeprefix(REJECT)})
                continue
            if later and messages[-1]["content"] in later:
                cut_short.append({**fault, "reason": later[messages[-1]["content"]]})
            ids = tokenizer(answer.removesuffix("..."), add_special_tokens=False)["input_ids"]
            cut = answer.endswith("...")
            rows.append(sample(row, list(row["requests"][0]["prompt_ids"]), ids if cut else [*ids, END], cut, answer))
        entry = {
            "part": part, "key": key, "rows_in": len(rows) + len(rejects), "conversations": len(rows),
            "rejects": rejects, "cut_short": cut_short, "tokens": {"prompt": 0, "answer": 0, "supervised": 0},
            "finish_reasons": {}, "layers": list(ctx.layers), "dtype": "bfloat16", "hidden_size": HIDDEN,
            "seconds": 0.0,
        }  # fmt: skip
        write_part(ctx.run.store, entry, rows, [states_of(r["prompt_ids"] + r["answer_ids"]) for r in rows])
    run_stage(stage("generate"), ctx)
    ctx.run.write_config(config)
    return ctx


def sample(row: dict[str, Any], prompt: list[int], answer: list[int], cut: bool, text: str) -> dict[str, Any]:
    messages = [*json.loads(row["messages"]), {"role": "assistant", "content": text}]
    keys = ("source", "domain", "use", "private", "template_kwargs")
    return {k: row[k] for k in keys} | {
        "sample_id": f"{row['id']}-0", "conversation_id": row["id"], "turn": 0, "messages": json.dumps(messages),
        "sampling": "{}", "prompt_ids": prompt, "answer_ids": answer, "mask_method": "engine",
        "loss_mask": [False] * len(prompt) + [True] * len(answer), "finish_reason": "length" if cut else "stop",
        "truncated": cut,
    }  # fmt: skip


def answered(tiny: Path, tmp_path: Path, answers: list[str], private: bool = False, **changes: Any) -> Config:
    """A run whose row i is answered by answers[i]; the generate checks are off."""
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{PROMPT} {i}"} for i in range(len(answers))])
    sources = [{"name": "rows", "path": str(path), "private": private}]
    return tiny_config(tiny, tmp_path / "run", path, **{"sources": sources, "generate__max_error_share": 1, **changes})


def run_quality(config: Config, answers: list[str], **later: Any) -> tuple[StageContext, Any]:
    ctx = finish(config, {f"{PROMPT} {i}": text for i, text in enumerate(answers)}, **later)
    manifest, _ = run_stage(stage("quality"), ctx)
    return ctx, manifest


# --- the classes ---


@pytest.mark.parametrize(
    ("ids", "period"),
    [
        ([1, 2, 3] + [7] * 16, 1),
        ([1, 2, 3] + [7] * 15, None),  # a row of dashes
        ([9] * 3 + [4, 5, 6, 7, 8] * 4, 5),
        ([9] * 3 + [4, 5, 6, 7, 8] * 3, None),  # three times is style
        ([9] * 3 + [4, 5, 6, 7, 8] * 4 + [4, 5], 5),  # cut off inside the period
        ([4, 5, 6, 7, 8] * 6 + [1], None),  # it left the loop
        (list(range(200)), None),
        ([4, 4, 4, 5] * 8, 4),
        ([], None),
        (list(range(20)) * 4, 20),
        (list(range(100, 140)) + list(range(20)) * 3, None),
    ],
)
def test_a_loop_is_a_tail_that_repeats(ids: list[int], period: int | None) -> None:
    assert loop_period(ids, 4) == period


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("What is this about?", "LATIN"),
        ("请用简单的话解释一下", "CJK"),
        ("これは何についてですか", "CJK"),
        ("Почему небо голубое?", "CYRILLIC"),
        ("2 + 2 = 4", None),
        ("请帮我写一个 quicksort", None),  # mixed
        ("短文 ```python\ndef sort(values): return sorted(values)\n```", None),  # code does not count
        ("请写一个排序函数好吗 ```def sort(values): return sorted(values)```", "CJK"),
    ],
)
def test_the_script_of_a_text_where_it_is_clear(text: str, script: str | None) -> None:
    assert script_of(text) == script


def classes(
    tiny: Path, text: str, prompt: str = PROMPT, finish: str = "stop", template: str | None = None, **changes: Any
) -> list[str]:
    tokenizer = load_tokenizer(tiny)
    if template is not None:
        tokenizer.chat_template = template
    before = tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], END]
    row = {
        "messages": json.dumps([{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]),
        "template_kwargs": "{}", "prompt_ids": before, "answer_ids": ids, "mask_method": "engine", "use": "regenerate",
        "loss_mask": [False] * len(before) + [True] * len(ids), "finish_reason": finish, **changes,
    }  # fmt: skip
    return Judge(tokenizer, (END,), QualityConfig()).classes(row)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (GOOD, []),
        ("", ["empty"]),
        (" \n \n ", ["empty"]),
        (LOOP, ["loop"]),
        ("请用简单的话解释一下为什么", ["language"]),
        ("a <think> b and more", ["leftover"]),
        ("yes, of course <|im_start|>user again", ["leftover"]),
        ("yes [/INST] and so on", ["leftover"]),
        ('<tool_call>{"name": "f"}</tool_call>', ["leftover"]),
        ("I'm sorry, but I can't help with that.", ["refusal"]),
        ("I’m sorry, I cannot assist.", ["refusal"]),
        ("I cannot provide medical advice here.", ["refusal"]),
        ("Unfortunately, I am not able to say.", ["refusal"]),
        ("As an AI language model, I have no sacks.", ["refusal"]),
        ("I can't stop smiling about the sacks.", []),
        ("I'm sorry to hear of the flood.", []),
        ("The miller said: I'm sorry, but I can't help with that.", []),
    ],
)
def test_the_classes_of_an_answer(tiny: Path, text: str, found: list[str]) -> None:
    assert classes(tiny, text) == found


@pytest.mark.parametrize(
    "text", ["很抱歉，我无法回答这个问题。", "对不起，这个问题我不能回答。", "作为一个人工智能，我没有感情。"]
)
def test_chinese_refusals(tiny: Path, text: str) -> None:
    assert classes(tiny, text, prompt="请用简单的话解释一下为什么") == ["refusal"]


def test_what_belongs_where_it_stands_is_no_leftover(tiny: Path) -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert classes(tiny, call, template_kwargs=json.dumps({"tools": [{}]})) == []
    thought = "<think>\nLet me count.\n</think>\n\nIt is 16 sacks."
    assert classes(tiny, thought) == ["leftover"]  # the template of TINY knows no thinking
    assert classes(tiny, thought, template=templates.THINK) == []
    assert classes(tiny, "<think>\nLet me count", finish="length", template=templates.THINK) == ["cut", "thinking_only"]
    # Thinking is not judged as the answer: only what follows it.
    assert classes(tiny, "<think>\nI cannot help.\n</think>\n\nIt is 16.", template=templates.THINK) == []


def test_each_answer_of_a_sample_is_judged(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    parts = [("<|im_start|>user\nhi<|im_end|>\n", False), (f"{LOOP}<|im_end|>", True), ("\nmore\n", False),
             (f"{GOOD}<|im_end|>", True)]  # fmt: skip
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in parts]
    mask = [m for piece, (_, m) in zip(ids, parts, strict=True) for _ in piece]
    rest = [i for piece in ids[1:] for i in piece]
    changes = {"prompt_ids": ids[0], "answer_ids": rest, "loss_mask": mask, "use": "as_is"}
    assert classes(tiny, "", **changes) == ["loop"]
    everything = {**changes, "loss_mask": [True] * len(mask)}
    assert classes(tiny, "", **everything) == ["leftover"]
    assert classes(tiny, "", **everything, mask_method="all") == []  # the markers are the template's


# --- the stage ---


def test_shares_by_source_with_ids_and_no_text(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("draftmill"), "propagate", True)
    answers = [GOOD] * 5 + [LOOP + "..."] * 7 + [f"{REJECT}leftover_tag", f"{REJECT}timeout", f"{REJECT}thinking_only"]
    config = answered(tiny, tmp_path, answers)
    with caplog.at_level(logging.INFO, logger="draftmill"):
        ctx, manifest = run_quality(
            config, answers, later={f"{PROMPT} 0": "tool_call_differs", f"{PROMPT} 1": "thinking_only"}
        )
    data = json.loads(ctx.run.store.read_bytes(QUALITY))
    rows = data["sources"]["rows"]
    assert rows["answers"] == 15 + 1  # the later turn that only thought was an answer too; another call was not
    assert rows["counts"] == {
        "empty": 0, "cut": 7, "loop": 7, "language": 0, "leftover": 1, "refusal": 0, "thinking_only": 2, "rejected": 1,
    }  # fmt: skip
    assert rows["shares"]["cut"] == pytest.approx(7 / 16) == manifest.counts["sources"]["rows"]["shares"]["cut"]
    assert rows["reasons"] == {"leftover_tag": 1, "timeout": 1, "thinking_only": 2, "tool_call_differs": 1}
    assert len(rows["examples"]["loop"]) == 5 and all(i.endswith("-0") for i in rows["examples"]["loop"])
    assert "sacks" not in json.dumps(data) and "wheel" not in json.dumps(data)
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("quality:")]
    assert any("rows" in line and "43.8 %" in line for line in said)
    assert any("are of class cut" in line and "set quality.max_cut to stop at that" in line for line in said)


@pytest.mark.parametrize(
    ("bad", "kind"),
    [(LOOP, "loop"), ("", "empty"), ("yes <|im_start|>user", "leftover"), (f"{REJECT}leftover_tag", "leftover"),
     ("I cannot help with this, sorry.", "refusal"), ("请用简单的话解释一下为什么", "language")],
)  # fmt: skip
def test_a_share_above_its_threshold_stops_the_run_in_one_sentence(
    tiny: Path, tmp_path: Path, bad: str, kind: str
) -> None:
    answers = [GOOD] * 9 + [bad] * 13
    with pytest.raises(UserError) as caught:
        run_quality(answered(tiny, tmp_path, answers), answers)
    said = str(caught.value)
    assert f"59.1 % of the answers of source rows are of class {kind}" in said
    limit = getattr(QualityConfig(), f"max_{kind}")
    data = json.loads((tmp_path / "run" / QUALITY).read_text())
    example = data["sources"]["rows"]["examples"][kind][0]
    assert f"quality.max_{kind} {limit:g}" in said
    assert f"draftmill inspect {tmp_path / 'run'} --id {example}" in said and "\n" not in said
    assert not (tmp_path / "run" / "quality" / "manifest.json").exists()
    assert any(example in line for line in inspect_lines(str(tmp_path / "run"), Wanted(id=example)))


def test_thresholds_can_be_moved_and_a_handful_of_answers_stops_nothing(tiny: Path, tmp_path: Path) -> None:
    answers = [LOOP + "..."] * 22
    config = answered(tiny, tmp_path, answers)
    with pytest.raises(UserError, match=r"class loop"):
        run_quality(config, answers)

    def run(**changes: Any) -> Any:
        moved = config.model_copy(update={"quality": QualityConfig(**changes)})
        return run_stage(stage("quality"), context(moved))

    assert run(max_loop=None)[1] is False
    assert run(max_loop=None)[1] is True  # reused
    run(max_loop=1)
    run(min_answers=23)
    with pytest.raises(UserError, match=r"class cut, more than quality.max_cut 0.9"):
        run(max_loop=None, max_cut=0.9)
    state = stage_state(stage("quality"), context(config.model_copy(update={"quality": QualityConfig(max_loop=0.7)})))
    assert state.reasons == ("quality.max_loop changed: 0.5 -> 0.7", "quality.min_answers changed: 23 -> 20")


def test_no_stage_but_the_report_waits_for_quality() -> None:
    assert stage("quality").inputs == ("generate",)
    assert "quality" in stage("report").inputs and "quality" not in stage("vocab").inputs


def test_the_shares_are_in_the_results_and_on_the_page(tiny: Path, tmp_path: Path) -> None:
    answers = [GOOD] * 3 + [LOOP]
    ctx, _ = run_quality(answered(tiny, tmp_path, answers), answers)
    quality = collect(ctx.run)["quality"]
    assert quality["sources"]["rows"]["shares"]["loop"] == 0.25
    data = report_data("rows")
    assert "quality: not run" in render(data)
    quality["sources"]["<b>x"] = quality["sources"].pop("rows")
    data["results"]["quality"] = quality
    page = render(data)
    assert "Quality of the answers" in page and "25.0 %" in page and "<b>x" not in page and "thinking only" in page


def test_the_table_has_a_line_per_source() -> None:
    tally = Tally()
    tally.add("a-0", ["cut", "loop"])
    tally.add("b-0", [])
    head, line = table_lines({"a long name of a source": tally})
    assert len(head) == len(line)
    assert line.split()[-2 * len(CLASSES) :][:6] == ["0.0", "%", "50.0", "%", "50.0", "%"]


# --- inspect ---


def shown(run: Path | str, **wanted: Any) -> str:
    return "\n".join(inspect_lines(str(run), Wanted(**wanted)))


def test_inspect_shows_samples_with_their_mask(tiny: Path, tmp_path: Path) -> None:
    answers = [GOOD, LOOP + "...", GOOD, f"{REJECT}leftover_tag", f"{REJECT}timeout"]
    ctx, _ = run_quality(answered(tiny, tmp_path, answers), answers)
    run = tmp_path / "run"
    text = shown(run, kind="loop")
    assert text.count("  sample ") == 1
    assert "finish      length, truncated; classes: cut, loop" in text
    assert f"| {PROMPT} 1<|im_end|>" in text and "| ⟦the wheel turns the wheel" in text
    assert f"user        {PROMPT} 1" in text and "assistant   the wheel turns" in text
    assert shown(run).count("  sample ") == 3 and shown(run, rows=2).count("  sample ") == 2
    assert f"⟦{GOOD}<|im_end|>⟧" in shown(run, source="rows", rows=1)
    assert shown(f"file://{run}", kind="cut").count("  sample ") == 1  # a URL
    assert shown(save_config(ctx.config, tmp_path / "c.yaml"), kind="cut").count("  sample ") == 1
    rejected = shown(run, kind="leftover")
    assert "not kept: leftover_tag, as the test says" in rejected and f"{PROMPT} 3" in rejected
    assert "  sample " not in rejected
    everything = shown(run, kind="any", rows=9)
    assert everything.count("  sample ") == 1 and everything.count("not kept") == 2
    identity = read_ingest_part(ctx.run.store, 0)[0]["id"]
    assert shown(run, id=identity).count("  sample ") == 1 and f"{identity}-0" in shown(run, id=f"{identity}-0")


def test_inspect_hides_private_samples(tiny: Path, tmp_path: Path) -> None:
    answers = [GOOD, LOOP + "...", f"{REJECT}leftover_tag"]
    run_quality(answered(tiny, tmp_path, answers, private=True), answers)
    run = str(tmp_path / "run")
    hidden = shown(run, rows=9) + shown(run, kind="leftover")
    assert "sacks" not in hidden and "wheel" not in hidden and "miller" not in hidden
    assert "classes: cut, loop" in hidden and "private, not shown" in hidden
    open_lines = "\n".join(inspect_lines(run, Wanted(), show_private=True))
    assert "sacks" in open_lines and "wheel" in open_lines


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--class", "ugly"], "there is no class 'ugly'; the classes are empty, cut, loop"),
        (["--class", "refusal"], "has no sample of class refusal"),
        (["--id", "123"], "has no sample '123'"),
        (["--source", "nobody"], "has no sample of source 'nobody'; its sources are rows"),
        (["--rows", "0"], "--rows is 0"),
    ],
)
def test_what_inspect_cannot_show_is_one_sentence(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet_log: None, args: list[str], words: str
) -> None:
    run_quality(answered(tiny, tmp_path, [GOOD] * 3), [GOOD] * 3)
    assert cli.run(["inspect", str(tmp_path / "run"), *args]) == 1
    out, error = capsys.readouterr()
    assert words in error and error.count("\n") == 1 and not out


def test_inspect_of_no_run_and_of_a_damaged_one(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no run folder"):
        shown(tmp_path / "nothing")
    config = answered(tiny, tmp_path, [GOOD] * 3)
    path = save_config(config, tmp_path / "c.yaml")
    with pytest.raises(UserError, match="no part is generated yet"):
        shown(path)
    ctx, _ = run_quality(config, [GOOD] * 3)
    [rows] = [n for n in ctx.run.store.files(PARTS) if n.endswith(".parquet")]
    ctx.run.store.delete(f"{PARTS}/{rows}")
    with pytest.raises(UserError, match="the rows of part 0 are missing"):
        shown(path)
    ctx.run.store.write_bytes(f"{PARTS}/part-00000.json", b"{}")
    with pytest.raises(UserError, match="none of the 1 entries"):
        shown(path)
