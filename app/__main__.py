"""`python -m app`: the same as `draftmill`; what a submitted job runs, with the Python that the cluster has."""

import sys

_OLDEST = (3, 11)


def _fault(what: str) -> str:
    return (
        f"draftmill: error: {sys.executable} {what}; use draftmill's own environment: on a cluster start Ray in it on"
        " every node, or name what is missing in a runtime environment (docs/cluster.md)"
    )


if __name__ == "__main__":
    if sys.version_info < _OLDEST:
        sys.exit(
            _fault(f"is Python {sys.version.split()[0]} and draftmill needs {'.'.join(map(str, _OLDEST))} or newer")
        )
    try:
        from app.cli import main

        main()
    except ModuleNotFoundError as error:
        if (error.name or "app").partition(".")[0] == "app":
            raise
        sys.exit(_fault(f"lacks the package {error.name}"))
