"""The recipes that are committed: valid, and what their first lines say."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.config import load_config
from app.target import default_aux_layers

FOLDER = Path(__file__).parents[1] / "configs"
RECIPES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_is_valid_and_its_sources_are_told_apart(path: Path) -> None:
    config = load_config(str(path), [])
    names = [s.name for s in config.sources]
    assert all(names) and len(set(names)) == len(names)
    assert path.stem in config.run_dir
    assert path.read_text().startswith("# ")


def test_kimis_hundred_thousand() -> None:
    config = load_config(str(FOLDER / "kimi-k2.5-100k.yaml"), [])
    as_they_are = {"kimi-swe": 2800, "kimi-2000x": 2000}  # whole, as their names say
    counts = {s.name: s.count or as_they_are[str(s.name)] for s in config.sources}
    assert sum(counts.values()) == 100_000
    assert {s.name for s in config.sources if s.use == "as_is"} == as_they_are.keys()
    assert counts["swe-agent"] == 10_000
    assert tuple(config.capture.layers or ()) == (2, 30, 58) == tuple(default_aux_layers(61))
    assert config.generate.max_length == 8192 and config.ingest.over == "cut_end"
    assert config.vocab.size == 32_000


def test_own_conversations_are_private_and_a_tenth() -> None:
    config = load_config(str(FOLDER / "kimi-k2.5-own.yaml"), [])
    own = [s for s in config.sources if s.private]
    general = sum(s.count or 0 for s in config.sources if not s.private)
    assert len(own) == 1 and 500 <= (own[0].count or 0) <= 1000
    assert 5_000 <= general <= 10_000
    assert config.ingest.redact
