"""One finished run for all tests of this folder; a test that changes it takes a copy."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from app.target import TargetInfo
from tests.report.made import make_run


@pytest.fixture(scope="session")
def finished(tiny: Path, tiny_target: TargetInfo, tiny_embed: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run."""
    return make_run(tiny, tmp_path_factory.mktemp("finished"), tiny_target, tiny_embed)
