"""Keeps secrets out of everything a run stores."""

from __future__ import annotations

import re
from typing import Any

_SECRET_KEY = re.compile(
    r"(^|[_\-.])(secret|password|passwd|token|key|auth|credential|connection_string)s?($|[_\-.])",
    re.I,
)
# Key names that hold the word but no secret.
_HARMLESS_KEY = re.compile(r"tokens|token_id|tokenizer|^pad_token|^eos_token|^bos_token", re.I)
_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_\-]{20,}|AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{30,}|xox[baprs]-[A-Za-z0-9\-]{10,})"
)
_URL_USERINFO = re.compile(r"(\b[a-z][a-z0-9+.\-]*://)[^/\s]+@", re.I)
_URL_QUERY = re.compile(r"([?&][^=&\s]*(?:token|signature|sig|key|secret|credential|password)[^=&\s]*=)[^&\s*]+", re.I)


def find_secrets(data: Any, path: str = "") -> list[str]:
    """Dotted keys of `data` whose name or value looks like a secret."""
    found: list[str] = []
    if isinstance(data, dict):
        for key, value in data.items():
            here = f"{path}.{key}" if path else str(key)
            if is_secret_name(str(key)) and isinstance(value, str) and value:
                found.append(here)
            else:
                found += find_secrets(value, here)
    elif isinstance(data, list):
        for number, value in enumerate(data):
            found += find_secrets(value, f"{path}.{number}")
    elif isinstance(data, str) and redact(data) != data:
        found.append(path)
    return found


def redact(text: str) -> str:
    """`text` with keys, tokens and passwords in URLs replaced by ***."""
    text = _URL_QUERY.sub(r"\1***", _SECRET_VALUE.sub("***", text))
    return _URL_USERINFO.sub(r"\1***@", text)


def is_secret_name(name: str) -> bool:
    """Whether a setting or variable of this name holds a secret."""
    return bool(_SECRET_KEY.search(name)) and not _HARMLESS_KEY.search(name)
