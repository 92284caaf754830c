"""The draft's config and checkpoint: layouts in, one full form out, and every way to break it named."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.checkpoint import (
    DraftConfig,
    check_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from app.errors import UserError
from app.pipelines.vocab import VocabMap
from app.rope import rope_of_config
from app.serving import sglang_command, vllm_serve_command
from app.target import TargetInfo, inspect_target, load_target_head
from app.train.draft import Eagle3Draft, inverse_frequencies
from tests.drafts import DRAFT_VOCAB, IDS, draft_config, edit_config, edit_tensors, random_tensors
from tests.tiny import HEAD_DIM, LAYERS, ROPE_THETA, TOKENIZER_LEN, VOCAB

# Layouts of config.json


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in names}


def speculators_layout(ours: dict[str, Any]) -> dict[str, Any]:
    outside = ("architectures", "draft_vocab_size", "target_hidden_size", "norm_before_residual", IDS)
    inner = without(ours, *outside, "eagle_config", "rope_parameters", "torch_dtype")
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/target"}},
        "transformer_layer_config": inner,
        "draft_vocab_size": ours["draft_vocab_size"],
        "target_hidden_size": ours["target_hidden_size"],
        "norm_before_residual": False,
        IDS: ours[IDS],
        "torch_dtype": "bfloat16",
    }


LAYOUTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "full form": lambda c: c,
    "nested ids only": lambda c: without(c, IDS, "fc_norm", "norm_output", "norm_before_fc"),
    "speculators": speculators_layout,
    "rope_parameters only": lambda c: without(c, "rope_theta", "rope_scaling"),
    "rope_theta and rope_scaling": lambda c: without(c, "rope_parameters"),
    "ids null": lambda c: {**without(c, "eagle_config"), IDS: None},
    "sizes left to the weights": lambda c: without(c, "head_dim", "draft_vocab_size", "target_hidden_size"),
    "newer dtype key": lambda c: {**without(c, "torch_dtype"), "dtype": c["torch_dtype"]},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", ["tiny", "tiny_llama3rope"])
def test_every_layout_gives_the_same_config(layout: str, variant: str, request: pytest.FixtureRequest) -> None:
    """F70: real-world layouts, one parsed object."""
    config = draft_config(inspect_target(str(request.getfixturevalue(variant))))
    if layout == "sizes left to the weights":  # only where hidden / heads is what q_proj says
        config = config.model_copy(update={"head_dim": config.hidden_size // config.num_attention_heads})
    foreign = json.loads(json.dumps(LAYOUTS[layout](config.to_hf_config())))
    shapes = {name: shape for name, (shape, _) in config.tensor_shapes().items()}
    assert DraftConfig.from_hf_config(foreign, shapes, target_num_layers=LAYERS) == config


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({IDS: None, "eagle_config": None}, "ids the draft was trained with"),
        ({"head_dim": None}, "add head_dim 32"),
        ({"num_hidden_layers": 8}, "num_hidden_layers is 8"),
        ({"hidden_size": "64"}, "whole number"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
        ({"attention_bias": True}, "attention_bias"),
        ({"model_type": "deepseek_v3"}, "Llama-style"),
        ({"rope_theta": 10000.0}, "disagree"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "disagree"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA, "ntk_alpha": 2}},
            "ntk_alpha",
        ),
        (
            {"rope_parameters": {"rope_type": "spiral", "rope_theta": ROPE_THETA}},
            "unknown rope_type 'spiral'",
        ),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({IDS: [2, 2, 5]}, "three ascending ids"),
        ({"draft_vocab_size": VOCAB + 1}, "exceeds vocab_size"),
        ({"torch_dtype": "int4"}, "dtype"),
    ],
)
def test_what_would_have_to_be_guessed_is_refused(tiny_target: TargetInfo, change: dict[str, Any], word: str) -> None:
    config = draft_config(tiny_target)
    shapes = {name: shape for name, (shape, _) in config.tensor_shapes().items()}
    with pytest.raises(UserError, match=word):
        DraftConfig.from_hf_config({**config.to_hf_config(), **change}, shapes)


def test_flags_the_trainer_does_not_know_are_refused_and_written_truthfully(tiny_target: TargetInfo) -> None:
    config = draft_config(tiny_target, fc_norm=True, norm_before_residual=True)
    assert config.to_hf_config()["fc_norm"] is True
    assert {f"fc_norm.{i}.weight" for i in range(3)} <= config.tensor_shapes().keys()
    config.require_flags(("fc_norm", "norm_before_residual"))
    with pytest.raises(UserError, match=r"cannot build a draft with fc_norm"):
        config.require_flags(("norm_before_residual",))


@pytest.mark.parametrize("variant", ["tiny", "tiny_llama3rope"])
def test_rotary_frequencies_survive_the_export(variant: str, request: pytest.FixtureRequest) -> None:
    """F67: the trainer's frequencies are those a plain Transformers loader makes of our config.json."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = draft_config(inspect_target(str(request.getfixturevalue(variant))))
    loaded = LlamaConfig(**config.to_hf_config())
    assert loaded.rope_parameters["rope_theta"] == ROPE_THETA
    frequencies, scale = inverse_frequencies(config)
    rotary = LlamaRotaryEmbedding(loaded)
    assert torch.equal(rotary.inv_freq, frequencies) and rotary.attention_scaling == scale
    if variant == "tiny_llama3rope":
        assert config.to_hf_config()["rope_scaling"]["rope_type"] == "llama3"
        assert not torch.equal(frequencies, inverse_frequencies(config.model_copy(update={"rope_scaling": None}))[0])


def test_flag_defaults_differ_by_format(tiny_target: TargetInfo) -> None:
    """F50: an absent norm_before_residual is false in a flat config and true in the speculators layout."""
    ours = draft_config(tiny_target).to_hf_config()
    flat, nested = (
        without(ours, "norm_before_residual"),
        without(speculators_layout(ours), "norm_before_residual"),
    )
    assert DraftConfig.from_hf_config(flat).norm_before_residual is False
    assert DraftConfig.from_hf_config(nested).norm_before_residual is True


def test_rope_spellings_compare_equal(tiny_target: TargetInfo) -> None:
    long = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    short = draft_config(tiny_target, rope_scaling={"type": "yarn", "factor": 4})
    assert short == draft_config(tiny_target, rope_scaling=long)
    assert DraftConfig.from_hf_config(short.to_hf_config()) == short


def test_legacy_type_key_and_outside_original_length() -> None:
    flat = {"rope_theta": 5e5, "max_position_embeddings": 4096, "original_max_position_embeddings": 1024}
    rope = rope_of_config({**flat, "rope_scaling": {"type": "yarn", "factor": 4}})
    assert rope.scaling == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


# Files


def test_a_written_checkpoint_has_no_differences_and_reads_back(
    tiny_draft: Path, tiny_target: TargetInfo, tiny_embed: Tensor
) -> None:
    """F55, F69, F70: TINY's head_dim of 32 is not hidden / heads; nothing but the folder is needed."""
    config = draft_config(tiny_target)
    assert check_checkpoint(tiny_draft, tiny_target, tiny_embed, config.aux_layer_ids) == []
    read, tensors = read_checkpoint(tiny_draft)
    assert read == config and read.head_dim == HEAD_DIM
    original = random_tensors(config)
    assert torch.equal(tensors["d2t"], original["d2t"]) and torch.equal(tensors["t2d"], original["t2d"])
    assert torch.equal(tensors["fc.weight"], original["fc.weight"].bfloat16())
    assert torch.equal(tensors["embed_tokens.weight"], tiny_embed)
    assert tensors.keys() == config.tensor_shapes(embed_tokens=True).keys()
    assert [p.name for p in tiny_draft.parent.iterdir()] == ["draft"]


def test_equal_vocabularies_have_no_map(tiny_target: TargetInfo, tiny_embed: Tensor, tmp_path: Path) -> None:
    """F56."""
    config = draft_config(tiny_target, draft_vocab_size=VOCAB)
    folder = write_checkpoint(tmp_path / "draft", config, random_tensors(config), tiny_embed, tiny_target)
    assert not {"d2t", "t2d"} & load_file(folder / "model.safetensors").keys()

    def add_zeros(tensors: dict[str, Tensor]) -> None:
        tensors["d2t"] = torch.zeros(VOCAB, dtype=torch.int64)

    edit_tensors(folder, add_zeros)
    _, tensors = read_checkpoint(folder)  # others write one, rightly all zero
    assert "d2t" not in tensors
    assert [d.what for d in check_checkpoint(folder, tiny_target, tiny_embed)] == ["tensor d2t"]


def test_all_zero_offsets_are_right_when_every_usable_id_is_kept(
    tiny_target: TargetInfo, tiny_embed: Tensor, tmp_path: Path
) -> None:
    config = draft_config(tiny_target, draft_vocab_size=TOKENIZER_LEN)
    tensors = random_tensors(config, torch.arange(TOKENIZER_LEN))
    write_checkpoint(tmp_path / "draft", config, tensors, tiny_embed, tiny_target)
    config = draft_config(tiny_target)
    with pytest.raises(UserError, match="all zero: just the ids below 320"):
        write_checkpoint(
            tmp_path / "first-n",
            config,
            random_tensors(config, torch.arange(DRAFT_VOCAB)),
            tiny_embed,
            tiny_target,
        )
    assert not (tmp_path / "first-n").exists()


def test_a_tied_target_gives_its_embedding(tiny_tied: Path, tmp_path: Path) -> None:
    """F69: head and embedding of a tied target are the same tensor; the draft's head is its own."""
    target = inspect_target(str(tiny_tied))
    head = load_target_head(target)
    config = draft_config(target)
    tensors = random_tensors(config)
    tensors["lm_head.weight"] = head.lm_head[VocabMap.from_d2t(tensors["d2t"], VOCAB).kept_ids]
    folder = write_checkpoint(tmp_path / "draft", config, tensors, head.embed_tokens, target)
    _, read = read_checkpoint(folder)
    assert torch.equal(read["embed_tokens.weight"], head.lm_head)
    assert torch.equal(read["lm_head.weight"], tensors["lm_head.weight"])


def test_other_trainers_names_and_shards_are_read(tiny_draft: Path, tiny_target: TargetInfo) -> None:
    _, expected = read_checkpoint(tiny_draft)
    tensors = load_file(tiny_draft / "model.safetensors")
    del tensors["t2d"]
    foreign = {}
    for name, tensor in tensors.items():
        renamed = name.replace("midlayer.", "layers.0.").replace("d2t", "draft_id_to_target_id")
        foreign[renamed if renamed.startswith(("lm_head", "draft_id")) else f"model.{renamed}"] = tensor
    (tiny_draft / "model.safetensors").unlink()
    names = sorted(foreign)
    shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, part in shards.items():
        save_file({name: foreign[name] for name in part}, tiny_draft / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tiny_draft / "model.safetensors.index.json").write_text(json.dumps(index))
    config, read = read_checkpoint(tiny_draft)
    assert config == draft_config(tiny_target) and read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in read)
    (tiny_draft / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="model-00002-of-00002"):
        read_checkpoint(tiny_draft)


def test_an_older_draft_is_replaced_only_by_a_right_one(
    tiny_draft: Path, tiny_target: TargetInfo, tiny_embed: Tensor
) -> None:
    config = draft_config(tiny_target)
    broken = random_tensors(config, seed=1)
    broken["norm.weight"][3] = float("nan")
    before = (tiny_draft / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="1 not finite"):
        write_checkpoint(tiny_draft, config, broken, tiny_embed, tiny_target)
    assert (tiny_draft / "model.safetensors").read_bytes() == before
    write_checkpoint(tiny_draft, config, random_tensors(config, seed=1), tiny_embed, tiny_target)
    assert (tiny_draft / "model.safetensors").read_bytes() != before
    assert [p.name for p in tiny_draft.parent.iterdir()] == ["draft"]


@pytest.mark.parametrize(
    ("break_it", "word"),
    [
        (lambda d: (d / "config.json").unlink(), "has no config.json"),
        (lambda d: (d / "config.json").write_text("{"), "not valid JSON"),
        (lambda d: (d / "model.safetensors").unlink(), "no .*safetensors"),
        (lambda d: (d / "model.safetensors").write_bytes(b"cut"), "cut or damaged"),
        (lambda d: edit_tensors(d, lambda t: t.pop("d2t")), "d2t is missing"),
        (lambda d: edit_tensors(d, lambda t: t.update(d2t=t["d2t"] + torch.arange(DRAFT_VOCAB))), "offsets"),
        (lambda d: edit_tensors(d, lambda t: t["t2d"].logical_not_()), "t2d is not true exactly"),
        (lambda d: edit_tensors(d, lambda t: t.pop("norm.weight")), "norm.weight is missing"),
        (lambda d: edit_config(d, lambda c: c.update(intermediate_size=96)), "gate_proj.weight has shape"),
    ],
)  # fmt: skip
def test_unreadable_checkpoints_are_explained(tiny_draft: Path, break_it: Callable[[Path], object], word: str) -> None:
    break_it(tiny_draft)
    with pytest.raises(UserError, match=word):
        read_checkpoint(tiny_draft)


@torch.no_grad()
def test_states_of_other_layers_give_other_logits(
    tiny_draft: Path, tiny_target: TargetInfo, tiny_embed: Tensor
) -> None:
    """F48: the exported draft on the states its config names, against the same draft on ids + 1."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_target.model, dtype=torch.float32)
    ids = torch.arange(20, 60)  # [T]
    states = model(ids[None], output_hidden_states=True).hidden_states  # s_k [1, T, H] for k < n
    config, tensors = read_checkpoint(tiny_draft)
    layer = Eagle3Draft(config)
    layer.load_exported(tensors)
    cast = layer.cast(torch.float32)

    def logits(layer_ids: tuple[int, ...]) -> Tensor:
        """One row attends to itself alone: [T-1, Vd]."""
        aux = torch.cat([states[k][0] for k in layer_ids], -1)[:-1]  # [T-1, 3H]
        state = cast.fuse(aux)
        qkv = cast.embed_qkv(cast.embedding(ids[1:])) + cast.state_qkv(state)
        value = cast.heads(qkv[:, cast.q_size + config.num_key_value_heads * config.head_dim :])
        attended = value.repeat_interleave(config.num_attention_heads // config.num_key_value_heads, 1)
        return cast.head_input(cast.finish(attended, state)) @ layer.lm_head.weight.T

    named = tuple(json.loads((tiny_draft / "config.json").read_text())[IDS])
    assert torch.equal(logits(named), logits(config.aux_layer_ids))
    shifted = logits(tuple(k + 1 for k in named))
    assert (shifted - logits(named)).abs().max() > 0.1 * logits(named).std()


def test_serve_commands_parse(tmp_path: Path) -> None:
    """F73: shell words and JSON that say EAGLE-3, and nothing of the draft's own tensor parallelism."""
    folder = tmp_path / "a draft's folder"
    words = shlex.split(vllm_serve_command("some/target", folder, 3))
    assert words[:3] == ["vllm", "serve", "some/target"]
    spec = json.loads(words[words.index("--speculative-config") + 1])
    assert spec == {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3}
    words = shlex.split(sglang_command("some/target", folder, 3))
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options["--speculative-algorithm"] == "EAGLE3"
    assert options["--speculative-draft-model-path"] == str(folder)
    assert (options["--speculative-num-steps"], options["--speculative-num-draft-tokens"]) == ("3", "4")
    assert options["--speculative-eagle-topk"] == "1"
