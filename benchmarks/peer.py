"""speculators' EAGLE-3 model beside ours: same shape, same embedding and heads at the start, same samples.

Its forward pass, its attention, its masks and its loss are its own, compiled as it does it itself (where there is a
GPU). What it would read from a checkpoint of the target is set from a `TargetHead`, so that no weights need be on disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from app.codecs import decoded
from app.draft_config import DraftConfig
from app.errors import UserError
from app.rope import Rope, rope_keys
from app.samples import Sample
from app.target import TargetHead

LOSSES = ("eager", "fused")
ATTENTIONS = ("simple_flex_attention", "sdpa", "eager")
_LAYER = "layers.0."
_SHARED_NAMES = ("fc", "fc_norm", "norm", "lm_head", "input_norm", "d2t", "t2d")


def peer_version() -> str:
    """speculators' version.

    Raises:
        UserError: it cannot be imported here.
    """
    if find_spec("speculators") is None:
        raise UserError("speculators is not installed here; install it, or leave the peer out with `--who ours`")
    try:
        return version("speculators")
    except PackageNotFoundError:
        return "of unknown version"


def peer_model(
    shape: DraftConfig, head: TargetHead, kept_ids: Tensor, unroll_steps: int,
    device: torch.device, train_head: bool = True, attention: str | None = None,
) -> Any:  # fmt: skip
    """An untrained `Eagle3DraftModel` on `device`, fp32; by default flex attention on a GPU and eager elsewhere.

    speculators 0.9.0 freezes the draft's head by itself; `train_head` trains it, as we do.
    """
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    if attention is None:
        attention = "simple_flex_attention" if device.type == "cuda" else "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=_layer_config(shape, attention),
        draft_vocab_size=shape.draft_vocab_size,
        norm_before_residual=shape.norm_before_residual,
        norm_before_fc=shape.norm_before_fc,
        fc_norm=shape.fc_norm,
        norm_output=shape.norm_output,
        eagle_aux_hidden_state_layer_ids=list(shape.aux_layer_ids),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=unroll_steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    with torch.device(device):
        model = Eagle3DraftModel(config)
    _load_target(model, head, kept_ids)
    model.lm_head.weight.requires_grad_(train_head)
    return model.train()


def _layer_config(shape: DraftConfig, attention: str) -> Any:
    from transformers import LlamaConfig

    rope = Rope.parse(shape.rope_theta, shape.rope_scaling, shape.max_position_embeddings)
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters=rope_keys(rope)["rope_parameters"],
    )
    config._attn_implementation = attention
    return config


@torch.no_grad()
def _load_target(model: Any, head: TargetHead, kept_ids: Tensor) -> None:
    """Embedding, both heads and the teacher's norm, as its own loader would set them from the target's files.

    Raises:
        UserError: its teacher cannot be this target's.
    """
    if head.norm_plus_one or head.logit_scale != 1.0 or head.logit_softcap is not None:
        raise UserError("speculators' teacher knows no scaled or capped logits and no gain of 1 + w in this benchmark")
    ids = kept_ids.to(head.lm_head.device)
    if model.use_draft_vocab:
        t2d = torch.zeros(len(head.lm_head), dtype=torch.bool, device=ids.device)
        t2d[ids] = True
        model.load_vocab_mappings(t2d, ids - torch.arange(len(ids), device=ids.device))
    rows = head.lm_head[ids]  # [Vd, H]
    model.embed_tokens.weight.copy_(head.embed_tokens)
    model.lm_head.weight.copy_(rows)
    model.verifier_lm_head.weight.copy_(rows)
    model.verifier_norm.weight.copy_(head.norm_weight)
    model.verifier_norm.variance_epsilon = head.norm_eps


def peer_loss(unroll_steps: int, step_decay: float, implementation: str = "eager") -> dict[str, Any]:
    """Arguments of its forward pass: forward KL, K and w. Its fused loss does not compile on torch 2.11."""
    from speculators.losses import resolve_loss_config

    return {
        "ttt_steps": unroll_steps,
        "ttt_step_loss_decay": step_decay,
        "loss_config": resolve_loss_config("kl_div", implementation),
    }


def peer_batch(
    samples: Sequence[Sample], length: int, hidden_size: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """Its one packed row [1, length] of `samples`, states in `dtype`, made by its own alignment and collation.

    A sample goes in as the T-1 tokens that have states. Its loss is on where the teacher's state is stored.
    """
    from speculators.models.eagle3 import shift_batch
    from speculators.train.data import CollateFn

    collate = CollateFn(max_len=length, hidden_size=hidden_size, dtype=dtype, preprocess=shift_batch)
    batch = collate([_peer_sample(sample) for sample in samples])
    return {name: value for name, value in batch.items() if isinstance(value, Tensor)}


def peer_rows(samples: Sequence[Sample]) -> int:
    """Rows that `samples` take in a packed row."""
    return sum(len(sample.token_ids) - 2 for sample in samples)


def _peer_sample(sample: Sample) -> dict[str, Tensor]:
    aux, stored = decoded(sample.aux), decoded(sample.teacher)  # [T-1, 3H], [S, H]
    teacher = stored.new_zeros(len(aux), stored.shape[1])  # [T-1, H]
    teacher[sample.teacher_pos] = stored
    mask = torch.zeros(len(aux), dtype=torch.bool)  # [T-1]
    mask[sample.teacher_pos] = True
    return {
        "input_ids": sample.token_ids[: len(aux)],
        "hidden_states": aux,
        "verifier_last_hidden_states": teacher,
        "loss_mask": mask,
        "lengths": torch.tensor([len(aux)]),
        "position_ids": torch.arange(len(aux)),
    }


def our_names(model: Any) -> dict[str, Tensor]:
    """Its trained weights under a checkpoint's root names, fp32 on the CPU, for `Eagle3Draft.load_exported`."""
    state: Mapping[str, Tensor] = model.state_dict()
    return {
        "midlayer." + name.removeprefix(_LAYER) if name.startswith(_LAYER) else name: tensor.detach().cpu()
        for name, tensor in state.items()
        if name.startswith(_LAYER) or name.split(".")[0] in _SHARED_NAMES
    }
