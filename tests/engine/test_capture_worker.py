"""Who owns which row of a batch, for both of vLLM's model runners, and the copies of a GPU."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.engine  # imports vLLM


def scheduled(new: dict[str, int], cached: dict[str, int], counts: dict[str, int]) -> Any:
    """A scheduler output: start positions of new and of running requests, and tokens per request."""
    sampling = SimpleNamespace(max_tokens=10)
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=r, num_computed_tokens=s, prompt_token_ids=[1] * 5, sampling_params=sampling)
            for r, s in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(cached), num_computed_tokens=list(cached.values())),
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        finished_req_ids=set(),
    )


def worker(runner: Any) -> Any:
    from app.engine.capture_store import reset_stores
    from app.engine.capture_worker import CaptureWorker

    made = CaptureWorker.__new__(CaptureWorker)
    made.model_runner = runner
    made._capacity, made._copier, made._num_states = {}, None, 2
    made._pack = made._packing = None
    made._stores = reset_stores()
    return made


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_rows_go_to_the_request_and_position_they_belong_to(runner: str) -> None:
    """The batch order is the runner's, not the scheduler's; r3 resumes after a preemption as position 0."""
    step = scheduled({"r1-aaaaaaaa": 0, "r3-cccccccc": 0}, {"r2-bbbbbbbb": 7}, {})
    step.num_scheduled_tokens = {"r1-aaaaaaaa": 3, "r2-bbbbbbbb": 1, "r3-cccccccc": 2}
    step.total_num_scheduled_tokens = 6
    order = SimpleNamespace(req_ids=["r2-bbbbbbbb", "r3-cccccccc", "r1-aaaaaaaa"])
    aux = [torch.arange(8.0)[:, None] + 100 * k for k in range(2)]  # two rows of padding
    state = SimpleNamespace(aux_hidden_states=aux)
    if runner == "V1":
        model_runner = SimpleNamespace(execute_model_state=state, input_batch=order)
    else:
        state.input_batch = order
        model_runner = SimpleNamespace(execute_model_state=state)
    made = worker(model_runner)
    made._capture(step)
    store = made._stores.states
    assert store.take("r1", 3)[:, :, 0].tolist() == [[3, 103], [4, 104], [5, 105]]
    assert store.take("r3", 2)[:, :, 0].tolist() == [[1, 101], [2, 102]]
    assert store._slots["r2"].rows[7, :, 0].tolist() == [0, 100]
    assert [i for i, there in enumerate(store._slots["r2"].present) if there] == [7]


def test_a_wrong_number_of_states_is_an_error() -> None:
    step = scheduled({"r1": 0}, {}, {"r1": 3})
    state = SimpleNamespace(aux_hidden_states=[torch.zeros(3, 1)])
    made = worker(SimpleNamespace(execute_model_state=state, input_batch=SimpleNamespace(req_ids=["r1"])))
    with pytest.raises(RuntimeError, match="gave 1 auxiliary states, 2 were asked for"):
        made._capture(step)


def test_pieces_are_cut_at_buffer_borders() -> None:
    from app.engine.capture_worker import Piece, _cut

    piece = Piece("r1", start=50, first=1000, count=100, capacity=0)
    assert _cut(piece, 0, 1024) == Piece("r1", 50, 1000, 24, 0)
    assert _cut(piece, 1024, 2048) == Piece("r1", 74, 0, 76, 0)


def test_forgetting_waits_its_turn_behind_copies_under_way() -> None:
    """A step more may have run for a request that ended: its rows must not outlive the report of the end."""
    from app.engine.capture_store import CaptureStore
    from app.engine.capture_worker import HostCopier, Piece

    copier = HostCopier.__new__(HostCopier)
    copier._store, copier._free, copier._jobs = CaptureStore(), queue.SimpleQueue(), queue.SimpleQueue()
    copied = threading.Event()
    copier._store.announce()
    copier._jobs.put((torch.ones(3, 2, 4), SimpleNamespace(synchronize=copied.wait), [Piece("r1", 0, 0, 3, 3)]))
    copier.forget("r1")
    copier._jobs.put(None)
    copier._thread = threading.Thread(target=copier._file)
    copier._thread.start()
    copied.set()
    copier._thread.join()
    assert len(copier._store) == 0
    assert copier._store._pending == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_from_the_gpu_arrive_whole() -> None:
    from app.engine.capture_store import CaptureStore
    from app.engine.capture_worker import HostCopier, Piece

    store = CaptureStore()
    copier = HostCopier(store, (4, 256), torch.bfloat16)
    steps = [torch.randn(3000, 4, 256, device="cuda", dtype=torch.bfloat16) for _ in range(40)]
    for n, rows in enumerate(steps):  # more than the ring holds
        pieces = [Piece("a", n * 2900, 0, 2900, 0), Piece("b", n * 100, 2900, 100, 4000)]
        copier.copy(rows.clone(), pieces)
    whole = torch.stack(steps).cpu()
    assert torch.equal(store.take("a", 40 * 2900), whole[:, :2900].flatten(0, 1))
    assert torch.equal(store.take("b", 4000), whole[:, 2900:].flatten(0, 1))
    copier.close()


def test_rows_that_cannot_be_handed_over_do_not_end_the_thread() -> None:
    """A full /dev/shm, say: a thread that ended would leave the engine waiting for a free buffer for ever."""
    from app.engine.capture_store import CaptureStore, MissingStates
    from app.engine.capture_worker import HostCopier, Piece

    store = CaptureStore()

    def full(key: str) -> None:
        raise OSError(28, "No space left on device")

    store.forget = full  # type: ignore[method-assign]
    copier = HostCopier.__new__(HostCopier)
    copier._store, copier._free, copier._jobs = store, queue.SimpleQueue(), queue.SimpleQueue()
    copier.forget("r1")
    store.announce()
    copier._jobs.put((torch.ones(3, 2, 4), SimpleNamespace(synchronize=lambda: None), [Piece("r2", 0, 0, 3, 3)]))
    copier._jobs.put(None)
    copier._file()
    assert copier._free.qsize() == 1
    with pytest.raises(MissingStates, match="No space left"):
        store.take("r3", 1)
