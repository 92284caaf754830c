"""Moments in a byte each: near AdamW, unbiased, small, and resumed to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.storage import Store
from app.train.eight_bit import BLOCK, MOMENTS, EightBitAdamW, Packed, grid
from app.train.state import load_latest
from app.train.trainer import Trainer
from tests.train.test_trainer import Killed, KilledAt, fresh_draft, make_job, weights_of


@pytest.mark.parametrize("moment", MOMENTS)
def test_values_come_back_near_and_rounding_again_changes_nothing(moment: str) -> None:
    assert len(grid(moment)) <= 256 and float(grid(moment)[-1]) == 1.0
    g = torch.Generator().manual_seed(0)
    values = torch.randn(3 * BLOCK + 17, generator=g) * torch.logspace(-3, 3, 3 * BLOCK + 17)
    values = values if moment == "exp_avg" else values**2
    packed = Packed(moment, len(values), values.device)
    packed.write(0, values, None)
    found = packed.read(0, len(values))
    largest = values.abs().amax()
    assert float(((found - values).abs() / (values.abs() + 1e-3 * packed._spread(0, len(values)))).max()) < 0.06
    assert float(found.abs().amax()) == float(largest)
    again = Packed(moment, len(values), values.device)
    again.write(0, found, None)
    assert torch.equal(again.codes, packed.codes) and torch.equal(again.scale, packed.scale)
    assert packed.nbytes < 1.05 * len(values)


def test_a_square_that_is_not_zero_stays_so() -> None:
    values = torch.full((4 * BLOCK,), 1e-14)
    values[::BLOCK], values[1::BLOCK] = 1.0, 0.0
    packed = Packed("exp_avg_sq", len(values), values.device)
    packed.write(0, values, torch.Generator().manual_seed(0))
    assert torch.equal(packed.read(0, len(values)) > 0, values > 0)


def test_a_small_decay_happens_on_the_mean() -> None:
    """0.999 of a value is nearer to the value than to the next of the grid, step after step."""
    values = torch.full((8 * BLOCK,), 0.1)
    values[::BLOCK] = 1.0  # holds the scale
    packed = Packed("exp_avg_sq", len(values), values.device)
    packed.write(0, values, None)
    chance = torch.Generator().manual_seed(0)
    start = float(packed.read(0, len(values))[1::BLOCK].mean())
    for _ in range(300):
        decayed = packed.read(0, len(values)) * 0.999
        decayed[::BLOCK] = 1.0
        packed.write(0, decayed, chance)
    mean = float(packed.read(0, len(values)).view(-1, BLOCK)[:, 1:].mean())
    assert mean / start == pytest.approx(0.999**300, rel=0.02)


def test_one_step_is_adamws() -> None:
    torch.manual_seed(0)
    start = torch.linspace(-1, 1, 5000)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    small, other = (torch.nn.Parameter(torch.ones(7)) for _ in range(2))
    a = EightBitAdamW([{"params": [ours, small], "weight_decay": 0.1}], 1e-2, (0.9, 0.95))
    b = torch.optim.AdamW([{"params": [theirs, other], "weight_decay": 0.1}], lr=1e-2, betas=(0.9, 0.95))
    for step in range(5):
        for p, q in ((ours, theirs), (small, other)):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        a.step()
        b.step()
        torch.testing.assert_close(small, other)  # fp32 moments
        if step == 0:
            torch.testing.assert_close(ours, theirs)
    assert float((ours - theirs).detach().abs().mean()) < 0.05 * float((theirs.detach() - start).abs().mean())
    assert sum(a.state[ours][name].nbytes for name in MOMENTS) < 2.05 * ours.numel()


def settings(**changes: Any) -> dict[str, Any]:
    return {"optimizer_state": "8bit", "compute_dtype": "float32", **changes}


def test_it_trains_as_far_as_fp32_moments(tmp_path: Path) -> None:
    found = {}
    for name in ("fp32", "8bit"):
        draft = fresh_draft(draft_vocab_size=96, intermediate_size=160)
        job = make_job(tmp_path / name, epochs=12, learning_rate=1e-2, draft=draft, **settings(optimizer_state=name))
        trainer = Trainer(job)
        found[name] = trainer.run()
        packed = [p for p in trainer.draft.parameters() if isinstance(trainer.optimizer.state[p]["exp_avg"], Packed)]
        assert bool(packed) == (name == "8bit")
    lengths = {name: run["validation"][-1]["acceptance_length"] for name, run in found.items()}
    assert lengths["8bit"] > 3.0 and lengths["8bit"] == pytest.approx(lengths["fp32"], abs=0.3)
    assert found["8bit"]["loss"] < 1.15 * found["fp32"]["loss"] + 0.02


def test_a_killed_and_resumed_training_equals_one_that_was_not(tmp_path: Path) -> None:
    def job(name: str) -> Any:
        draft = fresh_draft(draft_vocab_size=96, intermediate_size=160)
        return make_job(tmp_path / name, draft=draft, **settings(epochs=2))

    whole = Trainer(job("whole"))
    whole.run()
    cut = job("cut")
    with pytest.raises(Killed):
        Trainer(replace(cut, train=KilledAt(cut.train, 4 * 13))).run()
    resumed = Trainer(job("cut"))
    assert resumed.step == 13
    resumed.run()
    first, second = weights_of(tmp_path / "whole"), weights_of(tmp_path / "cut")
    assert all(torch.equal(first[n], second[n]) for n in first)
    a, b = (load_latest(Store(str(tmp_path / n)), whole.fingerprint) for n in ("whole", "cut"))
    assert a is not None and b is not None
    assert all(torch.equal(a.optimizer[n], b.optimizer[n]) for n in a.optimizer if not n.startswith("rng"))
