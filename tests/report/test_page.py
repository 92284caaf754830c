"""The report shows what the files say, names them, tells what has not run, and shows nothing private."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app import clean, cli
from app.doctor.command import examine
from app.parts import PARTS, PartEntry, read_entry
from app.pipelines import report
from app.report.data import STAGES, loss_curve, report_data
from app.report.page import render
from app.report.publish import publish
from app.report.samples import survey
from app.report.verdict import verdict
from app.runfolder import RunFolder
from app.storage import Store
from tests.report.made import BENCH, EVALUATE, change, copy_of

HEADINGS = (
    "Rows and tokens", "Data mix", "Lengths", "What is learnt", "Quality of the answers", "Training", "Acceptance",
    "Speed", "Planned and actual", "Doctor", "Serve it", "To reproduce",
)  # fmt: skip


def made(finished: Path, tmp_path: Path) -> tuple[str, dict[str, Any], RunFolder]:
    """Page and data of a copy of the run, as the stage writes them."""
    ctx, run = copy_of(finished, tmp_path / "run")
    run.store.write_json("plan.json", {"origin": "a guess", "stages": [{"name": "train", "seconds": 5.0}], "rows": 6,
                                       "samples": 6, "prompt_tokens": 9, "answer_tokens": 9, "bytes": 10})  # fmt: skip
    line = {"id": "A1", "title": "a check", "state": "failed", "cause": "c", "evidence": "<u>seen", "next_step": "mend"}
    run.store.write_json("doctor.json", {"lines": [line]})
    report.run(ctx)
    return run.store.read_bytes(report.PAGE).decode(), run.store.read_json(report.DATA), run


def test_every_section_is_there_and_every_file_it_names(finished: Path, tmp_path: Path) -> None:
    page, _, run = made(finished, tmp_path)
    assert [h for h in HEADINGS if f"<h2>{h}</h2>" not in page] == []
    assert 'class="absent"' not in page
    figures = re.findall(r"<figure>.*?</figure>", page, re.S)
    assert len(figures) >= 11
    for figure in figures:
        assert "<svg" in figure and 'class="from"' in figure, figure[:200]
    captions = re.findall(r'<p class="from">(.*?)</p>', page)
    named = {name for line in captions for name in re.findall("<code>(.*?)<", line)}
    assert {"bench/bench.json", "evaluate/evaluate.json", "train/metrics.jsonl", "plan.json", "doctor.json"} <= named
    for name in named - {line for line in named if re.fullmatch(r"[0-9a-f]+-\d+", line)}:  # samples go by their id
        places = [name.replace("STAGE", s) for s in STAGES] if "STAGE" in name else [name]
        assert all(run.store.exists(p.rstrip("/")) for p in places), name


def test_its_numbers_are_those_of_the_files(finished: Path, tmp_path: Path) -> None:
    page, data, run = made(finished, tmp_path)
    assert data["results"]["bench"] == run.store.read_json("bench/bench.json")
    assert data["results"]["evaluate"] == run.store.read_json("evaluate/evaluate.json")
    assert data["results"]["quality"]["sources"]["secret"]["shares"]["loop"] == pytest.approx(1 / 3, abs=1e-6)
    for words in ("2.190", "2.000 to 2.400", "1.55x", "69.0 %", "2.300 (2.100 to 2.600)", "33.3 %", "train.seed 5"):
        assert words in page, words
    assert "70.0 % (60.0 to 80.0)" in page  # offline, by position
    assert "69.0 % (59.0 to 79.0)" in page  # served, as wide
    assert [m["samples"] for m in data["mix"]] == [3, 3]
    assert sum(data["lengths"]["answer"]["counts"]) == 6
    assert data["planned"]["rows"][-2] == {"what": "train", "unit": "s", "planned": 5.0, "actual": 7.0}
    assert data["stages"]["bench"]["git_revision"] == "abc"


def test_f75_the_formula_stands_beside_the_number(finished: Path, tmp_path: Path) -> None:
    page, _, _ = made(finished, tmp_path)
    assert "Acceptance length = 1 + accepted / drafts = 1 + 119 / 100 in\nvLLM's counters" in page


def test_f74_another_form_of_the_target_is_said_at_the_top(finished: Path, tmp_path: Path) -> None:
    words = "the bench serves another form of the target (quantization fp8) than was captured (quantization none)"
    ctx, run = copy_of(finished, tmp_path / "run")
    change(run, "bench", other_form=words)
    report.run(ctx)
    page = run.store.read_bytes(report.PAGE).decode()
    assert page.index('class="verdict"') < page.index(f"Here {words}.") < page.index('class="cards"')
    publish(run.url, str(tmp_path / "out"))
    assert f"Here {words}." in (tmp_path / "out/README.md").read_text().split("## Serve it")[0]
    assert "another form" not in made(finished, tmp_path / "as it was")[0]


def test_f79_a_small_volume_is_noted_beside_what_was_used(finished: Path, tmp_path: Path) -> None:
    """As a line of the doctor's: advice, no error."""
    ctx, run = copy_of(finished, tmp_path / "run")
    generate, train = run.manifest("generate"), run.manifest("train")
    assert generate is not None and train is not None
    examine(ctx)
    (line,) = [x for x in run.store.read_json("doctor.json")["lines"] if x["id"] == "E1"]
    assert line["state"] == "advice" and line["next_step"].startswith("far below the usual volume of 50,000 samples")
    report.run(ctx)
    page = run.store.read_bytes(report.PAGE).decode()
    used = (f"{generate.counts['samples']} samples", f"{generate.counts['tokens']['answer']} answer tokens", "2 epochs",
            "100 % of the samples looked at answered by the target itself")  # fmt: skip
    assert ", ".join(used) in page and "Next: far below the usual volume" in page
    assert '<td>E1 enough data</td><td class="advice">advice</td>' in page


def test_it_is_self_contained_and_escaped(finished: Path, tmp_path: Path) -> None:
    page, _, _ = made(finished, tmp_path)
    assert "&lt;i&gt;rows" in page and "&lt;script&gt;" in page and "&lt;b&gt;code" in page and "&lt;u&gt;seen" in page
    assert not re.search(r"<(script|i>rows|b>code|u>|link(?! rel=\"icon\")|iframe|img)", page)
    assert not re.search(r"https?://|@import|url\(", page)


def test_masks_are_shown_and_private_text_is_not(finished: Path, tmp_path: Path) -> None:
    page, data, _ = made(finished, tmp_path)
    marked = re.findall(r"<mark>(.*?)</mark>", page, re.S)
    assert any("The miller counts" in text for text in marked)
    assert [m["source"] for m in data["masks"]] == ["<i>rows"]
    everything = page + json.dumps(data)
    assert (
        "sacks of the day 0" in everything or "sacks of the day 1" in everything or "sacks of the day 2" in everything
    )
    assert not any(f"sacks of the day {i}" in everything for i in (3, 4, 5))
    assert "the wheel turns" not in everything


@pytest.mark.parametrize("last", [None, *STAGES])
def test_what_has_not_run_is_told(finished: Path, tmp_path: Path, last: str | None) -> None:
    ctx, run = copy_of(finished, tmp_path / "run")
    gone = STAGES[STAGES.index(last) + 1 :] if last else STAGES
    for name in gone:
        run.store.delete(name)
    report.run(ctx)
    page = run.store.read_bytes(report.PAGE).decode()
    data = run.store.read_json(report.DATA)
    assert data["unfinished"] == dict.fromkeys(gone, "not run")
    assert page.count("not run") >= len(gone)
    assert [h for h in HEADINGS if f"<h2>{h}</h2>" not in page] == []


def test_a_number_of_another_making_is_not_shown(finished: Path, tmp_path: Path) -> None:
    ctx, run = copy_of(finished, tmp_path / "run")
    export = run.manifest("export")
    assert export is not None
    run.store.write_json("export/manifest.json", {})
    data = report_data(ctx)
    assert data["unfinished"] == {"export": "not run"}
    run.write_manifest(replace(export, digest="another"))
    data = report_data(ctx)
    assert set(data["unfinished"]) == {"evaluate", "bench"} and "out of date" in data["unfinished"]["bench"]
    assert "bench" not in data["results"] and "2.190" not in render(data)


def test_a_sweep_is_a_map_and_a_missing_baseline_is_told(finished: Path, tmp_path: Path) -> None:
    ctx, run = copy_of(finished, tmp_path / "run")
    cells = [{**BENCH, "num_draft_tokens": k, "concurrency": n, "speedup": 1 + 0.1 * k - 0.01 * n, "temperature": 0.0,
              "speedup_interval": [0.81, 1.62], "comparable": k == 1}
             for k in (1, 3) for n in (1, 16)]  # fmt: skip
    point = {"draft_tokens": 1, "concurrency": 1, "acceptance_length": 1.7, "break_even": 1.25, "speedup": 1.36,
             "measured": None, "go": True}  # fmt: skip
    change(run, "bench", sweep=cells, cost_model={"points": [point], "recommended": [], "lines": ["Take <3> tokens."]})
    page = render(report_data(ctx))
    for words in (
        "0.81-1.62",
        "2 of 4 not comparable",
        "1.09x",
        "1.14x",
        "0.94x",
        "1.29x",
        "Take &lt;3&gt; tokens.",
        "1.25",
    ):
        assert words in page, words
    alone = {"baseline": None, "draft": 620.0}
    change(run, "bench", speedup=None, sweep=[], tokens_per_second=alone, output_mismatches=None, comparable=False)
    page = render(report_data(ctx))
    assert "Nothing was served without the draft" in page and "its gain is not known" in page
    assert "Other programs took the processor" not in page


def test_the_verdict_goes_as_far_as_the_run() -> None:
    assert "nothing is made" in verdict({}).lower()
    assert "no draft yet" in verdict({"samples": 3})
    assert "20 steps" in verdict({"train": {"steps": 20}})
    assert "2.20 (95 % 2.00 to 2.40)" in verdict({"evaluate": EVALUATE})
    slower = {**BENCH, "speedup": 0.5}
    assert "leave it off here" in verdict({"bench": slower})
    assert "Hardly a token" in verdict({"bench": {**BENCH, "acceptance_length": 1.0}})
    gains = {"concurrency": 4, "draft_tokens": 2, "speedup": 1.4}
    none = {"concurrency": 8, "draft_tokens": None, "speedup": 1}
    said = verdict({"bench": {**slower, "cost_model": {"recommended": [gains, none]}}})
    assert "with 2 draft tokens at 4 requests at once it is 1.40 times as fast" in said


def test_curves_are_means_of_windows(tmp_path: Path) -> None:
    run = RunFolder(str(tmp_path))
    assert loss_curve(run) == {"train": [], "valid": []}
    lines = [json.dumps({"step": s, "loss": float(s)}) for s in range(1, 401)]
    run.store.write_bytes("train/metrics.jsonl", ("\n".join([*lines, '{"step": 4']) + "\n").encode())
    found = loss_curve(run)["train"]
    assert len(found) == 200 and found[0] == {"step": 2, "value": 1.5} and found[-1] == {"step": 400, "value": 399.5}


def test_a_report_of_what_is_there(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet_log: None
) -> None:
    _, run = copy_of(finished, tmp_path / "run")
    run.store.delete("bench")
    assert cli.run(["report", str(tmp_path / "run"), "--now"]) == 0
    assert capsys.readouterr().out.strip() == f"{run.url}/report/report.html"
    assert run.store.exists("report/report.json")
    assert cli.run(["report", str(tmp_path), "--now"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_sampled_outputs_are_not_counted_and_their_temperature_is_told(finished: Path, tmp_path: Path) -> None:
    ctx, run = copy_of(finished, tmp_path / "run")
    change(run, "bench", temperature=0.8)
    page = render(report_data(ctx))
    assert "outputs differ" not in page and "3 draft tokens, temperature 0.8" in page
    change(run, "bench", temperature=0.0)
    assert "<b>1</b>of 9 outputs differ" in render(report_data(ctx))


def test_the_page_names_the_engine_that_served(finished: Path, tmp_path: Path) -> None:
    ctx, run = copy_of(finished, tmp_path / "run")
    page = render(report_data(ctx))
    assert "acceptance length in vLLM" in page and "</i>vLLM" in page
    gauges = {"sglang:spec_accept_length": 2.19}
    change(run, "bench", gauges={"readings": 3, "sglang": gauges}, drafts=0, acceptance_per_position=[])
    page = render(report_data(ctx))
    assert "acceptance length in SGLang" in page and "</i>SGLang" in page
    assert "in vLLM" not in page and "</i>vLLM" not in page


def test_rows_of_a_far_store_are_read_in_place_and_entries_several_at_once(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = RunFolder(str(finished)).store
    far = Store(f"memory://{tmp_path.name}")
    for name in here.files(PARTS):
        far.write_bytes(f"{PARTS}/{name}", here.read_bytes(f"{PARTS}/{name}"))
    threads = []

    def read(store: Store, part: int) -> PartEntry | None:
        threads.append(threading.current_thread())
        return read_entry(store, part)

    monkeypatch.setattr(clean, "read_entry", read)
    monkeypatch.setattr(Store, "local", lambda store, path: pytest.fail(f"{path} was copied"))
    found = survey(far, clean.stored_entries(far))
    assert sum(m["samples"] for m in found.mix()) == 6 and found.shown
    assert threads and threading.main_thread() not in threads
