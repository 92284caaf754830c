"""The configuration: typos are named, overrides reach every key, secrets are refused."""

from pathlib import Path

import pytest
import yaml

from app.cluster import connect
from app.config import Config, RayConfig, load_config
from app.errors import UserError

SOURCE = "sources=[{path: a.jsonl}]"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([SOURCE, "train.epoch=2"], ["train.epoch", "did you mean 'train.epochs'"]),
        (["sources=[{pth: a}]"], ["sources.0.pth", "sources.0.path"]),
        (["sources=[{name: a}]"], ["sources.0", "`path` or `dataset`"]),
        ([SOURCE, "trian.epochs=1"], ["unknown key 'trian'", "'train'"]),
        ([SOURCE, "train.epochs=many"], ["train.epochs", "'many'"]),
        ([SOURCE, "train.epochs=-1"], ["train.epochs", "-1"]),
        (["sources=[{path: x, columns: {promt: a}}]"], ["sources.0.columns", "promt", "prompt"]),
        ([SOURCE, "generate"], ["'generate'", "section.key=value"]),
        ([SOURCE, "run_dir.x=1"], ["run_dir", "valid string"]),
        ([SOURCE, "storage.options.secret=abc"], ["storage.options.secret", "environment"]),
        ([SOURCE, "run_dir=s3://me:pass@host/x"], ["run_dir", "secret"]),
        (["sources=[{path: x/a.jsonl}, {path: y/a.jsonl}]"], ["'a'", "name"]),
        (["run_dir=/x"], ["'sources'", "missing"]),
    ],
)
def test_faults_are_one_sentence_that_names_the_key(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as fault:
        load_config(None, overrides)
    assert all(word in str(fault.value) for word in words), str(fault.value)
    assert "\n" not in str(fault.value)


def test_overrides_take_numbers_lists_and_list_entries(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("sources: [{path: a.jsonl}]\ntrain: {epochs: 2}\n")
    config = load_config(str(path), ["train.learning_rate=1e-3", "sources.0.limit=5", "capture.layers=[1, 2, 3]"])
    assert config.train.learning_rate == 1e-3
    assert config.train.epochs == 2
    assert config.sources[0].limit == 5
    assert config.capture.layers == [1, 2, 3]


def test_a_file_that_is_not_yaml_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("a: 1\nb: [1,\n")
    with pytest.raises(UserError, match=r"c\.yaml line 3"):
        load_config(str(path), [])
    with pytest.raises(UserError, match="No such file"):
        load_config(str(tmp_path / "absent.yaml"), [])


def test_what_is_printed_is_what_is_read() -> None:
    config = load_config(None, [SOURCE])
    assert Config.model_validate(yaml.safe_load(config.to_yaml())) == config


def test_trust_remote_code_is_off_unless_asked_for() -> None:
    assert load_config(None, [SOURCE]).target.trust_remote_code is False


@pytest.mark.parametrize("value", ["0", "-1", "lots", "true"])
def test_a_budget_for_activations_is_gib_or_auto(value: str) -> None:
    with pytest.raises(UserError, match=r"train\.activation_gib = .*: give GiB above 0, or auto$"):
        load_config(None, [SOURCE, f"train.activation_gib={value}"])
    assert load_config(None, [SOURCE, "train.activation_gib=1.5"]).train.activation_gib == 1.5


def test_the_reference_is_up_to_date() -> None:
    from tests.runs import ROOT
    from tools.config_reference import reference

    assert (ROOT / "docs" / "configuration.md").read_text() == reference()


def test_the_dashboards_address_is_told_from_a_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"ray\.address = .*that is a dashboard.*give HOST:6379"):
        load_config(None, [SOURCE, "ray.address=http://head:8265"])
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    with pytest.raises(UserError, match=r"RAY_ADDRESS is http://head:8265, the dashboard .* set ray.address=HOST:6379"):
        connect(RayConfig())
