"""A vLLM engine in this process that returns the target's hidden states with its answers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import queue
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from app.engine.base import Completion, EngineError, EngineSpec, Request
from app.engine.board import Load
from app.engine.capture_store import MissingStates, WorkerStores, packing_of
from app.engine.handover import drop, receive
from app.engine.vllm_args import check_engine_args, engine_args, first_line, vllm_request
from app.engine.warden import STATES_FOLDER, owner_tag
from app.errors import RowError, UserError
from app.nodes import SHARED, SHARED_LEAST
from app.packed import PackedStates, Packing

URGENT = 8  # requests beyond max_num_seqs that vLLM takes, so that urgent ones find a place
_MOST_UNWANTED = 256  # requests given up whose states are looked for
_IDLE_S = 0.5  # how long the idle engine waits for the inbox at a time


@dataclass
class Job:
    """One request under way, under the key that the worker files its states by."""

    key: str
    request: Request
    prompt: list[int]
    params: Any  # SamplingParams
    future: Future[Completion] = field(default_factory=Future)


class Answered(NamedTuple):
    """A request vLLM has finished; states of positions 0..positions-1 are wanted."""

    job: Job
    answer: list[int]
    reason: str
    positions: int


@dataclass
class _Call:
    """Something to run on the engine's thread, between steps."""

    function: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)


class VllmEngine:
    """One target in vLLM, stepped by a thread of its own; requests join and leave the batch at any time.

    A second thread hands finished requests over, so that the engine does not wait for the last copies.

    Args:
        spec: what to start.
        self_check: prove the capture on a few fixed prompts first (app/engine/self_check.py).

    Raises:
        UserError: vLLM cannot start so, or the self-check fails.
    """

    def __init__(self, spec: EngineSpec, self_check: bool = True) -> None:
        check_engine_args(spec)
        self.spec = spec
        self.vocab_size = 0
        self._engine: Any = None  # vLLM's LLMEngine, touched by the engine's thread alone
        self._stores: WorkerStores | None = None  # of the worker, where it lives in this process
        self._exports: tempfile.TemporaryDirectory[str] | None = None  # from a worker in another process
        self._inbox: queue.SimpleQueue[Job | _Call | str | None] = queue.SimpleQueue()
        self._packing: Packing | None = None  # of the states that the worker hands over
        self._unwanted: list[str] = []  # aborted, and their states perhaps still to come
        self._ended = False  # a request since the last step: the next one tells the worker, in process
        self._on_gpu = self._own_process = False
        self._waiting: deque[Job] = deque()
        self._jobs: dict[str, Job] = {}  # in vLLM
        self._num_urgent = 0  # of these
        self._late: list[Answered] = []  # mode extract: their states come with the next step
        self._dead: EngineError | None = None
        self._steps = 0
        self._count = 0
        self._count_lock = threading.Lock()
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="draftmill-finish")
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="draftmill-engine", daemon=True)
        self._thread.start()
        try:
            started.result()
            if self_check:
                from app.engine.self_check import run_self_check

                run_self_check(self)
            if spec.codec is not None and self._on_gpu:
                self.pack(spec.codec)
        except BaseException:
            self.close()
            raise

    # For callers, from any thread or event loop.

    async def complete(self, request: Request) -> Completion:
        """Run one request; cancelling the caller aborts it.

        Raises:
            RowError: `empty_prompt`, `prompt_too_long`, `answer_too_long`, `bad_token`, `bad_sampling`,
                `bad_request` or `engine_aborted`: this request alone is at fault.
            EngineError: the engine is dead, or states of this request are missing (then it dies of it).
        """
        job = self.submit(request)
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            self._inbox.put(job.key)
            raise

    def submit(self, request: Request) -> Job:
        """Post a request. The job's `future` yields what `complete` returns or raises.

        Raises:
            RowError, EngineError: as `complete`, where it shows at once.
        """
        if self._dead is not None:
            raise self._dead
        prompt, params = vllm_request(request, self.spec, self.vocab_size)
        with self._count_lock:
            self._count += 1
            key = f"r{self._count}"  # ours, not the caller's: unique, and without the dash vLLM appends
        job = Job(key, request, prompt, params)
        job.future.set_running_or_notify_cancel()
        self._post(job)
        return job

    def load(self) -> Load:
        """How busy it is; a running request's prompt and answer so far are what it holds of the KV cache."""
        return Load(self._steps, len(self._jobs), len(self._waiting) + self._inbox.qsize(), self._kv_use())

    def _kv_use(self) -> float | None:
        try:
            cache = self._engine.vllm_config.cache_config
            states = list(self._engine.output_processor.request_states.values())
            held = sum(s.prompt_len + s.detokenizer.num_output_tokens() for s in states)
            return min(1.0, float(held / (cache.num_gpu_blocks * cache.block_size)))
        except (AttributeError, TypeError, ZeroDivisionError):  # of another version of vLLM
            return None

    def close(self) -> None:
        """Stop the engine and release its memory and threads; requests under way get an EngineError."""
        self._dead = self._dead or EngineError("the engine was closed")
        self._inbox.put(None)
        self._thread.join()
        self._finisher.shutdown(wait=True)

    def pack(self, codec: str) -> None:
        """Hand states over packed in `codec` from now on; no request may be under way."""
        states = len(self.spec.aux_layer_ids) + 1
        self._call(lambda: self._rpc("pack_states", codec, states))
        self._packing = packing_of(self._engine.model_config, codec, states)

    def check_embeddings(self, on: bool) -> bool:
        """Start or stop keeping s_0, for the self-check; False where the model class does not give it."""
        return bool(self._call(lambda: self._rpc("check_embeddings", on)))

    def take_embeddings(self, job: Job, count: int) -> Tensor:
        """s_0 of positions 0..count-1 of a finished job, [count, H]."""
        rows: Tensor = self._call(lambda: self._rpc("take_embeddings", job.key, count))
        return rows[:, 0]

    def _call(self, function: Callable[[], Any]) -> Any:
        """Run `function` on the engine's thread, between two steps, and return its result."""
        if self._dead is not None:
            raise self._dead
        call = _Call(function)
        self._post(call)
        return call.future.result()

    def _post(self, item: Job | _Call) -> None:
        self._inbox.put(item)
        if self._dead is not None:  # since the caller looked; the inbox may not be read any more
            self._fail_all(self._dead)

    # The engine's thread.

    def _run(self, started: Future[None]) -> None:
        try:
            self._start()
        except BaseException as error:
            fault = UserError(f"vLLM could not start {self.spec.model}: {first_line(error)}")
            fault.__cause__ = error
            self._dead = EngineError(str(fault))
            self._shut_down()
            started.set_exception(fault)
            return
        started.set_result(None)
        try:
            self._loop()
        except BaseException as error:
            fault_ = EngineError(f"vLLM failed with {type(error).__name__}: {first_line(error)}")
            fault_.__cause__ = error
            self._dead = self._dead or fault_
        self._dead = self._dead or EngineError("the engine was stopped")
        self._shut_down()
        self._fail_all(self._dead)

    def _start(self) -> None:
        from app.engine.process import prepare_process

        prepare_process(self.spec.cpu_threads)  # on this thread: it does the arithmetic of a CPU engine
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        self._on_gpu = not current_platform.is_cpu()
        args = engine_args(self.spec, not self._on_gpu)
        args["max_num_seqs"] += URGENT
        backend = args["distributed_executor_backend"]
        wanted = self.spec.engine_process
        roomy = self._on_gpu and _export_root() == SHARED
        self._own_process = backend == "mp" or (roomy if wanted is None else wanted)
        # Sizes the batch as vllm.LLM does, for throughput: 16,384 tokens a step on a large GPU instead of 2,048.
        before = set(multiprocessing.active_children())
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(**args), usage_context=UsageContext.LLM_CLASS, enable_multiprocessing=self._own_process
        )
        if self._own_process:
            self._watch(set(multiprocessing.active_children()) - before)
        self.vocab_size = int(self._engine.model_config.get_vocab_size())
        if backend == "uni" and not self._own_process:
            self._rpc("start_capture")
            self._stores = self._rpc("capture_stores")
        else:
            self._exports = tempfile.TemporaryDirectory(prefix=f"{STATES_FOLDER}{owner_tag()}-", dir=_export_root())
            self._rpc("start_capture", self._exports.name)

    def _watch(self, processes: set[Any]) -> None:
        """Wake the engine's thread when a process of the engine ends: vLLM's client would wait for ever."""
        outputs = self._engine.engine_core.outputs_queue

        def wait() -> None:
            multiprocessing.connection.wait([p.sentinel for p in processes])
            self._dead = self._dead or EngineError("the engine's process ended")
            outputs.put(RuntimeError("the engine's process ended"))

        threading.Thread(target=wait, name="draftmill-watch", daemon=True).start()

    def _rpc(self, method: str, *args: Any) -> Any:
        """Run a method of the first worker."""
        return self._engine.collective_rpc(method, args=args)[0]

    def _loop(self) -> None:
        while self._read_inbox(wait=not (self._jobs or self._waiting or self._late or self._ended)):
            self._admit()
            if not (self._jobs or self._late or self._ended):
                continue
            late, self._late = self._late, []
            self._ended = False
            outputs = self._engine.step()
            self._steps += 1
            for output in outputs:
                if output.finished:
                    self._finish(output)
            for answered in late:
                self._hand_over(answered)

    def _read_inbox(self, wait: bool) -> bool:
        """Take what was posted; False when the engine is to stop."""
        while self._dead is None:
            try:
                item = self._inbox.get(timeout=_IDLE_S) if wait else self._inbox.get_nowait()
            except queue.Empty:
                return True
            wait = False
            if item is None:
                break
            if isinstance(item, Job):
                if item.request.urgent:
                    self._add(item)
                else:
                    self._waiting.append(item)
            elif isinstance(item, _Call):
                try:
                    item.future.set_result(item.function())
                except Exception as error:
                    item.future.set_exception(error)
            else:
                self._abort(item)
        return False

    def _admit(self) -> None:
        """Hand vLLM what waits, in the order it came, up to the configured number of requests at once."""
        while self._waiting and len(self._jobs) - self._num_urgent < self.spec.max_num_seqs:
            self._add(self._waiting.popleft())

    def _abort(self, key: str) -> None:
        if self._leave(key) is not None:
            self._engine.abort_request([key])
            self._drop_later(key)
        else:
            self._waiting = deque(job for job in self._waiting if job.key != key)

    def _drop_later(self, key: str) -> None:
        """Nobody waits for this request's states, which may come yet."""
        if self._exports is not None:
            self._unwanted = [*self._unwanted[-_MOST_UNWANTED:], key]  # of some none come

    def _leave(self, key: str) -> Job | None:
        """Take a job out of those in vLLM, if it is one."""
        job = self._jobs.pop(key, None)
        self._num_urgent -= job is not None and job.request.urgent
        return job

    def _add(self, job: Job) -> None:
        import vllm.exceptions
        from vllm.inputs import TokensPrompt

        try:
            self._engine.add_request(job.key, TokensPrompt(prompt_token_ids=job.prompt), job.params)
        except (ValueError, TypeError, vllm.exceptions.VLLMValidationError) as error:
            self._engine.abort_request([job.key])
            at_fault = getattr(error, "parameter", None) in job.request.sampling
            job.future.set_exception(RowError("bad_sampling" if at_fault else "bad_request", first_line(error)))
            return
        self._jobs[job.key] = job
        self._num_urgent += job.request.urgent

    def _finish(self, output: Any) -> None:
        job = self._leave(output.request_id)
        if job is None:
            return
        answer, reason = list(output.outputs[0].token_ids), output.outputs[0].finish_reason
        if reason not in ("stop", "length"):
            self._drop_later(job.key)
            job.future.set_exception(RowError("engine_aborted", f"vLLM ended the request with {reason!r}"))
            return
        if job.request.answer_ids is not None:
            answer, reason = list(job.request.answer_ids), "prefill"
        answered = Answered(job, answer, reason, len(job.request.prompt_ids) + len(answer) - 1)
        if self.spec.capture_mode == "extract" and not self._own_process:
            # The connector copies a finished request's blocks in the step after: run that one in any case.
            self._late.append(answered)
        else:
            self._hand_over(answered)

    def _hand_over(self, answered: Answered) -> None:
        """Give the answer to the finisher, its states held: the next step tells the worker to forget them."""
        if self._exports is not None:
            self._ended = not self._own_process
            folder = self._exports.name
            self._unwanted = [key for key in self._unwanted if not drop(folder, key)]
        else:
            assert self._stores is not None
            self._stores.states.hold(answered.job.key)
        self._finisher.submit(self._deliver, answered)

    def _deliver(self, answered: Answered) -> None:
        """On the finisher's thread: wait for the last copies and answer the caller."""
        job, answer, reason, positions = answered
        try:
            if self._exports is not None:
                states = self._receive(job.key, positions)
            else:
                assert self._stores is not None
                states = self._stores.states.take(job.key, positions)
            captured = states if self._packing is None else PackedStates(states, self._packing)
            job.future.set_result(Completion(answer, reason, captured))
        except MissingStates as error:
            # Capture no longer follows the engine: no later request could be trusted either.
            fault = EngineError(f"request {job.request.request_id}: {error}")
            self._dead = self._dead or fault
            job.future.set_exception(fault)
            self._inbox.put(None)
        except BaseException as error:
            _set_exception(job.future, error)

    def _receive(self, key: str, positions: int) -> Tensor:
        """The rows that a worker in another process hands over."""
        assert self._exports is not None
        if self._packing is None:
            shape: tuple[int, ...] = (len(self.spec.aux_layer_ids) + 1, self._engine.model_config.get_hidden_size())
            dtype = self._engine.model_config.dtype
        else:
            shape, dtype = (self._packing.nbytes,), torch.uint8
        try:
            return receive(self._exports.name, key, positions, shape, dtype, lambda: self._dead is not None)
        except (LookupError, OSError) as error:
            raise MissingStates(str(error)) from error

    def _fail_all(self, error: EngineError) -> None:
        """Answer everything that waits with `error`."""
        for job in [*self._jobs.values(), *self._waiting, *(late.job for late in self._late)]:
            _set_exception(job.future, error)
        self._jobs.clear()
        self._waiting.clear()
        self._late.clear()
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, Job | _Call):
                _set_exception(item.future, error)

    def _shut_down(self) -> None:
        """Release vLLM, whatever state it is in."""
        self._finisher.shutdown(wait=True)  # it reads the worker's store
        self._stores = None
        engine, self._engine = self._engine, None
        if engine is not None:
            for release in (engine.engine_core.shutdown, engine.renderer.shutdown):
                with contextlib.suppress(Exception):
                    release()
        if self._exports is not None:
            self._exports.cleanup()
        del engine
        gc.collect()


def _set_exception(future: Future[Any], error: BaseException) -> None:
    with contextlib.suppress(InvalidStateError):  # answered in the meantime
        future.set_exception(error)


def _export_root() -> str:
    """Shared memory where it is large enough for states under way, else the temporary folder."""
    roomy = os.path.isdir(SHARED) and shutil.disk_usage(SHARED).free > SHARED_LEAST
    return SHARED if roomy else tempfile.gettempdir()
