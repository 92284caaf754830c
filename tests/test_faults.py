"""Damage and misuse: garbage in a run folder, broken checkpoints, full disks, secrets, rows and settings that lie."""

from __future__ import annotations

import errno
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors import SafetensorError

from app.cli import run
from app.config import Config, load_config, parse_config
from app.conversations import RESERVED_KWARGS
from app.errors import UserError
from app.forgotten import read_forgotten
from app.lease import Lease, holder_of
from app.parts import PARTS, committed_parts, read_entry, remove_orphans, write_part
from app.pipeline import Stage, StageContext, StageResult, run_pipeline, run_stage
from app.pipelines import ingest
from app.redact import redact
from app.results import write_results
from app.runfolder import RunFolder, sealed, unsealed
from app.stages import stages_up_to
from app.status import status_lines
from app.storage import Store, explained
from app.train.state import Metrics, load_latest, read_weights, save_state
from tests.runs import context, prompts, tiny_config, write_rows

NO_JSON = {"list": "[1, 2]", "number": "5", "text": '"words"', "cut": '{"token": "a", "pi', "deep": "[" * 100_000}
SECRET = "abcdef0123456789"


def always(text: str) -> Callable[[dict[str, Any]], str]:
    return lambda good: text


def stub_stage(name: str = "ingest") -> Stage:
    """A stage that writes one file."""

    def make(ctx: StageContext) -> StageResult:
        ctx.run.store.write_bytes(f"{name}/made.bin", b"made")
        return StageResult(outputs=[f"{name}/made.bin"])

    return Stage(name, make)


# Checkpoints


@pytest.fixture
def checkpoints(tmp_path: Path) -> Store:
    """Whole checkpoints of steps 1 and 2; their weights hold the step."""
    store = Store(str(tmp_path / "train"))
    for step in (1, 2):
        weights, moments = torch.full((8,), float(step)), torch.zeros(8)
        save_state(store, step, {"w": weights}, {"m": moments}, {"fingerprint": "f"}, keep=2)
    return store


def checkpoint_file(store: Store, step: int, name: str) -> Path:
    return store.local(f"checkpoints/step-{step:08d}/{name}")


def flip_byte(path: Path) -> None:
    """One bit of the last tensor value: size and header stay right."""
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors"])
def test_a_flipped_byte_in_a_checkpoint_is_never_resumed(
    checkpoints: Store, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.train.state.log.propagate", True)
    newest = load_latest(checkpoints, "f")
    assert newest is not None and newest.meta["step"] == 2
    flip_byte(checkpoint_file(checkpoints, 2, name))
    older = load_latest(checkpoints, "f")
    assert older is not None and older.meta["step"] == 1
    assert older.weights["w"].tolist() == [1.0] * 8
    assert "step-00000002" in caplog.text and "checksum" in caplog.text
    flip_byte(checkpoint_file(checkpoints, 1, name))
    assert load_latest(checkpoints, "f") is None


def test_a_flipped_byte_in_the_last_checkpoint_is_not_exported(checkpoints: Store) -> None:
    flip_byte(checkpoint_file(checkpoints, 2, "weights.safetensors"))
    with pytest.raises(UserError, match=r"weights\.safetensors does not match its checksum"):
        read_weights(checkpoints, "last")


BAD_STATES: dict[str, Callable[[dict[str, Any]], str]] = {
    **{name: always(text) for name, text in NO_JSON.items()},
    "missing_keys": lambda good: json.dumps({"fingerprint": "f", "step": 2}),
    "sizes_is_a_list": lambda good: json.dumps({**good, "sizes": [1]}),
    "sizes_is_empty": lambda good: json.dumps({**good, "sizes": {}}),
    "sha256_is_a_number": lambda good: json.dumps({**good, "sha256": 5}),
}


@pytest.mark.parametrize("fault", BAD_STATES)
def test_a_checkpoint_with_garbage_for_its_state_does_not_count(checkpoints: Store, fault: str) -> None:
    path = checkpoint_file(checkpoints, 2, "state.json")
    garbage = BAD_STATES[fault](json.loads(path.read_text()))
    path.write_text(garbage)
    older = load_latest(checkpoints, "f")
    assert older is not None and older.meta["step"] == 1
    assert read_weights(checkpoints, "last")[1]["step"] == 1
    checkpoints.write_bytes("best/state.json", garbage.encode())
    with pytest.raises(UserError, match="the best checkpoint is damaged"):  # never another one without a word
        read_weights(checkpoints, "best")
    checkpoint_file(checkpoints, 1, "state.json").write_text(garbage)
    assert load_latest(checkpoints, "f") is None
    with pytest.raises(UserError, match="no finished checkpoint"):
        read_weights(checkpoints, "last")


# Control files of a run folder


@pytest.mark.parametrize(
    "garbage",
    [
        *NO_JSON.values(),
        "",
        '{"pid": "x"}',
        '{"pid": "\u00b2"}',
        '{"pid": 1, "host": ["elsewhere"], "heartbeat": "now"}',
        '{"pid": 1, "host": "elsewhere", "heartbeat": 1' + "0" * 400 + "}",
        '{"pid": 1, "host": "elsewhere", "heartbeat": 1, "timeout_s": {}}',
        '{"pid": "9", "host": "elsewhere", "heartbeat": 1e999, "timeout_s": 60}',
        '{"pid": 1, "host": "elsewhere", "heartbeat": 1e999, "timeout_s": 60}',
        '{"pid": 1, "host": "elsewhere", "heartbeat": NaN, "timeout_s": 60}',
        '{"pid": 1, "host": "elsewhere", "heartbeat": 4102444800, "timeout_s": 60}',
        '{"pid": 1, "host": "elsewhere", "heartbeat": 1, "timeout_s": 1e999}',
        '{"pid": "' + "9" * 5000 + '", "host": "elsewhere", "heartbeat": 1, "timeout_s": 60}',
    ],
)
def test_a_garbage_lease_holds_nobody_up_and_is_told(
    tiny: Path, tmp_path: Path, garbage: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("draftmill"), "propagate", True)
    run = tmp_path / "run"
    run.mkdir()
    config = tiny_config(tiny, run, tmp_path / "absent.jsonl")
    (run / "config.yaml").write_text(config.to_yaml())
    (run / "lease.json").write_text(garbage)
    assert not any(line.startswith("running") for line in status_lines(str(run), []))
    assert run_pipeline(config, [stub_stage()])["ingest"]["reused"] is False
    assert not (run / "lease.json").exists()
    (told,) = [r.getMessage() for r in caplog.records if "lease.json" in r.getMessage()]
    assert "counts as left over: it" in told and len(told) < 300


@pytest.mark.parametrize(("ahead", "words"), [(0.5, "0 s ago"), (-30, "30 s ago"), (3000, "3000 s ahead of this")])
def test_a_clock_that_is_ahead_is_told_as_such(tmp_path: Path, ahead: float, words: str) -> None:
    store = Store(str(tmp_path))
    living = {"pid": 7, "host": "elsewhere:boot", "heartbeat": time.time() + ahead, "timeout_s": 60}
    store.write_json("lease.json", living)
    with pytest.raises(UserError, match=f"last heartbeat {words}.*if it is dead, wait [0-9]+ s"):
        Lease(store, 5).acquire()


def test_a_lease_names_its_stage_only_while_its_driver_lives() -> None:
    living = {"pid": 7, "host": "elsewhere:boot", "heartbeat": time.time(), "timeout_s": 60, "stage": "train"}
    holder = holder_of(living)
    assert holder is not None
    assert (holder.pid, holder.host, holder.here, holder.stage) == (7, "elsewhere", False, "train")
    assert holder_of({**living, "heartbeat": time.time() - 61}) is None


BAD_MANIFESTS: dict[str, Callable[[dict[str, Any]], str]] = {
    **{name: always(text) for name, text in NO_JSON.items()},
    "version_alone": lambda good: json.dumps({"manifest_version": good["manifest_version"]}),
    "missing_key": lambda good: json.dumps({k: v for k, v in good.items() if k != "digest"}),
    "unknown_key": lambda good: json.dumps({**good, "colour": "blue"}),
    "inputs_is_a_list": lambda good: json.dumps({**good, "inputs": []}),
    "outputs_of_numbers": lambda good: json.dumps({**good, "outputs": {"ingest/made.bin": 4}}),
    "outputs_without_sizes": lambda good: json.dumps({**good, "outputs": {"ingest/made.bin": {}}}),
}


@pytest.mark.parametrize("fault", BAD_MANIFESTS)
def test_a_garbage_manifest_is_a_stage_to_do(tiny: Path, tmp_path: Path, fault: str) -> None:
    ctx = context(tiny_config(tiny, tmp_path / "run", tmp_path / "absent.jsonl"))
    assert run_stage(stub_stage(), ctx)[1] is False
    assert run_stage(stub_stage(), ctx)[1] is True
    path = tmp_path / "run" / "ingest" / "manifest.json"
    path.write_text(BAD_MANIFESTS[fault](json.loads(path.read_text())))
    assert run_stage(stub_stage(), ctx)[1] is False
    assert run_stage(stub_stage(), ctx)[1] is True


@pytest.mark.parametrize("name", ["config.yaml", "ingest/manifest.json", "lease.json"])
def test_a_folder_where_a_file_belongs_is_one_sentence(tiny: Path, tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    (run / name).mkdir(parents=True)
    config = tiny_config(tiny, run, tmp_path / "absent.jsonl")
    if name != "config.yaml":
        (run / "config.yaml").write_text(config.to_yaml())
    words = rf"{name} stands where a file belongs; move it away"
    with pytest.raises(UserError, match=words):
        status_lines(str(run), [])
    with pytest.raises(UserError, match=words):
        run_pipeline(config, [stub_stage()])
    assert (run / name).is_dir()


@pytest.mark.parametrize("text", ["", "[1, 2]", "a: [1,", "5", "a: \udcff", "a: \x00", "[" * 100_000])
def test_a_garbage_config_is_told_as_damaged(tiny: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text, errors="surrogateescape")
    with pytest.raises(UserError, match=r"config.yaml is damaged \(.*give the YAML file of the run"):
        status_lines(str(tmp_path), [])
    with pytest.raises(UserError, match="give it a folder of its own"):
        run_pipeline(tiny_config(tiny, tmp_path, tmp_path / "absent.jsonl"), [stub_stage()])
    assert (tmp_path / "config.yaml").read_text(errors="surrogateescape") == text


def test_garbage_in_the_training_log_does_not_break_status(tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    seen: list[str] = []

    def look(ctx: StageContext) -> StageResult:
        lines = ['{"step": 3, "epoch": 0.5}', "[1]", "5", '{"step": 4, "ep']
        ctx.run.store.write_bytes("train/metrics.jsonl", "\n".join(lines).encode() + b"\xff\n")
        seen.extend(status_lines(str(run), []))
        return StageResult(outputs=[])

    run_pipeline(tiny_config(tiny, run, tmp_path / "absent.jsonl"), [Stage("train", look)])
    assert [line.split()[:4] for line in seen if line.startswith("  train")] == [["train", "running", "step", "3,"]]


def test_garbage_in_the_training_log_is_dropped_on_resume(tmp_path: Path) -> None:
    good = '{"step": 3, "epoch": 0.5}'
    (tmp_path / "metrics.jsonl").write_bytes(
        "\n".join([good, "[1]", "5", '"x"', '{"step": "many"}']).encode() + b"\xff\n"
    )
    assert Metrics(Store(str(tmp_path)), resume_step=3).lines == [good]
    assert (tmp_path / "metrics.jsonl").read_text() == good + "\n"


ENTRY: dict[str, Any] = {
    "part": 0, "key": "k", "rows_in": 0, "conversations": 0, "rejects": [], "cut_short": [], "tokens": {},
    "finish_reasons": {}, "layers": [2, 4, 5], "dtype": "bfloat16", "hidden_size": 4, "seconds": 0.0,
}  # fmt: skip
BAD_ENTRIES: dict[str, Callable[[dict[str, Any]], str]] = {
    **{name: always(text) for name, text in NO_JSON.items()},
    "empty": lambda good: "",
    "cut_in_the_middle": lambda good: json.dumps(good)[: len(json.dumps(good)) // 2],
    "missing_key": lambda good: json.dumps({k: v for k, v in good.items() if k != "files"}),
    "files_is_a_list": lambda good: json.dumps({**good, "files": []}),
    "files_of_numbers": lambda good: json.dumps({**good, "files": {"rows": 1, "states": 2}}),
    "half_a_surrogate": lambda good: json.dumps({**good, "dtype": "\ud800"}),
    "file_without_checksum": lambda good: json.dumps(
        {**good, "files": {k: {"name": "x", "size": 1} for k in good["files"]}}
    ),
}


@pytest.mark.parametrize("fault", BAD_ENTRIES)
def test_a_garbage_part_entry_is_a_part_to_make(tmp_path: Path, fault: str) -> None:
    store = Store(str(tmp_path))
    write_part(store, ENTRY, [], [])
    assert committed_parts(store, {0: "k"}, "checksum")[0].keys() == {0}
    path = store.local(f"{PARTS}/part-00000.json")
    path.write_text(BAD_ENTRIES[fault](json.loads(path.read_text())))
    assert read_entry(store, 0) is None
    assert committed_parts(store, {0: "k"}, "checksum") == ({}, {0: "its entry cannot be read"})
    assert remove_orphans(store) == 3
    assert store.files(PARTS) == []


ODD_ENTRIES: dict[str, dict[str, Any]] = {
    "files_is_text": {"files": "x"},
    "files_is_a_list": {"files": ["rows", "states"]},
    "no_states": {"files": {"rows": {"name": "a.parquet", "size": 1, "sha256": "0"}}},
    "file_without_name": {"files": {k: {"size": 1, "sha256": "0"} for k in ("rows", "states")}},
    "file_of_another_folder": {
        "files": {k: {"name": "../../secret.parquet", "size": 1, "sha256": "0"} for k in ("rows", "states")}
    },
    "size_is_text": {"files": {k: {"name": "a.parquet", "size": "x", "sha256": "0"} for k in ("rows", "states")}},
    "rejects_of_text": {"rejects": ["x"]},
    "tokens_is_a_list": {"tokens": [1]},
    "counts_of_text": {"finish_reasons": {"stop": "many"}},
}


@pytest.mark.parametrize("fault", ODD_ENTRIES)
def test_a_sealed_entry_of_another_form_is_a_part_to_make(tmp_path: Path, fault: str) -> None:
    store = Store(str(tmp_path))
    write_part(store, ENTRY, [], [])
    path = store.local(f"{PARTS}/part-00000.json")
    entry = unsealed(json.loads(path.read_text()))
    assert entry is not None and read_entry(store, 0) is not None
    path.write_text(json.dumps(sealed({**entry, **ODD_ENTRIES[fault]})))
    assert committed_parts(store, {0: "k"}, "checksum") == ({}, {0: "its entry cannot be read"})
    assert remove_orphans(store) == 3


@pytest.mark.parametrize(
    "change", [{"outputs": {"ingest/made.bin": {}}}, {"outputs": []}, {"inputs": []}, {"counts": 5}, {"config": "x"}]
)
def test_a_sealed_manifest_of_another_form_is_a_stage_to_do(tiny: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    ctx = context(tiny_config(tiny, tmp_path / "run", tmp_path / "absent.jsonl"))
    run_stage(stub_stage(), ctx)
    path = tmp_path / "run" / "ingest" / "manifest.json"
    good = unsealed(json.loads(path.read_text()))
    assert good is not None
    path.write_text(json.dumps(sealed({**good, **change})))
    assert [run_stage(stub_stage(), ctx)[1] for _ in range(2)] == [False, True]


# Full disks


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_every_full_disk_is_the_same_sentence(error: Exception) -> None:
    with pytest.raises(UserError) as fault, explained("/some/run"):
        raise error
    assert str(fault.value) == (
        "/some/run: no space left on the device; free some or move run_dir, then run the same command again"
    )


def test_other_faults_of_safetensors_stay_what_they_are() -> None:
    with pytest.raises(SafetensorError), explained("/some/run"):
        raise SafetensorError("Error while deserializing header: invalid header")


def test_a_disk_that_fills_under_a_checkpoint_keeps_the_one_before(
    checkpoints: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("app.train.state.save_file", full)
    with pytest.raises(UserError, match="no space left on the device"):
        save_state(checkpoints, 3, {"w": torch.zeros(8)}, {"m": torch.zeros(8)}, {"fingerprint": "f"}, keep=2)
    saved = load_latest(checkpoints, "f")
    assert saved is not None and saved.meta["step"] == 2
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.read_bytes() == b"half"]


# Rows


def test_reserved_template_arguments_and_half_surrogates_are_rejected_by_reason(tiny: Path, tmp_path: Path) -> None:
    rows: list[Any] = [
        *prompts(5),
        *({"prompt": f"Count {name}", "template_kwargs": {name: 1}} for name in sorted(RESERVED_KWARGS)),
        {"prompt": "Count the fruit", "template_kwargs": {"fruit": "plums"}},
        {"prompt": "Count", "template_kwargs": ["tokenize"]},
        '{"prompt": "half \\ud83d of a pair"}',
        '{"messages": [{"role": "user", "content": "x", "\\ude00": 1}]}',
        '{"prompt": "a whole pair \\ud83d\\ude00"}',
    ]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    config = tiny_config(tiny, tmp_path / "run", source, sources=[{"path": str(source), "max_reject_share": 1}])
    counts = ingest.run(context(config)).counts
    assert counts["rejected"] == {
        "bad_template_kwargs": len(RESERVED_KWARGS) + 1, "bad_encoding": 2,
    }  # fmt: skip
    assert counts["kept"] == 7
    assert counts["rows_in"] == len(rows) == counts["kept"] + sum(counts["rejected"].values())
    rejects = [json.loads(x) for x in (tmp_path / "run" / "ingest" / "rejects.jsonl").read_text().splitlines()]
    assert len(rejects) == sum(counts["rejected"].values())
    named = {r["where"]: r for r in rejects}
    for number, name in enumerate(sorted(RESERVED_KWARGS), 6):
        assert named[f"rows.jsonl:{number}"]["detail"] == f"{name} cannot be set by a row"
    assert named[f"rows.jsonl:{len(rows) - 2}"]["reason"] == "bad_encoding"


DEEP = "[" * 100_000
NESTED = '{"a": ' + "[" * 900 + "]" * 900 + "}"  # within what JSON can be read to, not within a template's reach
HALF = '{"a": "\\ud800"}'


def called(arguments: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "weigh", "arguments": arguments}}]


@pytest.mark.parametrize("use", ["regenerate", "as_is"])
def test_json_inside_a_row_that_cannot_be_used_rejects_that_row_alone(tiny: Path, tmp_path: Path, use: str) -> None:
    def talk(calls: Any) -> dict[str, Any]:
        turns = [("user", "How heavy?"), ("assistant", "Wait."), ("tool", "5"), ("assistant", "Five.")]
        messages: list[dict[str, Any]] = [{"role": r, "content": c} for r, c in turns]
        messages[1]["tool_calls"] = calls
        return {"messages": messages}

    plain = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    shared = [{"from": "human", "value": "q"}, {"from": "function_call", "value": ""}, {"from": "gpt", "value": "a"}]
    log = {"model": "m", "response": {"choices": [{"message": {"role": "assistant", "content": "a"}}]}}
    bad: list[tuple[Any, str]] = [
        (talk(called(HALF)), "bad_encoding"), (talk(json.dumps(called({"a": "\ud800"}))), "bad_encoding"),
        (talk('[{"function": {"name": "\\ud800", "arguments": "x"}}]'), "bad_tool_arguments"),
        (talk(called(DEEP)), "bad_tool_arguments"), (talk(called(NESTED)), "bad_json"),
        (talk(DEEP), "bad_tool_call"), ({**plain, "tools": DEEP}, "bad_tools"),
        ({**plain, "tools": f"[{NESTED}]"}, "bad_json"), ({**plain, "tools": f"[{HALF}]"}, "bad_encoding"),
        ({"conversations": [shared[0], {**shared[1], "value": DEEP}, shared[2]]}, "bad_tool_call"),
        ('{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],'
         f' "template_kwargs": {NESTED}}}', "bad_json"),
        ({**log, "request": DEEP}, "bad_json"),
    ]  # fmt: skip
    rows = [{"messages": [{"role": "user", "content": f"q {i}"}, {"role": "assistant", "content": "a"}]} for i in "abc"]
    source = write_rows(tmp_path / "rows.jsonl", [*rows, *(row for row, _ in bad)])
    sources = [{"path": str(source), "max_reject_share": 1, "use": use}]
    result = ingest.run(context(tiny_config(tiny, tmp_path / "run", source, sources=sources)))
    rejects = [json.loads(x) for x in (tmp_path / "run" / "ingest" / "rejects.jsonl").read_text().splitlines()]
    assert [r["reason"] for r in rejects] == [reason for _, reason in bad]
    assert all(r["detail"] and len(r["detail"]) < 400 for r in rejects)
    assert result.counts["kept"] == 3


# Secrets

SECRET_URLS = [
    f"https://files.example/rows.jsonl?token={SECRET}",
    f"https://files.example/rows.jsonl?part=1&X-Amz-Signature={SECRET}&part=2",
    f"https://files.example/rows.jsonl?sig={SECRET}",
    f"https://me:{SECRET}@files.example/rows.jsonl",
    f"s3://{SECRET}@bucket/rows.jsonl",
    f"https://me:pass@{SECRET}@files.example/rows.jsonl",
]


@pytest.mark.parametrize("url", SECRET_URLS)
def test_a_secret_in_a_url_is_refused_and_lands_nowhere(tiny: Path, tmp_path: Path, url: str) -> None:
    assert SECRET not in redact(url)
    with pytest.raises(UserError, match=r"sources\.0\.path looks like a secret.*environment") as refused:
        parse_config({"sources": [{"path": url}]}, "c.yaml")
    assert SECRET not in str(refused.value)

    # Past the check, as a fault of a library would bring it in: nothing that a run stores shows it.
    config = tiny_config(tiny, tmp_path / "run", tmp_path / "absent.jsonl")
    config = config.model_copy(update={"sources": [config.sources[0].model_copy(update={"path": url})]})

    def fail(ctx: StageContext) -> StageResult:
        logging.getLogger("draftmill").warning("reading %s", url)
        raise UserError(f"{url} cannot be opened")

    with pytest.raises(UserError, match="cannot be opened"):
        run_pipeline(config, [stub_stage("vocab"), Stage("train", fail)])
    write_results(RunFolder(config.run_dir), {})
    written = {p.name: p.read_text() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert {"config.yaml", "results.json"} < written.keys()
    assert "***" in written["config.yaml"]
    assert any(name.startswith("driver-") and text.count("***") == 2 for name, text in written.items())
    assert not [name for name, text in written.items() if SECRET in text]


def test_a_secret_in_a_row_does_not_reach_the_rejects(tiny: Path, tmp_path: Path) -> None:
    rows = [*prompts(9), {"messages": [{"role": f"https://me:{SECRET}@host/", "content": "x"}]}]
    config = tiny_config(tiny, tmp_path / "run", write_rows(tmp_path / "rows.jsonl", rows))
    ingest.run(context(config))
    rejects = (tmp_path / "run" / "ingest" / "rejects.jsonl").read_text()
    assert "unknown_role" in rejects and "***@host" in rejects
    assert SECRET not in rejects


@pytest.mark.parametrize(
    "key",
    ["secret", "password", "api_key", "aws_secret_access_key", "session_token", "client-secret", "connection_string"],
)
@pytest.mark.parametrize("section", ["storage.options", "target.template_kwargs", "bench.engine_args"])
def test_keys_with_a_secrets_name_are_refused(section: str, key: str) -> None:
    with pytest.raises(UserError, match="looks like a secret") as refused:
        load_config(None, ["sources=[{path: a.jsonl}]", f"{section}.{key}={SECRET}"])
    assert f"{section}.{key}" in str(refused.value)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("key", ["max_tokens", "pad_token", "tokenizer_mode", "monkey_business"])
def test_keys_that_only_sound_secret_are_taken(key: str) -> None:
    config = load_config(None, ["sources=[{path: a.jsonl}]", f"bench.engine_args.{key}=auto"])
    assert config.bench.engine_args == {key: "auto"}


# Settings


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.betas=[0.9, 1.0]", ["train.betas.1 = 1.0", "less than 1"]),
        ("train.betas=[-0.1, 0.95]", ["train.betas.0 = -0.1", "greater than or equal to 0"]),
        ("train.betas=[0.9]", ["train.betas"]),
        ("train.learning_rate=.inf", ["train.learning_rate", "finite"]),
        ("train.weight_decay=.nan", ["train.weight_decay", "finite"]),
        ("train.epochs=.inf", ["train.epochs", "finite"]),
        ("storage.lease_timeout_s=.nan", ["storage.lease_timeout_s", "finite"]),
        (
            "generate.max_new_tokens=2048",
            ["generate.max_new_tokens (2048)", "leaves no room", "generate.max_length (2048)"],
        ),
        ("generate.max_length=512", ["generate.max_new_tokens (512)", "generate.max_length (512)"]),
        ("train.epoch=2", ["unknown key 'train.epoch'", "did you mean 'train.epochs'?"]),
        ("generate.max_newtokens=2", ["unknown key 'generate.max_newtokens'", "'generate.max_new_tokens'?"]),
        ("sources.0.lmit=2", ["unknown key 'sources.0.lmit'", "did you mean 'sources.0.limit'?"]),
        ("train.zzz=2", ["unknown key 'train.zzz'", "known keys: workers, "]),
        ("ingest.drop_overlap=true", ["ingest.drop_overlap needs ingest.benchmark_sets"]),
        ("generate.parts_in_flight=0", ["generate.parts_in_flight = 0", "a whole number above 0, or auto"]),
        ("sources.0.path=''", ["sources.0.path = ''"]),
    ],
)
def test_settings_that_cannot_be_are_one_sentence(override: str, words: list[str]) -> None:
    with pytest.raises(UserError) as fault:
        load_config(None, ["sources=[{path: a.jsonl}]", override])
    assert all(word in str(fault.value) for word in words), str(fault.value)
    assert "\n" not in str(fault.value)


def test_settings_at_the_edge_are_taken() -> None:
    config = load_config(None, ["sources=[{path: a.jsonl}]", "train.betas=[0, 0.999]", "generate.max_new_tokens=2047"])
    assert config.train.betas == (0, 0.999)
    assert config.generate.max_new_tokens == 2047


def test_a_cut_parquet_file_is_one_sentence(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(25)))
    run_pipeline(config, stages_up_to("ingest"))
    part = tmp_path / "run/ingest/parts/part-00000.parquet"
    part.write_bytes(part.read_bytes()[:-20])
    assert run(["forget", str(tmp_path / "run"), "0" * 24]) == 1
    assert f"draftmill: error: {part} cannot be read" in capsys.readouterr().err.strip().splitlines()[-1]

    def read(config: Config, ids: list[str]) -> list[str]:
        """A command that does not look for damage."""
        return [str(pq.read_table(part))]

    monkeypatch.setattr("app.forget.forget", read)
    assert run(["forget", str(tmp_path / "run"), "0" * 24]) == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("draftmill: error: a Parquet file of the run folder is damaged")


@pytest.mark.parametrize("data", ['{"ids": [], "pending": 5}', '{"ids": 5, "pending": null}', "[]", '{"ids": []}'])
def test_a_garbage_list_of_what_was_forgotten_is_one_sentence(tmp_path: Path, data: str) -> None:
    (tmp_path / "forgotten.json").write_text(data)
    with pytest.raises(UserError, match=r"forgotten\.json cannot be read"):
        read_forgotten(Store(str(tmp_path)))


def test_lines_among_the_rejects_that_are_no_rows_do_not_stop_a_forgetting(tiny: Path, tmp_path: Path) -> None:
    rows = [*prompts(25), {"prompt": None}]
    config = tiny_config(tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", rows))
    run_pipeline(config, stages_up_to("ingest"))
    rejects = tmp_path / "run/ingest/rejects.jsonl"
    rejects.write_text(rejects.read_text() + '5\n["x"]\nno json\n')
    first = pq.read_table(tmp_path / "run/ingest/parts/part-00000.parquet")["id"][0].as_py()
    assert run(["forget", str(tmp_path / "run"), first]) == 0
    assert all(isinstance(json.loads(line), dict) for line in rejects.read_text().splitlines())


def test_a_file_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(args: Any) -> int:
        raise FileNotFoundError(2, "No such file or directory", "part-00000.parquet")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.cli._status", fail)
        assert run(["status", "somewhere"]) == 1
    assert capsys.readouterr().err.strip() == "draftmill: error: part-00000.parquet: No such file or directory"
