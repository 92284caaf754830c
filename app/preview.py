"""`draftmill preview`: rows of each source as the model will see them, through the very code of ingest."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2

from app.config import Config, SourceConfig
from app.conversations import Conversation, turns_to_answer
from app.errors import RowError, UserError
from app.marked import CLOSE, OPEN, SPAN_LIMIT, Span, one_line, short, spans_of, terminal_lines, visible
from app.pipelines.ingest import check_settings
from app.redact import redact
from app.rows import Outcome, RowSettings, RowWorker
from app.sources.locate import SourceError
from app.sources.logs import join_streams
from app.sources.readers import read_rows
from app.target import inspect_target
from app.template_probe import additions, ignored_roles, ignores_messages

_TEMPLATE = Path(__file__).with_name("preview.html.jinja")
_REQUEST = ("prompt_ids", "answer_ids", "loss_mask")
_HIDDEN = "private, not shown (--show-private shows it)"


@dataclass(frozen=True)
class Shown:
    """One sample of a row: `spans` is None where its text must not be shown."""

    prompt: int  # tokens
    answer: int | None  # None where the target answers anew
    supervised: int | None
    truncated: bool
    spans: list[Span] | None


@dataclass
class RowView:
    """One row, ready to be written."""

    where: str
    id: str | None
    kept: bool
    verdict: str
    reason: str | None = None  # of the reject
    facts: list[tuple[str, str]] = field(default_factory=list)  # label, text
    samples: list[Shown] = field(default_factory=list)


@dataclass
class SourceView:
    """What is shown of one source."""

    name: str
    use: str
    notes: list[str]
    rows: list[RowView] = field(default_factory=list)


def preview(config: Config, rows: int, name: str | None = None, show_private: bool = False) -> list[SourceView]:
    """The first `rows` rows of each source, or of source `name`.

    Raises:
        UserError: there is no such source, or one cannot be read.
    """
    if rows < 1:
        raise UserError(f"--rows is {rows}; give at least 1")
    labels = [s.label for s in config.sources]
    if name is not None and name not in labels:
        raise UserError(f"there is no source {name!r}; the sources are {', '.join(labels)}")
    t = config.target
    target = inspect_target(t.model, t.revision, t.trust_remote_code, t.chat_template, weights=False)
    check_settings(config, target)
    looker = _Looker(config, RowWorker(RowSettings.of(config, target)), show_private)
    views = []
    for source in config.sources:
        if name is not None and source.label != name:
            continue
        try:
            views.append(looker.source(source, rows))
        except SourceError as error:
            if config.ingest.on_source_error == "stop":
                raise
            views.append(SourceView(source.label, source.use, [f"SKIPPED: {redact(str(error))}"]))
    return views


class _Looker:
    def __init__(self, config: Config, worker: RowWorker, show_private: bool) -> None:
        self._config, self._worker, self._show_private = config, worker, show_private
        self._tokenizer = worker.renderer.tokenizer
        self._seen: dict[str, str] = {}  # id -> where
        self._template_fault = ignores_messages(worker.renderer)
        self._ignored = ignored_roles(worker.renderer)

    def source(self, source: SourceConfig, rows: int) -> SourceView:
        view = SourceView(source.label, source.use, self._not_applied(source))
        for where, row in islice(join_streams(read_rows(source)), rows):
            view.rows.append(self._row(source, where, row))
        if self._template_fault is not None:
            view.notes.insert(0, f"WARNING: the target's chat template {self._template_fault}")
        if not view.rows:
            raise SourceError(source.label, f"{redact(source.location)} holds no rows")
        return view

    def _not_applied(self, source: SourceConfig) -> list[str]:
        """What ingest does over whole sources, and a look at the first rows cannot."""
        ingest = self._config.ingest
        notes = []
        if source.count is not None or source.share is not None:
            notes.append("the first rows as read; ingest draws by count or share from all of them")
        if ingest.near_duplicates is not None:
            notes.append("near repeats (ingest.near_duplicates) are not looked for here")
        if ingest.benchmark_sets:
            notes.append("prompts of ingest.benchmark_sets are not looked for here")
        return notes

    def _row(self, source: SourceConfig, where: str, row: Any) -> RowView:
        [outcome] = self._worker.chunk(source, [(where, row)], True)
        conversation: Conversation | None = None
        if not isinstance(row, RowError):
            with contextlib.suppress(RowError):  # the outcome says so
                conversation = self._worker.conversation(source, row)
        private = source.hides(conversation is not None and conversation.private)
        shown = self._show_private or not private
        if outcome.reject is None and outcome.id in self._seen:
            outcome.reject = ("duplicate", f"the same conversation as {self._seen[outcome.id]}")
        if outcome.id is not None:
            self._seen.setdefault(outcome.id, outcome.where)
        view = RowView(redact(where), outcome.id, outcome.reject is None, "kept")
        if outcome.reject is not None:
            view.reason, detail = outcome.reject
            said = f", {one_line(redact(detail), 300)}" if detail and shown else ""
            view.verdict = f"rejected: {view.reason}{said}"
        if conversation is not None:
            self._describe(source, row, conversation, outcome, shown, view)
        return view

    def _describe(
        self, source: SourceConfig, row: Any, conversation: Conversation, outcome: Outcome, shown: bool, view: RowView
    ) -> None:
        messages = conversation.messages
        roles = ", ".join(m["role"] for m in messages[:12]) + (", ..." if len(messages) > 12 else "")
        view.facts.append(("shape", f"{conversation.shape}: {roles}"))
        repairs = [k.replace("_", " ") for k in ("leading_assistant_dropped", "role_repeats") if conversation.notes[k]]
        if repairs:
            view.facts.append(("repairs", ", ".join(repairs)))
        self._template(source, conversation, shown, view)
        if source.use == "regenerate":
            self._replaced(source, row, shown, view)
        if not shown:
            view.facts.append(("text", _HIDDEN))
        if outcome.row is not None:
            if source.use == "as_is":
                view.facts.append(("mask", f"by {outcome.row['mask_method']}"))
            view.samples = [self._sample(request, shown) for request in outcome.row["requests"]]
        elif shown:
            try:
                text = self._worker.renderer_for(conversation).text(messages, source.use == "regenerate")
            except RowError:
                return
            ids = self._worker.renderer.encode(text)
            view.samples = [Shown(len(ids), None, None, False, [Span(text, False)])]

    def _template(self, source: SourceConfig, conversation: Conversation, shown: bool, view: RowView) -> None:
        """The effective system prompt, and what the template adds and leaves out."""
        renderer = self._worker.renderer_for(conversation)
        messages = conversation.messages
        if source.use == "regenerate":
            messages = turns_to_answer(messages)[0].inputs
        try:
            found = additions(renderer, messages, source.use == "regenerate")
        except RowError as error:
            view.facts.append(("template", one_line(error.detail, 300) if shown else error.reason))
            return
        own = [m for m in messages if m["role"] in ("system", "developer")]
        if own and own[0]["role"] in self._ignored:
            view.facts.append(("WARNING", f"the template leaves out what {own[0]['role']} messages say"))
        if own and own[0]["content"] == source.system_prompt:
            said = f'of the source: "{one_line(own[0]["content"])}"'
        elif own:
            said = f'of the row: "{one_line(own[0]["content"])}"' if shown else "of the row"
        elif found.default_system is not None:
            said = f'the template\'s default: "{one_line(found.default_system, 300)}"'
        else:
            said = "none"
        view.facts.append(("system", said))
        words = [one_line(w, 200) if shown or not w.startswith('"') else "other text" for w in found.words]
        if found.default_system is not None:
            words.insert(0, f"its default system prompt ({len(found.default_system)} characters)")
        view.facts.append(("adds", "; ".join(words) or "nothing but the marks of turns"))
        if found.left_out:
            view.facts.append(("leaves out", "; ".join(found.left_out)))

    def _replaced(self, source: SourceConfig, row: Any, shown: bool, view: RowView) -> None:
        """The answers on record that the target's own will stand in place of, the last one too."""
        try:
            turns = turns_to_answer(self._worker.conversation(source.model_copy(update={"use": "as_is"}), row).messages)
        except RowError:
            return  # there is none on record
        for number, turn in enumerate(turns):
            if turn.recorded is None:
                continue
            text = turn.recorded["content"] or json.dumps(turn.recorded.get("tool_calls", []), ensure_ascii=False)
            said = f'"{one_line(text, 160)}"' if shown else f"{len(text):,} characters"
            view.facts.append(("replaced", f"the recorded answer of turn {number}: {said}"))
        if len(turns) > 1:
            view.facts.append(("turns", f"{len(turns)} to answer; later prompts hold the target's earlier answers"))

    def _sample(self, request: dict[str, Any], shown: bool) -> Shown:
        prompt, answer, mask = (None if request[k] is None else list(map(int, request[k])) for k in _REQUEST)
        assert prompt is not None
        learnt = [False] * len(prompt) if mask is None else list(map(bool, mask))
        spans = spans_of(self._tokenizer, [*prompt, *(answer or [])], learnt) if shown else None
        supervised = None if answer is None else sum(learnt)
        return Shown(len(prompt), None if answer is None else len(answer), supervised, request["truncated"], spans)


def require_kept(views: list[SourceView]) -> None:
    """Raises UserError where rows were looked at and none would be kept; it names the commonest reason."""
    rows = [row for view in views for row in view.rows]
    if not rows or any(row.kept for row in rows):
        return
    [(reason, count)] = Counter(row.reason for row in rows).most_common(1)
    raise UserError(
        f"none of the {len(rows)} rows looked at would be kept, {count} of them for {reason}; the preview says what"
        " is wrong with each, docs/own-data.md which shapes are read"
    )


def counts_line(shown: Shown, config: Config) -> str:
    """Tokens of a sample in words."""
    if shown.answer is None or shown.supervised is None:
        return f"{shown.prompt:,} prompt; the target answers with up to {config.generate.max_new_tokens:,}, all learnt"
    share = 100 * shown.supervised / max(1, shown.prompt + shown.answer)
    cut = ", cut at generate.max_length" if shown.truncated else ""
    return f"{shown.prompt:,} prompt, {shown.answer:,} answer, {shown.supervised:,} supervised ({share:.0f} %){cut}"


def preview_lines(views: list[SourceView], config: Config, colour: bool, full: bool) -> Iterator[str]:
    """The preview for a terminal or a file."""
    limit = None if full else SPAN_LIMIT
    yield "green is what the draft learns" if colour else f"{OPEN} {CLOSE} stand around what the draft learns"
    for view in views:
        yield ""
        yield f"source {visible(view.name)} ({view.use})"
        for note in view.notes:
            yield f"  note: {note}"
        for number, row in enumerate(view.rows):
            yield ""
            yield f"  row {number + 1}  {visible(row.where)}  {row.verdict}"
            yield f"    {'id':<11} {row.id or 'none'}"
            for label, text in row.facts:
                yield f"    {label:<11} {text}"
            for index, sample in enumerate(row.samples):
                of = f" (sample {index + 1} of {len(row.samples)})" if len(row.samples) > 1 else ""
                if row.kept or sample.answer is not None:
                    yield f"    {'tokens':<11} {counts_line(sample, config)}{of}"
                else:
                    yield f"    {'tokens':<11} {sample.prompt:,}"
                for line in terminal_lines(sample.spans or [], colour, limit) if sample.spans else ():
                    yield f"    | {line}"


def preview_page(views: list[SourceView], config: Config, full: bool) -> str:
    """A self-contained page; everything that came from a file is escaped."""
    env = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters["shown"] = lambda text: visible(text if full else short(text, SPAN_LIMIT))
    env.filters["counts"] = lambda sample: counts_line(sample, config)
    page = env.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return page.render(views=views, model=config.target.model)


def write_page(path: str, page: str) -> None:
    """Raises UserError where the file cannot be written."""
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html {path} cannot be written: {error.strerror or error}") from error
