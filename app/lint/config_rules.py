"""Rules for config.json: classes, sizes, switches, the rotary embedding, and what must agree with the target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from app.draft_config import NUM_AUX
from app.errors import UserError
from app.lint.difference import SGLANG, VLLM, Difference
from app.lint.subject import Subject
from app.rope import Rope, rope_of_config

ARCHITECTURE = "LlamaForCausalLMEagle3"
_VLLM_KNOWS = (ARCHITECTURE, "Eagle3LlamaForCausalLM", "LlamaForCausalLM")  # the last is renamed for method eagle3
_SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("draft_vocab_size", "target_hidden_size", "num_hidden_layers", "rms_norm_eps", "max_position_embeddings"),
)
_SWITCHES = {
    "tie_word_embeddings": "the draft's head is its own: SGLang would use the embedding in its place",
    "attention_bias": "SGLang builds the layer without biases",
    "mlp_bias": "engines build the layer without biases",
}
_THETA = 10_000.0  # what readers take where no base is written


def config_differences(d: Subject) -> Iterator[Difference]:
    """Every fault of the keys but for layer ids."""
    yield from (_speculators_differences(d) if d.is_speculators else _class_differences(d))
    yield from _size_differences(d)
    yield from _switch_differences(d)
    yield from _norm_flag_differences(d)
    yield from _rope_differences(d)
    yield from _target_differences(d)


def _class_differences(d: Subject) -> Iterator[Difference]:
    found = d.config.get("architectures")
    if found != [ARCHITECTURE]:
        known = isinstance(found, list) and len(found) == 1 and found[0] in _VLLM_KNOWS
        engines = (SGLANG,) if known else (VLLM, SGLANG)
        yield d.key("architectures", [ARCHITECTURE], found, "write it: engines choose their class by it", engines)
    if d.config.get("model_type") is None:
        yield d.key("model_type", "llama", None, "write it: without it no config class is found")


def _speculators_differences(d: Subject) -> Iterator[Difference]:
    """What vLLM needs of the speculators layout besides the layer itself."""
    kind, model_type = d.raw.get("speculators_model_type"), d.raw.get("model_type")
    if kind != "eagle3":
        yield d.key("speculators_model_type", "eagle3", kind, "write it: vLLM chooses the method by it", (VLLM,))
    if model_type not in (None, "speculators"):
        fix = "remove it: vLLM would read the file as a config of that type and never look into the layer's"
        yield Difference("config model_type", "absent", str(model_type), fix, (VLLM,))
    if not isinstance(d.raw.get("transformer_layer_config"), Mapping):
        found = d.raw.get("transformer_layer_config")
        yield Difference("config transformer_layer_config", "the layer's keys", str(found), "write them", (VLLM,))
    settings = d.raw.get("speculators_config")
    settings = settings if isinstance(settings, Mapping) else {}
    methods, verifier = settings.get("proposal_methods"), settings.get("verifier")
    first = methods[0] if isinstance(methods, list) and methods else None
    tokens = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    if type(tokens) is not int or tokens < 1:
        where = "speculators_config.proposal_methods[0].speculative_tokens"
        yield d.key(where, "a number of draft tokens", tokens, "write it: vLLM refuses the file without", (VLLM,))
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    if not name:
        fix = "write the target's name: vLLM serves it when given this folder alone"
        yield d.key("speculators_config.verifier.name_or_path", "the target", name, fix, (VLLM,))
    if d.config.get("norm_before_fc") and d.config.get("fc_norm"):
        fix = "the speculators library takes one of them, vLLM both"
        yield d.key("fc_norm", "not with norm_before_fc", "both on", fix, (VLLM,), warning=True)


def _size_differences(d: Subject) -> Iterator[Difference]:
    for name in _SIZES:
        if d.config.get(name) is not None:
            continue
        words, taken = d.fallback(name)
        expected = d.inferred.get(name)
        right = taken is not None and expected == taken
        if name == "draft_vocab_size" and right:
            yield d.key(name, expected, None, "write it: SGLang stops without the key", (SGLANG,))
            continue
        fix = f"write it: engines would take {words}"
        harmless = right or name == "rms_norm_eps"
        yield d.key(name, "a number" if expected is None else expected, None, fix, warning=harmless)
    layers = d.config.get("num_hidden_layers")
    if layers not in (None, 1):
        fix = "write 1: an EAGLE-3 draft has one layer (is this the target's config.json?)"
        yield d.key("num_hidden_layers", 1, layers, fix)
    aux = d.config.get("num_aux_hidden_states")
    if aux not in (None, NUM_AUX):
        yield d.key("num_aux_hidden_states", NUM_AUX, aux, "three states enter fc: correct or remove it")


def _switch_differences(d: Subject) -> Iterator[Difference]:
    for name, why in _SWITCHES.items():
        if d.config.get(name):
            yield d.key(name, "false", d.config[name], f"write false: {why}")
    if d.config.get("hidden_act", "silu") != "silu":
        yield d.key("hidden_act", "silu", d.config["hidden_act"], "engines compute silu alone in a draft's layer")
    if d.nested.get("use_aux_hidden_state") is False:
        fix = "write true: with false the draft gets one state in place of three"
        yield d.key("eagle_config.use_aux_hidden_state", "true", "false", fix)


def _norm_flag_differences(d: Subject) -> Iterator[Difference]:
    if d.config.get("norm_before_residual") is None:
        fix = "write it: absent means false in a flat config and true to vLLM in a speculators one"
        yield d.key("norm_before_residual", "true or false", None, fix, warning=not d.is_speculators)
    top, nested = d.config.get("norm_before_fc"), d.nested.get("norm_before_fc")
    if top is not None and nested is not None and bool(top) != bool(nested):
        yield d.key("eagle_config.norm_before_fc", top, nested, "make both keys agree: engines read the nested one")
    for flag, on, tensor in (
        ("fc_norm", bool(d.config.get("fc_norm")), "fc_norm.0.weight"),
        ("norm_before_fc", d.norm_before_fc, "input_norm.weight"),
    ):
        if tensor in d.by_root and not on:
            fix = f"write true: the file holds {tensor}, which vLLM refuses and SGLang drops without it"
            yield d.key(flag, "true", d.config.get(flag), fix)


def _rope_differences(d: Subject) -> Iterator[Difference]:
    try:
        rope_of_config(d.config)
    except UserError as error:
        yield d.key("rope", "known keys that agree", error, "write what the draft was trained with, in both forms")
        return
    except (TypeError, ValueError, AttributeError) as error:
        yield d.key("rope", "numbers and keys of a rotary embedding", error, "write what the draft was trained with")
        return
    assert d.rope is not None
    target = Rope(d.target.rope_theta, d.target.rope_scaling) if d.target is not None else None
    if not _writes_base(d):
        usual = f"{target.theta:g} as the target's" if target is not None else "the base trained with"
        right = target is not None and target.theta == _THETA
        yield d.key("rope_theta", usual, None, f"write it: engines would take {_THETA:g}", warning=right)
    elif not d.is_speculators:
        yield from _rope_form_differences(d, d.rope)
    if target is not None and d.rope != target and _writes_base(d):
        fix = "right only if the draft was trained so; else write the target's in every form"
        yield d.key("rope", _rope_text(target), _rope_text(d.rope), fix, warning=True)


def _rope_form_differences(d: Subject, rope: Rope) -> Iterator[Difference]:
    """Readers before Transformers 5 know `rope_theta` and `rope_scaling`, later ones `rope_parameters`."""
    fix = "write both rotary forms: engines read either"
    if d.config.get("rope_theta") is None:
        yield d.key("rope_theta", f"{rope.theta:g}", None, fix, warning=rope.theta == _THETA)
    if rope.scaling is not None and d.config.get("rope_scaling") is None:
        yield d.key("rope_scaling", rope.scaling, None, fix)
    if d.config.get("rope_parameters") is None:
        yield d.key("rope_parameters", "the values trained with", None, fix, warning=True)


def _writes_base(d: Subject) -> bool:
    places = (d.config, d.config.get("rope_parameters"), d.config.get("rope_scaling"))
    return any(isinstance(place, Mapping) and place.get("rope_theta") is not None for place in places)


def _rope_text(rope: Rope) -> str:
    return f"base {rope.theta:g}, {'plain' if rope.scaling is None else rope.scaling}"


def _target_differences(d: Subject) -> Iterator[Difference]:
    if d.target is None:
        return
    for name, size in (("vocab_size", d.target.vocab_size), ("target_hidden_size", d.target.hidden_size)):
        if d.config.get(name) is not None and d.config[name] != size:
            yield d.key(name, size, d.config[name], "this draft belongs to another target")
    positions, wanted = d.config.get("max_position_embeddings"), d.target.max_position_embeddings
    if type(positions) is int and positions < wanted:
        fix = "write the target's: by version engines clamp the context to it, or crash beyond it"
        yield d.key("max_position_embeddings", f">= {wanted}", positions, fix)
