"""Rotary settings: one resolver for every config layout, so that no base or scaling is lost on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from app.errors import UserError

# Parameters by rotary type: (required, optional), next to `rope_type` itself.
_TYPES: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "dynamic": (frozenset({"factor"}), frozenset({"original_max_position_embeddings"})),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
        frozenset(),
    ),
    "yarn": (
        frozenset({"factor", "original_max_position_embeddings"}),
        frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    ),
    "longrope": (
        frozenset({"short_factor", "long_factor", "original_max_position_embeddings"}),
        frozenset({"attention_factor", "factor"}),
    ),
}
_DEFAULT_THETA = 10_000.0
_FREE_OF_LENGTH = frozenset({"default", "linear", "llama3", "yarn"})  # frequencies known before the sequence is
# Settings of targets that a Llama layer has no place for: parts of a head, and positions of more than one axis.
_NOT_OF_LLAMA = frozenset({"partial_rotary_factor", "mrope_section", "mrope_interleaved"})
_TYPES_NOT_OF_LLAMA = frozenset({"mrope", "proportional"})  # the same, named as a type


@dataclass(frozen=True)
class Rope:
    """Base and scaling of a rotary embedding.

    `scaling` is None for the plain form, else `rope_type` and exactly the parameters that type knows.
    """

    theta: float
    scaling: dict[str, Any] | None = None

    @classmethod
    def parse(cls, theta: float, scaling: Mapping[str, Any] | None, max_position_embeddings: int | None) -> Self:
        """Canonical form of a `rope_scaling` dict (legacy `type` accepted, numbers typed).

        `max_position_embeddings` stands in for an absent `original_max_position_embeddings`, as in engines.
        Raises UserError for an unknown type, an unknown or missing parameter, or a partial rotary factor.
        """
        given = {key: value for key, value in (scaling or {}).items() if value is not None}
        kind = given.pop("rope_type", given.get("type", "default"))
        legacy = given.pop("type", kind)
        if legacy != kind:
            raise UserError(f"rope settings: rope_type {kind!r} and type {legacy!r} disagree; keep one")
        if kind not in _TYPES:
            raise UserError(f"rope settings: unknown rope_type {kind!r}; supported: {', '.join(_TYPES)}")
        if float(given.pop("partial_rotary_factor", 1.0)) != 1.0:
            raise UserError(
                "rope settings: partial_rotary_factor below 1 is not supported by the Llama draft layer; "
                "give the draft plain rotary settings of its own"
            )
        required, optional = _TYPES[kind]
        if "original_max_position_embeddings" in required and max_position_embeddings is not None:
            given.setdefault("original_max_position_embeddings", max_position_embeddings)
        if unknown := sorted(given.keys() - required - optional):
            raise UserError(f"rope settings: unknown keys {unknown} for rope_type {kind!r}; remove or correct them")
        if missing := sorted(required - given.keys()):
            raise UserError(f"rope settings: rope_type {kind!r} needs {missing}")
        if kind == "default":
            return cls(float(theta), None)
        return cls(float(theta), {"rope_type": kind} | {key: _typed(key, given[key]) for key in sorted(given)})


def rope_of_config(config: Mapping[str, Any]) -> Rope:
    """Rotary settings of a config.json, wherever it keeps them.

    Reads `rope_parameters` (base and scaling together), `rope_theta` with `rope_scaling`, or both where they
    agree; a base absent everywhere is 10,000, as every reader of Llama configs takes it.
    Raises UserError where two places disagree: readers differ in which one wins.
    """
    parameters = dict(config.get("rope_parameters") or {})
    scaling = dict(config.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UserError("rope settings: rope_parameters per layer type cannot serve a single draft layer")
    places = {
        "rope_theta": config.get("rope_theta"),
        "rope_parameters.rope_theta": parameters.pop("rope_theta", None),
        "rope_scaling.rope_theta": scaling.pop("rope_theta", None),
    }
    bases = {place: float(value) for place, value in places.items() if value is not None}
    if len(set(bases.values())) > 1:
        raise UserError(f"rope settings: {bases} disagree; keep the base the model was trained with")
    theta = next(iter(bases.values()), _DEFAULT_THETA)

    outside = {
        key: config[key]
        for key in ("partial_rotary_factor", "original_max_position_embeddings")
        if config.get(key) is not None
    }
    max_positions = config.get("max_position_embeddings")

    def parse(settings: dict[str, Any]) -> Rope:
        kind = settings.get("rope_type", settings.get("type", "default"))
        known = {"partial_rotary_factor", *(_TYPES[kind][0] if kind in _TYPES else ())}
        return Rope.parse(theta, {k: v for k, v in outside.items() if k in known} | settings, max_positions)

    found = [parse(settings) for settings in (parameters, scaling) if settings] or [parse({})]
    if any(rope != found[0] for rope in found):
        raise UserError(
            f"rope settings: rope_parameters {found[0].scaling} and rope_scaling {found[1].scaling} "
            "disagree; write in both what the model was trained with"
        )
    return found[0]


def draft_rope(config: Mapping[str, Any]) -> Rope:
    """Rotary settings that a draft of this target takes by default: the target's own, or plain ones of its base.

    Plain where the target's are none of a Llama layer's: a part of the head (`partial_rotary_factor`), positions of
    several axes (`mrope_section`), frequencies that follow the length (dynamic, longrope), one set per layer type
    (then the base is full attention's).
    Raises UserError for unknown keys, here too.
    """
    flat = _one_layer_type(config)
    places = [flat, *(flat[key] for key in ("rope_parameters", "rope_scaling") if flat.get(key))]
    foreign = any(place.get(key) not in (None, 1.0) for place in places for key in _NOT_OF_LLAMA)
    foreign |= any(place.get(key) in _TYPES_NOT_OF_LLAMA for place in places for key in ("type", "rope_type"))
    rope = rope_of_config(_without_foreign(flat))
    kind = "default" if rope.scaling is None else rope.scaling["rope_type"]
    several_sets = flat is not config
    return Rope(rope.theta) if foreign or several_sets or kind not in _FREE_OF_LENGTH else rope


def _one_layer_type(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`config` itself, or, where its rope_parameters are kept per layer type, with those of full attention."""
    parameters = config.get("rope_parameters") or {}
    sets = {name: value for name, value in parameters.items() if isinstance(value, Mapping)}
    if not sets:
        return config
    return {**config, "rope_parameters": sets.get("full_attention") or next(iter(sets.values())), "rope_theta": None}


def _without_foreign(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` without the settings that a Llama layer has no place for."""
    out = {key: value for key, value in config.items() if key not in _NOT_OF_LLAMA}
    for place in ("rope_parameters", "rope_scaling"):
        if not config.get(place):
            continue
        kept = {key: value for key, value in config[place].items() if key not in _NOT_OF_LLAMA}
        for key in ("type", "rope_type"):
            if kept.get(key) in _TYPES_NOT_OF_LLAMA:
                kept[key] = "default"
        out[place] = kept
    return out


def rope_keys(rope: Rope) -> dict[str, Any]:
    """The config.json keys of `rope`, old (`rope_theta`, `rope_scaling`) and new (`rope_parameters`) form."""
    scaling = dict(rope.scaling) if rope.scaling else None
    return {
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": rope.theta},
    }


def _typed(key: str, value: Any) -> Any:
    if key == "original_max_position_embeddings":
        return int(value)
    if key == "truncate":
        return bool(value)
    return [float(v) for v in value] if isinstance(value, list | tuple) else float(value)
