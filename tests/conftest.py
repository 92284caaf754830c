"""Session fixtures: the tiny targets every test shares."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from app.checkpoint import write_checkpoint
from app.target import TargetInfo, inspect_target, load_target_head
from tests.drafts import draft_config, random_tensors
from tests.tiny import make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the base TINY target."""
    return make_tiny(tmp_path_factory.mktemp("targets") / "tiny")


@pytest.fixture(scope="session")
def tiny_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY whose output head is its embedding."""
    return make_tiny(tmp_path_factory.mktemp("targets") / "tiny-tied", "tied")


@pytest.fixture(scope="session")
def tiny_5l(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY with five layers, where the default auxiliary layer ids collapse."""
    return make_tiny(tmp_path_factory.mktemp("targets") / "tiny-5l", "5L")


@pytest.fixture(scope="session")
def tiny_llama3rope(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY with a scaled rotary embedding."""
    return make_tiny(tmp_path_factory.mktemp("targets") / "tiny-llama3rope", "llama3rope")


@pytest.fixture(scope="session")
def tiny_target(tiny: Path) -> TargetInfo:
    """What the product knows of TINY."""
    return inspect_target(str(tiny))


@pytest.fixture(scope="session")
def tiny_embed(tiny_target: TargetInfo) -> Tensor:
    """TINY's embedding [V, H] bf16."""
    return load_target_head(tiny_target).embed_tokens


@pytest.fixture
def tiny_draft(tiny_target: TargetInfo, tiny_embed: Tensor, tmp_path: Path) -> Path:
    """A right draft checkpoint for TINY, to break."""
    config = draft_config(tiny_target)
    return write_checkpoint(tmp_path / "draft", config, random_tensors(config), tiny_embed, tiny_target)


@pytest.fixture
def quiet_log() -> Iterator[None]:
    """For tests that call the command line in this process: its log handler, made for their stderr, goes with them."""
    log = logging.getLogger("draftmill")
    handlers, propagate, level = list(log.handlers), log.propagate, log.level
    log.handlers = []
    yield
    log.handlers, log.propagate = handlers, propagate
    log.setLevel(level)
