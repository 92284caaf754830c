"""The target adapter: the only place that knows how a target checkpoint is laid out.

Names follow CONTRACTS.md section 1: H hidden size, V rows of the output head, n decoder layers,
s_k the residual stream after k layers (s_0 the embeddings, s_n before the final norm).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from app.errors import RowError, UserError, first_line
from app.rope import rope_of_config

# Gain stored as (1 + w): the Gemma form of RMSNorm, which Qwen3-Next and Qwen3.5 took over.
_PLUS_ONE_NORM = {"gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_next", "qwen3_5", "qwen3_5_moe"}
_PIECES, _PIECE = 256, 1 << 16  # bytes
_TEMPLATE_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json")


@dataclass(frozen=True)
class TargetInfo:
    """What the rest of the product needs to know of a target, read once from its config."""

    model: str  # local folder
    name: str  # as the user named it
    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int  # V, rows of the output head
    tokenizer_len: int  # ids at or above it are never emitted
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    quantization: str | None
    weights_digest: str  # of config and weight files, see `_digest_files`
    tokenizer_digest: str
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TargetInfo:
        return cls(**{**data, "eos_token_ids": tuple(data["eos_token_ids"])})


@dataclass(frozen=True)
class TargetHead:
    """The teacher path: logits = lm_head(final_norm(s_n)), the norm applied exactly once."""

    norm_weight: Tensor  # [H] fp32
    norm_eps: float
    norm_plus_one: bool  # gain is (1 + w)
    lm_head: Tensor  # [V, H] target dtype, tied heads resolved
    embed_tokens: Tensor  # [V, H] target dtype, as stored
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    def normed(self, s_n: Tensor) -> Tensor:
        """Final norm in fp32: s_n [N, H] -> [N, H] fp32."""
        x = s_n.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.norm_eps)  # [N, H]
        gain = self.norm_weight + 1.0 if self.norm_plus_one else self.norm_weight  # [H]
        return x * gain

    def logits(self, s_n: Tensor, rows: Tensor | None = None) -> Tensor:
        """Target logits of s_n [N, H] over all V rows, or over vocabulary `rows` [R]: fp32 [N, V or R]."""
        weight = self.lm_head if rows is None else self.lm_head[rows]  # [R, H]
        out = self.normed(s_n) @ weight.float().T * self.logit_scale  # [N, R]
        if self.logit_softcap is not None:
            out = torch.tanh(out / self.logit_softcap) * self.logit_softcap
        return out


class TargetFiles:
    """Reads single tensors of a safetensors checkpoint (one file or sharded with an index)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.exists():
            self.where: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            files = sorted(p.name for p in folder.glob("*.safetensors"))
            if not files:
                raise UserError(
                    f"{folder} holds no *.safetensors weights; give target.model a folder in Hugging Face form"
                )
            self.where = {}
            for name in files:
                with safe_open(str(folder / name), "pt") as handle:
                    self.where.update(dict.fromkeys(handle.keys(), name))

    def find(self, suffix: str) -> str | None:
        """The name that ends with `suffix`, the language model's before any other's."""
        names = [n for n in self.where if n == suffix or n.endswith("." + suffix)]
        names.sort(key=lambda n: ("vision" in n or "visual" in n or "mtp" in n, len(n)))
        return names[0] if names else None

    def read(self, name: str) -> Tensor:
        with safe_open(str(self.folder / self.where[name]), "pt") as handle:
            tensor: Tensor = handle.get_tensor(name)
        return tensor


def resolve_model(name: str, revision: str | None = None) -> Path:
    """Local folder of target `name`: a path, the packaged `smollm2-135m`, or a hub id (downloaded once).

    Raises:
        UserError: it is none of these, or the hub cannot be reached.
    """
    from app.packaged import PACKAGED, packaged_target

    if name in PACKAGED:
        return packaged_target(name)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise UserError(f"target.model {name} has no config.json; give a folder in Hugging Face form")
        return path.resolve()
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        known = ", ".join(sorted(PACKAGED))
        raise UserError(
            f"target.model {name} is neither a folder, nor a hub id (owner/name), nor a packaged target ({known})"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, ignore_patterns=["*.bin", "*.pth", "original/*"]))
    except Exception as error:
        raise UserError(
            f"target.model {name} could not be fetched from the hub"
            f" ({first_line(error)});"
            " check the id, your access token, or give a local folder"
        ) from error


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config (multimodal wrappers nest it)."""
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(key), dict):
            return {**config[key], "architectures": config.get("architectures")}
    return config


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """k = {2, n//2, n-3} (CONTRACTS.md section 1).

    Raises:
        UserError: the model is too shallow for three distinct ids.
    """
    ids = (2, num_layers // 2, num_layers - 3)
    if not 1 <= ids[0] < ids[1] < ids[2] < num_layers:
        raise UserError(
            f"the default auxiliary layers {ids} collapse on a target of {num_layers} layers;"
            f" set capture.layers to three ascending ids in 1..{num_layers - 1}"
        )
    return ids


def check_aux_layers(layers: list[int], num_layers: int) -> tuple[int, int, int]:
    """Validate explicit layer ids.

    Raises:
        UserError: not three distinct ascending ids in 1..n-1.
    """
    if len(layers) != 3 or sorted(set(layers)) != list(layers) or layers[0] < 1 or layers[-1] >= num_layers:
        raise UserError(
            f"capture.layers is {layers}; give three distinct ascending ids in 1..{num_layers - 1}"
            " (k = the state after k layers)"
        )
    return (layers[0], layers[1], layers[2])


def _digest_files(paths: list[Path]) -> str:
    """Digest of names, sizes and content. Of a large file 256 spread pieces stand for the rest: weights that were
    trained further differ everywhere, and reading terabytes at every start would cost more than it saves."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with open(path, "rb") as file:
            if size <= 2 * _PIECES * _PIECE:
                digest.update(file.read())
                continue
            for number in range(_PIECES):
                file.seek((size - _PIECE) * number // (_PIECES - 1))
                digest.update(file.read(_PIECE))
    return digest.hexdigest()[:16]


def inspect_target(
    name: str, revision: str | None = None, trust_remote_code: bool = False, chat_template: str | None = None
) -> TargetInfo:
    """Read a target's shape from its files; loads no weights.

    Raises:
        UserError: the folder is not a usable target.
    """
    folder = resolve_model(name, revision)
    raw = json.loads((folder / "config.json").read_text())
    config = text_config(raw)
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        layers = int(config["num_hidden_layers"])
        vocab = int(config["vocab_size"])
    except KeyError as error:
        raise UserError(f"{folder}/config.json has no {error.args[0]!r}; this is not a decoder target") from error
    generation: dict[str, Any] = {}
    if (folder / "generation_config.json").exists():
        generation = json.loads((folder / "generation_config.json").read_text())
    eos: list[int] = []
    for source in (generation, config, raw):
        value = source.get("eos_token_id")
        eos += [value] if isinstance(value, int) else list(value or [])
    rope = rope_of_config(config)
    tokenizer = load_tokenizer(folder, trust_remote_code, chat_template)
    files = [folder / f for f in _TEMPLATE_FILES if (folder / f).exists()]
    template_text = str(tokenizer.chat_template or "")
    tokenizer_digest = hashlib.sha256((_digest_files(files) + template_text).encode()).hexdigest()[:16]
    weights = sorted(folder.glob("*.safetensors"))
    return TargetInfo(
        model=str(folder),
        name=name,
        architecture=(raw.get("architectures") or ["?"])[0],
        hidden_size=hidden,
        num_layers=layers,
        vocab_size=vocab,
        tokenizer_len=len(tokenizer),
        num_attention_heads=heads,
        num_key_value_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        intermediate_size=int(config.get("intermediate_size") or 4 * hidden),
        rms_norm_eps=float(config.get("rms_norm_eps") or 1e-6),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        max_position_embeddings=int(config.get("max_position_embeddings") or 2048),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", raw.get("tie_word_embeddings", False))),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        pad_token_id=config.get("pad_token_id"),
        quantization=(raw.get("quantization_config") or {}).get("quant_method"),
        weights_digest=_digest_files([folder / "config.json", *weights]),
        tokenizer_digest=tokenizer_digest,
        extra={
            "model_type": config.get("model_type", ""),
            "logits_scaling": config.get("logits_scaling"),
            "logit_scale": config.get("logit_scale"),
            "final_logit_softcapping": config.get("final_logit_softcapping"),
        },
    )


def load_target_head(info: TargetInfo) -> TargetHead:
    """Load the embedding, final norm and output head of a target.

    Raises:
        UserError: a tensor is not where any known layout keeps it.
    """
    files = TargetFiles(Path(info.model))

    def need(suffix: str) -> Tensor:
        name = files.find(suffix)
        if name is None:
            raise UserError(f"{info.model} has no tensor ending in {suffix!r}; its layout is not known to draftmill")
        return files.read(name)

    embed = need("embed_tokens.weight")
    # The final norm is the one outside any layer; per-layer norms have other names or a layer index before them.
    norm_names = [n for n in files.where if n.endswith(("model.norm.weight", "language_model.norm.weight"))]
    norm = files.read(norm_names[0]) if norm_names else need("norm.weight")
    head_name = files.find("lm_head.weight")
    if head_name is None and not info.tie_word_embeddings:
        raise UserError(f"{info.model} has no lm_head.weight and its config does not tie it to the embedding")
    # A tied config wins over a stored head: engines share the embedding then.
    head = embed if info.tie_word_embeddings or head_name is None else files.read(head_name)
    extra = info.extra
    scale = float(extra.get("logit_scale") or 1.0)
    if extra.get("logits_scaling"):
        scale /= float(extra["logits_scaling"])
    return TargetHead(
        norm_weight=norm.float(),
        norm_eps=info.rms_norm_eps,
        norm_plus_one=extra.get("model_type") in _PLUS_ONE_NORM,
        lm_head=head,
        embed_tokens=embed,
        logit_scale=scale,
        logit_softcap=extra.get("final_logit_softcapping"),
    )


def load_tokenizer(
    folder: Path | str, trust_remote_code: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """The target's tokenizer, with the chat template of a file in its place when one is given.

    Raises:
        UserError: it cannot be loaded.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code
        )
    except Exception as error:
        hint = "; set target.trust_remote_code=true if you trust its code" if "trust_remote_code" in str(error) else ""
        raise UserError(f"the tokenizer of {folder} cannot be loaded ({first_line(error)}){hint}") from error
    # What is too long is counted by us; transformers would warn of each once.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    if chat_template is not None:
        path = Path(chat_template)
        if not path.is_file():
            raise UserError(f"target.chat_template {chat_template} is not a file")
        try:
            tokenizer.chat_template = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"target.chat_template {chat_template} is not UTF-8 text") from error
    return tokenizer


class Renderer:
    """Turns conversations into token ids by the target's own chat template: always one render of the whole."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None = None) -> None:
        if not tokenizer.chat_template:
            raise UserError("the target's tokenizer has no chat template; give one with target.chat_template")
        self.tokenizer = tokenizer
        self.template: Any = tokenizer.chat_template  # text, or named texts that the tokenizer chooses from
        self.template_kwargs = dict(template_kwargs or {})

    @cached_property
    def is_fast(self) -> bool:
        """Whether the tokenizer tells where in the text its tokens lie."""
        return bool(self.tokenizer.is_fast)

    @cached_property
    def has_generation_tags(self) -> bool:
        return "{% generation" in str(self.template) or "{%- generation" in str(self.template)

    @cached_property
    def thinks(self) -> bool:
        """Whether the template knows thinking: then the target writes some before it answers."""
        return "</think>" in str(self.template)

    def text(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        """`messages` as the template writes them.

        Raises:
            RowError: `template_rejects`, with the template's own words.
        """
        try:
            out: Any = self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                chat_template=self.template if isinstance(self.template, str) else None,
                **self.template_kwargs,
            )
        except Exception as error:
            raise RowError("template_rejects", f"{type(error).__name__}: {str(error)[:200]}") from error
        return str(out)

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> list[int]:
        """Token ids of `messages`: the text of one render, tokenised once.

        Raises:
            RowError: `template_rejects`.
        """
        return self.encode(self.text(messages, add_generation_prompt))

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text; the template has put every special token there already."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """As `encode`, for many texts at once."""
        return [list(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]] if texts else []

    def tokens(self, text: str, cuts: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of `text` and the characters each covers; of a slow tokenizer, only the piece between `cuts`.

        Raises:
            RowError: `no_mask_method`, where a slow tokenizer's tokens lie across a cut.
        """
        if self.is_fast:
            out = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            return list(out["input_ids"]), list(out["offset_mapping"])
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        for begin, end in pairwise(sorted({0, *cuts, len(text)})):
            piece = self.encode(text[begin:end])
            ids += piece
            places += [(begin, end)] * len(piece)
        if ids != self.encode(text):
            raise RowError("no_mask_method", "a token lies across the boundary of an answer")
        return ids, places

    def render_with_tags(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        """Token ids and the assistant mask from the template's generation tags.

        Raises:
            RowError: `template_rejects`.
        """
        try:
            out: Any = self.tokenizer.apply_chat_template(
                messages,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                chat_template=self.template if isinstance(self.template, str) else None,
                **self.template_kwargs,
            )
        except Exception as error:
            raise RowError("template_rejects", f"{type(error).__name__}: {str(error)[:200]}") from error
        return list(out["input_ids"]), [bool(m) for m in out["assistant_masks"]]
