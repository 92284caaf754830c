"""`draftmill lint DIR`: the differences of a checkpoint, which engines serve it, and the commands that do."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from app.checkpoint_files import PICKLED_FILE, read_config, read_tensors, weight_files
from app.config import EvaluateConfig
from app.errors import UserError
from app.lint.check import check_draft, left_out
from app.lint.difference import ENGINES, Difference, errors_of, format_differences
from app.serving import SERVE_FILE, serve_commands, serving_name
from app.target import TargetInfo, inspect_target, load_target_head


@dataclass(frozen=True)
class LintReport:
    """What lint found in a folder."""

    folder: str
    differences: list[Difference]
    engines: tuple[str, ...]  # checked
    left_out: dict[str, str]  # engine: why it was not
    commands: dict[str, str]  # engine: the command that serves it, where it passes
    num_draft_tokens: int
    notes: list[str] = field(default_factory=list)

    @property
    def passes(self) -> bool:
        return not errors_of(self.differences)

    def lines(self, width: int) -> list[str]:
        """For people: the table, a verdict for each engine, what was not looked at, the commands."""
        out = [f"{self.folder}", *format_differences(self.differences, width).splitlines(), ""]
        out += [f"{engine}: {self._verdict(engine)}" for engine in self.engines]
        out += [f"{engine}: left out, {reason}" for engine, reason in self.left_out.items()]
        out += [f"note: {note}" for note in self.notes]
        for engine, command in self.commands.items():
            out += ["", f"{engine}, {self.num_draft_tokens} draft tokens a step:", f"  {command}"]
        return out

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": self.folder,
            "passes": self.passes,
            "engines": {engine: not errors_of(self.differences, engine) for engine in self.engines},
            "left_out": self.left_out,
            "differences": [difference.to_json() for difference in self.differences],
            "notes": self.notes,
            "num_draft_tokens": self.num_draft_tokens,
            "serve": self.commands,
        }

    def _verdict(self, engine: str) -> str:
        errors = len(errors_of(self.differences, engine))
        warnings = sum(d.severity == "warning" and engine in d.engines for d in self.differences)
        said = f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}"
        return f"would not serve it as trained: {said}" if errors else f"passes: {said}"


def lint(
    folder: str,
    target_name: str | None = None,
    engine: str | None = None,
    draft_tokens: int | None = None,
    trust_remote_code: bool = False,
) -> LintReport:
    """Check the draft in `folder`, ours or anyone's; needs no engine and no GPU.

    Args:
        folder: with config.json and weights (safetensors, one file or several, or pickled tensors).
        target_name: the target it is for, as in `target.model`; without it less can be compared.
        engine: only this one of `ENGINES`; by default those that can serve a draft of this kind.
        draft_tokens: for the serve commands; by default what the folder says.

    Raises:
        UserError: there is no readable checkpoint, or no such target.
    """
    path = Path(folder).expanduser()
    config, tensors = read_config(path), read_tensors(path)
    target = inspect_target(target_name, trust_remote_code=trust_remote_code) if target_name is not None else None
    embed, notes = _target_embedding(target, tensors)
    if target is None:
        notes.append(
            "without --target the vocabulary, layers, context and embedding are not compared with the target's"
        )
    if weight_files(path)[0].endswith(".bin"):
        notes.append(f"{PICKLED_FILE} is pickled: save the weights as model.safetensors before you pass them on")
    excluded = left_out(config, tensors, target) if engine is None else {}
    engines = (engine,) if engine is not None else tuple(e for e in ENGINES if e not in excluded)
    differences = check_draft(config, tensors, target, embed, engines=engines)
    k = draft_tokens or _said_tokens(path, config) or EvaluateConfig().num_draft_tokens
    refused = [e for e in ENGINES if e not in engines or errors_of(differences, e)]
    commands = serve_commands(_target_of(target, config), path.resolve(), k, dict.fromkeys(refused, ""))
    return LintReport(str(path), differences, engines, excluded, commands, k, notes)


def as_json(report: LintReport) -> str:
    return json.dumps(report.to_json(), indent=2, ensure_ascii=False)


def _target_embedding(target: TargetInfo | None, tensors: dict[str, Tensor]) -> tuple[Tensor | None, list[str]]:
    """The target's embedding [V, H] to compare with, and a note where it cannot be read."""
    if target is None or not any(name.endswith("embed_tokens.weight") for name in tensors):
        return None, []
    try:
        return load_target_head(target).embed_tokens, []
    except UserError as error:
        return None, [f"the embedding is not compared with the target's: {error}"]


def _said_tokens(folder: Path, config: dict[str, Any]) -> int | None:
    """The number of draft tokens in the folder's serve.json, or in a speculators config."""
    try:
        said = json.loads((folder / SERVE_FILE).read_text(encoding="utf-8"))["num_draft_tokens"]
    except (OSError, ValueError, KeyError, TypeError):
        try:
            said = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
        except (KeyError, IndexError, TypeError):
            return None
    return said if type(said) is int and said > 0 else None


def _target_of(target: TargetInfo | None, config: dict[str, Any]) -> str:
    """The target's name in the commands: the one given, else the one a speculators config names."""
    if target is not None:
        return serving_name(target)
    try:
        return str(config["speculators_config"]["verifier"]["name_or_path"])
    except (KeyError, TypeError):
        return "TARGET"
