"""The format of a part: exact round trips in every codec, one sample without the others, and every fault by name."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.captured import CONFIG_KEYS, load_entries, part_keys, shape_of
from app.codecs import Encoded, States, decoded, encode
from app.engine.part_worker import PartWorker
from app.errors import UserError
from app.parts import (
    PARTS,
    SAMPLE_SCHEMA,
    PartEntry,
    committed_parts,
    entry_fault,
    part_name,
    read_entry,
    remove_conversations,
    remove_orphans,
    teacher_positions,
    write_entry,
    write_part,
)
from app.pipeline import run_stage
from app.pipelines.generate import _worker_config
from app.plan.cost import Shape, naive_bytes, part_bytes
from app.plan.tokens import Length, SourceTokens, TokenStats
from app.record import record_of, refuse_mismatch
from app.runfolder import digest_of, flat_config, sealed
from app.samples import SampleReader, conversation_ids
from app.sizing import Engines
from app.states import StatesFile
from app.storage import Store
from app.target import TargetInfo
from app.train.loop import run_worker
from tests.pipelines.finished import finish_generate, stage
from tests.runs import ROOT, context, prompts, tiny_config, write_rows
from tests.stubs import states_of as stub_states
from tests.test_codecs import residual_stream, same

FORMS = [
    ("bf16", "none"), ("bf16", "zstd"), ("bf16", "planes"), ("fp8", "none"), ("fp8", "zstd"),
    ("int8", "none"), ("int8", "zstd"), ("int4", "none"), ("int4", "zstd"),
]  # fmt: skip
HIDDEN = 64
LENGTHS = [(5, 9), (30, 2), (3, 40), (17, 17), (2, 60)]  # prompt, answer


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sample_row(number: int, prompt: int, answer: int) -> dict[str, Any]:
    ids = random.Random(number).choices(range(49_000), k=prompt + answer)
    return {
        "sample_id": f"{number:024x}-0", "conversation_id": f"{number:024x}", "turn": 0, "source": "s", "domain": "d",
        "use": "regenerate", "private": False, "messages": json.dumps([{"content": " ".join(map(str, ids))}]),
        "template_kwargs": "{}", "sampling": '{"temperature": 0.0}', "prompt_ids": ids[:prompt],
        "answer_ids": ids[prompt:], "loss_mask": [False] * prompt + [True] * answer, "mask_method": "engine",
        "finish_reason": "stop", "truncated": False,
    }  # fmt: skip


def entry_of(part: int = 0, codec: str = "bf16", compression: str = "none", hidden: int = HIDDEN) -> dict[str, Any]:
    return {
        "part": part, "key": "k", "rows_in": 5, "conversations": 5, "rejects": [], "cut_short": [], "tokens": {},
        "finish_reasons": {}, "layers": [2, 4, 5], "dtype": "bfloat16", "hidden_size": hidden, "seconds": 0.0,
        "codec": codec, "compression": compression,
    }  # fmt: skip


def states_of(number: int, tokens: int, hidden: int = HIDDEN) -> Tensor:
    return residual_stream(tokens - 1, hidden, times=40, seed=number)  # as far out as SmolLM2's


def write(
    store: Store, codec: str = "bf16", compression: str = "none", part: int = 0, lengths: list[Any] = LENGTHS,
    hidden: int = HIDDEN,
) -> PartEntry:  # fmt: skip
    """A part of residual streams; sample i of part p is number 100 p + i."""
    rows = [sample_row(100 * part + i, p, a) for i, (p, a) in enumerate(lengths)]
    states = [states_of(100 * part + i, p + a, hidden) for i, (p, a) in enumerate(lengths)]
    return write_part(store, entry_of(part, codec, compression, hidden), rows, states)


def reader_of(store: Store, *entries: PartEntry) -> SampleReader:
    return SampleReader(store, list(entries), dict.fromkeys(conversation_ids(store, list(entries)), "train"))


def states_path(store: Store, entry: PartEntry) -> Path:
    return store.local(f"{PARTS}/{entry.files['states']['name']}")


def write_version_1(store: Store, part: int = 0) -> None:
    """A part as draftmill 0.1 wrote it: no codec, no table of samples, no num_tokens."""
    folder = Path(store.full(PARTS))
    folder.mkdir(parents=True, exist_ok=True)
    rows, aux, teacher, at = [], [], [], [0, 0]
    for i, (p, a) in enumerate(LENGTHS):
        row, states = sample_row(100 * part + i, p, a), states_of(100 * part + i, p + a)
        positions = teacher_positions(torch.tensor(row["loss_mask"]))
        rows.append({**row, "aux_start": at[0], "teacher_start": at[1], "teacher_rows": len(positions)})
        aux.append(states[:, :3].reshape(len(states), -1))
        teacher.append(states[positions, 3])
        at = [at[0] + len(states), at[1] + len(positions)]
    schema = pa.schema([f for f in SAMPLE_SCHEMA if f.name != "num_tokens"])
    pq.write_table(pa.Table.from_pylist(rows, schema), folder / "rows.parquet")
    about = {"format": "draftmill-states", "version": 1, "layers": [2, 4, 5], "convention": "s_k"}
    tensors = {"aux": torch.cat(aux), "teacher": torch.cat(teacher)}
    save_file(tensors, folder / "states.safetensors", {"draftmill": json.dumps(about)})
    files = {
        kind: {"name": name, "size": (folder / name).stat().st_size, "sha256": store.sha256(f"{PARTS}/{name}")}
        for kind, name in (("rows", "rows.parquet"), ("states", "states.safetensors"))
    }
    old = {k: v for k, v in entry_of(part).items() if k not in ("codec", "compression")}
    store.write_json(
        f"{PARTS}/{part_name(part)}.json", sealed({**old, "samples": len(rows), "files": files, "format_version": 1})
    )


def expected(number: int, prompt: int, answer: int, codec: str) -> tuple[States, States]:
    states = states_of(number, prompt + answer)
    positions = torch.arange(prompt, prompt + answer - 1)
    return encode(states[:, :3], codec), encode(states[positions, 3:], codec)


@pytest.mark.parametrize(("codec", "compression"), FORMS)
def test_a_sample_comes_back_as_it_was_encoded(tmp_path: Path, codec: str, compression: str) -> None:
    store = Store(str(tmp_path))
    entry = write(store, codec, compression)
    assert read_entry(store, 0) == entry
    assert (entry.codec, entry.compression, entry.format_version) == (codec, compression, 3)
    reader = reader_of(store, entry)
    for i, (prompt, answer) in enumerate(LENGTHS):
        sample, row = reader[i], sample_row(i, prompt, answer)
        assert sample.token_ids.tolist() == row["prompt_ids"] + row["answer_ids"]
        assert sample.loss_mask.tolist() == row["loss_mask"]
        assert sample.teacher_pos.tolist() == list(range(prompt, prompt + answer - 1))
        aux, teacher = expected(i, prompt, answer, codec)
        assert same(sample.aux, aux) and same(sample.teacher, teacher)
        assert sample.greedy and reader.infos[i].num_tokens == prompt + answer


def test_bf16_is_exact_and_readable_with_safetensors_alone(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    tensors = load_file(states_path(store, write(store)))
    assert torch.equal(tensors["aux"][:13].view(13, 3, HIDDEN), states_of(0, 14)[:, :3])
    assert tensors["samples"].tolist()[:2] == [[0, 0], [13, 8]]


@pytest.mark.parametrize("codec", ["fp8", "int8", "int4"])
def test_quantised_tensors_are_readable_with_safetensors_alone(tmp_path: Path, codec: str) -> None:
    """As docs/format.md tells it."""
    store = Store(str(tmp_path))
    entry = write(store, codec)
    tensors = load_file(states_path(store, entry))
    values, scale = tensors["aux"][:13], tensors["aux.scale"][:13].float()
    if codec == "int4":
        values = torch.stack((values & 15, values >> 4), -1).flatten(1).float()
        values = values - tensors["aux.zero"][:13].float().repeat_interleave(values.shape[1] // scale.shape[1], 1)
    read = (values.float() * scale.repeat_interleave(values.shape[1] // scale.shape[1], 1)).bfloat16()
    assert torch.equal(read, decoded(reader_of(store, entry)[0].aux))


@pytest.mark.parametrize(("codec", "compression"), [f for f in FORMS if f[1] != "none"])
def test_one_sample_is_read_without_the_rest_of_the_part(tmp_path: Path, codec: str, compression: str) -> None:
    """Every byte that belongs to other samples' frames is destroyed, and the sample is still right."""
    store = Store(str(tmp_path))
    entry = write(store, codec, compression)
    path = states_path(store, entry)
    tensors = load_file(path)
    frames, samples = tensors["aux.frames"], tensors["samples"]
    first, last = (int(r) for r in samples[2:4, 0])
    begin, end = (int(frames[frames[:, 0] == r][0, 1]) for r in (first, last))
    data = bytearray(path.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    at = 8 + int.from_bytes(data[:8], "little") + header["aux.zstd"]["data_offsets"][0]
    size = header["aux.zstd"]["data_offsets"][1] - header["aux.zstd"]["data_offsets"][0]
    data[at : at + begin] = b"\xff" * begin
    data[at + end : at + size] = b"\xff" * (size - end)
    path.write_bytes(data)
    reader = reader_of(store, entry)
    assert same(reader[2].aux, expected(2, *LENGTHS[2], codec)[0])
    with pytest.raises(UserError, match=rf"states file {path.name} is damaged: frame \d+ of aux"):
        _ = reader[1]


def test_long_samples_are_cut_into_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.states._FRAME", 7 * 3 * HIDDEN)
    store = Store(str(tmp_path))
    entry = write(store, "fp8", "zstd")
    file = StatesFile.local(states_path(store, entry))
    assert len(load_file(states_path(store, entry))["aux.frames"]) == 1 + sum(-(-(p + a - 1) // 7) for p, a in LENGTHS)
    whole = file.rows("aux", 0, 180)
    assert all(same(file.rows("aux", a, b), whole[a:b]) for a, b in ((0, 1), (6, 8), (13, 44), (70, 179), (5, 5)))


def test_the_same_samples_give_the_same_files(tmp_path: Path) -> None:
    names = [write(Store(str(tmp_path / folder)), "fp8", "zstd").files for folder in "ab"]
    assert names[0] == names[1]


def test_a_part_without_samples(tmp_path: Path) -> None:
    for number, (codec, compression) in enumerate(FORMS):
        store = Store(str(tmp_path / str(number)))
        entry = write_part(store, entry_of(codec=codec, compression=compression), [], [])
        assert read_entry(store, 0) == entry and len(SampleReader(store, [entry], {})) == 0
        assert len(StatesFile.local(states_path(store, entry)).rows("aux", 0, 0)) == 0


def test_samples_that_teach_nothing(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    entry = write(store, "fp8", "zstd", lengths=[(9, 1), (4, 1)])
    sample = reader_of(store, entry)[1]
    assert len(sample.aux) == 4 and len(sample.teacher) == 0 and decoded(sample.teacher).shape == (0, HIDDEN)


# Faults


def test_states_of_another_row_are_refused(tmp_path: Path) -> None:
    """F45, at the writer and at the reader."""
    store = Store(str(tmp_path))
    rows = [sample_row(i, p, a) for i, (p, a) in enumerate(LENGTHS)]
    states = [states_of(i, p + a) for i, (p, a) in enumerate(LENGTHS)]
    with pytest.raises(ValueError, match=r"sample 0+-0: 31 states for 14 tokens"):
        write_part(store, entry_of(), rows, [states[1], states[0], *states[2:]])
    one, other = write(store), write(store, part=1, lengths=[(6, 9), *LENGTHS[1:]])
    mixed = replace(one, files={**one.files, "states": other.files["states"]})
    with pytest.raises(UserError, match=r"sample 0+-0: the states in part-00001-\w+.safetensors are not those of its"):
        _ = reader_of(store, mixed)[0]


@pytest.mark.parametrize("kind", ["rows", "states"])
@pytest.mark.parametrize(("codec", "compression"), [("bf16", "none"), ("fp8", "zstd"), ("int4", "none")])
def test_one_flipped_bit_is_found(tmp_path: Path, kind: str, codec: str, compression: str) -> None:
    store = Store(str(tmp_path))
    entry = write(store, codec, compression)
    path = store.local(f"{PARTS}/{entry.files[kind]['name']}")
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    path.write_bytes(data)
    assert committed_parts(store, {0: "k"}, "size")[0].keys() == {0}
    valid, bad = committed_parts(store, {0: "k"}, "checksum")
    assert not valid and bad == {0: f"{kind} file {path.name} does not match its checksum"}


@pytest.mark.parametrize("left", [0, 7, 100, -1])
def test_a_cut_file_is_named(tmp_path: Path, left: int) -> None:
    store = Store(str(tmp_path))
    entry = write(store)
    path = states_path(store, entry)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(UserError, match=rf"states file {path.name} is damaged: it (ends inside|has [\d,]+ bytes inst)"):
        _ = reader_of(store, entry)[0]
    assert "bytes instead of" in committed_parts(store, {0: "k"}, "size")[1][0]


def test_a_file_that_is_no_states_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for text in (b"not json", b"[]", b'{"aux": 5}'):
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(UserError, match=r"states file x.safetensors is damaged: its header cannot be read"):
            StatesFile.local(path)


# The reader


def test_opening_reads_neither_lists_nor_states(tmp_path: Path) -> None:
    """With the bytes of token ids, masks and texts destroyed a reader still starts."""
    store = Store(str(tmp_path))
    entry = write(store)
    path = store.local(f"{PARTS}/{entry.files['rows']['name']}")
    data = bytearray(path.read_bytes())
    group = pq.read_metadata(path).row_group(0)
    for column in (group.column(i) for i in range(group.num_columns)):
        if column.path_in_schema.split(".")[0] in ("prompt_ids", "answer_ids", "loss_mask", "messages"):
            start = min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset)
            data[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(data)
    states_path(store, entry).unlink()
    reader = reader_of(store, entry)
    assert [(i.num_tokens, i.num_supervised) for i in reader.infos] == [(p + a, a - 1) for p, a in LENGTHS]
    with pytest.raises(OSError):
        _ = reader[0]


@pytest.mark.parametrize(("codec", "compression"), [("bf16", "none"), ("fp8", "zstd")])
def test_a_remote_store_is_asked_for_the_bytes_of_a_sample_alone(
    tmp_path: Path, codec: str, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.states._FIRST_READ", 1 << 10)
    store = Store(f"memory://{tmp_path.name}-{codec}")
    entry = write(store, codec, compression)
    reader = reader_of(store, entry)
    _ = reader[1]  # the header and the ids are kept
    fetched = []
    read = type(store.fs).cat_file

    def count(fs: Any, path: str, start: int, end: int, **more: Any) -> Any:
        fetched.append(end - start)
        return read(fs, path, start=start, end=end, **more)

    monkeypatch.setattr(type(store.fs), "cat_file", count)
    sample = reader[2]
    assert same(sample.aux, expected(2, *LENGTHS[2], codec)[0])
    plain = 2 * HIDDEN * (3 * 42 + 39)
    assert 0 < sum(fetched) <= plain and len(fetched) <= 4
    store.delete("")


def test_token_ids_kept_in_memory_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.samples._CACHED_BYTES", 1)
    store = Store(str(tmp_path))
    reader = reader_of(store, *(write(store, part=p) for p in range(4)))
    order = [0, 19, 7, 1, 12, 0]
    got = [reader[i].token_ids.tolist() for i in order]
    assert len(reader._lists._values) == 1
    for index, ids in zip(order, got, strict=True):
        row = sample_row(100 * (index // 5) + index % 5, *LENGTHS[index % 5])
        assert ids == row["prompt_ids"] + row["answer_ids"]


# Versions


def test_a_version_1_part_is_read_as_it_is(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    write_version_1(store)
    valid, bad = committed_parts(store, {0: "k"}, "checksum")
    assert not bad and (valid[0].format_version, valid[0].codec, valid[0].compression) == (1, "bf16", "none")
    reader = reader_of(store, valid[0])
    for i, (prompt, answer) in enumerate(LENGTHS):
        aux, teacher = expected(i, prompt, answer, "bf16")
        assert same(reader[i].aux, aux) and same(reader[i].teacher, teacher)
        assert reader.infos[i].num_tokens == prompt + answer


def test_parts_of_both_versions_and_several_codecs_are_one_run(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    write_version_1(store, 2)
    old = read_entry(store, 2)
    assert old is not None
    reader = reader_of(store, write(store, "fp8", "zstd"), write(store, "int8", part=1), old)
    assert [type(reader[i].aux) for i in (0, 5, 10)] == [Encoded, Encoded, Tensor]
    assert len(reader) == 15


def test_a_conversation_leaves_a_version_1_part(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    write_version_1(store)
    old = read_entry(store, 0)
    assert old is not None
    done = remove_conversations(store, old, {f"{1:024x}"}, "new")
    assert (done.format_version, done.samples, done.key) == (3, 4, "new")
    assert same(reader_of(store, done)[1].aux, expected(2, *LENGTHS[2], "bf16")[0])


def test_a_part_with_sha256_checksums_counts_and_its_damage_is_seen(tmp_path: Path) -> None:
    """As versions 1 and 2 wrote them."""
    store = Store(str(tmp_path))
    entry = write(store)
    files = {
        kind: {"name": f["name"], "size": f["size"], "sha256": store.sha256(f"{PARTS}/{f['name']}")}
        for kind, f in entry.files.items()
    }
    store.write_json(f"{PARTS}/part-00000.json", sealed({**entry.__dict__, "files": files, "format_version": 2}))
    old = read_entry(store, 0)
    assert old is not None and entry_fault(store, old, old.key, "checksum") is None
    path = states_path(store, old)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "does not match its checksum" in str(entry_fault(store, old, old.key, "checksum"))


def test_a_newer_version_is_refused_by_name(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    entry = write(store)
    store.write_json(f"{PARTS}/part-00000.json", sealed({**entry.__dict__, "format_version": 4}))
    with pytest.raises(
        UserError, match=r"part-00000\.json has format version 4 and this draftmill reads versions up to 3"
    ):
        committed_parts(store, {0: "k"}, "checksum")


# Forgetting


@pytest.mark.parametrize(("codec", "compression"), FORMS)
def test_forgetting_changes_no_byte_of_the_others(tmp_path: Path, codec: str, compression: str) -> None:
    store = Store(str(tmp_path))
    entry = write(store, codec, compression)
    before = [reader_of(store, entry)[i] for i in range(5)]
    kept = [(s.aux, s.teacher) for s in before]
    done = remove_conversations(store, entry, {f"{1:024x}", f"{3:024x}"}, "new")
    assert (done.codec, done.compression, done.samples) == (codec, compression, 3)
    reader = reader_of(store, done)
    for place, number in enumerate((0, 2, 4)):
        assert same(reader[place].aux, kept[number][0]) and same(reader[place].teacher, kept[number][1])
    assert not states_path(store, entry).exists()


# What a part was captured from


def test_the_trainer_refuses_a_mismatch_by_name(tiny: Path, tiny_target: TargetInfo, tmp_path: Path) -> None:
    config = tiny_config(tiny, tmp_path, tmp_path / "x.jsonl")
    wanted = record_of(config, tiny_target)
    store = Store(str(tmp_path))
    made = {**entry_of(), "layers": wanted["layers"], "record": wanted}
    entry = write_part(store, made, [], [])
    refuse_mismatch([entry], wanted)
    refuse_mismatch([replace(entry, record={**wanted, "target": "renamed", "engine": "vllm 9"})], wanted)
    for name, value in {
        "layers": [1, 2, 3], "teacher_layer": 9, "convention": "after the norm", "pre_norm": False,
        "dtype": "float16", "hidden_size": 32, "target_weights": "00", "quantization": "fp8",
        "tokenizer_and_template": "00", "template": "00", "max_length": 512,
    }.items():  # fmt: skip
        other = replace(entry, record={**wanted, name: value})
        with pytest.raises(UserError) as fault:
            refuse_mismatch([entry, other], wanted)
        assert f"its {name} is {value} and the run's is {wanted[name]}" in str(fault.value)


def test_a_version_1_part_is_compared_by_what_it_recorded(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    write_version_1(store)
    entry = read_entry(store, 0)
    assert entry is not None
    refuse_mismatch([entry], {"layers": [2, 4, 5], "dtype": "bfloat16", "max_length": 7})
    with pytest.raises(UserError, match=r"part 0 does not fit this run: its layers is \[2, 4, 5\] and the run's is"):
        refuse_mismatch([entry], {"layers": [2, 4, 6]})


@pytest.mark.parametrize(("codec", "compression"), [("bf16", "none"), ("fp8", "zstd"), ("int4", "none")])
def test_a_worker_stores_as_configured_and_says_what_it_captured(
    tiny: Path, tmp_path: Path, codec: str, compression: str
) -> None:
    source = write_rows(tmp_path / "rows.jsonl", prompts(6))
    config = tiny_config(
        tiny, tmp_path / "run", source, capture__codec=codec, capture__compression=compression, evaluate__holdout=1
    )
    ctx = context(config)
    run_stage(stage("ingest"), ctx)
    (key,) = part_keys(ctx).values()
    worker = PartWorker(_worker_config(ctx, False, Engines(1, 1, "a test")))
    outcome = json.loads(worker({"part": [0], "key": [key]})["outcome"][0])
    entry = read_entry(ctx.run.store, 0)
    assert entry is not None and outcome == entry.__dict__
    assert (entry.codec, entry.compression) == (codec, compression)
    assert entry.record == {**record_of(config, ctx.target, ctx.layers), "engine": "tests.stubs:StubEngine"}
    assert entry.record["template"] and entry.record["tokenizer_and_template"]
    sample = reader_of(ctx.run.store, entry)[0]
    states = stub_states(sample.token_ids.tolist())
    assert same(sample.aux, encode(states[:, :3], codec))
    assert same(sample.teacher, encode(states[sample.teacher_pos, 3:], codec))


def test_later_stages_name_what_a_part_was_captured_from(tiny: Path, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", prompts(6))
    config = tiny_config(tiny, tmp_path / "run", source, evaluate__holdout=1)
    ctx = finish_generate(config)
    entry = load_entries(ctx)[0]
    write_entry(ctx.run.store, replace(entry, key="other", record={"max_length": 64}))
    with pytest.raises(UserError, match=r"part 0 does not fit this run: its max_length is 64 and the run's is 256"):
        load_entries(ctx)


def test_the_worker_of_training_refuses_before_it_reads(tiny: Path, tiny_target: TargetInfo, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", prompts(6))
    ctx = finish_generate(tiny_config(tiny, tmp_path / "run", source, evaluate__holdout=1))
    run_stage(stage("vocab"), ctx)
    entries = [replace(e, record={"quantization": "fp8"}) for e in load_entries(ctx)]
    config = ctx.config.model_dump(mode="json")
    with pytest.raises(UserError, match=r"its quantization is fp8 and the run's is None"):
        run_worker(ctx.run.store, config, tiny_target.to_json(), entries, torch.device("cpu"))


def test_keys_of_plain_parts_are_those_of_before_there_were_codecs(tiny: Path, tmp_path: Path) -> None:
    """A run of version 1 generates nothing again; another codec is another part, another compression is not."""
    shapes = {}
    for codec, compression in FORMS:
        config = tiny_config(
            tiny, tmp_path / "run", tmp_path / "x.jsonl", capture__codec=codec, capture__compression=compression
        )
        ctx = context(config)
        shapes[codec, compression] = shape_of(ctx)
    keys = tuple(k for k in CONFIG_KEYS if k != "capture.codec")
    target = ctx.target
    old = digest_of([flat_config(ctx.config, keys), target.weights_digest, target.tokenizer_digest, list(ctx.layers)])
    assert shapes["bf16", "none"] == shapes["bf16", "planes"] == old
    assert len(set(shapes.values())) == 4


def test_the_examples_of_the_format_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "format.md").read_text(), re.DOTALL)
    for codec, compression in (("bf16", "none"), ("fp8", "none"), ("int8", "none"), ("fp8", "zstd")):
        folder = tmp_path / f"{codec}-{compression}"
        store = Store(str(folder / "runs" / "demo"))
        aux = reader_of(store, write(store, codec, compression))[0].aux
        monkeypatch.chdir(folder)
        names: dict[str, Any] = {}
        if compression == "none":
            exec(first, names)
            assert torch.equal(names["aux"], decoded(aux))
        else:
            exec(first.partition("aux = ")[0] + second, names)
            assert isinstance(aux, Encoded)
            assert torch.equal(names["values"].view(torch.uint8), aux.data)


# Bytes


@pytest.mark.parametrize(("codec", "compression"), FORMS)
def test_the_plan_knows_the_bytes_of_every_form(tmp_path: Path, codec: str, compression: str) -> None:
    """Within 5 % on states like those of real targets; the entropy of a residual stream hardly varies."""
    lengths = [(60 + i, 60 + 3 * i) for i in range(20)]
    entry = write(Store(str(tmp_path)), codec, compression, lengths=lengths, hidden=576)
    pairs = tuple(Length(p, a) for p, a in lengths)
    stats = TokenStats((SourceTokens("s", "regenerate", 20, 20.0, pairs, pairs),), "test")
    shape = Shape(
        hidden=576, layers=30, vocab=49152, draft_vocab=8192, intermediate=1536, query=576, key=192, value_bytes=2,
        target_parameters=1e8, target_bytes=10**8, codec=codec, compression=compression,
    )  # fmt: skip
    assert part_bytes(stats, shape, rows_per_part=20) == pytest.approx(entry.bytes, rel=0.05)


def test_fp8_with_zstd_takes_less_than_two_fifths_of_four_plain_states(tmp_path: Path) -> None:
    lengths = [(100, 100)] * 10
    entry = write(Store(str(tmp_path)), "fp8", "zstd", lengths=lengths, hidden=576)
    assert entry.bytes < 0.40 * naive_bytes(2000, 576)


def test_what_a_killed_writer_had_begun_goes_with_the_orphans(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "run"), {})
    torn, other = store.scratch() / "part-00003.parquet.tmp-1f", store.scratch() / "rejects.tmp-7"
    for path in (torn, other):
        path.write_bytes(b"x")
    remove_orphans(store)
    assert not torn.exists() and other.exists()
