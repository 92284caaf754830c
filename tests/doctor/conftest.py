"""One whole healthy run that the tests copy and spoil."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app.config import Config
from tests.doctor.tiny_run import Target, benched, generated, run_config, trained


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Several threads gain nothing on tensors of this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def target(tiny: Path) -> Target:
    return Target(tiny)


@pytest.fixture(scope="package")
def healthy(tiny: Path, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run whose draft has learnt something: about half of its first tokens are accepted."""
    config = run_config(
        tiny, tmp_path_factory.mktemp("healthy"), 60,
        train__epochs=20, train__learning_rate=5e-3, storage__rows_per_part=20,
    )  # fmt: skip
    benched(trained(generated(config, target)))
    return config
