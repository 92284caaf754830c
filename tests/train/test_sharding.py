"""Weights spread over the workers compute what whole ones do."""

from __future__ import annotations

import os
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from app.storage import Store
from app.train.activations import Rows
from app.train.sharding import is_sharded
from app.train.state import read_weights
from app.train.trainer import Trainer
from tests.train.debug import run_workers
from tests.train.test_trainer import KilledAt, mixed_job, weights_of

# Of its documents the longest need steps made again, and no two share a pass.
TIGHT: dict[str, Any] = {"activation_gib": 4e-4, "embedding_device": "cpu"}


def _worker(
    rank: int, world: int, folder: str, address: str, shard: bool, fail_at: int | None, settings: dict[str, Any]
) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=world)
    job = mixed_job(Path(folder))
    job = replace(job, config=job.config.model_copy(update={"shard": shard, **settings}))
    if fail_at is not None and rank == 1:
        job = replace(job, train=KilledAt(job.train, fail_at))  # type: ignore[arg-type]
    trainer = Trainer(job)
    assert is_sharded(trainer.draft) == shard
    longest = Rows.most(60, 58, job.config.unroll_steps)
    assert (trainer.activations.again(longest) > 0) == ("activation_gib" in settings)
    held = sum(p.to_local().numel() if shard else p.numel() for p in trainer.draft.parameters())  # type: ignore[attr-defined]
    whole = sum(p.numel() for p in trainer.draft.parameters())
    assert held == whole if not shard else held < 0.6 * whole
    trainer.run()
    dist.destroy_process_group()


def train(folder: Path, shard: bool, fail_at: int | None = None, world: int = 2, **settings: Any) -> None:
    address = folder.parent / f"rendezvous-{uuid.uuid4().hex}"
    run_workers(_worker, (world, str(folder), str(address), shard, fail_at, settings), world)


def test_sharded_equals_whole_and_goes_on_after_a_death_and_as_either(tmp_path: Path) -> None:
    train(tmp_path / "whole", shard=False)
    train(tmp_path / "sharded", shard=True)
    whole, sharded = weights_of(tmp_path / "whole"), weights_of(tmp_path / "sharded")
    train(tmp_path / "tight", shard=True, **TIGHT)
    tight = weights_of(tmp_path / "tight")
    for name in whole:
        torch.testing.assert_close(whole[name], sharded[name], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(whole[name], tight[name], rtol=1e-4, atol=1e-5)
    train(tmp_path / "bytes", shard=True, optimizer_state="8bit")
    start, moved = dict(mixed_job(tmp_path / "new").draft.named_parameters()), weights_of(tmp_path / "bytes")
    for name, first in start.items():
        way = (whole[name] - first).detach().abs().mean()
        assert float((moved[name] - whole[name]).abs().mean()) < 0.1 * float(way), name
    with pytest.raises(mp.ProcessRaisedException):
        train(tmp_path / "killed", shard=True, fail_at=60)
    saved = read_weights(Store(str(tmp_path / "killed")), "last")[1]
    assert 0 < saved["step"] < saved["total_steps"]
    for name in ("again", "other"):
        os.system(f"cp -r {tmp_path}/killed {tmp_path}/{name}")
    train(tmp_path / "again", shard=True)
    resumed = weights_of(tmp_path / "again")
    assert all(torch.equal(resumed[n], sharded[n]) for n in sharded)
    train(tmp_path / "other", shard=False)  # a checkpoint is whole whoever wrote it
    for name, tensor in weights_of(tmp_path / "other").items():
        torch.testing.assert_close(tensor, sharded[name], rtol=1e-4, atol=1e-5)
