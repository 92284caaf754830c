"""The target adapter: the teacher path is the model's own, for every layout (F47, F50)."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from app.errors import UserError
from app.target import (
    check_aux_layers,
    default_aux_layers,
    inspect_target,
    load_target_head,
    load_tokenizer,
    resolve_model,
)


def forward(folder: Path, ids: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """s_0..s_{n-1}, s_n before the final norm (each [T, H]), and the logits [T, V], by Transformers in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    caught: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, args: caught.append(args[0][0]))
    with torch.no_grad():
        out = model(ids[None], output_hidden_states=True)
    return [h[0] for h in out.hidden_states[:-1]], caught[0], out.logits[0]


@pytest.mark.parametrize("variant", ["tiny", "tiny_tied", "tiny_5l", "tiny_llama3rope"])
def test_f47_the_last_state_through_norm_and_head_gives_the_models_logits(
    variant: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(variant)
    ids = torch.randint(5, 500, (24,), generator=torch.Generator().manual_seed(0))
    states, last, logits = forward(folder, ids)
    head = load_target_head(inspect_target(str(folder)))
    assert (head.logits(last) - logits).abs().max() < 1e-3
    # One layer too early, or normed twice, is far off: the test can fail.
    assert (head.logits(states[-1]) - logits).abs().max() > 1e-1
    rows = torch.tensor([7, 300, 5])
    assert torch.allclose(head.logits(last, rows), head.logits(last)[:, rows], atol=1e-4)
    assert torch.equal(states[0], head.embed_tokens[ids].float())  # s_0 are the embedding rows


def test_f47_a_model_inside_a_wrapper_is_found(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wrapped"
    shutil.copytree(tiny, folder)
    tensors = load_file(folder / "model.safetensors")
    wrapped = {f"language_model.{k}": v for k, v in tensors.items()}
    wrapped["vision_tower.norm.weight"] = torch.full((64,), 9.0)
    wrapped["vision_tower.embed_tokens.weight"] = torch.zeros(3, 64)
    save_file(wrapped, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"architectures": ["Wrapper"], "text_config": config}))
    plain, inner = inspect_target(str(tiny)), inspect_target(str(folder))
    assert (inner.hidden_size, inner.num_layers, inner.vocab_size) == (64, 8, 640)
    assert inner.rope_theta == plain.rope_theta == 1e6
    a, b = load_target_head(plain), load_target_head(inner)
    for name in ("norm_weight", "lm_head", "embed_tokens"):
        assert torch.equal(getattr(a, name), getattr(b, name))


def test_a_gain_of_one_plus_w_is_honoured(tiny: Path) -> None:
    from dataclasses import replace

    info = inspect_target(str(tiny))
    plain = load_target_head(info)
    shifted = load_target_head(replace(info, extra={**info.extra, "model_type": "qwen3_next"}))
    state = torch.randn(3, 64)
    assert torch.allclose(
        shifted.normed(state), replace(plain, norm_weight=plain.norm_weight + 1).normed(state), atol=1e-6
    )


def test_shape_is_read_not_assumed(tiny: Path) -> None:
    info = inspect_target(str(tiny))
    assert (info.head_dim, info.num_attention_heads, info.num_key_value_heads) == (32, 4, 2)
    assert (info.vocab_size, info.tokenizer_len) == (640, 600)
    assert not info.tie_word_embeddings
    assert info.eos_token_ids == (load_tokenizer(tiny).convert_tokens_to_ids("<|im_end|>"),)


def test_f58_the_digest_follows_the_template(tiny: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    one = inspect_target(str(tiny), chat_template=str(template)).tokenizer_digest
    assert one == inspect_target(str(tiny), chat_template=str(template)).tokenizer_digest
    template.write_text("{{ messages[0]['content'] }}.")
    assert one != inspect_target(str(tiny), chat_template=str(template)).tokenizer_digest


def test_layer_ids() -> None:
    assert default_aux_layers(30) == (2, 15, 27)
    assert default_aux_layers(61) == (2, 30, 58)
    with pytest.raises(UserError, match=r"collapse.*capture\.layers"):
        default_aux_layers(5)
    for wrong in ([1, 2], [1, 1, 2], [3, 2, 1], [0, 1, 2], [1, 2, 8]):
        with pytest.raises(UserError, match="three distinct ascending ids"):
            check_aux_layers(wrong, 8)


@pytest.mark.parametrize(
    ("name", "words"),
    [("/no/such/folder", "neither a folder"), ("smollm3", "smollm2-135m"), ("./x", "neither a folder")],
)
def test_an_unknown_target_is_a_sentence(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        resolve_model(name)


def test_a_hub_that_cannot_be_reached_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"some/model could not be fetched"):
        resolve_model("some/model")


def test_a_folder_without_weights_is_a_sentence(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    shutil.copytree(tiny, folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no \*\.safetensors"):
        load_target_head(inspect_target(str(folder)))
    with pytest.raises(UserError, match=r"config\.json"):
        resolve_model(str(tmp_path))
