"""Answers of a real vLLM server and states by prefill: they equal those of our own engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app.captured import load_entries
from app.samples import SampleReader, load_split
from tests.engine.vllm_server import vllm_server
from tests.runs import ROOT, Command, context, prompts, save_config, tiny_config, write_rows
from tests.stubs import END
from tests.tiny import MAX_POSITIONS

pytestmark = pytest.mark.engine
EXACT = 1e-4  # as in test_engine.py
SPLITS = ("train", "valid", "holdout")


@pytest.fixture(scope="module")
def vllm(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a vLLM that serves TINY."""
    options = ["--max-model-len", str(MAX_POSITIONS), "--max-num-seqs", "8"]
    with vllm_server(tiny, tmp_path_factory.mktemp("vllm") / "log", *options) as url:
        yield url


def test_a_real_server_and_prefill_equal_our_own_engine(vllm: str, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    command = [sys.executable, "-m", "tests.engine.served_scenario", str(tiny), vllm, str(out)]
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    got = torch.load(out, weights_only=False)
    for api in ("completions", "chat"):
        assert got[api]["answers"] == got["own"]["answers"][: len(got[api]["answers"])]
        assert got[api]["reasons"] == got["own"]["reasons"][: len(got[api]["reasons"])]
        assert max(got[api]["errors"]) < EXACT
        assert got[api]["gives_ids"]
    assert set(got["own"]["reasons"]) == {"stop", "length"}
    assert all((ids[-1] == END) == (r == "stop") for ids, r in zip(*got["own"].values(), strict=True))
    assert got["sampled twice"][0] == got["sampled twice"][1], "the seed is passed on"
    assert got["too long"] == "prompt_too_long or bad_request"
    assert "does not serve" in got["other weights"]
    assert got["threads"] == []


@pytest.mark.cluster
def test_generate_through_a_server(vllm: str, tiny: Path, tmp_path: Path, draftmill_here: Command) -> None:
    """By chat, which needs the conversation of each request; the tokens are those the prompt ids give."""
    source = write_rows(tmp_path / "rows.jsonl", [
        *prompts(6),
        {"messages": [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Ten."},
                      {"role": "user", "content": "Are you sure?"}]},
    ])  # fmt: skip
    config = tiny_config(
        tiny, tmp_path / "run", source, target__dtype="float32", generate__engine="vllm", generate__kv_cache_gib=0.25,
        generate__max_new_tokens=24, generate__endpoints=[vllm], generate__endpoint_api="chat",
    )  # fmt: skip
    result = draftmill_here("generate", str(save_config(config, tmp_path / "run.yaml")))
    assert result.returncode == 0, result.stderr[-3000:]
    assert f"{vllm} serves 'tiny'" in result.stderr
    ctx = context(config)
    entries = load_entries(ctx)
    reader = SampleReader(ctx.run.store, entries, load_split(ctx.run.store, entries, config), SPLITS)
    rows = [reader.row(i) for i in range(len(reader))]
    assert len(rows) == 8
    for number, row in enumerate(rows):
        assert row["answer_ids"] == greedy(vllm, row["prompt_ids"], 24)
        assert row["finish_reason"] == ("stop" if row["answer_ids"][-1] == END else "length")
        assert len(reader[number].aux) == len(row["prompt_ids"]) + len(row["answer_ids"]) - 1


def greedy(url: str, prompt: list[int], count: int) -> list[int]:
    """Tokens that the server itself gives."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": count, "temperature": 0, "return_token_ids": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        ids: list[int] = json.load(response)["choices"][0]["token_ids"]
    return ids
