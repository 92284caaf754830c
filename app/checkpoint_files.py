"""The files of a draft's folder as they are: config.json and tensors, in any of the forms people publish."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from app.errors import UserError, first_line

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
PICKLED_FILE = "pytorch_model.bin"


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of `folder`.

    Raises:
        UserError: there is none, or it is no JSON object.
    """
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} is not a draft checkpoint: it has no {CONFIG_FILE}") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} must hold a JSON object")
    return config


def weight_files(folder: Path) -> list[str]:
    """Names of the weight files: safetensors, one or as the index says; else pickled ones (`pytorch_model.bin`).

    Raises:
        UserError: there are none, or the index is damaged.
    """
    for stem, pattern in ((WEIGHTS_FILE, "*.safetensors"), (PICKLED_FILE, "pytorch_model*.bin")):
        index = folder / f"{stem}.index.json"
        if index.exists():
            return _indexed(index)
        if files := sorted(path.name for path in folder.glob(pattern)):
            return files
    raise UserError(f"{folder} holds no *.safetensors and no {PICKLED_FILE}: there are no weights to read")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of `folder` on the CPU, under the names they have there. Pickled files may hold tensors alone.

    Raises:
        UserError: there are no weights, or a file is missing, damaged, or pickled with more than tensors.
    """
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        path = folder / file
        if not path.is_file():
            raise UserError(f"{folder}: the index names {file}, which is missing")
        tensors |= _pickled(path) if path.suffix == ".bin" else _safetensors(path)
    return tensors


def _indexed(index: Path) -> list[str]:
    try:
        return sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is damaged: it must hold a weight_map of tensor names to files") from error


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(str(path), "pt") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"{path} is cut or damaged ({error}); copy it again") from error


def _pickled(path: Path) -> dict[str, Tensor]:
    """Nothing in the file is executed (`weights_only`)."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read as plain tensors ({first_line(error)}); save it as safetensors where it was made"
        ) from error
    if not isinstance(content, dict) or not all(isinstance(t, Tensor) for t in content.values()):
        raise UserError(f"{path} holds something else than named tensors; save it as safetensors where it was made")
    return {str(name): tensor.detach() for name, tensor in content.items()}
