"""The target adapter: the only place that knows how a target checkpoint is laid out.

Names follow CONTRACTS.md section 1: H hidden size, V rows of the output head, n decoder layers,
s_k the residual stream after k layers (s_0 the embeddings, s_n before the final norm).
"""

from __future__ import annotations

import contextlib
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
from app.families import draft_shape, logit_scale, norm_eps, norm_is_plus_one, whole

_PIECES, _PIECE = 256, 1 << 16  # bytes
_WEIGHTS = ".safetensors"
_TEMPLATE_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json")
_REMOTE_TOKENIZER_FILES = ("*.tiktoken", "tiktoken.model", "tokenization_*.py")
_EMBEDDING = ("embed_tokens.weight", "backbone.embeddings.weight")
FINAL_NORM = ("model.norm.weight", "language_model.norm.weight", "norm.weight", "norm_f.weight")
_HEAD = ("lm_head.weight",)
_NOT_THE_DECODER = ("vision", "visual", "audio", "mm_projector", "multi_modal_projector", "mtp")
_PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
    num_attention_heads: int  # this and the next five: as a draft takes them by default (app/families.py)
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    rms_norm_eps: float
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


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor -> file, by the index of a sharded checkpoint; None where there is no index."""
    index = folder / "model.safetensors.index.json"
    return dict(json.loads(index.read_text())["weight_map"]) if index.exists() else None


class TargetFiles:
    """Reads single tensors of a safetensors checkpoint (one file or sharded with an index)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        indexed = _weight_map(folder)
        if indexed is not None:
            self.where: dict[str, str] = indexed
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

    def find(self, *suffixes: str) -> str | None:
        """The decoder's tensor whose name is, or ends with, one of `suffixes`; the first suffix found wins.

        Tensors of single layers, vision and audio towers and next-token heads do not count.
        """
        names = [n for n in self.where if "layers." not in n and not any(word in n for word in _NOT_THE_DECODER)]
        for suffix in suffixes:
            if found := [n for n in names if n == suffix or n.endswith("." + suffix)]:
                return min(found, key=len)
        return None

    def read(self, name: str) -> Tensor:
        """One tensor as stored.

        Raises:
            UserError: the file that the index names is not there.
        """
        path = self.folder / self.where[name]
        if not path.exists():
            raise UserError(f"{self.folder} lacks {path.name}, which its index names; the download is not complete")
        with safe_open(str(path), "pt") as handle:
            tensor: Tensor = handle.get_tensor(name)
        return tensor


def resolve_model(name: str, revision: str | None = None, weights: bool = True) -> Path:
    """Local folder of target `name`: a path, the packaged `smollm2-135m`, or a hub id (downloaded once, without
    `weights` only what is small).

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

    left = ["*.bin", "*.pth", "original/*", *([] if weights else [f"*{_WEIGHTS}"])]
    try:
        return Path(snapshot_download(name, revision=revision, ignore_patterns=left))
    except Exception as error:
        raise UserError(
            f"target.model {name} could not be fetched from the hub"
            f" ({first_line(error)});"
            " check the id, your access token, or give a local folder"
        ) from error


def has_weights(folder: Path) -> bool:
    """Whether every file of weights of a checkpoint is there."""
    indexed = _weight_map(folder)
    if indexed is not None:
        return all((folder / name).exists() for name in set(indexed.values()))
    return any(folder.glob(f"*{_WEIGHTS}"))


def weight_bytes(folder: Path, name: str, revision: str | None = None) -> int:
    """Bytes of a target's weights in its folder; of a hub's target whose weights were left there, what they will take,
    or 0 where the hub does not say."""
    here = sum(p.stat().st_size for p in folder.glob(f"*{_WEIGHTS}"))
    if here or Path(name).expanduser().is_dir():
        return here
    from huggingface_hub import HfApi

    with contextlib.suppress(Exception):  # a plan without them is better than none
        files = HfApi().list_repo_tree(name, revision=revision)
        return sum(int(f.size) for f in files if f.path.endswith(_WEIGHTS) and hasattr(f, "size"))
    return 0


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


def weights_digest(folder: Path) -> str:
    """Digest of a target's config and weight files."""
    return _digest_files([folder / "config.json", *sorted(folder.glob(f"*{_WEIGHTS}"))])


def inspect_target(
    name: str, revision: str | None = None, trust_remote_code: bool = False, chat_template: str | None = None,
    weights: bool = True,
) -> TargetInfo:  # fmt: skip
    """Read a target's shape from its files; loads no weights, and fetches none without `weights`.

    Raises:
        UserError: the folder is not a usable target.
    """
    folder = resolve_model(name, revision, weights)
    raw = json.loads((folder / "config.json").read_text())
    config = text_config(raw)
    shape = draft_shape(config)
    generation: dict[str, Any] = {}
    if (folder / "generation_config.json").exists():
        generation = json.loads((folder / "generation_config.json").read_text())
    eos: list[int] = []
    for source in (generation, config, raw):
        value = source.get("eos_token_id")
        eos += [value] if isinstance(value, int) else list(value or [])
    tokenizer = load_tokenizer(folder, trust_remote_code, chat_template)
    files = [folder / f for f in _TEMPLATE_FILES if (folder / f).exists()]
    files += sorted(path for pattern in _REMOTE_TOKENIZER_FILES for path in folder.glob(pattern))
    template_text = str(tokenizer.chat_template or "")
    tokenizer_digest = hashlib.sha256((_digest_files(files) + template_text).encode()).hexdigest()[:16]
    return TargetInfo(
        model=str(folder),
        name=name,
        architecture=(raw.get("architectures") or ["?"])[0],
        hidden_size=whole(config, "hidden_size"),
        num_layers=whole(config, "num_hidden_layers"),
        vocab_size=whole(config, "vocab_size"),
        tokenizer_len=len(tokenizer),
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        rope_theta=shape.rope.theta,
        rope_scaling=shape.rope.scaling,
        rms_norm_eps=norm_eps(config),
        max_position_embeddings=whole(config, "max_position_embeddings", 2048),
        tie_word_embeddings=_is_tied(folder, config, raw),
        bos_token_id=config.get("bos_token_id", raw.get("bos_token_id")),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        pad_token_id=config.get("pad_token_id", raw.get("pad_token_id")),
        quantization=quantization_of(raw, config),
        weights_digest=weights_digest(folder),
        tokenizer_digest=tokenizer_digest,
        extra={
            "model_type": config.get("model_type", ""),
            "template_digest": hashlib.sha256(template_text.encode()).hexdigest()[:16],
            "norm_plus_one": norm_is_plus_one(config),
            "logit_scale": logit_scale(config),
            "logit_softcap": config.get("final_logit_softcapping"),
            **({} if weights else {"weight_bytes": weight_bytes(folder, name, revision)}),
        },
    )


def quantization_of(raw: dict[str, Any], config: dict[str, Any]) -> str | None:
    """The quantisation method of a checkpoint, from its config or its language model's (Kimi-K2.5), or None."""
    settings = raw.get("quantization_config") or config.get("quantization_config") or {}
    method = settings.get("quant_method")
    return str(method) if method is not None else None


def _is_tied(folder: Path, config: dict[str, Any], raw: dict[str, Any]) -> bool:
    """Whether the head is the embedding: as the config says, else whether the checkpoint holds no head."""
    for source in (config, raw):
        if source.get("tie_word_embeddings") is not None:
            return bool(source["tie_word_embeddings"])
    if not any(folder.glob(f"*{_WEIGHTS}*")):  # they were left at the hub
        return False
    return not any("lm_head." in name for name in TargetFiles(folder).where)


def load_target_head(info: TargetInfo) -> TargetHead:
    """Load the embedding, final norm and output head of a target.

    Raises:
        UserError: a tensor is not where any known layout keeps it, is quantised, or has another number of rows
            than the config says.
    """
    files = TargetFiles(Path(info.model))
    embed = _plain_tensor(files, "embedding", _EMBEDDING)
    norm = _plain_tensor(files, "final norm", FINAL_NORM)
    # A tied config wins over a stored head: engines share the embedding then.
    head = embed if info.tie_word_embeddings else _plain_tensor(files, "output head", _HEAD)
    wanted = (info.vocab_size, info.hidden_size)
    for what, tensor in (("embedding", embed), ("output head", head)):
        if tuple(tensor.shape) != wanted:
            raise UserError(
                f"the {what} of {info.model} has shape {tuple(tensor.shape)}, its config.json says {wanted}"
                " (vocab_size, hidden_size); correct the one that is wrong"
            )
    return TargetHead(
        norm_weight=norm.float(),
        norm_eps=info.rms_norm_eps,
        norm_plus_one=bool(info.extra.get("norm_plus_one")),
        lm_head=head,
        embed_tokens=embed,
        logit_scale=float(info.extra.get("logit_scale") or 1.0),
        logit_softcap=info.extra.get("logit_softcap"),
    )


def _plain_tensor(files: TargetFiles, what: str, suffixes: tuple[str, ...]) -> Tensor:
    """The tensor `what`, as stored in one of the plain dtypes.

    Raises:
        UserError: it is not there, or quantised.
    """
    name = files.find(*suffixes)
    if name is not None:
        tensor = files.read(name)
        if tensor.dtype in _PLAIN_DTYPES:
            return tensor
        found = f"{name} is stored as {str(tensor.dtype).removeprefix('torch.')}"
    else:
        stem = suffixes[0].removesuffix("weight")
        packed = sorted(n for n in files.where if n.startswith(stem) or "." + stem in n)
        if not packed:
            raise UserError(
                f"{files.folder} has no {what} (no tensor whose name ends in {' or '.join(suffixes)});"
                " its layout is not known to draftmill"
            )
        found = f"{name_list(packed)} instead of {suffixes[0]}"
    raise UserError(
        f"the {what} of {files.folder} is quantised ({found}); the teacher and the draft's frozen embedding need it"
        " in bf16, fp16 or fp32: use a checkpoint that leaves lm_head and embed_tokens out of the quantisation"
    )


def name_list(names: list[str], limit: int = 3) -> str:
    """The first names of a list, in words."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def load_tokenizer(
    folder: Path | str, trust_remote_code: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """The target's tokenizer, with the chat template of a file in its place when one is given.

    Raises:
        UserError: it cannot be loaded.
    """
    if not trust_remote_code and _tokenizer_is_code(Path(folder)):
        # Left to itself, transformers would build another tokenizer from the same vocabulary.
        raise UserError(
            f"the tokenizer of {folder} is code of that folder (auto_map in tokenizer_config.json);"
            " set target.trust_remote_code=true if you trust it"
        )
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


def _tokenizer_is_code(folder: Path) -> bool:
    """Whether the tokenizer exists only as Python beside the weights."""
    path = folder / "tokenizer_config.json"
    if not path.exists() or (folder / "tokenizer.json").exists():
        return False
    return "AutoTokenizer" in (json.loads(path.read_text(encoding="utf-8")).get("auto_map") or {})


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
