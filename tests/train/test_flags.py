"""Norm flags in training: they learn, their own weights move, and settings nobody can train are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.draft_config import DraftConfig
from app.errors import UserError
from app.rope import Rope
from app.train.trainer import Trainer
from tests.train.debug import debug_config
from tests.train.test_trainer import fresh_draft, make_job

FLAGS = {"fc_norm": True, "norm_output": True, "norm_before_fc": True, "norm_before_residual": True}


def test_every_norm_of_every_flag_moves_in_fifty_bf16_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F60, with the four norms that the flags add."""
    job = make_job(tmp_path, draft=fresh_draft(**FLAGS), epochs=5, learning_rate=1e-4, compute_dtype="bfloat16")
    start = {n: p.detach().clone() for n, p in job.draft.named_parameters() if p.dim() == 1}
    assert {n for n in start if n.startswith(("fc_norm", "input_norm"))} == {
        "fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight", "input_norm.weight",
    }  # fmt: skip
    Trainer(job).run()
    for name, p in job.draft.named_parameters():
        assert p.dtype == torch.float32
        if name in start:
            assert not p.equal(start[name]), name
    assert "did not change" not in caplog.text


@pytest.mark.parametrize("flags", [{"fc_norm": True, "norm_output": True}, {"norm_before_fc": True}, FLAGS])
def test_a_draft_with_flags_learns(flags: dict[str, bool], tmp_path: Path) -> None:
    draft = fresh_draft(draft_vocab_size=96, **flags)
    summary = Trainer(make_job(tmp_path, draft=draft, epochs=10, learning_rate=1e-2)).run()
    assert summary["validation"][-1]["acceptance_length"] > 2.5


def test_a_rotary_embedding_of_part_of_the_head_is_refused() -> None:
    """F67: the draft's layer turns whole heads, and a factor that is copied and not obeyed would be served."""
    with pytest.raises(UserError, match="partial_rotary_factor"):
        Rope.parse(1e4, {"rope_type": "default", "partial_rotary_factor": 0.25}, 512)
    written = {**debug_config().to_hf_config(), "partial_rotary_factor": 0.25}
    with pytest.raises(UserError, match="partial_rotary_factor"):
        DraftConfig.from_hf_config(written)
