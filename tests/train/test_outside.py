"""The teacher's mass outside the draft vocabulary, against the whole softmax."""

from __future__ import annotations

import pytest
import torch

from app.train import outside
from app.train.loss import Teacher
from app.train.outside import outside_vocabulary
from tests.train.debug import ListSource, debug_config, debug_head, kept_ids, random_samples


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_mass_and_first_choices_are_those_of_the_whole_softmax(temperature: float) -> None:
    head, ids, samples = debug_head(), kept_ids(debug_config()), random_samples(9, seed=3, longest=40)
    found = outside_vocabulary(Teacher(head, ids, torch.float32), ListSource(samples), temperature)
    states = torch.cat([s.teacher for s in samples])
    logits = head.logits(states)
    masses = 1 - (logits / temperature).softmax(-1)[:, ids].sum(-1)
    assert found["rows"] == len(states) and found["temperature"] == temperature
    assert found["mass"] == pytest.approx(float(masses.mean()), rel=1e-4)
    assert found["first"] == pytest.approx(float((~torch.isin(logits.argmax(-1), ids)).double().mean()))
    assert 0.3 < found["mass"] < 0.8


def test_a_whole_vocabulary_loses_nothing_and_an_empty_source_is_no_fault() -> None:
    teacher = Teacher(debug_head(), torch.arange(96), torch.float32)
    assert outside_vocabulary(teacher, ListSource(random_samples(4)))["mass"] == 0.0
    assert outside_vocabulary(teacher, ListSource([]))["rows"] == 0


def test_only_a_spread_part_of_a_large_source_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "SAMPLES", 5)
    monkeypatch.setattr(outside, "ROWS", 4)
    read: list[int] = []

    class Counting(ListSource):
        def __getitem__(self, index: int) -> object:
            read.append(index)
            return super().__getitem__(index)

    source = Counting(random_samples(40, longest=60))
    found = outside_vocabulary(Teacher(debug_head(), torch.arange(50), torch.float32), source)
    assert read == [0, 8, 16, 24, 32]
    assert 0 < found["rows"] <= 5 * 7
