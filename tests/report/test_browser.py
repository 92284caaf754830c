"""The pages in headless Chromium: they render on a phone, at a desk and on paper, and nothing complains."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.pipelines import report
from app.report.compare import compare_page, compare_runs
from tests.browser import chromium, show
from tests.report.made import BENCH, change, copy_of

pytestmark = pytest.mark.skipif(chromium() is None, reason="there is no Chromium on the PATH")

# Text of charts that leaves its chart, or lies over another text of it.
MISPLACED = """
[...document.querySelectorAll('svg')].flatMap(svg => {
  const edge = svg.viewBox.baseVal;
  const boxes = [...svg.querySelectorAll('text')].filter(t => t.textContent).map(t => [t.textContent, t.getBBox()]);
  const out = boxes.filter(([, b]) => b.x < -1 || b.x + b.width > edge.width + 1 || b.y < -1 ||
    b.y + b.height > edge.height + 1);
  const meet = (a, b) => a.x + a.width > b.x + 1 && b.x + b.width > a.x + 1 && a.y + a.height > b.y + 4 &&
    b.y + b.height > a.y + 4;
  const over = boxes.filter(([, a], i) => boxes.some(([, b], j) => j > i && meet(a, b)));
  return [...out, ...over].map(([text]) => svg.ariaLabel + ': ' + text);
})
"""
SMALL = "[...document.querySelectorAll('svg')].filter(s => s.getBoundingClientRect().height < 20).map(s => s.ariaLabel)"
# What is cut off at the side without a way to scroll there.
CUT = """
[...document.querySelectorAll('body *')].filter(e => !e.closest('svg, .scroll') &&
  e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))
"""
CONTRAST = """
(() => {
  const part = v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = c => { const [r, g, b] = c.match(/[0-9.]+/g).map(part); return .2126 * r + .7152 * g + .0722 * b; };
  const back = light(getComputedStyle(document.body).backgroundColor);
  const style = s => getComputedStyle(document.querySelector(s))[s.startsWith('svg') ? 'fill' : 'color'];
  return ['.verdict', '.soft', '.from', 'svg text'].map(s => light(style(s))).map(
    t => (Math.max(t, back) + .05) / (Math.min(t, back) + .05));
})()
"""


@pytest.fixture
def pages(finished: Path, tmp_path: Path) -> dict[str, Path]:
    """A whole report, one of half a run, and a comparison."""
    ctx, run = copy_of(finished, tmp_path / "a run with quite a long name, as people give them")
    cells = [{**BENCH, "num_draft_tokens": k, "concurrency": n, "speedup": 2 / k - n / 999, "temperature": 0.0}
             for k in (1, 3, 5) for n in (1, 4, 16, 64, 128)]  # fmt: skip
    domains = {"chat": {"acceptance_length": 2.2, "interval": [2.0, 2.4], "drafts": 9}}
    long = "a domain of a name that is longer than any chart is wide, as people give them to their data"
    change(run, "bench", sweep=cells, domains={**domains, long: domains["chat"]})
    run.store.write_json("plan.json", {"origin": "a guess", "stages": [{"name": "train", "seconds": 5.0}], "rows": 6,
                                       "samples": 6, "prompt_tokens": 9, "answer_tokens": 9, "bytes": 10})  # fmt: skip
    report.run(ctx)
    half_ctx, half = copy_of(finished, tmp_path / "half")
    for name in ("train", "export", "evaluate", "bench"):
        half.store.delete(name)
    report.run(half_ctx)
    compared = tmp_path / "compare.html"
    compared.write_text(compare_page(compare_runs([str(finished), run.url])), encoding="utf-8")
    return {"whole": Path(run.store.full(report.PAGE)), "half": Path(half.store.full(report.PAGE)), "compare": compared}


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1280, False), (390, True)])
@pytest.mark.parametrize("name", ["whole", "half", "compare"])
def test_a_page_renders_without_a_complaint(pages: dict[str, Path], name: str, width: int, dark: bool) -> None:
    shown = show(pages[name], width, dark, pdf=width == 1280, ask=(MISPLACED, SMALL, CUT, CONTRAST))
    assert shown.complaints == [] and shown.requests == []
    assert shown.width <= width
    assert shown.values[MISPLACED] == [] and shown.values[SMALL] == [] and shown.values[CUT] == []
    assert shown.png.startswith(b"\x89PNG") and len(shown.png) > 10_000
    assert shown.pdf.startswith(b"%PDF") or width != 1280
    if name == "whole":
        assert "2.190" in shown.text and "Doctor" in shown.text and "1.55x" in shown.text
        assert min(shown.values[CONTRAST]) > 4.5
    if name == "half":
        assert "train: not run." in shown.text


def test_the_check_sees_what_is_wrong(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        "<body><svg viewBox='0 0 100 50' width='100' aria-label='c'><text x='-40' y='20'>left</text>"
        "<text x='50' y='20'>one</text><text x='52' y='22'>two</text></svg><div style='width:3000px'>x</div>"
        "<script>console.error('no'); nothing()</script><img src='http://127.0.0.1:9/x.png'>"
    )
    shown = show(page, 390, ask=(MISPLACED, CUT))
    assert sorted(shown.values[MISPLACED]) == ["c: left", "c: one"]
    assert shown.values[CUT] and shown.requests == ["http://127.0.0.1:9/x.png"]
    assert len(shown.complaints) >= 2 and any("nothing is not defined" in c for c in shown.complaints)
