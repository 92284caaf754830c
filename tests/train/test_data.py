"""Order, balance, tails and resume of the step plan (F63, F64), and the loader's thread."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from app.codecs import Encoded, decoded, encode
from app.errors import UserError
from app.train.alignment import pack
from app.train.data import StepLoader, StepPlan, cut, on_device
from app.train.loss import UnrolledLoss
from tests.test_codecs import tensors
from tests.train.debug import FakeSample, Length, ListSource, debug_draft, debug_head, make_sample, span_mask


def mixed_lengths(n: int = 101) -> list[Length]:
    rng = random.Random(1)
    tokens = [rng.choice([8, 30, 120, 900, 4000]) + rng.randrange(8) for _ in range(n)]
    return [Length(t, t // 2) for t in tokens]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens_per_step", [1, 2000, 8192, 10**9])
def test_every_rank_has_the_same_steps_and_every_row_is_seen_once(world: int, tokens_per_step: int) -> None:
    """F63: 101 rows of very mixed length."""
    plan = StepPlan(mixed_lengths(), tokens_per_step, seed=0, max_tokens=10**6)
    for epoch in range(3):
        steps = plan.epoch(epoch)
        assert len(steps) == plan.steps_per_epoch
        assert all(steps)
        shares = [plan.share(step, world) for step in steps]
        assert all(len(share) == world for share in shares)
        seen = sorted(i for share in shares for rank in share for i in rank)
        assert seen == list(range(101))


def test_steps_hold_about_the_tokens_asked_for_and_ranks_about_the_same_work() -> None:
    plan = StepPlan(mixed_lengths(2000), 20_000, seed=0, max_tokens=10**6)
    sizes = [sum(plan.tokens[i] for i in step) for step in plan.epoch(0)]
    assert max(sizes) < 20_000 + 2 * 4008
    assert min(sizes) > 20_000 - 2 * 4008
    skews = []
    for step in plan.epoch(0):
        loads = [sum(plan.cost[i] for i in rank) for rank in plan.share(step, 4)]
        skews.append(max(loads) / (sum(loads) / 4))
    assert sum(skews) / len(skews) < 1.15


def test_order_depends_on_seed_and_epoch_only() -> None:
    lengths = mixed_lengths()
    one, again = (StepPlan(lengths, 2000, seed=3, max_tokens=10**6) for _ in range(2))
    again.epoch(0)
    assert one.epoch(2) == again.epoch(2)
    assert one.epoch(2) != one.epoch(1)
    assert one.epoch(1) != StepPlan(lengths, 2000, seed=4, max_tokens=10**6).epoch(1)


@pytest.mark.parametrize("killed_at", [10, 13, 20, 29])
def test_resume_gives_the_same_rows_at_every_later_step(killed_at: int) -> None:
    """F64: 3 epochs x 10 steps straight against a stop and a new start."""
    source = ListSource([make_sample(span_mask(12, [(3, 12)]), seed=i) for i in range(40)])
    plan = StepPlan(source.infos, 48, seed=0, max_tokens=512)
    assert plan.steps_per_epoch == 10
    straight = [(s.index, s.epoch, s.samples) for s in StepLoader(source, plan, 2).steps(0, 30)]
    resumed = [(s.index, s.epoch, s.samples) for s in StepLoader(source, plan, 2).steps(killed_at, 30)]
    assert resumed == straight[killed_at:]
    assert [e for _, e, _ in straight] == [i // 10 for i in range(30)]


def test_samples_that_teach_nothing_are_counted_and_left_out() -> None:
    plan = StepPlan([Length(10, 0), Length(10, 4), Length(10, 0)], 100, seed=0, max_tokens=512)
    assert plan.left_out == 2
    assert plan.epoch(0) == [[1]]
    with pytest.raises(UserError, match="two supervised tokens"):
        StepPlan([Length(10, 0)], 100, seed=0, max_tokens=512)


def test_a_too_long_sample_is_cut_with_its_states() -> None:
    sample = make_sample(span_mask(30, [(6, 30)]))
    short = cut(sample, 20)
    assert len(short.token_ids) == 20 and len(short.aux) == 19
    assert short.teacher_pos.tolist() == list(range(6, 19))
    assert pack([short], 3).counts == [13, 12, 11]
    assert cut(sample, 30) is sample
    plan = StepPlan([Length(30, 23)], 100, seed=0, max_tokens=20)
    assert plan.cut == 1 and plan.tokens[0] == 20


def test_a_pass_is_bounded_and_a_rank_without_samples_gets_an_empty_pack() -> None:
    source = ListSource([make_sample(span_mask(20, [(3, 20)]), seed=i) for i in range(5)])
    plan = StepPlan(source.infos, 10**6, seed=0, max_tokens=512)
    (step,) = StepLoader(source, plan, 2, tokens_per_pass=45).steps(0, 1)
    assert [p.tokens for p in step.packs] == [40, 40, 20]
    (idle,) = StepLoader(source, plan, 2, rank=7, world=8).steps(0, 1)
    assert idle.samples == [] and idle.packs[0].counts == [0, 0]


def test_an_error_while_reading_reaches_the_training_thread_and_no_thread_stays() -> None:
    source = ListSource([make_sample(span_mask(20, [(3, 20)]), seed=i) for i in range(8)])
    plan = StepPlan(source.infos, 20, seed=0, max_tokens=512)

    class Broken(ListSource):
        def __getitem__(self, index: int) -> Any:
            raise UserError("part 3 cannot be read")

    with pytest.raises(UserError, match="part 3"):
        list(StepLoader(Broken(source.samples), plan, 2).steps(0, 8))
    steps = StepLoader(source, plan, 2).steps(0, 8)
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    assert not [t for t in threading.enumerate() if t.name == "step-loader"]


def test_packs_keep_the_samples_own_values() -> None:
    source = ListSource([make_sample(span_mask(12, [(3, 12)]), seed=i) for i in range(4)])
    plan = StepPlan(source.infos, 10**6, seed=0, max_tokens=512)
    (step,) = StepLoader(source, plan, 2).steps(0, 1)
    expected = torch.cat([source[i].aux[:10] for i in step.samples])
    assert torch.equal(step.packs[0].aux, expected)


def stored(sample: FakeSample, codec: str) -> FakeSample:
    """`sample` as a reader gives it from a part in `codec`."""
    aux = encode(sample.aux.view(len(sample.aux), 3, -1), codec)
    return replace(sample, aux=aux, teacher=encode(sample.teacher.unsqueeze(1), codec))  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", ["fp8", "int8", "int4"])
def test_packs_carry_encoded_states_and_the_loss_is_that_of_their_values(codec: str) -> None:
    samples = [make_sample(span_mask(20, [(3, 20)]), seed=i) for i in range(6)]
    kept = [stored(s, codec) for s in samples]
    values = [replace(s, aux=decoded(s.aux), teacher=decoded(s.teacher)) for s in kept]
    plan = StepPlan(ListSource(kept).infos, 10**6, seed=0, max_tokens=15)
    head = debug_head()
    losses = []
    for source in (kept, values):
        (step,) = StepLoader(ListSource(source), plan, 2, tokens_per_pass=45).steps(0, 1)
        assert len(step.packs) == 2
        assert all(isinstance(p.aux, Encoded) is isinstance(p.teacher, Encoded) is (source is kept) for p in step.packs)
        elsewhere = step.packs[0].to("meta")  # as on a GPU: every tensor of it moves
        assert all(t.is_meta for s in (elsewhere.aux, elsewhere.teacher) for t in tensors(s))
        moved = next(iter(on_device(iter([step]), torch.device("cpu"))))
        loss = UnrolledLoss(debug_draft(head), head, 2, 0.8, torch.float32)
        losses.append([float(loss(p.to("cpu"))[0].detach()) for p in moved.packs])
    assert losses[0] == losses[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_encoded_packs_reach_the_gpu_as_they_are() -> None:
    kept = [stored(make_sample(span_mask(20, [(3, 20)]), seed=i), "fp8") for i in range(6)]
    plan = StepPlan(ListSource(kept).infos, 60, seed=0, max_tokens=512)
    device = torch.device("cuda")
    there = list(on_device(StepLoader(ListSource(kept), plan, 2, pin=True).steps(0, 2), device))
    here = list(StepLoader(ListSource(kept), plan, 2).steps(0, 2))
    for a, b in zip((p for s in there for p in s.packs), (p for s in here for p in s.packs), strict=True):
        assert isinstance(a.aux, Encoded) and a.aux.data.is_cuda
        assert torch.equal(decoded(a.aux).cpu(), decoded(b.aux))


def test_a_step_mixes_parts_of_several_codecs() -> None:
    samples = [make_sample(span_mask(20, [(3, 20)]), seed=i) for i in range(3)]
    mixed = [samples[0], stored(samples[1], "fp8"), stored(samples[2], "int4")]
    packed = pack(mixed, 2)
    assert torch.equal(decoded(packed.aux), torch.cat([decoded(s.aux)[:18] for s in mixed]))


def test_samples_are_read_at_once_and_keep_their_order() -> None:
    """The first one read waits for another: alone it would never come."""
    source = ListSource([make_sample(span_mask(20, [(3, 20)]), seed=i) for i in range(4)])
    plan = StepPlan(source.infos, 10**6, seed=0, max_tokens=512)
    together = threading.Barrier(2, timeout=30)

    class Slow(ListSource):
        def __getitem__(self, index: int) -> Any:
            together.wait()
            return self.samples[index]

    (step,) = StepLoader(Slow(source.samples), plan, 2).steps(0, 1)
    assert torch.equal(step.packs[0].aux, torch.cat([source[i].aux[:18] for i in step.samples]))  # type: ignore[arg-type]
