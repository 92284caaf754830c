"""Rules for the weights' values: finite, not zero, norms that training moved, the target's own embedding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from app.draft_config import DraftConfig
from app.lint.difference import ENGINES, VLLM, Difference
from app.lint.subject import Subject
from app.target import name_list

_EMBEDDING = "embed_tokens.weight"
_UNRELATED = 0.1  # mean cosine of rows below which an embedding is another one, not a changed one


def value_differences(d: Subject, draft: DraftConfig) -> Iterator[Difference]:
    """Every fault of the weights' content."""
    known = draft.tensor_shapes(embed_tokens=True)
    tensors = {n: t for n, t in d.by_root.items() if n in known and t.is_floating_point() and t.numel()}
    for name, tensor in tensors.items():
        if wrong := int((~torch.isfinite(tensor)).sum()):
            yield Difference(f"tensor {name}", "finite values", f"{wrong} not finite", "use an earlier checkpoint")
        elif not tensor.any():
            yield Difference(f"tensor {name}", "trained values", "all zero", "nobody loaded or trained it: export anew")
    yield from _norm_differences({n: t for n, t in tensors.items() if "norm" in n})
    yield from _embedding_differences(d, draft)


def _norm_differences(norms: dict[str, Tensor]) -> Iterator[Difference]:
    if still := [name for name, tensor in norms.items() if bool((tensor == 1).all())]:
        found = f"{len(still)} of {len(norms)} exactly 1: {name_list(still)}"
        fix = "train in fp32: a bf16 step is smaller than what 1.0 can show; after few steps it is usual"
        yield Difference("norm weights", "moved by training", found, fix, ENGINES, "warning")


def _embedding_differences(d: Subject, draft: DraftConfig) -> Iterator[Difference]:
    """SGLang puts the target's embedding in place of the file's; vLLM trusts the file."""
    embed, target_embed = d.by_root.get(_EMBEDDING), d.target_embed
    shared = draft.hidden_size == draft.target_hidden_size
    if embed is None or target_embed is None or not shared or embed.shape != target_embed.shape:
        return
    wanted = target_embed.to(embed.dtype)
    if torch.equal(embed, wanted):
        return
    found = f"{int((embed != wanted).any(-1).sum())} of {len(embed)} rows differ"
    if _mean_cosine(embed, wanted) < _UNRELATED:
        found += ", unrelated to the target's: random, or another model's"
    fix = "copy the target's embedding or leave the tensor out: vLLM serves what is there"
    yield Difference(f"tensor {_EMBEDDING}", "the target's, bit for bit", found, fix, (VLLM,))


def _mean_cosine(a: Tensor, b: Tensor) -> float:
    """Mean cosine of the first rows of `a` and `b` [V, H]."""
    rows = slice(0, 4096)
    return float(torch.cosine_similarity(a[rows].float(), b[rows].float(), dim=-1).nanmean())
