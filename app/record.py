"""What states were captured from: kept with every part, and compared before anything is learnt from it.

Fields: `layers` (the three k), `teacher_layer` (n), `convention`, `pre_norm` (the final norm is not applied yet),
`dtype`, `hidden_size`, `target` (as it was named), `target_revision`, `target_weights` and
`tokenizer_and_template` (digests), `template` (digest of the chat template alone), `quantization`, `max_length`; and
`engine` with its version, which the worker adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from app.config import Config
from app.errors import UserError
from app.parts import PartEntry
from app.states import CONVENTION
from app.target import TargetInfo, check_aux_layers, default_aux_layers
from app.versions import package_versions

# Recorded for people: the digests say whether it is the same target.
_NOT_COMPARED = ("target", "target_revision", "engine")


def record_of(config: Config, target: TargetInfo, layers: Sequence[int] | None = None) -> dict[str, Any]:
    """The record of states that this configuration captures from this target; layers as configured unless given.

    Raises:
        UserError: the auxiliary layers do not fit the target.
    """
    if layers is None:
        n, chosen = target.num_layers, config.capture.layers
        layers = default_aux_layers(n) if chosen is None else check_aux_layers(chosen, n)
    return {
        "layers": list(layers),
        "teacher_layer": target.num_layers,
        "convention": CONVENTION,
        "pre_norm": True,
        "dtype": config.target.dtype,
        "hidden_size": target.hidden_size,
        "target": target.name,
        "target_revision": config.target.revision,
        "target_weights": target.weights_digest,
        "quantization": target.quantization or config.generate.engine_args.get("quantization"),
        "tokenizer_and_template": target.tokenizer_digest,
        "template": target.extra.get("template_digest"),
        "max_length": config.generate.max_length,
    }


def engine_version(engine: str) -> str:
    """The engine as a part records it: its name, and its version where it is a package."""
    versions = package_versions()
    version = versions.get(engine) or versions.get(f"{engine}-cpu")
    return f"{engine} {version}" if version else engine


def refuse_mismatch(entries: Iterable[PartEntry], wanted: dict[str, Any]) -> None:
    """Raises UserError where a part was captured from something else than the run's record `wanted` says.

    Fields that a part does not have are not compared: version 1 recorded layers, type and size alone.
    """
    for entry in entries:
        has = {"layers": entry.layers, "dtype": entry.dtype, "hidden_size": entry.hidden_size, **entry.record}
        for name, value in wanted.items():
            if name not in _NOT_COMPARED and name in has and has[name] != value:
                raise UserError(
                    f"part {entry.part} does not fit this run: its {name} is {has[name]} and the run's is {value};"
                    " give the run what the part was made with, or let `draftmill generate` make it again"
                )
