"""A store that fails for a while: tried again with longer and longer waits, then a sentence instead of a traceback."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from app.errors import UserError

T = TypeVar("T")
WAITS_S = (1.0, 4.0, 15.0, 60.0)


def persistently(function: Callable[[], T], url: str) -> T:
    """The result of `function`, called again where the store at `url` fails; what it does must bear repeating.

    Raises:
        UserError: what a person can mend, at once; anything else of the store after the last wait.
    """
    for wait in WAITS_S:
        try:
            return function()
        except FileNotFoundError:
            raise
        except (OSError, TimeoutError) as error:
            print(f"{url}: {error}; tried again in {wait:g} s", file=sys.stderr, flush=True)
            time.sleep(wait)
    try:
        return function()
    except FileNotFoundError:
        raise
    except (OSError, TimeoutError) as error:
        raise UserError(f"{url} does not answer ({error}); the same command resumes from what is committed") from error
