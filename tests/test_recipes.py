"""The recipes that are committed: valid, what their first lines say, and planned against a hub served here.

The hub has a tenth of the rows that each recipe draws and a few more; the draws are a tenth too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.config import Config, SourceConfig, load_config
from app.plan.cost import Shape, shape_of
from app.plan.hardware import Described, find_hardware, rough_rates
from app.sources.shapes import to_raw
from app.target import default_aux_layers, inspect_target
from tests.runs import draftmill, write_rows
from tests.sources.hub_server import Hub, serving
from tests.sources.recipe_hub import LAYOUTS, repositories
from tests.sources.test_hub_http import environment

FOLDER = Path(__file__).parents[1] / "configs"
RECIPES = sorted(FOLDER.glob("*.yaml"))
OF_THE_HUB = ("kimi-k2.5-100k", "kimi-k2.5-own", "llama-3.1-8b", "qwen3-8b")
# Taken whole: the rows of the one as counted by others, of the other as its name says.
WHOLE = {"kimi-swe": 2809, "kimi-2000x": 2000}
IDS = {"kimi-swe": "SWE-Factory/DeepSWE-Agent-Kimi-K2-Trajectories-2.8K", "kimi-2000x": "crownelius/KimiK2.5-2000x"}
TENTH = {IDS[name]: round(rows / 10) for name, rows in WHOLE.items()}
MORE = 2530  # rows of every other dataset: a tenth of the largest draw, and what is left out of it

# Dataset -> shape, and the roles of a row.
SHAPES: dict[str, tuple[str, str]] = {
    "nebius/SWE-agent-trajectories": ("trajectory", "system user assistant user assistant"),
    "SWE-Factory/DeepSWE-Agent-Kimi-K2-Trajectories-2.8K": ("messages", "system user assistant user assistant"),
    "crownelius/KimiK2.5-2000x": ("prompt_response", "user assistant"),
    "Team-ACE/ToolACE": ("sharegpt", "system user assistant tool assistant"),
    "NousResearch/hermes-function-calling-v1": ("sharegpt", "system user assistant tool assistant"),
    "open-r1/Mixture-of-Thoughts": ("messages", "user assistant"),
    "open-thoughts/OpenThoughts-114k": ("sharegpt", "system user assistant"),
    "mlabonne/open-perfectblend": ("sharegpt", "user assistant"),
    "HuggingFaceH4/ultrachat_200k": ("messages", "user assistant user assistant"),
    "anon8231489123/ShareGPT_Vicuna_unfiltered": ("sharegpt", "user assistant user assistant"),
}


def loaded(name: str) -> Config:
    return load_config(str(FOLDER / f"{name}.yaml"), [])


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_is_valid_and_its_sources_are_told_apart(path: Path) -> None:
    config = load_config(str(path), [])
    names = [s.name for s in config.sources]
    assert all(names) and len(set(names)) == len(names)
    assert path.stem in config.run_dir
    assert path.read_text().startswith("# ")


def test_kimis_hundred_thousand() -> None:
    config = loaded("kimi-k2.5-100k")
    counts = {s.name: s.count or WHOLE[str(s.name)] for s in config.sources}
    assert sum(counts.values()) == 100_000
    assert {s.name for s in config.sources if s.use == "as_is"} == WHOLE.keys()
    assert counts["swe-agent"] == 10_000
    assert tuple(config.capture.layers or ()) == (2, 30, 58) == tuple(default_aux_layers(61))
    assert config.generate.max_length == 8192 and config.ingest.over == "cut_end"
    assert config.vocab.size == 32_000


def test_own_conversations_are_private_and_a_tenth() -> None:
    config = loaded("kimi-k2.5-own")
    own = [s for s in config.sources if s.private is True]
    general = sum(s.count or 0 for s in config.sources if not s.private)
    assert len(own) == 1 and 500 <= (own[0].count or 0) <= 1000
    assert 5_000 <= general <= 10_000
    assert config.ingest.redact


@pytest.mark.parametrize("name", ["kimi-k2.5-100k", "kimi-k2.5-own", "qwen3-8b"])
def test_a_target_that_thinks_is_not_stopped_by_long_thoughts(name: str) -> None:
    """Dropped, they would count as failed rows, of which 5 % end the run."""
    generate = loaded(name).generate
    assert (generate.thinking_only, generate.length_stopped) == ("keep", "keep")


def test_the_hub_has_what_the_recipes_name() -> None:
    named = {s.dataset or "/".join(str(s.path).removeprefix("hf://datasets/").split("/")[:2])
             for path in RECIPES for s in load_config(str(path), []).sources
             if s.dataset or str(s.path).startswith("hf://")}  # fmt: skip
    assert named == LAYOUTS.keys() == SHAPES.keys()


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_shape_of_each_dataset_is_recognised(name: str) -> None:
    raw = to_raw(json.loads(json.dumps(LAYOUTS[name][0](3))), {})
    shape, roles = SHAPES[name]
    assert (raw.shape, " ".join(m["role"] for m in raw.messages)) == (shape, roles)
    assert all(m["content"] for m in raw.messages)
    assert bool(raw.tools) == ("hermes" in name)
    assert bool(raw.messages[-1].get("reasoning_content")) == ("2000x" in name)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the targets of the hub lie."""
    return tmp_path_factory.mktemp("targets")


@pytest.fixture(scope="module")
def hub(made: Path) -> Iterator[Hub]:
    with serving(repositories(made, TENTH, MORE)) as served:
        yield served


Planned = tuple[dict[str, Any], str, str]  # plan.json, what was printed, what was logged


@pytest.fixture(scope="module")
def plan_of(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Planned]:
    """The plan of a recipe by its name, made once."""
    made: dict[str, Planned] = {}

    def plan(name: str) -> Planned:
        if name not in made:
            made[name] = planned(name, hub, tmp_path_factory.mktemp("plan"))
        return made[name]

    return plan


def tenth(source: SourceConfig) -> int:
    """The rows that a tenth of the recipe's draw keeps."""
    return round((source.count or WHOLE[str(source.name)]) / 10)


def planned(name: str, hub: Hub, folder: Path) -> Planned:
    """`draftmill plan` for eight H200 GPUs with 20 TB free."""
    changes = [f"run_dir={folder}/run", "ingest.workers=2"]
    for number, source in enumerate(loaded(name).sources):
        if source.private:
            rows = [{"prompt": f"What does the mill earn on day {i}?"} for i in range(200)]
            changes.append(f"sources.{number}.path={write_rows(folder / 'own.jsonl', rows)}")
        if source.count:
            changes.append(f"sources.{number}.count={tenth(source)}")
    machine = ["--nodes", "1", "--gpus-per-node", "8", "--gpu", "H200", "--disk-free", "20"]
    done = draftmill(
        "plan", str(FOLDER / f"{name}.yaml"), *changes, *machine, env=environment(hub, folder / "hf"), timeout=600
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return json.loads((folder / "run/plan.json").read_text()), done.stdout, done.stderr


def told(logged: str) -> list[str]:
    """Lines of draftmill's own log: a plan without a fault has none."""
    return re.findall(r"^\d\d:\d\d:\d\d .*", logged, re.MULTILINE)


@pytest.mark.parametrize("name", OF_THE_HUB)
def test_draftmill_plan_finds_the_rows_of_every_source_and_warns_of_nothing(
    plan_of: Callable[[str], Planned], name: str
) -> None:
    plan, said, logged = plan_of(name)
    config = loaded(name)
    assert {s["name"]: s["rows"] for s in plan["sources"]} == {s.label: tenth(s) for s in config.sources}
    assert [s["use"] for s in plan["sources"]] == [s.use for s in config.sources]
    assert plan["max_length"] == config.generate.max_length
    assert plan["fits"] and "verdict      fits" in said
    assert not told(logged)
    # Of ShareGPT a few conversations are empty; nothing else is lost.
    lost = [a for a in plan["assumptions"] if "rejected" in a or "repeat" in a or "no rows" in a]
    assert all(a.startswith("sharegpt: 0.") for a in lost), lost


def test_the_plan_of_a_hundred_thousand_is_the_size_that_was_asked_for(
    plan_of: Callable[[str], Planned], made: Path
) -> None:
    plan, _, _ = plan_of("kimi-k2.5-100k")
    assert plan["rows"] == 10_000  # a tenth
    tokens = plan["prompt_tokens"] + plan["answer_tokens"]
    assert plan["forms"]["four states of every token, bfloat16"] == pytest.approx(57_344 * tokens)
    # The trajectory that is too long keeps its beginning.
    assert {s["name"]: s["longest"] for s in plan["sources"]}["kimi-swe"] == 8192
    shape = kimis_shape(made)
    assert (shape.hidden, shape.layers, shape.vocab, shape.draft_vocab) == (7168, 61, 163_840, 32_000)


def kimis_shape(made: Path) -> Shape:
    return shape_of(inspect_target(str(made / "kimi"), trust_remote_code=True), loaded("kimi-k2.5-100k"))


def test_a_rough_rate_counts_the_weights_of_all_experts(hub: Hub, made: Path, tmp_path: Path) -> None:
    """2,300 tokens/s were measured by others; by the active parameters alone it would be 37,000."""
    config = loaded("kimi-k2.5-100k").model_copy(update={"run_dir": str(tmp_path)})
    machine = find_hardware(config, Described(nodes=1, gpus_per_node=8, gpu_name="H200"))
    shape = replace(kimis_shape(made), target_bytes=595 * 10**9)
    rate = rough_rates(shape, config, machine, 0.6).generate_tokens_per_s.value
    assert 2_300 / 2 < rate < 2_300 * 2
    smaller = replace(shape, target_bytes=60 * 10**9)  # then the arithmetic of the active ones is what counts
    assert rough_rates(smaller, config, machine, 0.6).generate_tokens_per_s.value > 30_000


def test_the_laptops_recipe_is_planned_without_a_hub(tmp_path: Path) -> None:
    done = draftmill("plan", str(FOLDER / "smollm2-cpu.yaml"), f"run_dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr[-2000:]
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    assert plan["fits"] and plan["rows"] == 400 and not told(done.stderr)
