"""The target adapter: the teacher path is the model's own, for every layout (F47, F50)."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from app.config import TrainConfig
from app.errors import UserError
from app.families import dense_width, draft_shape, logit_scale, norm_eps, norm_is_plus_one
from app.rope import Rope, draft_rope
from app.target import (
    check_aux_layers,
    default_aux_layers,
    inspect_target,
    load_target_head,
    load_tokenizer,
    resolve_model,
)
from app.train.loop import draft_config
from tests.families import FAMILIES, LAYERS, make_family, make_kimi_k25


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
    info = inspect_target(str(tiny))
    plain = load_target_head(info)
    shifted = load_target_head(replace(info, extra={**info.extra, "norm_plus_one": True}))
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


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"llama"}))
def test_f47_every_family_ends_in_the_head_that_the_adapter_reads(family: str, tmp_path: Path) -> None:
    folder = make_family(tmp_path, family)
    ids = torch.randint(5, 500, (24,), generator=torch.Generator().manual_seed(0))
    _, last, logits = forward(folder, ids)
    info = inspect_target(str(folder))
    head = load_target_head(info)
    assert info.num_layers == LAYERS
    assert (head.logits(last) - logits).abs().max() < 1e-3 * logits.abs().max()
    for wrong in (replace(head, norm_plus_one=not head.norm_plus_one), replace(head, logit_scale=2 * head.logit_scale)):
        assert (wrong.logits(last) - logits).abs().max() > 1e-2 * logits.abs().max()


def test_the_draft_of_a_mixture_is_a_dense_layer(tmp_path: Path) -> None:
    """gpt-oss keeps its experts' width (64) where others keep the dense one; its rotary settings are kept."""
    info = inspect_target(str(make_family(tmp_path, "gpt_oss")))
    draft = draft_config(info, TrainConfig(), [2, 4, 5, 8], 320)
    assert (draft.intermediate_size, draft.head_dim) == (4 * 64, 32)
    assert draft.rope_scaling is not None
    assert (draft.rope_theta, draft.rope_scaling["rope_type"], draft.rope_scaling["truncate"]) == (
        150_000,
        "yarn",
        False,
    )
    chosen = TrainConfig(num_attention_heads=8, num_key_value_heads=4, head_dim=16, intermediate_size=96)
    draft = draft_config(info, chosen, [2, 4, 5, 8], 320)
    assert (draft.num_attention_heads, draft.num_key_value_heads, draft.head_dim) == (8, 4, 16)
    assert draft.intermediate_size == 96


def test_dense_width() -> None:
    expert = {"hidden_size": 64, "num_experts": 8, "moe_intermediate_size": 32}
    assert dense_width({**expert, "intermediate_size": 200}) == 200
    assert dense_width(expert) == 256
    assert dense_width({"hidden_size": 64, "num_local_experts": 8, "intermediate_size": 32}) == 256
    assert dense_width({"hidden_size": 64, "intermediate_size": 32}) == 32
    llama4 = {"hidden_size": 64, "num_local_experts": 8, "intermediate_size": 32, "intermediate_size_mlp": 160}
    assert dense_width(llama4) == 160


def test_a_latent_target_gets_a_draft_with_attention_of_its_own(tmp_path: Path) -> None:
    """The configs of DeepSeek-V3 and Kimi-K2 themselves, cut down to what shapes a draft."""
    target = inspect_target(str(make_family(tmp_path, "deepseek_v3")))
    draft = draft_config(target, TrainConfig(), [2, 4, 5, 8], 320)
    assert (draft.head_dim, draft.num_attention_heads, draft.num_key_value_heads) == (128, 4, 4)
    assert (draft.rope_theta, draft.rope_scaling) == (10_000, None)
    assert draft.intermediate_size == 128
    kimi = {"hidden_size": 7168, "num_attention_heads": 64, "num_key_value_heads": 64, "kv_lora_rank": 512}
    kimi |= {"v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 384}
    yarn = {"type": "yarn", "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    yarn["original_max_position_embeddings"] = 4096
    shape = draft_shape({**kimi, "rope_theta": 50_000.0, "rope_scaling": yarn, "max_position_embeddings": 262_144})
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (64, 8, 128)
    assert (shape.intermediate_size, shape.rope) == (18432, Rope(50_000.0))


def test_rotary_settings_no_llama_layer_has_become_plain_ones_of_the_same_base() -> None:
    def of(**rope: object) -> Rope:
        return draft_rope({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default", **rope}})

    assert of(partial_rotary_factor=0.25) == Rope(1e6)
    assert of(mrope_section=[11, 11, 10], mrope_interleaved=True, partial_rotary_factor=0.25) == Rope(1e6)
    assert draft_rope({"rope_theta": 5e5, "partial_rotary_factor": 0.25}) == Rope(5e5)
    assert draft_rope({"rope_theta": 5e5, "rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 3]}}) == Rope(5e5)
    per_type = {"full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}}
    per_type["sliding_attention"] = {"rope_theta": 1e4, "rope_type": "default"}
    assert draft_rope({"rope_parameters": per_type}) == Rope(1e6)
    assert of(rope_type="proportional", partial_rotary_factor=0.25) == Rope(1e6)
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    assert draft_rope({"rope_theta": 1e4, "rope_scaling": dynamic}) == Rope(1e4)
    kept = {"rope_type": "linear", "factor": 8.0}
    assert draft_rope({"rope_theta": 1e4, "rope_scaling": kept}) == Rope(1e4, kept)
    with pytest.raises(UserError, match="unknown keys \\['bend'\\]"):
        of(partial_rotary_factor=0.25, bend=3)


def test_norms_and_scales_by_their_keys() -> None:
    assert norm_is_plus_one({"model_type": "qwen3_5_text"}) and norm_is_plus_one({"model_type": "gemma3_text"})
    assert not norm_is_plus_one({"model_type": "gemma4_text"}) and not norm_is_plus_one({"model_type": "qwen3"})
    assert norm_eps({"layernorm_epsilon": 1e-5}) == norm_eps({"rms_norm_eps": 1e-5}) == 1e-5
    with pytest.raises(UserError, match="LayerNorm"):
        norm_eps({"model_type": "cohere2", "layer_norm_eps": 1e-5})
    assert logit_scale({"logits_scaling": 8.0}) == 0.125
    assert logit_scale({"logit_scale": 0.25}) == 0.25
    assert logit_scale({"model_type": "minicpm", "dim_model_base": 256, "hidden_size": 4096}) == 0.0625


def test_soft_capped_logits(tiny: Path) -> None:
    head = load_target_head(inspect_target(str(tiny)))
    state = torch.randn(3, 64)
    capped = replace(head, logit_softcap=0.5).logits(state)
    assert capped.abs().max() <= 0.5
    assert torch.allclose(capped, 0.5 * torch.tanh(head.logits(state) / 0.5))


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_kimi_k25(tmp_path_factory.mktemp("kimi"))


def test_kimi_k25_is_read_through_its_wrapper_shards_and_quantisation(kimi: Path, tmp_path: Path) -> None:
    info = inspect_target(str(kimi), trust_remote_code=True)
    assert info.architecture == "KimiK25ForConditionalGeneration"
    assert (info.hidden_size, info.num_layers, info.vocab_size, info.tokenizer_len) == (64, LAYERS, 640, 257)
    assert info.quantization == "compressed-tensors"
    plain = make_family(tmp_path, "deepseek_v3")
    head, wanted = load_target_head(info), load_target_head(inspect_target(str(plain)))
    for name in ("norm_weight", "lm_head", "embed_tokens"):
        assert torch.equal(getattr(head, name), getattr(wanted, name))
    draft = draft_config(info, TrainConfig(), [2, 4, 5, 8], 257)
    assert (draft.head_dim, draft.rope_scaling, draft.intermediate_size) == (128, None, 128)
    tokenizer = load_tokenizer(kimi, trust_remote_code=True)
    assert tokenizer("a<|im_end|>", add_special_tokens=False)["input_ids"] == [97, 256]


def test_a_tokenizer_that_is_code_asks_for_trust(kimi: Path) -> None:
    with pytest.raises(UserError, match=r"is code of that folder.*target\.trust_remote_code=true"):
        inspect_target(str(kimi))


def test_a_shard_that_is_missing_is_a_sentence(kimi: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(kimi, folder)
    (folder / "model-00003-of-000003.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks model-00003-of-000003\.safetensors.*not complete"):
        load_target_head(inspect_target(str(folder), trust_remote_code=True))


def test_a_quantised_head_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "quantised"
    shutil.copytree(tiny, folder)
    tensors = load_file(folder / "model.safetensors")
    head = tensors.pop("lm_head.weight")
    for stored, words in (
        ({"lm_head.weight": head.to(torch.float8_e4m3fn)}, "lm_head.weight is stored as float8_e4m3fn"),
        ({"lm_head.weight_packed": torch.zeros(640, 8, dtype=torch.int32)}, "lm_head.weight_packed instead of"),
        ({"lm_head.qweight": torch.zeros(8, 640, dtype=torch.int32)}, "lm_head.qweight instead of"),
    ):
        save_file({**tensors, **stored}, folder / "model.safetensors")
        with pytest.raises(UserError, match=f"output head of .* is quantised.*{words}"):
            load_target_head(inspect_target(str(folder)))
    # Quantised layers are the engine's affair.
    layer = {"model.layers.0.mlp.up_proj.weight": head.to(torch.float8_e4m3fn)}
    save_file({**tensors, **layer, "lm_head.weight": head}, folder / "model.safetensors")
    assert torch.equal(load_target_head(inspect_target(str(folder))).lm_head, head)


def test_a_head_of_other_rows_than_the_config_says_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 656}))
    with pytest.raises(UserError, match=r"shape \(640, 64\), its config\.json says \(656, 64\)"):
        load_target_head(inspect_target(str(folder)))


def test_a_config_that_does_not_say_is_tied_when_no_head_is_stored(tiny_tied: Path, tmp_path: Path) -> None:
    folder = tmp_path / "silent"
    shutil.copytree(tiny_tied, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    info = inspect_target(str(folder))
    assert info.tie_word_embeddings
    head = load_target_head(info)
    assert torch.equal(head.lm_head, head.embed_tokens)


def test_a_size_that_differs_by_layer_is_a_sentence(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "layers"
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": [4, 2, 4]}))
    with pytest.raises(UserError, match=r"num_attention_heads \[4, 2, 4\]; one whole number is needed"):
        inspect_target(str(folder))
