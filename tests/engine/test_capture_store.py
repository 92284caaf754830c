"""Rows are filed by request and position, whatever order, size and repetition they arrive in."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from app.engine.capture_store import CaptureStore, MissingStates, external_key


def rows(start: int, count: int, request: int = 0) -> Tensor:
    """[count, 2, 3]: each row says whose and which position it is."""
    return (torch.arange(start, start + count) + 1000 * request)[:, None, None].expand(-1, 2, 3).float()


def test_pieces_make_a_whole() -> None:
    store = CaptureStore()
    store.write("a", 0, rows(0, 4), 10)
    store.write("b", 0, rows(0, 6, 1), 10)
    store.write("a", 4, rows(4, 3), 10)
    assert torch.equal(store.take("a", 7), rows(0, 7))
    assert torch.equal(store.take("b", 6), rows(0, 6, 1))
    assert len(store) == 0


def test_what_is_taken_is_no_larger_than_its_rows_and_trainable() -> None:
    store = CaptureStore()
    with torch.inference_mode():
        store.write("a", 0, rows(0, 5), 1000)
    states = store.take("a", 4)  # one step more than wanted ran
    assert states.shape == (4, 2, 3)
    assert states.untyped_storage().nbytes() == 4 * 2 * 3 * 4
    assert not states.is_inference()


def test_a_preempted_request_overwrites_itself() -> None:
    store = CaptureStore()
    store.write("a", 0, rows(0, 4, 9), 8)
    store.write("a", 0, rows(0, 2), 8)
    store.write("a", 2, rows(2, 5), 8)
    assert torch.equal(store.take("a", 7), rows(0, 7))


def test_a_request_may_outgrow_its_capacity() -> None:
    store = CaptureStore()
    store.write("a", 0, rows(0, 3), 0)
    store.write("a", 3, rows(3, 2000), 0)
    assert torch.equal(store.take("a", 2003), rows(0, 2003))


def test_missing_positions_are_named() -> None:
    store = CaptureStore()
    store.write("a", 0, rows(0, 4), 20)
    store.write("a", 6, rows(6, 3), 20)
    with pytest.raises(MissingStates, match=r"request a: 2 of the positions 4\.\.5 were not captured"):
        store.take("a", 9)
    with pytest.raises(MissingStates, match=r"3 of the positions 4\.\.9"):
        store.take("a", 10)
    with pytest.raises(MissingStates, match="all 5 positions"):
        store.take("b", 5)


def test_rows_after_taking_are_dropped_until_the_request_is_forgotten() -> None:
    store = CaptureStore()
    store.write("a", 0, rows(0, 4), 4)
    store.take("a", 4)
    store.write("a", 4, rows(4, 1), 4)
    assert len(store) == 0
    store.forget("a")
    assert not store._taken


def test_an_aborted_request_is_freed() -> None:
    store = CaptureStore()
    store.write("a", 0, rows(0, 4), 4)
    store.forget("a")
    assert len(store) == 0


def test_taking_waits_for_copies_under_way() -> None:
    store = CaptureStore()
    store.announce()

    def late() -> None:
        time.sleep(0.1)
        store.write("a", 0, rows(0, 4), 4)
        store.settle()

    thread = threading.Thread(target=late)
    thread.start()
    assert torch.equal(store.take("a", 4), rows(0, 4))
    thread.join()


def test_a_failed_copy_fails_the_request() -> None:
    store = CaptureStore()
    store.announce()
    store.settle(RuntimeError("planted"))
    with pytest.raises(MissingStates, match="planted"):
        store.take("a", 4)


def test_internal_ids_lead_to_ours() -> None:
    assert external_key("r12") == external_key("r12-1a2b3c4d") == "r12"


def test_held_rows_outlive_the_engines_report_of_the_end() -> None:
    """The engine reports a finished request in its next step, however late the rows are taken."""
    store = CaptureStore()
    store.write("r1", 0, torch.ones(3, 2, 4), 3)
    store.hold("r1")
    store.forget("r1")
    assert torch.equal(store.take("r1", 3), torch.ones(3, 2, 4))
    store.write("r2", 0, torch.ones(3, 2, 4), 3)
    store.forget("r2")  # aborted: nobody holds it
    with pytest.raises(MissingStates):
        store.take("r2", 3)
    assert len(store) == 0 and not store._held and not store._taken
