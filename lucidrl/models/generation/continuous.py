"""Continuous generation: separate replicas complete requests that come at any time, also during a refit.

Each replica decodes in short slices, one after the other. The calls of a refit come between two slices, so a refit
stops a replica only for as long as it takes to switch to the new weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.pool import PoolWorker
from lucidrl.errors import LostWorkerError, WorkerError
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.generation.interfaces import (
    Completion,
    GenerationDatumSpec,
    GenerationOutputSpec,
    GenerationRequest,
)
from lucidrl.models.generation.sampling import prompts_of, with_draw_keys
from lucidrl.models.generation.separate import FIRST_STEP, LIVENESS, STEP, SeparateGenerator
from lucidrl.models.generation.synchronous import output_of, requests_of

SLICE_S = 0.05
"""A replica decodes for this long, or until a request is complete, before it takes new requests or weights. A slice is
at least one decoding step."""
_CHECK_S = 1.0
"""Time between two looks for lost replicas."""

STALL_TIMEOUT = "max(cluster.call_timeout_s, policy.generation.step_timeout_s) + cluster.start_timeout_s"
"""How errors name the settings of `stall_timeout_s`."""

Done = Callable[[Completion | None], None]
"""Called with the completion, or with None if the replica was lost; in the thread of the replica's worker."""


@dataclass
class _Replica:
    """What a replica has to do."""

    new: list[GenerationRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    open: dict[str, Done] = field(default_factory=dict)
    """Requests that are not complete, by id."""
    is_running: bool = False
    """Whether a slice is queued or runs."""
    has_stepped: bool = False
    """Whether a slice of its process has ended."""
    idle_since: float = field(default_factory=time.monotonic)
    idle_s: float = 0.0
    """Time without a request, up to `idle_since` or the last slice."""


class ContinuousGenerator:
    """Completes requests on separate replicas; a `GenerationInterface` too, for calls that wait for all completions.

    `recover`, `generate` and `update_weights` are for the thread that uses the policy, other methods for any thread.

    Args:
        replicas: the replicas; their owner starts them and shuts them down.
        pad_id: token on the padding of outputs.
        seed: seed of the sampling of rows without `draw_keys`.
        step_timeout_s: a replica whose slice takes longer is lost.
        first_timeout_s: the same for the first slice of a process, in which engines compile.
        stall_timeout_s: `generate` raises if it waits this long without a completion or a restart.

    Attributes:
        on_lost: called with the number of a lost replica, before its requests are reported as lost; perhaps repeatedly.
        on_failure: called with an error other than the loss of a replica.
    """

    def __init__(
        self,
        replicas: SeparateGenerator,
        pad_id: int,
        seed: int = 0,
        *,
        step_timeout_s: float,
        first_timeout_s: float,
        stall_timeout_s: float,
    ) -> None:
        self.on_lost: Callable[[int], None] = lambda number: None
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self.policy_version = replicas.policy_version
        self._replicas, self._pad_id, self._seed = replicas, pad_id, seed
        self._lock = threading.Lock()
        self._states = [_Replica() for _ in replicas.pool.workers]
        self._timeouts_s = {STEP: step_timeout_s, FIRST_STEP: max(step_timeout_s, first_timeout_s)}
        self._stall_timeout_s = stall_timeout_s
        self._num_calls = 0
        self._is_closed = False
        replicas.pool.on_loss = self._note_loss

    @property
    def num_restarts(self) -> int:
        return self._replicas.num_restarts

    @property
    def refit_gb_per_s(self) -> float | None:
        return self._replicas.refit_gb_per_s

    def live(self) -> list[int]:
        """Numbers of the replicas that take requests."""
        return self._replicas.ready

    def submit(self, number: int, request: GenerationRequest, done: Done) -> None:
        """Let a replica complete a request, whose id must be unique among its open requests."""
        with self._lock:
            state = self._states[number]
            state.new.append(request)
            state.open[request.request_id] = done
        self._advance(number)

    def abort(self, number: int, request_ids: Sequence[str]) -> None:
        """Forget requests; their `done` is not called any more. Unknown ids are ignored."""
        with self._lock:
            state = self._states[number]
            known = [request_id for request_id in request_ids if state.open.pop(request_id, None) is not None]
            state.new = [request for request in state.new if request.request_id not in known]
            state.aborted += known
        self._advance(number)

    def take_idle_s(self) -> list[float]:
        """Seconds that each replica had no request since the last call."""
        now, taken = time.monotonic(), []
        with self._lock:
            for state in self._states:
                if not state.is_running:
                    state.idle_s += now - state.idle_since
                    state.idle_since = now
                taken.append(state.idle_s)
                state.idle_s = 0.0
        return taken

    def recover(self) -> bool:
        """Restart lost replicas and bring them to the current version; return whether any needed it.

        Raises:
            WorkerError: a rank of the policy exited, or a replica exceeded `max_restarts`.
        """
        return self._replicas.recover()

    def update_weights(self, version: int) -> None:
        """Refit all replicas while they generate; see `SeparateGenerator.update_weights`."""
        self._check_idle()
        self._replicas.update_weights(version)
        self.policy_version = version

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete every prompt, beside the other requests; call this while the weights do not change.

        Raises:
            WorkerError: a rank of the policy exited, a replica exceeded `max_restarts`, or no completion comes.
        """
        data = with_draw_keys(data, self._seed, self._num_calls)
        self._num_calls += 1
        requests = [
            replace(request, request_id=f"call {self._num_calls} {request.request_id}", may_continue=False)
            for request in requests_of(data, greedy)
        ]
        number_of_prompt = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts_of(data)))}
        places = [number_of_prompt[prompt] for prompt in prompts_of(data)]  # rows of a prompt share a replica
        found: dict[str, Completion] = {}
        waiting = threading.Condition()
        lost = list(range(len(requests)))
        last_progress = time.monotonic()

        def note(row: int, completion: Completion | None) -> None:
            nonlocal last_progress
            with waiting:
                if completion is None:
                    lost.append(row)
                else:
                    found[completion.request_id], last_progress = completion, time.monotonic()
                waiting.notify_all()

        while len(found) < len(requests):
            is_recovered = self.recover()
            with waiting:
                if is_recovered:
                    last_progress = time.monotonic()
                rows, live = list(lost), self.live()
                if live:
                    lost.clear()
            for row in rows if live else ():
                self.submit(live[places[row] % len(live)], requests[row], partial(note, row))
            with waiting:
                waiting.wait_for(lambda: lost or len(found) == len(requests), _CHECK_S)
            num_open, waited_s = len(requests) - len(found), time.monotonic() - last_progress
            if num_open and waited_s > self._stall_timeout_s:
                raise WorkerError(
                    f"the generators have completed no prompt for {waited_s:.0f} s, and {num_open} of {len(requests)} "
                    f"are open; look into logs/generation, or raise the timeout, which is {STALL_TIMEOUT}"
                )
        return output_of(requests, found, self._pad_id)

    def release_memory(self) -> None:
        """Does nothing, because generation goes on while the policy trains."""

    def close(self) -> None:
        """Start no more slices; may be called twice."""
        self._is_closed = True

    def _advance(self, number: int) -> None:
        """Queue the next slice of a replica that has something to do."""
        with self._lock:
            state = self._states[number]
            if state.is_running or self._is_closed or not (state.new or state.aborted or state.open):
                return
            state.is_running = True
            state.idle_s += time.monotonic() - state.idle_since
            new, aborted, state.new, state.aborted = state.new, state.aborted, [], []
            phase = STEP if state.has_stepped else FIRST_STEP
        call: Future[Any] = self._replicas.pool.submit(
            number, "advance", new, aborted, SLICE_S, timeout_s=self._timeouts_s[phase], phase=phase
        )
        call.add_done_callback(partial(self._advanced, number))

    def _advanced(self, number: int, call: Future[list[Completion]]) -> None:
        try:
            worker, error = self._replicas.pool.workers[number], call.exception()
            if isinstance(error, LostWorkerError):
                self._note_loss(worker)  # again, for requests that came after the loss
                return
            if error is not None:
                raise error
            completions = call.result()
            with self._lock:
                state = self._states[number]
                state.is_running, state.has_stepped, state.idle_since = False, True, time.monotonic()
                done = [(state.open.pop(completion.request_id, None), completion) for completion in completions]
            if completions:
                worker.succeeded()
            for callback, completion in done:
                if callback is not None:
                    callback(completion)
            self._advance(number)
        except BaseException as error:  # this thread has no caller
            if not self._is_closed:
                self.on_failure(error)

    def _check_idle(self) -> None:
        """Notice replicas that hang without a request, before the calls of a refit, whose timeouts are long."""
        with self._lock:
            idle = [w for w in self._replicas.pool.workers if w.loss is None and not self._states[w.number].is_running]
        timeout_s = self._timeouts_s[STEP]
        self._replicas.pool.each(lambda worker: worker.run("report_places", timeout_s=timeout_s, phase=LIVENESS), idle)

    def _note_loss(self, worker: PoolWorker) -> None:
        """Report the requests of a lost replica as lost."""
        if self._is_closed:
            return
        try:
            self.on_lost(worker.number)  # no more requests come until the replica is ready again
            with self._lock:
                lost, self._states[worker.number] = self._states[worker.number].open, _Replica()
            for done in lost.values():
                done(None)
        except Exception as error:  # not Ctrl-C: the driver may call this; other threads have no caller
            self.on_failure(error)


def stall_timeout_s(generation: GenerationConfig, cluster: ClusterConfig) -> float:
    """Return how long to wait for the next completion, from the last completion or restart of any replica.

    As in synchronous training, a completion may take `call_timeout_s`; a process may compile before. A slice that hangs
    is noticed earlier.
    """
    return max(cluster.call_timeout_s, generation.step_timeout_s) + cluster.start_timeout_s
