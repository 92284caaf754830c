"""A run folder on an object store: whatever reads or writes the draft's folder leaves no copy of it on this machine."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from app.bench import engine
from app.bench.measure import Done, Job
from app.checkpoint import read_checkpoint
from app.doctor.facts import Facts
from app.errors import UserError
from app.pipeline import StageContext, run_stage
from app.pipelines.bench import _engines
from app.pipelines.evaluate import load_draft
from app.storage import Store
from app.train.warm_start import read_draft
from tests.pipelines.finished import finish_random, stage
from tests.runs import prompts, tiny_config, write_rows


def copies(temporary: Path) -> list[str]:
    """What is left in the temporary folder, but for parts: one copy of each is kept for the processes of a run."""
    left = [p.name for p in temporary.iterdir() if p.name != "draftmill-cache"]
    return left + [p.name for p in temporary.rglob("*") if p.name in ("config.json", "model.safetensors")]


@pytest.fixture
def exported(tiny: Path, tmp_path: Path, s3: str, temporary: Path) -> StageContext:
    """A run on S3, exported in both layouts."""
    source = write_rows(tmp_path / "rows.jsonl", prompts(8))
    ctx = finish_random(tiny_config(tiny, f"{s3}/run", source, export__format="speculators"))
    run_stage(stage("export"), ctx)
    return ctx


def test_export_evaluate_and_doctor_leave_no_copy(exported: StageContext, temporary: Path) -> None:
    store = exported.run.store
    assert copies(temporary) == []
    for name in ("draft", "speculators"):
        assert {"README.md", "config.json", "model.safetensors", "serve.json"} == set(store.files(f"export/{name}"))
        record = store.read_json(f"export/{name}/serve.json")
        assert record["vLLM"]["speculative_config"]["model"] == name  # as the folder is called, not its copy
    assert load_draft(exported).config.aux_layer_ids == exported.layers
    assert copies(temporary) == []
    store.delete("export/speculators/model.safetensors")
    named = r"^s3://runs/run/export/speculators holds no"  # and not the copy's name
    with pytest.raises(UserError, match=named), store.open_folder("export/speculators") as folder:
        read_checkpoint(folder)
    assert copies(temporary) == []
    with closing(Facts(exported, ("export",))) as facts:
        assert facts.exported_config["draft_vocab_size"] and facts.exported and not facts.lint
        assert facts.draft_folder.is_dir()
    assert copies(temporary) == []


@pytest.mark.parametrize("fault", [None, RuntimeError("the engine died")])
def test_the_bench_copies_where_the_engine_is_and_while_it_runs(
    exported: StageContext, temporary: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception | None
) -> None:
    seen: list[Any] = []

    class Engine:
        def __init__(self, spec: engine.ServeSpec, draft: Path | None) -> None:
            seen.append(draft if draft is None else json.loads((draft / "config.json").read_text())["architectures"])
            seen.append(copies(temporary) != [])

    def do(service: Engine, job: Job) -> Done:
        if fault is not None:
            raise fault
        return Done([], {}, [], {})

    monkeypatch.setattr(engine, "OwnEngine", Engine)
    monkeypatch.setattr(engine, "do", do)
    monkeypatch.setattr("app.pipelines.bench.connect", lambda ray: None)
    monkeypatch.setattr("app.pipelines.bench.gpu_count", lambda: 0)
    monkeypatch.setattr("app.pipelines.bench.serving_gpus", lambda target, config: 1)
    monkeypatch.setattr("app.pipelines.bench._serve_elsewhere", lambda spec, job, cpus: engine.serve(spec, job))
    service, job = _engines(exported), Job([], (1,), 1, None)  # type: ignore[arg-type]
    for k in (0, 3):
        if fault is None:
            service(k, job)
        else:
            with pytest.raises(RuntimeError):
                service(k, job)
        assert copies(temporary) == []
    assert seen == [None, False, ["LlamaForCausalLMEagle3"], True]


def test_a_training_may_begin_from_a_checkpoint_on_s3(tiny_draft: Path, s3: str, temporary: Path) -> None:
    far = Store(f"{s3}/draft")
    far.fs.put(str(tiny_draft), far.root, recursive=True)
    here, there = read_draft(str(tiny_draft), {}, 8), read_draft(far.url, {}, 8)
    assert here.config == there.config and here.digest == there.digest
    assert all(torch.equal(tensor, there.tensors[name]) for name, tensor in here.tensors.items())
    assert copies(temporary) == []
