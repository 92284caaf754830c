"""States that cross to another process by files that both map."""

from __future__ import annotations

import os
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from app.engine import handover
from app.engine.capture_store import CaptureStore, MissingStates
from app.engine.handover import SharedRows, drop, publish_fault, receive

SHAPE, KIND = (2, 8), torch.float32


def never() -> bool:
    return False


def filed(folder: Path, *keys: str) -> CaptureStore:
    """A store that has rows 0..9 of each request, which may reach position 19."""
    store = CaptureStore()
    store.folder = str(folder)
    for number, key in enumerate(keys):
        rows = torch.arange(160.0).view(10, *SHAPE) + 1000 * number
        store.write(key, 4, rows[4:], 20)
        store.write(key, 0, rows[:4], 20)
    return store


@pytest.mark.parametrize("room", [True, False])
def test_rows_arrive_whole_and_leave_nothing(tmp_path: Path, room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_has_room", lambda folder: room)
    store = filed(tmp_path, "r1", "r2")
    assert not (tmp_path / "r1").exists()  # nothing has a name before its request has ended
    for key in ("r2", "r1"):
        store.forget(key)
    got = [receive(str(tmp_path), key, 9, SHAPE, KIND, never) for key in ("r1", "r2")]
    assert list(tmp_path.iterdir()) == []
    for number, rows in enumerate(got):
        assert torch.equal(rows, torch.arange(144.0).view(9, *SHAPE) + 1000 * number)
        rows += 1  # they are the receiver's own
    assert len(store) == 0


def test_a_file_takes_no_more_than_its_rows(tmp_path: Path) -> None:
    store = filed(tmp_path, "r1")
    store.forget("r1")
    assert os.stat(tmp_path / "r1").st_size == 10 * 64


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    store = CaptureStore()
    store.folder = str(tmp_path)
    store.write("r1", 3, torch.zeros(2, *SHAPE), 20)
    store.forget("r1")
    with pytest.raises(LookupError, match=r"request r1: 3 of the positions 0\.\.2 were not captured"):
        receive(str(tmp_path), "r1", 5, SHAPE, KIND, never)
    store = filed(tmp_path, "r2")
    store.forget("r2")
    with pytest.raises(LookupError, match="request r2: 10 of 12 positions were captured"):
        receive(str(tmp_path), "r2", 12, SHAPE, KIND, never)
    with pytest.raises(LookupError, match="request r3: no states came from the worker"):
        receive(str(tmp_path), "r3", 12, SHAPE, KIND, lambda: True)
    with pytest.raises(LookupError, match="no states came"):
        receive(str(tmp_path), "r3", 12, SHAPE, KIND, never, timeout_s=0.01)


def test_what_nobody_waits_for_is_dropped(tmp_path: Path) -> None:
    store = filed(tmp_path, "r1")
    assert not drop(str(tmp_path), "r1")
    store.forget("r1")
    publish_fault(str(tmp_path), "r2", "why")
    assert drop(str(tmp_path), "r1") and drop(str(tmp_path), "r2")
    assert list(tmp_path.iterdir()) == []


def test_a_request_longer_than_it_said_is_an_error(tmp_path: Path) -> None:
    store = filed(tmp_path, "r1")
    with pytest.raises(MissingStates, match="position 20 of a request that was to have 20"):
        store.write("r1", 20, torch.zeros(1, *SHAPE), 20)


def test_no_room_is_an_error_and_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: int) -> None:
        raise OSError(28, "No space left on device")

    rows = SharedRows(str(tmp_path), 100)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        rows.reserve(50)
    rows.discard()
    assert list(tmp_path.iterdir()) == []


def test_room_is_what_the_file_system_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = namedtuple("about", "f_bavail f_blocks")
    monkeypatch.setattr(os, "statvfs", lambda path: about(60, 100))
    assert handover._has_room(str(tmp_path))
    monkeypatch.setattr(os, "statvfs", lambda path: about(40, 100))
    assert not handover._has_room(str(tmp_path))
