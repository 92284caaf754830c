"""Errors meant for the person who runs the job."""


class UserError(Exception):
    """A fault the person who runs the job can mend.

    The message is one clear sentence: what is wrong, where, and what to change.
    The command line prints it without a traceback and exits with status 1.
    """


class RowError(Exception):
    """A fault of one row; the row is rejected with `reason` and the run goes on.

    `reason` is a short identifier counted in reports (`prompt_too_long`), `detail` says more in words.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        detail = detail.encode(errors="replace").decode()  # it may quote half a surrogate pair, and is stored
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


def first_line(error: BaseException, limit: int = 200) -> str:
    """What an exception says in its first line, or its name where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0][:limit] if lines else type(error).__name__
