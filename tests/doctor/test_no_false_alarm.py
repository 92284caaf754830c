"""What once refused a right run, or read whole samples: each stays quiet, and reads little."""

from __future__ import annotations

import datetime
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import chat_template_utils

from app.codecs import decoded
from app.config import Config
from app.doctor import finding as f
from app.doctor import parity, profile, served, states
from app.doctor.command import ALL, BEFORE_TRAIN, examine
from app.doctor.facts import ROWS_LOOKED_AT, SAMPLES_LOOKED_AT, Facts
from app.doctor.finding import Finding, NotApplicable
from app.doctor.profile import Profile, compare, replay
from app.pipeline import run_stage
from app.runfolder import sealed, unsealed
from app.samples import SampleReader
from app.states import StatesFile
from app.storage import Store
from app.train.data import cut
from tests.doctor.test_matrix import causes, draft_of
from tests.doctor.tiny_run import Target, copied, generated, run_config
from tests.pipelines.finished import stage, template_file
from tests.runs import context
from tests.train.debug import make_sample, span_mask

DAY = ("'<|im_start|>' + message", "'<|im_start|>' + strftime_now('%d %b %Y') + message")


def finding(config: Config, line: str) -> Finding:
    return {x.id: x.finding for x in examine(context(config)).lines}[line]


@pytest.fixture
def dated(tiny: Path, target: Target, tmp_path: Path) -> Config:
    """A run whose template writes the day of rendering."""
    template = template_file(tiny, tmp_path, DAY)
    config = run_config(tiny, tmp_path, 12, target__chat_template=str(template))
    run_stage(stage("vocab"), generated(config, target))
    return config


def test_prompts_of_another_day_are_no_other_template(dated: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    assert finding(dated, "D1").state == "passed"

    class Tomorrow(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Tomorrow:
            return cls.fromtimestamp(datetime.datetime.now().timestamp() + 86400)

    monkeypatch.setattr(chat_template_utils, "datetime", Tomorrow)
    found = finding(dated, "D1")
    assert found.state == "not applicable" and "strftime_now" in found.evidence, found
    assert not causes(examine(context(dated), BEFORE_TRAIN))


def test_a_replay_that_cannot_cover_all_answers_is_not_compared(
    healthy: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's counters are of all answers; those of a few would be held against them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(profile, "MIN_DRAFTS", 15)
    config = copied(healthy, tmp_path / "run")
    facts = Facts(context(config), ALL)
    reader = facts.holdout()
    size = sum(t.numel() for n, t in facts.exported.items() if t.dim() == 2 and "embed" not in n)
    per_token = size * config.evaluate.num_draft_tokens
    tokens = sum(info.num_tokens for info in reader.infos)
    monkeypatch.setattr(parity, "_WORK", per_token * tokens)
    assert finding(config, "P2").state == "passed"
    read: list[int] = []
    whole = SampleReader.__getitem__
    monkeypatch.setattr(SampleReader, "__getitem__", lambda self, i: read.append(i) or whole(self, i))
    for work in (per_token * (tokens - 1), 0):  # but for the last one; not even the first
        monkeypatch.setattr(parity, "_WORK", work)
        with pytest.raises(NotApplicable, match="GPU"):
            parity.replay_against_engine(facts)
    assert not read


def test_the_tolerance_is_wider_by_the_spread_of_the_conversations() -> None:
    sample = make_sample(span_mask(43, [(3, 43)]))
    ids = sample.token_ids

    def draft(samples: Any, k: int) -> list[torch.Tensor]:
        """Right all along in every second conversation, wrong all along in the others."""
        right = torch.stack([ids[(t + 2 + torch.arange(k)).clamp(max=42)] for t in range(2, 41)])
        return [right if int(samples[0].conversation_id) % 2 else right + 1]

    def samples(count: int) -> Iterator[Any]:
        return (replace(sample, conversation_id=str(i)) for i in range(count))

    few, many = (replay(samples(n), draft, 1, resamples=200) for n in (20, 400))
    (share,), (wide,), (narrow,) = few.joint, few.margin, many.margin
    assert 0.02 < narrow < wide / 3 and many.joint == few.joint
    beside = Profile((share + wide / 2 + 0.02,), 5000)
    assert compare(replace(few, drafts=5000), beside).cause is None
    assert compare(replace(many, drafts=5000), beside).cause is not None
    assert replay(samples(20), draft, 1).margin == () == replay(samples(1), draft, 1, resamples=200).margin


@pytest.fixture
def rows_read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many rows of states were read, by kind."""
    counts: dict[str, int] = {}
    right = StatesFile.rows

    def rows(self: StatesFile, kind: str, start: int, stop: int) -> Any:
        counts[kind] = counts.get(kind, 0) + stop - start
        return right(self, kind, start, stop)

    monkeypatch.setattr(StatesFile, "rows", rows)
    return counts


def test_few_rows_of_a_long_sample_are_read_and_once(
    healthy: Config, rows_read: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.doctor.facts.ROWS_LOOKED_AT", 8, raising=False)
    facts = Facts(context(healthy), BEFORE_TRAIN)
    for check in (states.plausible, states.final_norm, parity.teacher_gives_tokens):
        assert check(facts).state == "passed"
    assert len(facts.looks) == SAMPLES_LOOKED_AT and ROWS_LOOKED_AT <= 64
    assert rows_read == {"aux": 8 * SAMPLES_LOOKED_AT, "teacher": 8 * SAMPLES_LOOKED_AT}
    sample = facts.sample(facts.looks[0].index)
    assert len(sample.aux) == 8 == len(sample.teacher) == len(sample.teacher_pos)


@pytest.mark.parametrize("codec", ["bf16", "int8"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_some_rows_are_those_of_the_whole_sample(
    codec: str, compression: str, tiny: Path, target: Target, tmp_path: Path
) -> None:
    config = run_config(tiny, tmp_path, 6, evaluate__holdout=1, capture__codec=codec, capture__compression=compression)
    generated(config, target)
    reader = Facts(context(config), BEFORE_TRAIN).reader
    whole = reader[1]
    some = reader.some_rows(1, 8, 4)
    plain = [decoded(s.teacher) for s in (whole, some)]
    at = [whole.teacher_pos.tolist().index(p) for p in some.teacher_pos.tolist()]
    assert len(at) == 8 and at[0] == 0 and at[-1] == len(plain[0]) - 1 and at == sorted(set(at))
    assert torch.equal(plain[0][at], plain[1])
    assert torch.equal(decoded(some.aux)[[0, 1, -1]], decoded(whole.aux)[[0, 1, -1]])
    for tokens in (12, 40, 1000):
        a, b = cut(whole, tokens), cut(reader.some_rows(1, tokens), tokens)
        assert torch.equal(decoded(a.aux), decoded(b.aux))
        assert torch.equal(a.teacher_pos, b.teacher_pos) and torch.equal(a.token_ids, b.token_ids)
        assert torch.equal(decoded(a.teacher), decoded(b.teacher))


def test_captures_of_other_settings_are_not_looked_at(healthy: Config, tmp_path: Path) -> None:
    config = copied(healthy, tmp_path / "run")
    parts = Path(config.run_dir) / "generate" / "parts"
    last = sorted(parts.glob("part-*.json"))[-1]
    number = int(last.stem[5:])
    entry = unsealed(json.loads(last.read_text()))
    assert entry is not None
    stale = parts / f"part-{number + 1:05d}.json"  # of a larger ingest
    layers = [1, 3, 4, *entry["layers"][3:]]
    stale.write_text(json.dumps(sealed({**entry, "part": number + 1, "key": "of before", "layers": layers})))
    facts = Facts(context(config), ALL)
    assert [e.part for e in facts.entries] == list(range(number + 1))
    assert not causes(examine(context(config)))


def test_a_part_of_the_finished_stage_that_is_cut_is_told(healthy: Config, tmp_path: Path) -> None:
    config = copied(healthy, tmp_path / "run")
    file = next((Path(config.run_dir) / "generate" / "parts").glob("part-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    report = examine(context(config), BEFORE_TRAIN)
    assert causes(report) == {f.DAMAGED} and file.name in report.failures[0].finding.evidence


def test_the_export_of_an_object_store_is_copied_once_and_removed(
    healthy: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "temporary"
    made.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    far = Store(f"memory://{tmp_path.name}")
    for path in draft_of(healthy).iterdir():
        far.put(Path(shutil.copy(path, made)), f"export/draft/{path.name}")
    ctx = context(healthy)
    manifests = {name: ctx.run.manifest(name) for name in ("export", "train", "vocab", "generate", "ingest")}
    monkeypatch.setattr(Facts, "store", property(lambda self: far))
    monkeypatch.setattr(type(ctx.run), "manifest", lambda self, name: manifests.get(name))
    facts = Facts(ctx, ALL)
    assert facts.exported_config and facts.exported
    assert len(list(made.glob("draftmill-?*/draft/config.json"))) == 1
    facts.close()
    assert list(made.glob("draftmill-*")) == []


def test_one_long_answer_in_a_rare_language_makes_no_map_stale(healthy: Config) -> None:
    facts = Facts(context(healthy), ALL)
    assert served.map_of_the_head(facts).state == "passed"
    rare = sorted(set(range(facts.vocab.vocab_size)) - set(facts.vocab.kept_ids.tolist()))[:50]
    long = facts.looks[0]
    answer = rare * 100
    row = {**long.row, "answer_ids": answer, "loss_mask": [False] * len(long.row["prompt_ids"]) + [True] * len(answer)}
    mostly = [replace(look, row=row) for look in facts.looks]
    facts.looks = [*facts.looks[:-1], mostly[-1]]
    assert served.map_of_the_head(facts).state == "passed"
    facts.looks = mostly
    assert served.map_of_the_head(facts).cause == f.STALE_MAP
