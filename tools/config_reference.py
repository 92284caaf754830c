"""Prints docs/configuration.md from the configuration's own fields: `python tools/config_reference.py > docs/...`."""

from __future__ import annotations

from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from app.config import Config, SourceConfig

_HEAD = """# Configuration

Every key with its default, made from `app/config.py` by `python tools/config_reference.py`. Values come from the YAML
file, then from `section.key=value` on the command line. Unknown keys are errors. `sources` is a list; its first entry
is `sources.0`.
"""


def type_name(annotation: Any) -> str:
    """The type as a person would write it."""
    if getattr(annotation, "__origin__", None) is not None and str(annotation).startswith("typing.Literal"):
        return " \\| ".join(map(str, get_args(annotation)))
    if get_origin(annotation) is Union:
        return " \\| ".join(type_name(a) for a in get_args(annotation))
    if get_origin(annotation) is Annotated:
        return type_name(get_args(annotation)[0])
    text = getattr(annotation, "__name__", None) if isinstance(annotation, type) else str(annotation)
    return str(text).replace("typing.", "").replace("|", "\\|").replace("NoneType", "None").replace("None", "null")


def table(model: type[BaseModel], prefix: str) -> list[str]:
    lines = ["| key | type | default | what |", "| --- | --- | --- | --- |"]
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            lines += table(annotation, f"{prefix}{name}.")[2:]
            continue
        default = field.get_default(call_default_factory=True)
        shown = "required" if default is PydanticUndefined else "null" if default is None else str(default)
        lines.append(f"| `{prefix}{name}` | {type_name(annotation)} | {shown} | {field.description or ''} |")
    return lines


def reference() -> str:
    """The whole page."""
    lines = [_HEAD]
    plain = [n for n, f in Config.model_fields.items() if not _section(f.annotation) and n != "sources"]
    for name in plain:
        field = Config.model_fields[name]
        lines.append(f"`{name}` (default `{field.default}`): {field.description}.\n")
    for name, field in Config.model_fields.items():
        section = SourceConfig if name == "sources" else field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            prefix = "sources.N." if name == "sources" else f"{name}."
            lines += [f"## {name}\n", *table(section, prefix), ""]
    return "\n".join(lines)


def _section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


if __name__ == "__main__":
    print(reference(), end="")
