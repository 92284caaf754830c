"""Files of a run: all or nothing, temporary files gone, faults in words."""

import errno
import os
from pathlib import Path
from unittest import mock

import pytest

from app.errors import UserError
from app.lease import Lease, host_identity, process_start
from app.storage import Store


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store(str(tmp_path / "run") if request.param == "local" else f"memory://{tmp_path.name}")


def test_round_trip_list_and_delete(store: Store) -> None:
    store.write_json("a/b/x.json", {"k": 1})
    store.write_bytes("a/b/y.bin", b"123")
    assert store.read_json("a/b/x.json") == {"k": 1}
    assert store.files("a/b") == ["x.json", "y.bin"]
    assert store.folders("a") == ["b"]
    assert store.files("absent") == []
    assert store.size("a/b/y.bin") == 3
    assert store.size("absent") is None
    assert store.local("a/b/y.bin").read_bytes() == b"123"
    store.delete("a")
    store.delete("a")
    assert not store.exists("a/b/x.json")


def test_a_folder_goes_whatever_others_do_meanwhile(tmp_path: Path) -> None:
    """As in a submitted job whose own folder Ray has removed, beside an engine that ends."""
    store = Store(str(tmp_path))
    unlink = os.unlink

    def beaten(path: str, *, dir_fd: int | None = None) -> None:
        unlink(path, dir_fd=dir_fd)
        if path == "0":
            raise FileNotFoundError(path)

    for name in range(4):
        store.write_bytes(f"attempts/{name}", b"x")
    with mock.patch("os.unlink", beaten), mock.patch("os.getcwd", side_effect=FileNotFoundError):
        store.delete("attempts")
        store.delete("attempts")
    assert not store.exists("attempts")


def test_a_killed_writer_leaves_no_half_file(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.write_bytes("x.bin", b"old")
    with mock.patch("os.replace", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        store.write_bytes("x.bin", b"new")
    assert store.read_bytes("x.bin") == b"old"
    (tmp_path / "y.bin.tmp-1234").write_bytes(b"half")
    assert store.remove_temporary() == 1
    assert store.files() == ["x.bin"]


def test_staged_moves_on_success_only(store: Store) -> None:
    with store.staged("s/x.bin") as path:
        path.write_bytes(b"whole")
    assert store.read_bytes("s/x.bin") == b"whole"
    with pytest.raises(RuntimeError), store.staged("s/y.bin") as path:
        path.write_bytes(b"half")
        raise RuntimeError
    assert not store.exists("s/y.bin")


def test_a_far_folder_is_a_copy_for_as_long_as_its_block(s3: str, temporary: Path) -> None:
    store = Store(f"{s3}/run")
    store.write_bytes("export/draft/config.json", b"{}")
    store.write_bytes("export/draft/deeper/x", b"no plain file of it")
    for holder, path in ((store, "export/draft"), (store.sub("export/draft"), "")):
        with holder.open_folder(path) as folder:
            assert folder.name == "draft" and folder.parent.parent == temporary
            assert [p.name for p in folder.iterdir()] == ["config.json"]
            (folder / "README.md").write_text("thrown away")
        assert list(temporary.iterdir()) == [] and store.files("export/draft") == ["config.json"]
    with pytest.raises(RuntimeError), store.open_folder("export/draft", write=True) as folder:
        (folder / "README.md").write_text("half")
        raise RuntimeError
    assert list(temporary.iterdir()) == [] and store.files("export/draft") == ["config.json"]
    with store.open_folder("export/other", write=True) as folder:
        (folder / "README.md").write_text("whole")
    assert list(temporary.iterdir()) == [] and store.read_bytes("export/other/README.md") == b"whole"
    (missing := Store("s3://no-such-bucket/run")).files("x")
    with pytest.raises(UserError, match="bucket does not exist"), missing.open_folder("x", write=True) as folder:
        (folder / "README.md").write_text("nowhere to go")
    assert list(temporary.iterdir()) == []


def test_a_local_folder_is_itself(tmp_path: Path, temporary: Path) -> None:
    store = Store(str(tmp_path / "run"))
    store.write_bytes("a/x", b"1")
    for write in (False, True):
        with store.open_folder("a", write) as folder:
            assert folder == tmp_path / "run" / "a"
    with store.sub("a").open_folder() as folder:
        assert folder == tmp_path / "run" / "a"
    assert list(temporary.iterdir()) == [] and store.files("a") == ["x"]


def test_a_full_disk_is_a_sentence(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch("os.fsync", side_effect=full), pytest.raises(UserError, match="no space left"):
        store.write_bytes("x.bin", b"data")
    assert store.files() == []


def test_an_unknown_protocol_is_a_sentence() -> None:
    with pytest.raises(UserError, match="fsspec"):
        Store("nosuch://x")


def test_a_dead_driver_of_this_host_is_replaced_at_once(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    first = Lease(store, 60)
    first.acquire()
    with pytest.raises(UserError, match=f"held by a running driver \\(pid {os.getpid()}"):
        Lease(store, 60).acquire()
    first.release()
    assert not store.exists("lease.json")
    # A lease whose process is gone, with a heartbeat of a moment ago.
    first.acquire()
    record = store.read_json("lease.json")
    first._stop.set()
    store.write_json("lease.json", {**record, "started": "1"})
    second = Lease(store, 60)
    second.acquire()
    second.release()


def test_a_driver_of_another_host_is_replaced_after_its_timeout(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    lease = Lease(store, 60)
    lease._write()
    record = store.read_json("lease.json")
    store.write_json("lease.json", {**record, "host": "elsewhere:1"})
    with pytest.raises(UserError, match="elsewhere"):
        Lease(store, 60).acquire()
    store.write_json("lease.json", {**record, "host": "elsewhere:1", "heartbeat": record["heartbeat"] - 61})
    taker = Lease(store, 60)
    taker.acquire()
    taker.release()


def test_a_driver_notices_that_it_lost_the_folder(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    lease = Lease(store, 0.2)
    lease.acquire()
    store.write_json("lease.json", {"token": "other", "pid": 1, "host": host_identity(), "heartbeat": 0})
    lease._thread.join(timeout=10)  # type: ignore[union-attr]
    with pytest.raises(UserError, match="took the run folder over"):
        lease.check()
    lease.release()
    assert store.read_json("lease.json")["token"] == "other"


def test_process_start_tells_processes_apart() -> None:
    assert process_start(os.getpid()) == process_start(os.getpid())
    assert process_start(2**22 + 1) is None
