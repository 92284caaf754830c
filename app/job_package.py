"""What a submission sends to the cluster: the checkout, less what no job needs, measured before it is sent.

Ray packs the current folder by the patterns of `.gitignore` and `.rayignore` in each folder and those of the runtime
environment, without compression. The walk here follows the same rules, so that what is measured is what Ray sends.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config import Config
from app.errors import UserError
from app.units import size_text

LIMIT = 100 * 2**20  # bytes of one request to Ray's job server; it answers a larger one with 413
LARGE_FOLDER = 20 * 2**20  # bytes from which on a folder that the configuration does not name stays here
EXCLUDES = (
    ".git",
    ".venv",
    "venv",
    "__pycache__",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".hypothesis",
    "*.egg-info",
    "/build",
    "/dist",
    "/runs",
    ".setup.log",
)
_ZIP_ENTRY = 76  # bytes of a file's two headers in a zip, beside its name twice
_NAMED = 5  # paths that the refusal of a large package names
Matcher = Callable[[str], bool]  # of a path relative to the checkout: whether it stays here


@dataclass(frozen=True)
class Package:
    """What is sent. Sizes in bytes."""

    files: dict[str, int]  # path -> size
    excludes: tuple[str, ...]  # patterns for Ray
    left_out: dict[str, int]  # folders that stay here for their size alone

    @property
    def size(self) -> int:
        return sum(size + _ZIP_ENTRY + 2 * len(path.encode()) for path, size in self.files.items())


def measure(root: Path, config: Config, config_path: Path, more: Sequence[str] = ()) -> Package:
    """The package of the checkout `root` for a run of `config`, which is read from `config_path`.

    Args:
        more: patterns of what stays here, beside our own.

    Raises:
        UserError: it is larger than Ray takes, or lacks a file that the configuration names.
    """
    named = _named_paths(root, config)
    if config_path.is_relative_to(root):
        named["the configuration"] = str(config_path.relative_to(root))
    excludes = [*EXCLUDES, *more, *(_pattern(p) for p in _run_folders(root, config))]
    files = dict(_walk(root, _matcher(excludes)))
    _require(root, named, files)
    kept = {"app", *(Path(path).parts[0] for path in named.values())}
    left_out = {f: s for f, s in _folders(files).items() if s > LARGE_FOLDER and f not in kept}
    excludes += [_pattern(folder) for folder in left_out]
    package = Package(
        {path: size for path, size in files.items() if path.partition("/")[0] not in left_out},
        tuple(excludes),
        left_out,
    )
    if package.size >= LIMIT:
        raise UserError(
            f"the package of {root} is {size_text(package.size)} and Ray takes {size_text(LIMIT)}, the largest:"
            f" {', '.join(largest(package.files))}; list in .rayignore, as in a .gitignore, what the job does not need,"
            " and give what it needs at an absolute path that the nodes have, or a URL"
        )
    return package


def largest(files: dict[str, int]) -> list[str]:
    """The largest files and folders with their sizes; not a folder but its largest entry where that is most of it."""
    found = []
    top: dict[str, int] = {}
    for path, size in files.items():
        top[path.partition("/")[0]] = top.get(path.partition("/")[0], 0) + size
    for name in sorted(top, key=lambda n: -top[n])[:_NAMED]:
        size = top[name]
        while (inner := _heaviest(files, name)) is not None and inner[1] > size / 2:
            name, size = inner
        found.append(f"{name} {size_text(size)}")
    return found


def _heaviest(files: dict[str, int], folder: str) -> tuple[str, int] | None:
    sizes: dict[str, int] = {}
    for path, size in files.items():
        if path.startswith(f"{folder}/"):
            name = f"{folder}/{path[len(folder) + 1 :].partition('/')[0]}"
            sizes[name] = sizes.get(name, 0) + size
    return max(sizes.items(), key=lambda item: item[1], default=None)


def _folders(files: dict[str, int]) -> dict[str, int]:
    """Bytes of each folder of the checkout itself."""
    sizes: dict[str, int] = {}
    for path, size in files.items():
        folder, inside, _ = path.partition("/")
        if inside:
            sizes[folder] = sizes.get(folder, 0) + size
    return sizes


def _named_paths(root: Path, config: Config) -> dict[str, str]:
    """Configuration key -> the path in the checkout that its value names, relative to it.

    Raises:
        UserError: a relative path leads out of the checkout.
    """
    found = {}
    for key, value in _strings(config.model_dump(mode="json")):
        if key == "run_dir" or "://" in value or not value.strip() or Path(value).is_absolute():
            continue
        path = _existing(root, value)
        if path is None:
            continue
        inside = Path(os.path.normpath(root / path))
        if not inside.is_relative_to(root):
            raise UserError(
                f"{key} is {value}, outside of the folder that is submitted; give an absolute path that the cluster's"
                " nodes have, or a URL"
            )
        if inside != root:
            found[key] = str(inside.relative_to(root))
    return found


def _strings(data: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(data, str):
        yield key, data
    elif isinstance(data, dict | list):
        items = data.items() if isinstance(data, dict) else enumerate(data)
        for name, value in items:
            yield from _strings(value, f"{key}.{name}" if key else str(name))


def _existing(root: Path, value: str) -> str | None:
    """The path in `root` that a value names: a file, a folder, what stands before a glob's first star, a module."""
    try:
        if (root / value).exists():
            return value
        before_glob = re.split(r"[*?\[]", value)[0].rpartition("/")[0]
        if before_glob and before_glob != value and (root / before_glob).exists():
            return before_glob
        module = value.partition(":")[0].replace(".", "/") + ".py"
        return module if ":" in value and (root / module).is_file() else None
    except (OSError, ValueError):  # a text that is no path
        return None


def _require(root: Path, named: dict[str, str], files: dict[str, int]) -> None:
    for key, path in named.items():
        if path not in files and not any(f.startswith(f"{path}/") for f in files):
            raise UserError(
                f"{key} is {path}, which is not submitted: a .gitignore, a .rayignore or draftmill's own list"
                " (docs/cluster.md) leaves it out; give an absolute path that the cluster's nodes have, or a URL"
            )


def _run_folders(root: Path, config: Config) -> Iterator[str]:
    """Run folders in the checkout, relative to it: what runs leave is never sent."""
    if "://" not in config.run_dir:
        own = Path(os.path.normpath(root / Path(config.run_dir).expanduser()))
        if own.is_relative_to(root) and own != root:
            yield str(own.relative_to(root))
    for folder in (*root.iterdir(), *(sub for f in root.iterdir() if _looked_into(f) for sub in f.iterdir())):
        if (folder / "config.yaml").is_file() and (folder / "ingest").is_dir() and (folder / "logs").is_dir():
            yield str(folder.relative_to(root))


def _looked_into(folder: Path) -> bool:
    return folder.is_dir() and folder.name not in (".git", ".venv", "venv", "app")


def _pattern(path: str) -> str:
    """The pattern of exactly this path of the checkout."""
    return "/" + re.sub(r"([\\*?\[\]!# ])", r"\\\1", path)


def _matcher(patterns: list[str], base: str = "") -> Matcher:
    """Ray's own matcher, for paths under `base`."""
    from ray._private.thirdparty.pathspec import PathSpec

    spec = PathSpec.from_lines("gitwildmatch", patterns)
    return lambda path: bool(spec.match_file(path[len(base) :]))


def _walk(root: Path, excluded: Matcher) -> Iterator[tuple[str, int]]:
    """Path and size of each file that Ray would pack."""
    names = (
        [".rayignore"] if os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE") == "1" else [".gitignore", ".rayignore"]
    )

    def files_of(folder: str, matchers: list[Matcher], above: tuple[str, ...]) -> Iterator[tuple[str, int]]:
        place = root / folder
        base = f"{folder}/" if folder else ""
        real = os.path.realpath(place)
        if real in above:
            raise UserError(f"{place} is a link to a folder above it, which Ray would follow for ever; remove it")
        ignores = [place / name for name in names if (place / name).is_file()]
        own = [_matcher(i.read_text(errors="replace").splitlines(), base) for i in ignores]
        if any(matches(f"{base}.") for matches in own):  # the folder itself, as Ray asks
            return
        inner = [*matchers, *own]
        for entry in sorted(os.scandir(place), key=lambda e: e.name):
            path = base + entry.name
            if any(matches(path) for matches in inner):
                continue
            if entry.is_dir():
                yield from files_of(path, inner, (*above, real))
            elif entry.is_file():
                yield path, entry.stat().st_size

    yield from files_of("", [excluded], ())
