"""Lint: what the engines will look for in a draft's folder, rebuilt from its config, and every difference with its fix.

Needs no engine and no GPU. `check_draft` compares; `app/lint/command.py` is `draftmill lint`.
"""

from app.lint.check import check_draft
from app.lint.difference import Difference, errors_of, format_differences
from app.lint.names import canonical_name

__all__ = ["Difference", "canonical_name", "check_draft", "errors_of", "format_differences"]
