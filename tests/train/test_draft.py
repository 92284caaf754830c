"""The draft module: names, loading, vocabulary, rotary settings, and memory that grows with the rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from app.errors import UserError
from app.rope import draft_rope
from app.train.alignment import pack
from app.train.draft import Eagle3Draft, inverse_frequencies
from app.train.loss import Teacher, UnrolledLoss
from tests.train.debug import debug_config, debug_draft, debug_head, kept_ids, make_sample, span_mask


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"draft_vocab_size": 96},
        {"norm_before_fc": True, "fc_norm": True, "norm_output": True},
        {"num_key_value_heads": 1, "head_dim": 24, "target_hidden_size": 48},
    ],
)
def test_exported_names_and_shapes_are_those_of_the_checkpoint(changes: dict[str, Any]) -> None:
    draft = debug_draft(**changes)
    exported = draft.export_state_dict()
    expected = draft.config.tensor_shapes(embed_tokens=True)
    assert {n: tuple(t.shape) for n, t in exported.items()} == {n: s for n, (s, _) in expected.items()}
    again = Eagle3Draft(draft.config)
    again.load_exported(exported)
    again.check_loaded()
    for name, tensor in again.export_state_dict().items():
        assert torch.equal(tensor, exported[name])
        assert tensor.dtype == exported[name].dtype


def test_what_must_be_loaded_is_nan_until_it_is_and_the_embedding_is_frozen_and_bit_exact() -> None:
    head, draft = debug_head(), Eagle3Draft(debug_config())
    assert bool(draft.embed_tokens.weight.isnan().all()) and bool(draft.lm_head.weight.isnan().all())
    with pytest.raises(UserError, match="never loaded"):
        draft.check_loaded()
    ids = kept_ids(draft.config)
    draft.init_from_target(head, ids)
    draft.check_loaded()
    assert draft.embed_tokens.weight.dtype == head.embed_tokens.dtype
    assert torch.equal(draft.embed_tokens.weight, head.embed_tokens)
    assert torch.equal(draft.lm_head.weight, head.lm_head[ids].float())
    assert "embed_tokens.weight" not in dict(draft.named_parameters())
    assert all(p.dtype == torch.float32 for p in draft.parameters())


def test_the_vocabulary_holds_offsets_and_refuses_what_is_none() -> None:
    """F56."""
    draft = debug_draft()
    ids = draft.kept_ids
    assert torch.equal(draft.d2t, ids - torch.arange(40))
    assert torch.equal(ids[draft.target_to_draft[ids]], ids)
    state = draft.export_state_dict()
    assert int(state["t2d"].sum()) == 40 and state["d2t"].dtype == torch.int64
    for wrong in (ids.flip(0), ids[:-1], ids + 96):
        with pytest.raises(UserError):
            draft.set_vocabulary(wrong)
    with pytest.raises(UserError, match="d2t"):
        draft.load_exported({k: v for k, v in state.items() if k != "d2t"})
    assert "d2t" not in debug_draft(draft_vocab_size=96).export_state_dict()


def test_a_target_of_another_width_cannot_lend_its_embedding() -> None:
    with pytest.raises(UserError, match="48 wide"):
        Eagle3Draft(debug_config()).init_from_target(debug_head(hidden=48), torch.arange(40))


ROPES: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
]


@pytest.mark.parametrize("scaling", ROPES, ids=lambda r: r["rope_type"] if r else "plain")
def test_rotary_tables_are_those_of_transformers(scaling: dict[str, Any] | None) -> None:
    """F67: same base, scaling and head_dim (not hidden / heads) as the engine's own table."""
    config = debug_config(rope_theta=1e6, rope_scaling=scaling)
    draft = Eagle3Draft(config)
    settings = LlamaConfig(
        hidden_size=32, num_attention_heads=4, head_dim=16, max_position_embeddings=512,
        rope_parameters={"rope_type": "default", **(scaling or {}), "rope_theta": 1e6},
    )  # fmt: skip
    positions = torch.arange(300)
    cos, sin = LlamaRotaryEmbedding(settings)(torch.zeros(1), positions[None])
    mine = draft.cast(torch.float32).rotary(positions)
    torch.testing.assert_close(mine[0][:, 0], cos[0, :, :8])
    torch.testing.assert_close(mine[1][:, 0], sin[0, :, :8])


LLAMA3: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
TARGETS: list[list[dict[str, Any]]] = [  # one target each, in the layouts of its config
    [
        {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ],
    [
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, **LLAMA3}},
    ],
]


@pytest.mark.parametrize("layouts", TARGETS, ids=["plain", "llama3"])
def test_every_layout_of_the_target_gives_the_frequencies_that_a_reader_of_our_export_has(
    layouts: list[dict[str, Any]],
) -> None:
    """F67: trainer and loader agree, wherever the target's config keeps its base and scaling."""
    found = []
    for layout in layouts:
        rope = draft_rope({**layout, "max_position_embeddings": 512})
        config = debug_config(rope_theta=rope.theta, rope_scaling=rope.scaling)
        trained = Eagle3Draft(config).inv_freq
        loaded = LlamaRotaryEmbedding(LlamaConfig(**config.to_hf_config())).inv_freq
        assert torch.equal(trained, loaded)
        found.append(trained)
    assert all(torch.equal(f, found[0]) for f in found)
    assert not torch.equal(found[0], inverse_frequencies(debug_config(rope_theta=1e4))[0])


def test_scaling_that_depends_on_the_length_is_refused() -> None:
    with pytest.raises(UserError, match="dynamic"):
        inverse_frequencies(debug_config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}))


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_every_norm_flag_changes_the_loss(flag: str) -> None:
    """F50."""
    sample, head = make_sample(span_mask(20, [(4, 20)])), debug_head()
    losses = []
    for on in (False, True):
        draft = debug_draft(head)
        other = Eagle3Draft(debug_config(**{flag: on}))
        state = {**dict(other.named_parameters()), **draft.export_state_dict()}
        other.load_exported(state)
        losses.append(float(UnrolledLoss(other, head, 3, 0.8, torch.float32)(pack([sample], 3))[0].detach()))
    assert abs(losses[0] - losses[1]) > 1e-4


def test_the_teacher_is_the_target_head_over_the_kept_rows() -> None:
    head = debug_head(norm_plus_one=True, logit_scale=0.25, logit_softcap=3.0)
    ids = kept_ids(debug_config())
    s_n = 3 * torch.randn(9, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    teacher = Teacher(head, ids, torch.float32)
    torch.testing.assert_close(teacher.logits(s_n), head.logits(s_n, ids))
    top = head.logits(s_n).argmax(-1)
    assert teacher.keep(s_n).tolist() == [int(t) in ids.tolist() for t in top]


def test_only_the_kept_rows_of_the_targets_head_go_to_the_trainers_device() -> None:
    """The whole head [V, Ht] stays where it was read, unless an objective needs the mass outside."""
    head, ids = debug_head(), kept_ids(debug_config())
    teacher = Teacher(head, ids, torch.bfloat16, "meta")
    held = [t for t in vars(teacher).values() if isinstance(t, torch.Tensor)]
    assert teacher.rows.shape == (len(ids), 32) and teacher.rows.is_meta
    assert sum(t.numel() for t in held) == len(ids) * 32 + len(ids) + 32  # rows, ids, gain
    assert not head.lm_head.is_meta


def test_memory_kept_for_backward_grows_with_the_rows_not_their_square() -> None:
    """F61: one document of L = 256, 512, 1024 tokens, four unroll steps."""
    head = debug_head()
    draft = debug_draft(head)
    kept = []
    for length in (256, 512, 1024):
        held: dict[int, int] = {}

        def save(t: torch.Tensor, held: dict[int, int] = held) -> torch.Tensor:
            held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        packed = pack([make_sample(span_mask(length, [(16, length)]))], 4)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
            loss, _ = UnrolledLoss(draft, head, 4, 0.8, torch.float32)(packed)
        del loss
        kept.append(sum(held.values()))
    assert kept[2] - kept[1] < 2.3 * (kept[1] - kept[0])


def test_bf16_teacher_probabilities_stay_near_fp32() -> None:
    head, ids = debug_head(), kept_ids(debug_config())
    s_n = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact, rounded = (Teacher(head, ids, d).logits(s_n).softmax(-1) for d in (torch.float32, torch.bfloat16))
    assert rounded.dtype == torch.float32
    assert float((exact - rounded).abs().sum(-1).max()) < 0.05
