"""The command line takes its words in any order a person writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli import run
from tests.runs import prompts, write_rows


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "c.yaml"
    path.write_text(f"sources: [{{path: {write_rows(tmp_path / 'r.jsonl', prompts(3))}}}]\n")
    return str(path)


@pytest.mark.parametrize(
    "words",
    [
        ["train.epochs=2", "vocab.size=64", "--print-config"],
        ["--print-config", "train.epochs=2", "vocab.size=64"],
        ["train.epochs=2", "--print-config", "vocab.size=64"],
    ],
)
def test_overrides_stand_anywhere(config: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", config, *words]) == 0
    printed = capsys.readouterr().out
    assert "epochs: 2.0" in printed and "size: 64" in printed


def test_the_format_of_an_export_is_an_override(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", config, "--format", "speculators", "--print-config"]) == 0
    assert "format: speculators" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--prnt-config"], ["--print-config", "no override"], ["--print-config", "-x=1"]])
def test_a_word_that_fits_nowhere_is_refused(config: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(["run", config, *words])
    assert stopped.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err
