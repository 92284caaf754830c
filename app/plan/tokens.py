"""How many tokens a run will have: from a sample of its sources, from `--assume`, or from what it generated."""

from __future__ import annotations

import json
import logging
import os
import random
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pyarrow.parquet as pq

from app.config import Config, SourceConfig
from app.conversations import turns_to_answer
from app.errors import UserError
from app.parts import PARTS, read_entry, read_ingest_part
from app.runfolder import RunFolder
from app.storage import Store
from app.target import TargetInfo

if TYPE_CHECKING:
    from app.rows import RowPool

log = logging.getLogger("draftmill")
CHARS_PER_TOKEN = 4.0  # of text that nobody tokenised
USUAL_ANSWER = 600  # tokens; a bound on the mean assumed for answers nobody has seen
PARTS_LOOKED_AT = 32
_TOO_LONG = ("prompt_too_long", "too_long")  # reasons of rows that a longer context would take
ROWS_READ = 200_000  # rows of one source that a sample is drawn from


class SampledRow(Protocol):
    """One engine request of a sampled row."""

    @property
    def source(self) -> str: ...
    @property
    def use(self) -> str: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def answer_tokens(self) -> int | None: ...  # of the recorded answer, before any limit
    @property
    def reject(self) -> str | None: ...


@dataclass(frozen=True)
class Request:
    """The plain SampledRow."""

    source: str
    use: str
    prompt_tokens: int
    answer_tokens: int | None = None
    reject: str | None = None


@dataclass(frozen=True)
class SourceSample:
    """Requests of some rows of one source; `rows_total` are all its rows."""

    name: str
    use: str
    rows_total: int
    rows_sampled: int
    requests: Sequence[SampledRow]
    rows_exact: bool = True
    repeats: int = 0  # rows beside `rows_total` that ingest will reject as repeats


Sampler = Callable[[Config, TargetInfo, int], Sequence[SourceSample]]


class Length(NamedTuple):
    """Tokens of one request."""

    prompt: int
    answer: int

    @property
    def total(self) -> int:
        return self.prompt + self.answer


@dataclass(frozen=True)
class SourceTokens:
    """One source. `wanted` are the sampled lengths before the run's limits, `lengths` what is kept of them."""

    name: str
    use: str
    rows: int  # conversations that will be kept
    samples: float  # engine requests that will be kept
    wanted: tuple[Length, ...]
    lengths: tuple[Length, ...]
    supervised_share: float = 1.0  # of the answer tokens

    def _total(self, values: list[int]) -> float:
        return self.samples * statistics.fmean(values) if values else 0.0

    @property
    def prompt(self) -> float:
        return self._total([x.prompt for x in self.lengths])

    @property
    def answer(self) -> float:
        return self._total([x.answer for x in self.lengths])

    @property
    def teacher(self) -> float:
        """Rows of the last state: supervised tokens whose predecessor is supervised too, one span a sample."""
        return self.supervised_share * self._total([max(0, x.answer - 1) for x in self.lengths])

    @property
    def tokens(self) -> float:
        return self.prompt + self.answer


@dataclass(frozen=True)
class TokenStats:
    """All sources, where the counts are from, and what was assumed on the way."""

    sources: tuple[SourceTokens, ...]
    origin: str
    assumptions: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        return sum(s.rows for s in self.sources)

    @property
    def samples(self) -> float:
        return sum(s.samples for s in self.sources)

    @property
    def prompt(self) -> float:
        return sum(s.prompt for s in self.sources)

    @property
    def answer(self) -> float:
        return sum(s.answer for s in self.sources)

    @property
    def teacher(self) -> float:
        return sum(s.teacher for s in self.sources)

    @property
    def tokens(self) -> float:
        return self.prompt + self.answer

    @property
    def decoded(self) -> float:
        """Answer tokens the target writes; answers taken as they are go through prefill."""
        return sum(s.answer for s in self.sources if s.use == "regenerate")

    def scaled(self, share: float) -> TokenStats:
        """The same lengths with `share` of the rows."""
        parts = [replace(s, rows=round(s.rows * share), samples=s.samples * share) for s in self.sources]
        return replace(self, sources=tuple(parts))


# What `--assume` may name: tokens and rows here, rates in app/plan/hardware.py.
TOKEN_KEYS = ("rows", "prompt_tokens", "answer_tokens")


def parse_assumptions(texts: Sequence[str], known: Sequence[str]) -> dict[str, float]:
    """`name=number,...` as given to `--assume`.

    Raises:
        UserError: an unknown name, or a value that is not a number above 0.
    """
    values: dict[str, float] = {}
    for item in (i.strip() for text in texts for i in text.split(",")):
        name, equals, number = item.partition("=")
        if not equals:
            raise UserError(f"--assume {item!r} is not of the form name=number")
        if name not in known:
            raise UserError(f"--assume knows no {name!r}; it takes {', '.join(known)}")
        try:
            values[name] = float(number.replace("_", ""))
        except ValueError:
            values[name] = 0.0
        if not 0 < values[name] < float("inf"):
            raise UserError(f"--assume {name}={number}: give a number above 0")
    return values


def token_stats(config: Config, samples: Sequence[SourceSample], assume: Mapping[str, float]) -> TokenStats:
    """What the sources will give under the run's limits; `assume` overrules the sample.

    Raises:
        UserError: no sampled row can be used.
    """
    notes: list[str] = []
    mean = assume.get("answer_tokens") or assumed_answer(config)
    unknown = 0
    sources = []
    all_rows = sum(s.rows_total + s.repeats for s in samples)
    for sample in samples:
        usable = [r for r in sample.requests if r.reject is None]
        rejected = len(sample.requests) - len(usable)
        wanted = []
        for r in usable:
            answer = r.answer_tokens
            if r.use == "regenerate" and "answer_tokens" in assume:
                answer = None
            unknown += answer is None
            prompt = round(assume.get("prompt_tokens", r.prompt_tokens))
            wanted.append(Length(prompt, round(mean) if answer is None else answer))
        lengths = [left for x in wanted if (left := fitted(x, sample.use, config)) is not None]
        rows_in = sample.rows_total
        if "rows" in assume and all_rows:
            rows_in = round(assume["rows"] * sample.rows_total / all_rows)
        kept_share = len(lengths) / len(sample.requests) if sample.requests else 0.0
        kept = rows_in * kept_share if "rows" in assume else _drawn(config, sample.name, rows_in, kept_share)
        per_row = len(sample.requests) / max(1, sample.rows_sampled)
        if rejected or len(lengths) < len(usable):
            notes.append(
                f"{sample.name}: {1 - kept_share:.1%} of the sample is rejected or too long for"
                f" generate.max_length {config.generate.max_length}, so of the whole"
            )
        if sample.repeats:
            read = sample.rows_total + sample.repeats
            notes.append(
                f"{sample.name}: {sample.repeats:,} of {read:,} rows ({sample.repeats / read:.1%}) repeat another"
                " conversation and are not counted, as ingest rejects them"
            )
        if not sample.rows_total + sample.repeats:
            notes.append(f"{sample.name}: it holds no rows, and counts for nothing")
        if not sample.rows_exact:
            notes.append(f"{sample.name}: at least {sample.rows_total:,} rows; reading stopped there")
        sources.append(
            SourceTokens(
                sample.name, sample.use, round(kept), kept * per_row,
                tuple(wanted), tuple(lengths),
            )
        )  # fmt: skip
    if not any(s.lengths for s in sources):
        raise UserError(_why_none(config, samples, sources))
    if unknown:
        total = sum(len(s.wanted) for s in sources)
        where = "--assume answer_tokens" if "answer_tokens" in assume else "they have no recorded one to go by"
        notes.append(
            f"{unknown} of {total} sampled answers are taken to be {mean:.0f} tokens ({where});"
            f" generate.max_new_tokens {config.generate.max_new_tokens} is the bound"
        )
    if any(r.use == "regenerate" and r.answer_tokens is not None for s in samples for r in s.requests) and (
        "answer_tokens" not in assume
    ):
        notes.append("answers to be regenerated that have a recorded one are taken to be as long")
    return TokenStats(tuple(sources), f"a sample of {sum(s.rows_sampled for s in samples):,} rows", tuple(notes))


def _why_none(config: Config, samples: Sequence[SourceSample], sources: Sequence[SourceTokens]) -> str:
    """Why no sampled row is left, in a sentence: every reason with its number."""
    names = ", ".join(s.name for s in samples)
    if not samples:
        return "no source could be read, all were skipped; the lines above say why"
    if not any(s.requests for s in samples):
        return f"the sources hold no rows ({names}); look at sources.N.path, or whether the files are filled yet"
    reasons = Counter(r.reject for s in samples for r in s.requests if r.reject is not None)
    limit = config.generate.max_length
    too_long = sum(len(s.wanted) for s in sources) + sum(n for r, n in reasons.items() if r in _TOO_LONG)
    said = [f"{n} {reason}" for reason, n in reasons.most_common() if reason not in _TOO_LONG]
    if too_long:
        said.insert(0, f"{too_long} too long for generate.max_length {limit}")
    change = "raise it or look at the sources" if len(said) == 1 and too_long else "`draftmill preview` shows them"
    return f"no sampled row of {names} can be used: {', '.join(said)}; {change}"


def assumed_stats(config: Config, assume: Mapping[str, float]) -> TokenStats:
    """Token counts from `--assume rows=..,prompt_tokens=..,answer_tokens=..` alone."""
    rows = round(assume["rows"])
    use = config.sources[0].use
    wanted = Length(round(assume["prompt_tokens"]), round(assume["answer_tokens"]))
    kept = fitted(wanted, use, config)
    if kept is None:
        raise UserError(
            f"--assume prompt_tokens={wanted.prompt} leaves no room for an answer in generate.max_length"
            f" {config.generate.max_length}; lower the one or raise the other"
        )
    source = SourceTokens("assumed", use, rows, float(rows), (wanted,), (kept,))
    return TokenStats((source,), "--assume", ("every row is alike, as assumed",))


def assumed_answer(config: Config) -> float:
    """Mean length taken for answers nobody has seen: three quarters of the bound, within the usual."""
    return min(0.75 * config.generate.max_new_tokens, USUAL_ANSWER)


def fitted(wanted: Length, use: str, config: Config) -> Length | None:
    """What the run's limits leave of a request; None where the row is rejected."""
    limit = config.generate.max_length
    room = limit - wanted.prompt
    if room < 2:
        return None
    if use == "regenerate":
        return Length(wanted.prompt, min(wanted.answer, config.generate.max_new_tokens, room))
    if wanted.total <= limit:
        return wanted
    return Length(wanted.prompt, room) if config.ingest.over == "cut_end" else None


def _drawn(config: Config, name: str, rows: int, usable: float) -> float:
    """Rows that are kept of `rows`: the limit is of rows read, count and share are of usable ones."""
    source = next((s for s in config.sources if s.label == name), None)
    if source is None:
        return rows * usable
    kept = min(rows, source.limit or rows) * usable
    return min(kept, source.count) if source.count is not None else kept * (source.share or 1.0)


def requests_of(row: Mapping[str, Any], count: Callable[[str], int] | None = None) -> list[Request]:
    """Requests of one row of an ingest part; recorded answers and later turns are counted by `count`."""
    measure = count or (lambda text: round(len(text) / CHARS_PER_TOKEN))
    if row["use"] == "as_is":
        return [Request(row["source"], "as_is", len(r["prompt_ids"]), len(r["answer_ids"])) for r in row["requests"]]
    found = []
    prompt = len(row["requests"][0]["prompt_ids"])
    for number, turn in enumerate(turns_to_answer(json.loads(row["messages"]))):
        if number:
            prompt += sum(measure(str(m.get("content") or "")) + 5 for m in turn.inputs)
        recorded = str((turn.recorded or {}).get("content") or "") + str(
            (turn.recorded or {}).get("reasoning_content") or ""
        )
        answer = measure(recorded) + 1 if recorded else None
        found.append(Request(row["source"], "regenerate", prompt, answer))
        prompt += answer or 0
    return found


def read_sample(config: Config, target: TargetInfo, rows_per_source: int) -> list[SourceSample]:
    """A random sample of every source, tokenised as ingest does it, and the number of rows; repeats counted apart.

    Raises:
        UserError: a source cannot be read.
    """
    from app.pipelines.ingest import EXPECTED
    from app.rows import RowPool, RowSettings
    from app.sources.locate import SourceError

    samples = []
    known: set[bytes] = set()  # ids of sources that are taken whole
    with RowPool(RowSettings.of(config, target), config.ingest.workers or os.cpu_count() or 1) as pool:
        tokenizer = pool.local.renderer.tokenizer

        def count(text: str) -> int:
            return len(tokenizer.encode(text, add_special_tokens=False))

        for source in config.sources:
            draw, seen, repeats = random.Random(source.seed), 0, 0
            chosen: list[tuple[str, Any]] = []
            ids = known if source.count is None and source.share is None else set(known)
            try:
                for row, is_repeat in _marked_rows(pool, source, ids):
                    seen += 1
                    repeats += is_repeat
                    if is_repeat:
                        continue
                    if len(chosen) < rows_per_source:
                        chosen.append(row)
                    elif (at := draw.randrange(seen - repeats)) < rows_per_source:
                        chosen[at] = row
            except SourceError as error:
                if config.ingest.on_source_error == "stop":
                    raise
                log.warning("plan: SKIPPED %s", error)
                continue
            requests: list[Request] = []
            for outcome in pool.outcomes(source, iter(chosen)):
                if outcome.row is None:
                    reason = outcome.reject[0] if outcome.reject else "unusable"
                    requests.append(Request(source.label, source.use, 0, None, reason))
                else:
                    requests += requests_of(outcome.row, count)
            bad = sum(r.reject is not None and r.reject not in EXPECTED for r in requests)
            if bad > source.max_reject_share * len(chosen):
                log.warning(
                    "plan: ingest will stop: %d of %d rows sampled from %s are rejected, more than max_reject_share %g",
                    bad, len(chosen), source.label, source.max_reject_share,
                )  # fmt: skip
            rows = seen - repeats
            samples.append(
                SourceSample(source.label, source.use, rows, len(chosen), requests, seen < ROWS_READ, repeats)
            )
    return samples


def _marked_rows(pool: RowPool, source: SourceConfig, ids: set[bytes]) -> Iterator[tuple[tuple[str, Any], bool]]:
    """The first rows of a source, each with whether its conversation's id is in `ids` already; it is then."""
    from app.sources.logs import join_streams
    from app.sources.readers import read_rows

    waiting: deque[tuple[str, Any]] = deque()

    def given() -> Iterator[tuple[str, Any]]:
        for row in islice(join_streams(read_rows(source)), ROWS_READ):
            waiting.append(row)
            yield row

    for outcome in pool.outcomes(source, given(), tokenise=False):
        key = bytes.fromhex(outcome.id or "")
        yield waiting.popleft(), key in ids
        if key:
            ids.add(key)


def stats_of_ingest(config: Config, store: Store, parts: Sequence[int]) -> TokenStats:
    """Token counts of ingest parts, some of them read and the rest taken to be like them."""
    looked = list(parts)[:: max(1, len(parts) // PARTS_LOOKED_AT)]
    by_source: dict[tuple[str, str], list[Request]] = {}
    rows: dict[tuple[str, str], int] = {}
    for part in looked:
        for row in read_ingest_part(store, part):
            key = (row["source"], row["use"])
            rows[key] = rows.get(key, 0) + 1
            by_source.setdefault(key, []).extend(requests_of(row))
    share = len(parts) / max(1, len(looked))
    samples = [
        SourceSample(name, use, round(rows[name, use] * share), rows[name, use], requests)
        for (name, use), requests in by_source.items()
    ]
    # ingest has drawn and dropped already
    whole = config.model_copy(update={"sources": [s for s in config.sources if not (s.count or s.share or s.limit)]})
    return replace(token_stats(whole, samples, {}), origin="the prompts of ingest")


def stats_of_run(run: RunFolder) -> TokenStats | None:
    """Token counts of what a run generated; None where generate is not finished."""
    manifest = run.manifest("generate")
    if manifest is None or not manifest.counts.get("samples"):
        return None
    counts = manifest.counts
    parts = range(int(counts["parts"]))
    found: dict[tuple[str, str], list[tuple[str, Length, int]]] = {}
    for part in list(parts)[:: max(1, len(parts) // PARTS_LOOKED_AT)]:
        entry = read_entry(run.store, part)
        if entry is None:
            return None
        columns = ["source", "use", "conversation_id", "prompt_ids", "answer_ids", "loss_mask"]
        table = pq.read_table(run.store.local(f"{PARTS}/{entry.files['rows']['name']}"), columns=columns)
        for row in table.to_pylist():
            length = Length(len(row["prompt_ids"]), len(row["answer_ids"]))
            item = (row["conversation_id"], length, sum(row["loss_mask"]))
            found.setdefault((row["source"], row["use"]), []).append(item)
    seen = sum(map(len, found.values()))
    scale = counts["samples"] / seen
    sources = []
    for (name, use), items in found.items():
        lengths = tuple(length for _, length, _ in items)
        answers = sum(x.answer for x in lengths)
        share = sum(n for _, _, n in items) / answers if answers else 1.0
        rows = round(len({c for c, _, _ in items}) * scale)
        sources.append(SourceTokens(name, use, rows, len(items) * scale, lengths, lengths, min(1.0, share)))
    return TokenStats(tuple(sources), f"the {counts['samples']:,} samples that {run.url} generated")
