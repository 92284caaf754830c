"""Vocabulary map: chosen by supervised counts, an exact round trip, redone when a setting changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from app.errors import UserError
from app.pipeline import run_stage, stage_state
from app.pipelines.vocab import (
    VOCAB_FILE,
    VocabMap,
    always_keep_ids,
    build_vocab_map,
    count_tokens,
    coverage,
    load_vocab,
)
from app.samples import SampleReader, load_split
from app.target import load_tokenizer
from tests.pipelines.finished import finish_generate, stage, template_file
from tests.runs import context, prompts, tiny_config, write_rows
from tests.tiny import TOKENIZER_LEN, VOCAB


def test_counts_are_of_supervised_tokens_only() -> None:
    ids = torch.tensor([5, 5, 7, 9, 7])
    counts = count_tokens(ids, torch.tensor([False, True, True, False, True]), 12)
    assert counts.shape == (12,) and counts.dtype == torch.int64
    assert counts.nonzero().squeeze(-1).tolist() == [5, 7] and counts[[5, 7]].tolist() == [1, 2]
    with pytest.raises(UserError, match="do not fit the target's 9 ids"):
        count_tokens(ids, torch.ones(5, dtype=torch.bool), 9)


def test_frequent_ids_are_kept_ties_by_lower_id_and_gaps_filled_from_below() -> None:
    counts = torch.zeros(20, dtype=torch.int64)
    counts[[4, 9, 11, 13]] = torch.tensor([1, 5, 5, 5])
    counts[18] = 99  # beyond the tokenizer
    kept = [build_vocab_map(counts, size, {17, 19}, 18).kept_ids.tolist() for size in (2, 3, 4, 5, 8)]
    assert kept == [[9, 17], [9, 11, 17], [9, 11, 13, 17], [4, 9, 11, 13, 17], [0, 1, 2, 4, 9, 11, 13, 17]]


@settings(deadline=None)
@given(st.data())
def test_round_trip_of_offsets_is_exact(data: st.DataObject) -> None:
    """F56, over random counts and sizes."""
    vocab_size = data.draw(st.integers(2, 60))
    usable = data.draw(st.integers(1, vocab_size))
    size = data.draw(st.one_of(st.integers(1, usable), st.just(vocab_size)))
    counts = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=vocab_size, max_size=vocab_size)))
    keep = data.draw(st.sets(st.integers(0, vocab_size - 1), max_size=size))
    found = build_vocab_map(counts, size, keep, usable)
    ids = torch.arange(size) + found.d2t
    assert found.d2t.dtype == torch.int64 and found.t2d.dtype == torch.bool
    assert torch.equal(ids, found.kept_ids) and torch.equal(found.t2d.nonzero().squeeze(-1), ids)
    assert int(found.t2d.sum()) == size and bool((ids[1:] > ids[:-1]).all())
    assert torch.equal(VocabMap.from_d2t(found.d2t, vocab_size).kept_ids, found.kept_ids)
    assert found.is_full == (size == vocab_size)
    if not found.is_full:
        assert int(ids[-1]) < usable
        assert {i for i in keep if i < usable} <= set(ids.tolist())
        left_out = sorted(set(range(usable)) - set(ids.tolist()))
        chosen = [i for i in ids.tolist() if i not in keep]
        if left_out and chosen:
            assert max(counts[left_out]) <= min(counts[chosen])
    share = coverage(counts, found.kept_ids)
    assert share is None or 0 <= share <= 1


def test_sizes_that_cannot_be_are_refused() -> None:
    """F55: no silent fall-back to another vocabulary."""
    counts = torch.ones(20, dtype=torch.int64)
    with pytest.raises(UserError, match="does not fit the 18 ids"):
        build_vocab_map(counts, 19, set(), 18)
    with pytest.raises(UserError, match="cannot hold the 4"):
        build_vocab_map(counts, 3, {1, 2, 3, 4}, 18)
    assert build_vocab_map(counts, 20, set(), 18).is_full
    for ids in ([3, 2], [0, 20], [-1, 2], [1, 1]):
        with pytest.raises(UserError, match="ascend"):
            VocabMap(torch.tensor(ids), 20)


def test_saved_maps_are_checked_when_read(tmp_path: Path) -> None:
    found = VocabMap(torch.tensor([1, 4, 5]), 9)
    found.save(tmp_path / "map.safetensors")
    assert torch.equal(VocabMap.load(tmp_path / "map.safetensors").kept_ids, found.kept_ids)
    tensors = load_file(tmp_path / "map.safetensors")
    save_file({**tensors, "d2t": tensors["kept_ids"].clone()}, tmp_path / "map.safetensors")
    with pytest.raises(UserError, match="contradict"):
        VocabMap.load(tmp_path / "map.safetensors")


def test_byte_level_tokenizer_keeps_special_and_single_byte_tokens(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    keep = always_keep_ids(tokenizer)
    assert {tokenizer.convert_tokens_to_ids(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")} <= keep
    assert len(keep) == 3 + 256
    spelt = tokenizer("\x00\xff漢字🙂", add_special_tokens=False)["input_ids"]
    assert set(spelt) <= keep


def test_byte_fallback_and_tags_are_kept() -> None:
    words = [
        "<unk>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "<think>",
        "</think>",
        "<tool_call>",
        "[TOOL_CALLS]",
    ]
    words += ["think", "<b>", "tool", "a", "é", "<|function|>", "x<think>"]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="<unk>")), unk_token="<unk>"
    )
    tokenizer.add_tokens(["added"])
    left_out = {words[i] for i in range(len(words)) if i not in always_keep_ids(tokenizer)}
    assert left_out == {"think", "<b>", "tool", "a", "é", "x<think>"}
    assert len(words) in always_keep_ids(tokenizer)  # "added"


def test_stage_counts_the_training_split_alone(tiny: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(24)), evaluate__holdout=6)
    ctx = finish_generate(config)
    manifest, _ = run_stage(stage("vocab"), ctx)
    found = load_vocab(ctx.run.store)
    assert len(found.kept_ids) == 320 and found.vocab_size == VOCAB and int(found.kept_ids[-1]) < TOKENIZER_LEN

    from app.captured import load_entries

    entries = load_entries(ctx)
    split = load_split(ctx.run.store, entries, config)
    expected = torch.zeros(VOCAB, dtype=torch.int64)
    reader = SampleReader(ctx.run.store, entries, split, ("train",))
    for sample in (reader[i] for i in range(len(reader))):
        expected += count_tokens(sample.token_ids, sample.loss_mask, VOCAB)
    tokenizer = load_tokenizer(tiny)
    wanted = build_vocab_map(expected, 320, always_keep_ids(tokenizer), TOKENIZER_LEN)
    assert torch.equal(found.kept_ids, wanted.kept_ids)
    counts = manifest.counts
    assert counts["supervised_tokens"] == {"train": 12 * len(reader), "valid": 12, "holdout": 72}
    assert counts["coverage"]["train"] == coverage(expected, found.kept_ids)
    assert counts["draft_vocab_size"] == 320 and counts["always_kept"] == 259
    assert 0 < counts["coverage"]["holdout"] < counts["coverage"]["train"] < 1


@pytest.mark.parametrize(("size", "kept"), [(None, VOCAB), (32000, VOCAB), (VOCAB, VOCAB), (620, TOKENIZER_LEN)])
def test_sizes_at_and_beyond_the_targets(tiny: Path, tmp_path: Path, size: int | None, kept: int) -> None:
    source = write_rows(tmp_path / "r.jsonl", prompts(8))
    ctx = finish_generate(tiny_config(tiny, tmp_path / "run", source, vocab__size=size))
    manifest, _ = run_stage(stage("vocab"), ctx)
    found = load_vocab(ctx.run.store)
    assert len(found.kept_ids) == kept and found.is_full == (kept == VOCAB) and not found.d2t.any()
    assert manifest.counts["coverage"]["holdout"] == 1.0


def test_f58_a_changed_template_or_size_makes_a_new_map(tiny: Path, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "r.jsonl", prompts(8))
    template = template_file(tiny, tmp_path)
    config = tiny_config(tiny, tmp_path / "run", source, target__chat_template=str(template))
    ctx = finish_generate(config)
    run_stage(stage("vocab"), ctx)
    first = (tmp_path / "run" / VOCAB_FILE).read_bytes()
    assert stage_state(stage("vocab"), context(config)).state == "done"
    _, reused = run_stage(stage("vocab"), context(config))
    assert reused

    changes = {"target__chat_template": str(template), "vocab__size": 340}
    resized = tiny_config(tiny, tmp_path / "run", source, **changes)
    assert stage_state(stage("vocab"), context(resized)).reasons == ("vocab.size changed: 320 -> 340",)
    _, reused = run_stage(stage("vocab"), context(resized))
    assert not reused and (tmp_path / "run" / VOCAB_FILE).read_bytes() != first

    template_file(tiny, tmp_path, ("assistant", "Assistant"))  # one character of the template
    state = stage_state(stage("generate"), context(config))
    assert state.state == "stale" and "target tokenizer and template changed" in state.reasons
    stale = stage_state(stage("vocab"), context(resized), frozenset({"generate"}))
    assert stale.reasons == ("generate is to be redone",)
