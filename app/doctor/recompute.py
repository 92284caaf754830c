"""The target's own states of a few token sequences, by a plain forward pass on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.doctor.finding import NotApplicable
from app.errors import first_line
from app.target import FINAL_NORM, TargetFiles, TargetInfo


@torch.no_grad()
def recompute(
    target: TargetInfo, sequences: Sequence[Tensor], limit_gib: float, trust_remote_code: bool = False
) -> list[list[Tensor]]:
    """s_0 .. s_n (s_n before the final norm) of each sequence: n + 1 tensors [T-1, H] fp32, for tokens [T] int64.

    Raises:
        NotApplicable: the weights exceed `limit_gib`, are quantised, or transformers cannot run this target.
    """
    size = sum(path.stat().st_size for path in Path(target.model).glob("*.safetensors")) / 2**30
    if size > limit_gib:
        raise NotApplicable(f"the target's weights ({size:.1f} GiB) exceed doctor.recompute_gib ({limit_gib:g})")
    if target.quantization is not None:
        raise NotApplicable(f"the target is quantised ({target.quantization}) and is not computed on the CPU")
    try:
        model = _load(target, trust_remote_code)
        norm = model.get_submodule(_final_norm(target).removesuffix(".weight"))
    except Exception as error:  # whatever a foreign model class raises
        raise NotApplicable(f"transformers cannot run this target ({first_line(error)})") from error
    last: list[Tensor] = []
    norm.register_forward_pre_hook(lambda module, inputs: last.append(inputs[0]))
    found = []
    for ids in sequences:
        last.clear()
        out = model(ids[:-1].unsqueeze(0), output_hidden_states=True, use_cache=False)
        found.append([s[0].float() for s in (*out.hidden_states[: target.num_layers], last[-1])])
    return found


def _load(target: TargetInfo, trust_remote_code: bool) -> Any:
    """The target in fp32, without a progress bar in the run's log."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(
            target.model, dtype=torch.float32, trust_remote_code=trust_remote_code
        ).eval()
    finally:
        if shown:
            logging.enable_progress_bar()


def _final_norm(target: TargetInfo) -> str:
    name = TargetFiles(Path(target.model)).find(*FINAL_NORM)
    if name is None:
        raise LookupError("its final norm is not found")
    return name
