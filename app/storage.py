"""Files of a run at any fsspec URL: atomic writes, checksums, and errors a person can act on."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec

from app.checksum import hasher
from app.errors import UserError

_TEMP_MARK = ".tmp-"
_CHUNK = 8 << 20  # bytes


class Store:
    """A folder at a local path or fsspec URL. Relative paths inside it use `/`.

    Picklable: workers rebuild the file system from the URL and options.
    """

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        self.options = dict(options or {})
        if "://" not in url:
            url = str(Path(url).expanduser().absolute())
        self.url = url.rstrip("/")
        with explained(self.url):
            self._fs, self.root = fsspec.core.url_to_fs(self.url, **_fs_options(self.url, self.options))
        self.root = self.root.rstrip("/")

    def __reduce__(self) -> Any:
        return (Store, (self.url, self.options))

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    @property
    def is_local(self) -> bool:
        return "file" in _protocols(self._fs)

    @property
    def fs(self) -> Any:
        """The fsspec file system below."""
        return self._fs

    def full(self, path: str) -> str:
        """`path` as the file system names it."""
        return f"{self.root}/{path}" if path else self.root

    def sub(self, path: str) -> Store:
        """The store of a folder inside this one."""
        return Store(f"{self.url}/{path}", self.options)

    def exists(self, path: str) -> bool:
        with explained(self.url):
            return bool(self._fs.exists(self.full(path)))

    def size(self, path: str) -> int | None:
        """Bytes of `path`, or None where it is absent."""
        try:
            with explained(self.url):
                return int(self._fs.info(self.full(path))["size"])
        except FileNotFoundError:
            return None

    def files(self, path: str = "") -> list[str]:
        """Names of the files directly in folder `path`, sorted; empty when the folder is absent."""
        with explained(self.url):
            self._fs.invalidate_cache(self.full(path))
            try:
                entries = self._fs.ls(self.full(path), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(e["name"].rstrip("/").rsplit("/", 1)[-1] for e in entries if e["type"] == "file")

    def folders(self, path: str = "") -> list[str]:
        """Names of the folders directly in folder `path`, sorted."""
        with explained(self.url):
            self._fs.invalidate_cache(self.full(path))
            try:
                entries = self._fs.ls(self.full(path), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(e["name"].rstrip("/").rsplit("/", 1)[-1] for e in entries if e["type"] == "directory")

    def read_bytes(self, path: str) -> bytes:
        with explained(self.url), self._fs.open(self.full(path), "rb") as handle:
            data: bytes = handle.read()
        return data

    def read_json(self, path: str) -> Any:
        """Parsed JSON, or None where the file is absent, cut or no JSON."""
        try:
            return json.loads(self.read_bytes(path))
        except (FileNotFoundError, ValueError, RecursionError):
            return None

    def write_bytes(self, path: str, data: bytes, sync: bool = True) -> None:
        """Write all of `data` or nothing: a reader never sees a part of it; without `sync` a local disk takes it in its
        own time, and only a power failure can undo it.

        Raises:
            UserError: no space, no permission, or the store cannot be reached.
        """
        with explained(self.url):
            full = self.full(path)
            if not self.is_local:
                self._fs.pipe_file(full, data)
                return
            folder = os.path.dirname(full)
            os.makedirs(folder, exist_ok=True)
            temp = f"{full}{_TEMP_MARK}{uuid.uuid4().hex[:8]}"
            try:
                with open(temp, "wb") as handle:
                    handle.write(data)
                    if sync:
                        handle.flush()
                        os.fsync(handle.fileno())
                os.replace(temp, full)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temp)
                raise
            if sync:
                _sync_folder(folder)

    def write_json(self, path: str, data: Any, sync: bool = True) -> None:
        self.write_bytes(path, (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode(), sync)

    def put(self, local: Path, path: str, sync: bool = True) -> None:
        """Move a finished local file to `path`, all or nothing; without `sync` a local disk takes it in its own time.

        Raises:
            UserError: as `write_bytes`.
        """
        with explained(self.url):
            full = self.full(path)
            if not self.is_local:
                self._fs.put_file(str(local), full)
                local.unlink()
                return
            folder = os.path.dirname(full)
            os.makedirs(folder, exist_ok=True)
            if os.stat(local).st_dev != os.stat(folder).st_dev:
                temp = Path(f"{full}{_TEMP_MARK}{uuid.uuid4().hex[:8]}")
                shutil.copyfile(local, temp)
                local.unlink()
                local = temp
            if sync:
                with open(local, "rb") as handle:
                    os.fsync(handle.fileno())
            os.replace(local, full)
            if sync:
                _sync_folder(folder)

    def scratch(self) -> Path:
        """A local folder for files on their way in: inside a local store, else in the temporary folder."""
        if self.is_local:
            folder = Path(self.root) / "tmp"
            with explained(self.url):
                folder.mkdir(parents=True, exist_ok=True)
            return folder
        return Path(tempfile.gettempdir())

    @contextlib.contextmanager
    def staged(self, path: str) -> Iterator[Path]:
        """A local path to write to; moved to `path` when the block ends well, removed when it does not."""
        temp = self.scratch() / f"{path.rsplit('/', 1)[-1]}{_TEMP_MARK}{uuid.uuid4().hex[:8]}"
        try:
            with explained(self.url):
                yield temp
            self.put(temp, path)
        finally:
            temp.unlink(missing_ok=True)

    def local(self, path: str) -> Path:
        """A local file with the content of `path`: itself when local, else a copy fetched once per process tree."""
        if self.is_local:
            return Path(self.full(path))
        copy = self._copy(path)
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            temp = copy.with_name(f"{copy.name}{_TEMP_MARK}{uuid.uuid4().hex[:8]}")
            with explained(self.url):
                self._fs.get_file(self.full(path), str(temp))
            os.replace(temp, copy)
        return copy

    def forget_copy(self, path: str) -> None:
        """Delete what `local` keeps of `path` on this machine, if that is a copy."""
        if not self.is_local:
            shutil.rmtree(self._copy(path).parent, ignore_errors=True)

    def _copy(self, path: str) -> Path:
        cache = Path(tempfile.gettempdir()) / "draftmill-cache" / hashlib.sha256(self.url.encode()).hexdigest()[:12]
        info = self._fs.info(self.full(path))
        tag = hashlib.sha256(f"{path}:{info['size']}:{info.get('ETag') or info.get('mtime')}".encode()).hexdigest()[:12]
        return cache / tag / path.rsplit("/", 1)[-1]

    def walk(self) -> list[str]:
        """Every file of the folder, sorted."""
        with explained(self.url):
            self._fs.invalidate_cache(self.root)
            found = self._fs.find(self.root)
        return sorted(str(p)[len(self.root) + 1 :] for p in found)

    @contextlib.contextmanager
    def open_folder(self, path: str = "", write: bool = False) -> Iterator[Path]:
        """A local folder with the plain files of folder `path`: itself when local, else a copy that the block's end
        removes.

        With `write`, the files that the block leaves in the copy are put into the store, unless it ends in an error. A
        UserError of the block that names the copy names the store's folder instead.
        """
        if self.is_local:
            yield Path(self.full(path))
            return
        inside = f"{path}/" if path else ""
        with tempfile.TemporaryDirectory(prefix="draftmill-") as temporary:
            folder = Path(temporary) / self.full(path).rsplit("/", 1)[-1]
            with explained(self.url):
                folder.mkdir()
                for name in self.files(path):
                    self._fs.get_file(self.full(inside + name), str(folder / name))
            try:
                yield folder
            except UserError as error:
                raise UserError(str(error).replace(str(folder), f"{self.url}/{path}".rstrip("/"))) from error
            for file in sorted(folder.iterdir()) if write else ():
                self.put(file, inside + file.name)

    def sha256(self, path: str) -> str:
        """Hex SHA-256 of the content of `path`."""
        return self.checksum(path, "sha256")

    def checksum(self, path: str, kind: str) -> str:
        """Hex digest of the content of `path`, of one of the kinds of app/checksum.py."""
        digest = hasher(kind)
        with explained(self.url), self._fs.open(self.full(path), "rb", block_size=_CHUNK) as handle:
            while chunk := handle.read(_CHUNK):
                digest.update(chunk)
        return digest.hexdigest()

    def delete(self, path: str) -> None:
        """Remove a file or a folder with all it holds; nothing happens where it is absent."""
        with explained(self.url), contextlib.suppress(FileNotFoundError):
            if self.is_local:
                _remove(self.full(path))  # fsspec's own fails where the process's folder is gone, as a job's may be
            else:
                self._fs.rm(self.full(path), recursive=True)

    def remove_temporary(self) -> int:
        """Remove files that a killed writer left behind; returns their number."""
        if not self.is_local or not os.path.isdir(self.root):
            return 0
        count = 0
        for path in list(Path(self.root).rglob(f"*{_TEMP_MARK}*")):
            with contextlib.suppress(OSError):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
                count += 1
        return count


def _remove(path: str) -> None:
    """A file, or a folder with all it holds, of which others may remove some at the same time."""
    if not os.path.isdir(path) or os.path.islink(path):
        os.remove(path)
        return
    for _ in range(10):  # one that others empty fails, and so do names that a network's folder has no more
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)
        if not os.path.isdir(path):
            return


def file_sha256(path: Path) -> str:
    """Hex digest of a local file."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _fs_options(url: str, options: dict[str, Any]) -> dict[str, Any]:
    if url.startswith(("s3://", "s3a://")):
        # Listings must show what other processes wrote a moment ago.
        return {"use_listings_cache": False, **options}
    return options if "://" in url else {}


def _sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _no_space(url: str) -> UserError:
    return UserError(f"{url}: no space left on the device; free some or move run_dir, then run the same command again")


@contextlib.contextmanager
def explained(url: str) -> Iterator[None]:
    """Turns faults of the storage that a person can mend into UserError."""
    try:
        yield
    except FileNotFoundError as error:
        if str(error.filename or "").startswith(("/proc/", "/sys/")):
            raise UserError(f"{url} cannot be made; choose another run_dir") from error
        if "bucket" in str(error).lower():
            raise UserError(f"{url}: the bucket does not exist; create it or change the location") from error
        raise
    except ImportError as error:
        raise UserError(
            f"{url}: {error}; install the file system it needs (for s3: pip install draftmill[s3])"
        ) from error
    except PermissionError as error:
        raise UserError(f"{url}: permission denied ({error}); check its owner or your credentials") from error
    except ValueError as error:
        if "Protocol not known" in str(error):
            raise UserError(f"{url}: {error}; use a local path, s3:// or another fsspec URL") from error
        raise
    except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
        wanted = "a file" if isinstance(error, IsADirectoryError) else "a folder"
        path = error.filename2 or error.filename or "something"
        raise UserError(f"{url}: {path} stands where {wanted} belongs; move it away") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space(url) from error
        if error.errno == errno.EROFS:
            raise UserError(f"{url}: the file system is read-only; move run_dir") from error
        raise
    except Exception as error:
        kind = type(error).__name__
        if "os error 28" in str(error):  # how safetensors says it
            raise _no_space(url) from error
        if kind in ("NoCredentialsError", "EndpointConnectionError", "ConnectTimeoutError"):
            raise UserError(
                f"{url}: {error}; set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for an S3 of your own,"
                " AWS_ENDPOINT_URL"
            ) from error
        raise
