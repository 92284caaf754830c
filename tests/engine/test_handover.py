"""States that cross to another process by files that both map, one request after the other."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import random
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.engine import handover
from app.engine.capture_store import CaptureStore, MissingStates
from app.engine.handover import SharedPool, SharedRows, drop, publish_fault, receive
from tests.runs import ROOT

SHAPE, KIND = (2, 8), torch.float32


def never() -> bool:
    return False


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """However full the disk of the tests is, rows stay where they are."""
    monkeypatch.setattr(handover, "_has_room", lambda *args: True)


def new_store(folder: Path) -> CaptureStore:
    store = CaptureStore()
    store.hand_over_in(str(folder))
    return store


def filed(folder: Path, *keys: str) -> CaptureStore:
    """A store that has rows 0..9 of each request, which may reach position 19."""
    store = new_store(folder)
    for number, key in enumerate(keys):
        rows = torch.arange(160.0).view(10, *SHAPE) + 1000 * number
        store.write(key, 4, rows[4:], 20)
        store.write(key, 0, rows[:4], 20)
    return store


def got(folder: Path, key: str, count: int) -> Tensor:
    return receive(str(folder), key, count, SHAPE, KIND, never)


def run(store: CaptureStore, key: str, count: int, value: float, capacity: int = 20) -> None:
    """A request from start to end."""
    store.write(key, 0, torch.full((count, *SHAPE), value), capacity)
    store.forget(key)


def files(folder: Path) -> list[Path]:
    """The worker's files, in the order they were made."""
    return sorted(folder.glob(".rows-*"), key=lambda p: int(p.name.rpartition("-")[2]))


def named(folder: Path) -> list[str]:
    """What is there beside them."""
    return [p.name for p in folder.iterdir() if p not in files(folder)]


@pytest.mark.parametrize("room", [True, False])
def test_rows_arrive_whole_and_leave_no_name(tmp_path: Path, room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_has_room", lambda *args: room)
    store = filed(tmp_path, "r1", "r2")
    assert named(tmp_path) == []  # nothing has a request's name before that has ended
    for key in ("r2", "r1"):
        store.forget(key)
    arrived = [got(tmp_path, key, 9) for key in ("r1", "r2")]
    assert named(tmp_path) == []
    for number, rows in enumerate(arrived):
        assert torch.equal(rows, torch.arange(144.0).view(9, *SHAPE) + 1000 * number)
        rows += 1  # they are the receiver's own
    assert len(store) == 0


def test_a_file_serves_the_next_request_and_shows_nothing_of_the_last(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    run(store, "r1", 20, 9.0)
    assert bool((got(tmp_path, "r1", 20) == 9).all())
    run(store, "r2", 5, 2.0)
    assert bool((got(tmp_path, "r2", 5) == 2).all())
    run(store, "r3", 6, 3.0)
    with pytest.raises(LookupError, match="request r3: 6 of 7 positions were captured"):
        got(tmp_path, "r3", 7)
    store.write("r4", 1, torch.ones(3, *SHAPE), 20)  # position 0 holds a row of r3's
    store.forget("r4")
    with pytest.raises(LookupError, match=r"request r4: 1 of the positions 0\.\.0 were not captured"):
        got(tmp_path, "r4", 3)
    run(store, "r5", 3, 5.0)
    assert bool((got(tmp_path, "r5", 3) == 5).all())
    assert len(files(tmp_path)) == 1


@pytest.mark.usefixtures("roomy")
def test_rows_that_something_refers_to_are_never_overwritten(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    run(store, "r1", 12, 1.0)
    rows = got(tmp_path, "r1", 10)
    view = rows[2:8].view(-1).view(torch.int32)[5:9]
    array = rows.view(torch.int32).numpy()[3:4, 1]
    del rows

    def others() -> None:
        gc.collect()
        for number in range(5):
            run(store, f"other {number}", 20, 7.0)
            got(tmp_path, f"other {number}", 20)

    others()
    assert bool((view.view(KIND) == 1).all())
    del view
    others()
    assert bool((torch.from_numpy(array.copy()).view(KIND) == 1).all())
    assert len(files(tmp_path)) == 2
    del array
    run(store, "r2", 20, 3.0)
    run(store, "r3", 20, 4.0)
    assert len(files(tmp_path)) == 2  # both served again


@pytest.mark.usefixtures("roomy")
def test_requests_of_every_length_held_for_any_time_keep_their_rows(tmp_path: Path) -> None:
    chance = random.Random(3)
    store, held = new_store(tmp_path), dict[int, Tensor]()
    for number in range(400):
        count = chance.randrange(1, 3000)
        run(store, f"r{number}", count, float(number), count + chance.randrange(50))
        if chance.random() < 0.2:
            assert drop(str(tmp_path), f"r{number}")
        else:
            held[number] = got(tmp_path, f"r{number}", count)[chance.randrange(count) :]
        for key in chance.sample(sorted(held), max(0, len(held) - 12)):
            assert bool((held.pop(key) == key).all())
    assert all(bool((rows == number).all()) for number, rows in held.items())
    assert len(files(tmp_path)) < 60


@pytest.mark.usefixtures("roomy")
def test_a_copy_of_the_receiving_process_gives_nothing_back(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    run(store, "r1", 10, 1.0)
    rows = got(tmp_path, "r1", 10)
    child = os.fork()
    if child == 0:
        del rows
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    run(store, "r2", 10, 2.0)
    assert bool((rows == 1).all()) and len(files(tmp_path)) == 2


def test_the_first_file_that_came_back_and_fits_is_taken_first(tmp_path: Path) -> None:
    pool = SharedPool(str(tmp_path))
    small, second, first, large = (pool.take(size) for size in (4096, 40_000, 40_000, 2**20))
    for rows in (large, first, small, second):
        rows.reserve(4096)
        pool.discard(rows)
    assert pool._idle == sum(rows.reserved for rows in (small, second, first, large))
    assert [pool.take(39_000) for _ in range(3)] == [first, second, large] and pool._idle == small.reserved
    assert pool.take(39_000) not in (small, large, first, second)


def test_what_is_kept_idle_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedPool, "_reserve_ahead", lambda *args: None)
    pool = SharedPool(str(tmp_path))
    pool._most_idle = 2 * 2**20
    taken = [pool.take(2**20) for _ in range(4)]
    for rows in taken:
        rows.reserve(2**20)
        pool.discard(rows)
    assert list(pool._free) == taken[2:] and pool._idle == 2 * 2**20
    assert len(files(tmp_path)) == 2


def test_what_is_given_up_is_free_at_once_though_the_receiver_is_still_unmapping_it(tmp_path: Path) -> None:
    rows = SharedRows(str(tmp_path), 2**20)
    rows.reserve(2**20)
    with open(files(tmp_path)[0], "rb") as mapped:
        assert os.fstat(mapped.fileno()).st_blocks * 512 >= 2**20
        rows.give_up()
        assert os.fstat(mapped.fileno()).st_blocks == 0 and list(tmp_path.iterdir()) == []


def test_memory_beyond_the_rows_can_be_given_up_and_reserved_again(tmp_path: Path) -> None:
    rows = SharedRows(str(tmp_path), 2**20)
    rows.reserve(2**20)
    rows.end()
    rows.begin()  # of a request with few rows, which is all that counts
    rows.reserve(5000)
    rows.memory[:5000] = 5
    assert rows.trim() and not rows.trim()
    assert rows.reserved == -(-5000 // mmap.PAGESIZE) * mmap.PAGESIZE
    assert bool((rows.memory[:5000] == 5).all())
    rows.reserve(2**20)
    assert rows.reserved == 2**20


def test_whole_files_are_reserved_ahead_while_there_is_plenty_of_room(tmp_path: Path) -> None:
    rows = SharedRows(str(tmp_path), 5 * 2**20)
    while rows.reserve_ahead():
        pass
    assert rows.reserved == rows.capacity and files(tmp_path)[0].stat().st_blocks * 512 >= rows.capacity
    rows = SharedRows(str(tmp_path), 5 * 2**20)
    rows.end()
    assert not rows.reserve_ahead() and rows.reserved == 0  # nobody needs it any more


def test_nothing_is_reserved_ahead_without_plenty_of_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = []

    def has_room(folder: str, idle: int, share: float = 0.5) -> bool:
        shares.append(share)
        return share < 0.6

    monkeypatch.setattr(handover, "_has_room", has_room)
    pool = SharedPool(str(tmp_path))
    rows = pool.take(2**20)
    pool._ahead.shutdown(wait=True)
    assert rows.reserved == 0 and shares == [handover._PLENTY]


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    store.write("r1", 3, torch.zeros(2, *SHAPE), 20)
    store.forget("r1")
    with pytest.raises(LookupError, match=r"request r1: 3 of the positions 0\.\.2 were not captured"):
        got(tmp_path, "r1", 5)
    store = filed(tmp_path, "r2")
    store.forget("r2")
    with pytest.raises(LookupError, match="request r2: 10 of 12 positions were captured"):
        got(tmp_path, "r2", 12)
    with pytest.raises(LookupError, match="request r3: no states came from the worker"):
        receive(str(tmp_path), "r3", 12, SHAPE, KIND, lambda: True)
    with pytest.raises(LookupError, match="no states came"):
        receive(str(tmp_path), "r3", 12, SHAPE, KIND, never, timeout_s=0.01)


def test_what_nobody_waits_for_is_dropped_and_its_file_used_again(tmp_path: Path) -> None:
    store = filed(tmp_path, "r1")
    assert not drop(str(tmp_path), "r1")
    store.forget("r1")
    publish_fault(str(tmp_path), "r2", "why")
    assert drop(str(tmp_path), "r1") and drop(str(tmp_path), "r2")
    assert named(tmp_path) == []
    run(store, "r3", 20, 3.0)
    assert len(files(tmp_path)) == 1


def test_a_request_longer_than_it_said_is_an_error(tmp_path: Path) -> None:
    store = filed(tmp_path, "r1")
    with pytest.raises(MissingStates, match="position 20 of a request that was to have 20"):
        store.write("r1", 20, torch.zeros(1, *SHAPE), 20)


def test_no_room_is_an_error_and_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    rows = SharedRows(str(tmp_path), 100)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        rows.reserve(50)
    rows.give_up()
    with pytest.raises(OSError, match="No space left"):
        SharedPool(str(tmp_path)).take(100)
    assert list(tmp_path.iterdir()) == []


def test_room_is_what_the_file_system_says_and_what_can_be_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    about = namedtuple("about", "f_bavail f_blocks f_frsize")
    monkeypatch.setattr(os, "statvfs", lambda path: about(60, 100, 4096))
    assert handover._has_room("", 0)
    monkeypatch.setattr(os, "statvfs", lambda path: about(40, 100, 4096))
    assert not handover._has_room("", 0) and not handover._has_room("", 10 * 4096)
    assert handover._has_room("", 11 * 4096)


# On a file system of 16 MiB of its own. Rows of 4 KiB; 3 MiB a request.
IN_16_MIB = """
import os, subprocess, sys
import torch
from app.engine import handover
from app.engine.capture_store import CaptureStore
from app.engine.handover import receive

folder, MIB = sys.argv[1], 2**20
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], check=True)
store = CaptureStore()
store.hand_over_in(folder)
pool = store._pool

def free():
    return os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize

def write(key, first, count, value):
    store.write(key, first, torch.full((count, 4096), value, dtype=torch.uint8), 768)

def take(key, count):
    return receive(folder, key, count, (4096,), torch.uint8, lambda: False)

# Rows that are held stay where they are until half is used; the next are copied, and their file goes back at once.
held = []
for n in range(3):
    write(f"r{n}", 0, 768, n)
    store.forget(f"r{n}")
    held.append(take(f"r{n}", 768))
    pool._collect()
    assert (len(pool._free) == 1) == (n == 2), n
assert 6 * MIB < free() < 8 * MIB  # which would be too little, but for the free file:
assert handover._has_room(folder, pool._idle)

# A request fits only when what is free is given up.
pool.take(8 * MIB).reserve(8 * MIB)
assert not pool._free and len(os.listdir(folder)) == 3, os.listdir(folder)

# Then what a request under way has beyond its rows.
write("a", 0, 10, 7)
slack = store._slots["a"].shared
slack._extend(MIB)
assert slack.reserved == MIB
pool.take(2 * MIB).reserve(free() + MIB // 2)
assert slack.reserved < MIB, slack.reserved
write("a", 10, 3, 8)
assert slack.reserved > MIB // 8
store.forget("a")
assert slack.reserved < MIB // 8  # where room is short, a file takes no more than its rows
rows = take("a", 13)
assert bool((rows[:10] == 7).all()) and bool((rows[10:] == 8).all())

# Then it is an error, and nothing that is held has changed.
try:
    pool.take(16 * MIB).reserve(16 * MIB)
except OSError as error:
    assert "No space left" in str(error)
else:
    raise AssertionError("no error")
assert all(bool((rows == n).all()) for n, rows in enumerate(held))
print("done")
"""


def test_where_room_runs_out_free_files_are_given_up_first(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this host does not let users mount in a namespace of their own")
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", IN_16_MIB, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr


@contextmanager
def killed_after(script: str, folder: Path) -> Iterator[None]:
    """While another process has run `script`, which says a word then; it is killed before this ends."""
    head = "import time\nfrom tests.engine.test_handover import *\n"
    head += "handover._has_room = lambda *args: True\nfolder = Path(sys.argv[1])\n"
    tail = "\nprint('ready', flush=True)\ntime.sleep(600)\n"
    child = subprocess.Popen(
        [sys.executable, "-c", head + script + tail, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        yield
    finally:
        child.kill()
        child.communicate()


@pytest.mark.usefixtures("roomy")
def test_rows_outlive_the_worker_that_was_killed(tmp_path: Path) -> None:
    script = "store = filed(folder, 'r1', 'r2', 'under way')\nstore.forget('r1'); store.forget('r2')"
    with killed_after(script, tmp_path):
        rows = got(tmp_path, "r1", 10)
    late = got(tmp_path, "r2", 10)
    shutil.rmtree(tmp_path)
    for number, held in enumerate((rows, late)):
        assert torch.equal(held, torch.arange(160.0).view(10, *SHAPE) + 1000 * number)
    with pytest.raises(LookupError, match="no states came from the worker"):
        receive(str(tmp_path), "under way", 10, SHAPE, KIND, lambda: True)
    del rows, late, held
    gc.collect()  # they are unmapped, and nothing else is touched


@pytest.mark.usefixtures("roomy")
def test_the_worker_outlives_a_receiver_that_was_killed_with_rows(tmp_path: Path) -> None:
    store = filed(tmp_path, "r1", "r2")
    store.forget("r1")
    store.forget("r2")
    with killed_after("rows = got(folder, 'r1', 10); del rows; rows = got(folder, 'r2', 10)", tmp_path):
        for number in range(3, 6):  # in the file of r1
            run(store, f"r{number}", 20, float(number))
            assert bool((got(tmp_path, f"r{number}", 20) == number).all())
        assert len(files(tmp_path)) == 2
    run(store, "r6", 20, 6.0)
    assert bool((got(tmp_path, "r6", 20) == 6).all())
    shutil.rmtree(tmp_path)
