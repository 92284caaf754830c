"""The states file of a part: safetensors, written piece by piece and read by row ranges (docs/format.md).

`aux` and `teacher` hold the rows of every sample in turn; scales have names of their own (`aux.scale`). Compressed
rows are zstd frames: `aux.zstd` holds them end to end, `aux.frames` says where each starts; no frame spans two
samples, so that one sample is read without the others. `samples` says which rows are whose.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from app.codecs import Encoded, States, compress, decompress, encode, in_threads
from app.errors import UserError
from app.storage import Store, explained

KINDS = ("aux", "teacher")
CONVENTION = "s_k: residual stream after k layers, un-normed; teacher: s_n before the final norm"
_FRAME = 1 << 20  # bytes of rows in a frame, about: a long sample is decompressed by several threads
_FIRST_READ = 1 << 18  # bytes of a remote file fetched at once for its header and tables
_ALIGN = 8  # bytes
_DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8, "U8": torch.uint8, "I64": torch.int64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class _Piece:
    """A tensor to write: its shape, and its bytes in pieces."""

    dtype: str
    shape: list[int]
    data: list[Any]  # bytes, or tensors; rows of a wider tensor are gathered as they are written, one sample at a time

    @property
    def size(self) -> int:
        return sum(d.nbytes if isinstance(d, Tensor) else len(d) for d in self.data)


def write_states(file: BinaryIO, samples: Sequence[tuple[States, States]], hidden: int, about: dict[str, Any]) -> None:
    """Write the states of `samples`: per sample its rows of `aux` and of `teacher`, all in the codec of `about`.

    Args:
        hidden: H; a row of `aux` has 3 H values, one of `teacher` H.
        about: metadata with `codec` and `compression`; the file keeps it as JSON.
    """
    pieces: dict[str, _Piece] = {"samples": _sample_table(samples)}
    values: dict[str, dict[str, Any]] = {}
    for place, kind in enumerate(KINDS):
        states = 3 if kind == "aux" else 1
        none = torch.empty(0, states, hidden, dtype=torch.bfloat16)
        parts = [sample[place] for sample in samples] or [encode(none, about["codec"])]
        stored = [p.tensors() if isinstance(p, Encoded) else {"": p} for p in parts]
        for ending in stored[0]:
            tensors = [s[ending] for s in stored]
            dtype = torch.float8_e4m3fn if ending == "" and about["codec"] == "fp8" else None
            pieces[kind + ending] = _plain(tensors, dtype)
        values[kind] = {"dtype": pieces[kind].dtype, "shape": pieces[kind].shape, "width": states * hidden}
        if about["compression"] != "none":
            packed, frames = _frames(pieces.pop(kind), [s[""] for s in stored], about["compression"])
            pieces[f"{kind}.zstd"], pieces[f"{kind}.frames"] = packed, frames
    _write(file, pieces, {"draftmill": json.dumps({**about, "values": values})})


def _sample_table(samples: Sequence[tuple[States, States]]) -> _Piece:
    """[samples + 1, 2] int64: the first row of each sample in `aux` and in `teacher`, then their ends."""
    lengths = torch.tensor([[len(a), len(t)] for a, t in samples], dtype=torch.int64).view(-1, 2)
    return _table(torch.cat([torch.zeros(1, 2, dtype=torch.int64), lengths.cumsum(0)]))


def _table(tensor: Tensor) -> _Piece:
    return _Piece("I64", list(tensor.shape), [tensor])


def _plain(tensors: list[Tensor], dtype: torch.dtype | None) -> _Piece:
    first = tensors[0]
    shape = [sum(map(len, tensors)), *first.shape[1:]]
    return _Piece(_NAMES[dtype or first.dtype], shape, [t for t in tensors if t.numel()])


def _bytes_of(data: Any, room: Tensor) -> Any:
    """`data` if it is bytes, else the tensor's; where its rows lie apart they are gathered in `room`, uint8 and large
    enough: memory fresh from the system would cost more than the copying."""
    if not isinstance(data, Tensor):
        return data
    if data.is_contiguous():
        return data.view(torch.uint8).numpy().reshape(-1)
    gathered = room[: data.nbytes]
    gathered.view(data.dtype).view(data.shape).copy_(data)
    return gathered.numpy()


def _frames(rows: _Piece, tensors: list[Tensor], compression: str) -> tuple[_Piece, _Piece]:
    """Frames end to end, and where each starts [F + 1, 2] int64: its first row and first byte, then the ends."""
    planes = _planes(rows.dtype, compression)
    cuts: list[Tensor] = []
    for tensor in tensors:
        if len(tensor):
            flat = tensor.contiguous().view(torch.uint8)
            cuts += flat.split(max(1, _FRAME // max(1, flat.shape[1])))
    frames = in_threads(lambda cut: compress(cut, planes), cuts)
    ends = torch.tensor([[len(c), len(f)] for c, f in zip(cuts, frames, strict=True)], dtype=torch.int64).view(-1, 2)
    starts = torch.cat([torch.zeros(1, 2, dtype=torch.int64), ends.cumsum(0)])
    return _Piece("U8", [sum(map(len, frames))], frames), _table(starts)


def _planes(dtype: str, compression: str) -> int:
    return _DTYPES[dtype].itemsize if compression == "planes" else 1


def _write(file: BinaryIO, pieces: dict[str, _Piece], metadata: dict[str, str]) -> None:
    """The safetensors form: length of the header, header, data. The same pieces give the same bytes."""
    header: dict[str, Any] = {"__metadata__": metadata}
    order = sorted(pieces, key=lambda n: (-_DTYPES[pieces[n].dtype].itemsize, n))  # aligned, the tables first
    at = 0
    for name in order:
        piece = pieces[name]
        header[name] = {"dtype": piece.dtype, "shape": piece.shape, "data_offsets": [at, at + piece.size]}
        at += piece.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    file.write(len(text).to_bytes(8, "little") + text)
    _write_pieces(file, [data for name in order for data in pieces[name].data])


def _write_pieces(file: BinaryIO, pieces: list[Any]) -> None:
    """Write bytes and tensors; one is gathered while that before it is written."""
    largest = max((p.nbytes for p in pieces if isinstance(p, Tensor) and not p.is_contiguous()), default=0)
    rooms = [torch.empty(largest, dtype=torch.uint8) for _ in range(2)]
    with ThreadPoolExecutor(1) as beside:
        coming: Future[Any] | None = None
        for number, piece in enumerate(pieces):
            before, coming = coming, beside.submit(_bytes_of, piece, rooms[number % 2])
            if before is not None:
                file.write(before.result())
        if coming is not None:
            file.write(coming.result())


class StatesFile:
    """Rows of one states file; holds its header and tables, no rows. Of several threads at once."""

    def __init__(self, name: str, size: int, read: Callable[[int, int], Any]) -> None:
        """`read` gives the bytes from `start` to `stop` of the file, of `size` bytes, as a writable buffer.

        Raises:
            UserError: the file is cut, or no states file.
        """
        self.name, self._read = name, read
        first = memoryview(read(0, min(size, _FIRST_READ)))
        self._start = 8 + int.from_bytes(first[:8], "little") if size >= 8 else size + 1
        if self._start > size:
            raise self._damaged(f"it ends inside its header, at {size:,} bytes")
        head = first if self._start <= len(first) else memoryview(read(0, self._start))
        try:
            header = json.loads(bytes(head[8 : self._start]))
            about = json.loads(header.pop("__metadata__")["draftmill"])
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged("its header cannot be read") from error
        self._tensors: dict[str, dict[str, Any]] = header
        end = self._start + max((t["data_offsets"][1] for t in header.values()), default=0)
        if end != size:
            raise self._damaged(f"it has {size:,} bytes instead of {end:,}")
        self.about: dict[str, Any] = about
        self.codec: str = about.get("codec", "bf16")
        self._compression: str = about.get("compression", "none")
        self._values: dict[str, dict[str, Any]] = about.get("values") or {
            kind: {"dtype": header[kind]["dtype"], "shape": header[kind]["shape"], "width": header[kind]["shape"][1]}
            for kind in KINDS
        }
        self._frames = {k: self._whole(f"{k}.frames") for k in KINDS if f"{k}.frames" in header}
        self.samples: Tensor | None = self._whole("samples") if "samples" in header else None  # [samples + 1, 2]

    @classmethod
    def local(cls, path: Path) -> StatesFile:
        """A local file, mapped into memory: rows that are not compressed are not copied."""
        with open(path, "rb") as file:
            size = path.stat().st_size
            # Private pages: tensors over them count as writable, and the file never changes.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else b""
        view = memoryview(mapped)
        return cls(path.name, size, lambda start, stop: view[start:stop])

    @classmethod
    def open(cls, store: Store, path: str) -> StatesFile:
        """Any store's file: mapped where it is local, else read by ranges, each when it is asked for."""
        if store.is_local:
            return cls.local(Path(store.full(path)))

        def read(start: int, stop: int) -> Any:
            with explained(store.url):
                return bytearray(store.fs.cat_file(store.full(path), start=start, end=stop))

        size = store.size(path)
        if size is None:
            raise FileNotFoundError(store.full(path))
        return cls(path.rsplit("/", 1)[-1], size, read)

    def rows(self, kind: str, start: int, stop: int) -> States:
        """Rows start .. stop-1 of `aux` or `teacher`, as they are stored.

        Raises:
            UserError: the file has fewer rows, or they are damaged.
        """
        values = self._values[kind]
        if not 0 <= start <= stop <= values["shape"][0]:
            raise self._damaged(f"it has {values['shape'][0]} rows of {kind} and rows {start}..{stop} are asked for")
        compressed = kind in self._frames
        data = self._decompressed(kind, start, stop) if compressed else self._slice(kind, start, stop)
        if self.codec == "bf16":
            return data
        zero = self._slice(f"{kind}.zero", start, stop) if f"{kind}.zero" in self._tensors else None
        bits = data.view(torch.uint8) if self.codec == "fp8" else data
        return Encoded(self.codec, values["width"], bits, self._slice(f"{kind}.scale", start, stop), zero)

    def empty(self, kind: str) -> States:
        """No rows, in the file's codec."""
        return self.rows(kind, 0, 0)

    def bounds(self, sample: int) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """Rows of sample number `sample` in `aux` and in `teacher`; None where the file does not say (version 1)."""
        if self.samples is None:
            return None
        (a, t), (a_end, t_end) = self.samples[sample : sample + 2].tolist()
        return (a, a_end), (t, t_end)

    def _slice(self, name: str, start: int, stop: int) -> Tensor:
        about = self._tensors[name]
        shape = about["shape"][1:]
        dtype = _DTYPES[about["dtype"]]
        row = math.prod(shape) * dtype.itemsize
        begin = self._start + about["data_offsets"][0]
        if start == stop or not row:
            return torch.empty(stop - start, *shape, dtype=dtype)
        buffer = self._read(begin + start * row, begin + stop * row)
        return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(stop - start, *shape)

    def _whole(self, name: str) -> Tensor:
        return self._slice(name, 0, self._tensors[name]["shape"][0])

    def _decompressed(self, kind: str, start: int, stop: int) -> Tensor:
        values, table = self._values[kind], self._frames[kind]
        dtype = _DTYPES[values["dtype"]]
        columns = values["shape"][1]
        if start == stop:
            return torch.empty(0, columns, dtype=dtype)
        first = int(torch.searchsorted(table[:, 0].contiguous(), start, right=True)) - 1
        last = int(torch.searchsorted(table[:, 0].contiguous(), stop))  # one past the last frame
        marks = table[first : last + 1].tolist()
        begin = self._start + self._tensors[f"{kind}.zstd"]["data_offsets"][0]
        packed = memoryview(self._read(begin + marks[0][1], begin + marks[-1][1]))
        planes, row = _planes(values["dtype"], self._compression), columns * dtype.itemsize
        cuts = []
        try:
            for (row_at, byte_at), (row_end, byte_end) in pairwise(marks):
                frame = packed[byte_at - marks[0][1] : byte_end - marks[0][1]]
                cuts.append(decompress(frame, (row_end - row_at) * row, planes))
        except (OSError, ValueError) as error:
            raise self._damaged(f"frame {first + len(cuts)} of {kind} cannot be decompressed") from error
        flat = cuts[0] if len(cuts) == 1 else torch.cat(cuts)
        return flat.view(dtype).view(-1, columns)[start - marks[0][0] : stop - marks[0][0]]

    def _damaged(self, why: str) -> UserError:
        return UserError(f"states file {self.name} is damaged: {why}; `draftmill generate` makes its part again")
