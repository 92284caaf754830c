"""What vLLM's class for a target can do, read from vLLM's source: nothing is imported, no weight is loaded.

To import vLLM takes seconds and a whole process; its registry and class heads are plain text. Three facts matter:
which class serves an architecture, whether that class gives auxiliary hidden states (`SupportsEagle3` among its
bases), and whether it passes them on between pipeline ranks.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from app.errors import UserError

log = logging.getLogger("draftmill")

_AUXILIARY, _DECODER = "SupportsEagle3", "EagleModelMixin"
_OVER_PIPELINE = "supports_aux_hidden_states_over_pp"
_MODELS = "model_executor/models"


def check_model_class(architecture: str, engine_args: dict[str, Any]) -> None:
    """Refuse a target whose vLLM class gives no auxiliary states, and pipeline parallelism.

    Says so in the log where vLLM is not installed here; the engine's own start decides then.

    Raises:
        UserError: names the class.
    """
    pipeline = int(engine_args.get("pipeline_parallel_size") or 1)
    source = vllm_source()
    if source is None:
        log.warning("vLLM is not installed here: whether it can capture %s shows when the engine starts", architecture)
    elif engine_args.get("model_impl") != "transformers" and gives_auxiliary_states(source, architecture) is False:
        raise UserError(
            f"{architecture} gives no auxiliary hidden states in the vLLM that is installed, so no EAGLE-3 draft can"
            " be trained or served for it; choose a target that does (docs/targets.md) or another vLLM version"
        )
    if pipeline > 1:
        raise UserError(f"generate.engine_args.pipeline_parallel_size is {pipeline}: {_pipeline(source, architecture)}")


def _pipeline(source: Path | None, architecture: str) -> str:
    way_out = "leave it out, and use generate.replicas for more GPUs"
    if source is not None and passes_over_pipeline(source, architecture):
        return f"draftmill does not collect the auxiliary states that {architecture} passes between ranks; {way_out}"
    return f"{architecture} does not pass its auxiliary states from one pipeline rank to the next; {way_out}"


def vllm_source() -> Path | None:
    """Folder of the installed vLLM package, or None."""
    spec = importlib.util.find_spec("vllm")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def gives_auxiliary_states(source: Path, architecture: str) -> bool | None:
    """Whether the class of `architecture` gives auxiliary states; None where its source does not tell."""
    found = _class_of(source, architecture)
    if found is None:
        return None
    classes = list(_family(*found))
    return any(node.name == _AUXILIARY for _, node in classes) if classes else None


def passes_over_pipeline(source: Path, architecture: str) -> bool:
    """Whether the decoder of the class of `architecture` passes auxiliary states between pipeline ranks."""
    found = _class_of(source, architecture)
    for path in dict.fromkeys(path for path, _ in _family(*found)) if found is not None else ():
        decoders = [[node for _, node in _family(path, name)] for name in _classes(path)]
        decoders = [family for family in decoders if any(node.name == _DECODER for node in family)]
        if decoders:  # in the nearest file that has one
            return any(
                next((f for node in family if (f := _flag(node, _OVER_PIPELINE)) is not None), False)
                for family in decoders
            )
    return False


def _class_of(source: Path, architecture: str) -> tuple[Path, str] | None:
    """File and name of the class that vLLM's registry gives for `architecture`."""
    path = source / _MODELS / "registry.py"
    if not path.exists():
        return None
    for node in ast.walk(_tree(path)):
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == architecture and isinstance(value, ast.Tuple):
                module, name = (part.value for part in value.elts if isinstance(part, ast.Constant))
                file = _file(path, str(module), 0 if "." in str(module) else 1)
                return (file, str(name)) if file is not None else None
    return None


def _family(
    path: Path, name: str, seen: frozenset[tuple[Path, str]] = frozenset()
) -> Iterator[tuple[Path, ast.ClassDef]]:
    """The class `name` of a file and its ancestors within vLLM, nearest first."""
    if (path, name) in seen:
        return
    seen |= {(path, name)}
    node = _classes(path).get(name)
    if node is not None:
        yield path, node
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(base, ast.Name):
                yield from _family(path, base.id, seen)
        return
    for imported in ast.walk(_tree(path)):
        if isinstance(imported, ast.ImportFrom):
            for alias in imported.names:
                if (alias.asname or alias.name) == name and (file := _file(path, imported.module, imported.level)):
                    yield from _family(file, alias.name, seen)
                    return


def _file(path: Path, module: str | None, level: int) -> Path | None:
    """The file of `from <level dots><module> import` in `path`, or None where it is not vLLM's."""
    parts = module.split(".") if module else []
    if level == 0:
        root = next((p for p in path.parents if p.name == "vllm"), None)
        if root is None or not parts or parts[0] != "vllm":
            return None
        folder, parts = root, parts[1:]
    else:
        folder = path.parents[level - 1]
    target = folder.joinpath(*parts)
    return next((f for f in (target.with_name(target.name + ".py"), target / "__init__.py") if f.exists()), None)


def _flag(node: ast.ClassDef, name: str) -> bool | None:
    """The truth value that a class body gives `name`."""
    for line in node.body:
        target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
        value = getattr(line, "value", None)
        if isinstance(target, ast.Name) and target.id == name and isinstance(value, ast.Constant):
            return bool(value.value)
    return None


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _classes(path: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.walk(_tree(path)) if isinstance(node, ast.ClassDef)}
