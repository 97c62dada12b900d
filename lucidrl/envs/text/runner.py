"""EnvRunner: splits a batch into calls of an environment, retries samples and reports failures."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

from lucidrl.distributed.workers.outcomes import RemoteTraceback
from lucidrl.envs.text.config import OnError
from lucidrl.envs.text.interfaces import EnvReply, EnvRequest, TextEnv
from lucidrl.envs.text.worker import Cause, EnvState, Outcome
from lucidrl.envs.text.workers import EnvWorkers, InProcessEnv
from lucidrl.errors import CheckpointError, EnvironmentFailure, LostWorkerError, WorkerError
from lucidrl.rewards.interfaces import SampleTime
from lucidrl.utils.gate import Gate

logger = logging.getLogger(__name__)

Indices = Sequence[int]
"""Indices into the requests of a step."""


@dataclass(frozen=True)
class _Failed:
    """The failure of a sample, which has no step result."""

    cause: Cause
    what: str
    """A verb with its object; the subject is the environment's `step`."""
    rows: Indices
    """Indices of the samples that may be the reason: those of the call, or of all calls of a lost worker."""
    error: RemoteTraceback | LostWorkerError | None
    sentence: str = ""
    """The whole clause, if the subject is not the environment's `step`."""

    @property
    def is_shared(self) -> bool:
        """Whether another sample may be the reason."""
        return len(self.rows) > 1

    @property
    def is_suspect(self) -> bool:
        """Whether the worker was lost, perhaps because of another sample."""
        return self.is_shared and isinstance(self.error, LostWorkerError)


class EnvRunner:
    """Scores samples with an environment, in worker processes or in the driver.

    A call that raises, times out or returns the wrong number of replies fails for all its samples. With
    `on_error="fail"` the runner raises. With "drop" it retries the samples one by one, and leaves out those that fail
    again. If the environment raises an EnvironmentFailure, the runner raises it in both cases.

    The runner kills a worker that does not reply in time; it restarts killed and exited workers. It retries the samples
    of a lost worker, finally one by one, so that the error names the sample that is the reason.

    Args:
        env: an environment, which runs in this process, or the result of `start_env`; closed with the runner.
        timeout_s: timeout of a call.
        watch: see `wait_watching`.
        seconds_per_sample: added to the timeout for the samples of all calls that run at the same time, because samples
            wait for free processes of a verifier pool or places of an LLM judge, which have a timeout per sample.
        is_concurrent: whether several threads call `step` at the same time. A retry then waits until it is alone, so
            that the error names the right sample.

    Attributes:
        counts: dropped samples by cause.
    """

    def __init__(
        self,
        env: TextEnv | EnvWorkers,
        timeout_s: float,
        max_concurrency: int,
        on_error: OnError,
        watch: Callable[[], None] = lambda: None,
        seconds_per_sample: Sequence[SampleTime] = (),
        is_concurrent: bool = False,
    ) -> None:
        self.counts: Counter[Cause] = Counter()
        self._workers = env if isinstance(env, EnvWorkers) else InProcessEnv(env)
        self._timeout_s = timeout_s
        self._max_concurrency = max_concurrency
        self._on_error = on_error
        self._watch = watch
        self._seconds_per_sample = seconds_per_sample
        self._is_concurrent, self._gate = is_concurrent, Gate()
        self._restarting = threading.Lock()
        self._num_running = self._num_steps = 0
        self._lost: list[EnvRequest] = []
        """Requests of the workers that were lost in the last `_call`."""

    @property
    def num_restarts(self) -> int:
        """Restarts of the environment's workers so far."""
        return self._workers.num_restarts

    def step(self, requests: Sequence[EnvRequest]) -> list[EnvReply | None]:
        """Replies in the order of the requests; None for a sample that was dropped because it failed.

        Raises:
            EnvironmentFailure: a sample failed and `on_error="fail"`; the message names environment, samples, turn and
                cause. With any `on_error`: the environment raised it, or a worker used up its `max_restarts`.
        """
        found: dict[int, EnvReply | _Failed] = {}
        with self._gate.together():
            exited = self._call(requests, self._calls_of(requests), found)
        if exited or _failures(found):
            with self._gate.alone():
                self._retry(requests, exited, found)
        if num_dropped := sum(isinstance(reply, EnvReply) and reply.is_dropped for reply in found.values()):
            self.counts["dropped"] += num_dropped
        return [reply if isinstance(reply := found[row], EnvReply) else None for row in range(len(requests))]

    def _calls_of(self, requests: Sequence[EnvRequest]) -> list[Indices]:
        # Of several threads, each makes one call.
        return _even_chunks(range(len(requests)), 1 if self._is_concurrent else self._max_concurrency)

    def _retry(
        self, requests: Sequence[EnvRequest], exited: Sequence[Indices], found: dict[int, EnvReply | _Failed]
    ) -> None:
        """Retry what may succeed; raise for the rest, or count it as dropped."""
        # A worker may exit for reasons outside the environment, such as memory: repeat its calls once.
        self._call(requests, exited, found)
        if self._on_error == "drop":
            shared = [row for row, failed in _failures(found).items() if failed.is_shared and not failed.is_suspect]
            self._retry_alone(requests, shared, self._max_concurrency, found)
        self._raise_first(requests, found)
        suspects = [row for row, failed in _failures(found).items() if failed.is_suspect]
        self._retry_alone(requests, _spread(suspects), self._workers.num_workers, found)
        for failed in _failures(found).values():
            self._count_dropped(requests, failed)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the environment as `env`, and the random states of its workers as `env_random`.

        Raises:
            EnvironmentFailure: if the environment raises, or its state is not JSON.
        """
        states = self._workers.states()
        kept = {"env": json.loads(states[0].env)} if states[0].env is not None else {}
        drawn = [state.random for state in states if state.random is not None]
        return {**kept, "env_random": drawn} if drawn else kept

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`.

        Raises:
            CheckpointError: only one of checkpoint and environment has state, or the environment raises.
        """
        now = self._workers.states()
        if (now[0].env is not None) != ("env" in state):
            which, has = ("a", "has no state") if "env" in state else ("no", "has state")
            problem = f"the checkpoint has {which} state of the environment, but {self._workers.name} {has}"
            raise CheckpointError(f"{problem}; resume with the env.name of the checkpoint")
        drawn: Sequence[Any] = state.get("env_random", [])
        if now[0].random is None or len(drawn) != len(now):
            if now[0].random is not None:
                text = (
                    "the checkpoint has random states of %d environment workers, but the run has %d; seeding them anew"
                )
                logger.warning(text, len(drawn), len(now))
            drawn = [None] * len(now)
        kept = json.dumps(state["env"]) if "env" in state else None
        self._workers.load_states([EnvState(kept, random) for random in drawn])

    def close(self) -> None:
        """Shut down the workers; may be called twice."""
        self._workers.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _call(
        self, requests: Sequence[EnvRequest], calls: Sequence[Indices], found: dict[int, EnvReply | _Failed]
    ) -> list[Indices]:
        """Make calls concurrently and write the results into `found`; return the calls of workers that exited."""
        if not calls:
            return []
        self._restart_lost()
        size, first = self._workers.num_workers, self._next_worker()
        shares = {(first + number) % size: calls[number::size] for number in range(size)}
        messages = {
            number: [[requests[row] for row in call] for call in share] for number, share in shares.items() if share
        }
        exited: list[Indices] = []
        self._lost = []
        scored, timeout_s = self._scored(messages)
        for number, outcomes in scored.items():
            if isinstance(outcomes, LostWorkerError):
                rows = [row for call in shares[number] for row in call]
                found |= dict.fromkeys(rows, _lost_with(outcomes, rows, timeout_s))
                self._lost += [requests[row] for row in rows]
                # Calls of other threads may have blocked the worker.
                exited += [] if outcomes.timed_out and not self._is_concurrent else shares[number]
                continue
            for call, of_call in zip(shares[number], outcomes, strict=True):
                for row, outcome in zip(call, of_call, strict=True):
                    found[row] = _result(row, call, outcome)
        return exited

    def _retry_alone(
        self, requests: Sequence[EnvRequest], rows: Indices, num_concurrent: int, found: dict[int, EnvReply | _Failed]
    ) -> None:
        """Retry each sample in a separate call; if its worker is lost again, the sample is the reason."""
        for start in range(0, len(rows), num_concurrent):
            self._call(requests, [[row] for row in rows[start : start + num_concurrent]], found)
            self._raise_first(requests, found)

    def _scored(
        self, messages: Mapping[int, Sequence[Sequence[EnvRequest]]]
    ) -> tuple[Mapping[int, list[list[Outcome]] | LostWorkerError], float]:
        """Return the outcomes by worker, and the timeout of the calls."""
        num_samples = sum(len(call) for share in messages.values() for call in share)
        with self._restarting:
            self._num_running += num_samples
            most = self._num_running
        timeout_s = self._timeout_s + sum(time.of(most) for time in self._seconds_per_sample)
        try:
            if self._is_concurrent:
                return self._workers.score_concurrently(messages, timeout_s), timeout_s
            return self._workers.score(messages, timeout_s, self._watch), timeout_s
        finally:
            with self._restarting:
                self._num_running -= num_samples

    def _next_worker(self) -> int:
        """The worker of the first call: steps of one call each take turns, others begin with the first worker."""
        if not self._is_concurrent:
            return 0
        with self._restarting:
            self._num_steps += 1
            return self._num_steps % self._workers.num_workers

    def _restart_lost(self) -> None:
        try:
            with self._restarting:
                self._workers.restart_lost()
        except (WorkerError, EnvironmentFailure) as error:
            samples = _named(self._lost)
            raise EnvironmentFailure(f"{self._workers.name}.step lost its worker ({samples}): {error}") from error

    def _raise_first(self, requests: Sequence[EnvRequest], found: Mapping[int, EnvReply | _Failed]) -> None:
        """With `on_error="fail"`, raise the first failure, except of suspects, which are retried."""
        failed = next((failed for failed in _failures(found).values() if not failed.is_suspect), None)
        if failed is not None and self._on_error == "fail":
            remedy = f"fix {'it' if failed.sentence else 'the environment'}, or set env.on_error=drop"
            detail = f": {failed.error}" if isinstance(failed.error, LostWorkerError) else ""
            raise EnvironmentFailure(f"{self._described(requests, failed)}; {remedy}{detail}") from failed.error

    def _count_dropped(self, requests: Sequence[EnvRequest], failed: _Failed) -> None:
        if failed.cause not in self.counts:
            text = "%s; the sample is dropped; later samples with this cause are counted without a warning"
            logger.warning(text, self._described(requests, failed))
        self.counts[failed.cause] += 1

    def _described(self, requests: Sequence[EnvRequest], failed: _Failed) -> str:
        of_call = [requests[row] for row in failed.rows]
        happened = failed.sentence or f"{self._workers.name}.step {failed.what}"
        return f"{happened} ({_named(of_call)}, turn {of_call[0].turn})"


def _named(requests: Sequence[EnvRequest]) -> str:
    ids = [request.sample_id for request in requests]
    shown = ", ".join(ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
    return f"{'sample' if len(ids) == 1 else 'samples'} {shown}"


def _lost_with(loss: LostWorkerError, rows: Indices, timeout_s: float) -> _Failed:
    if loss.timed_out:
        return _Failed("timeout", f"exceeded its timeout of {timeout_s:g} s and blocked its worker", rows, loss)
    return _Failed("exited", "ended its worker", rows, loss)


def _result(row: int, call: Indices, outcome: Outcome) -> EnvReply | _Failed:
    if isinstance(outcome, EnvReply):
        return outcome
    error = RemoteTraceback(outcome.trace) if outcome.trace else None
    rows = call if outcome.is_of_call else [row]
    return _Failed(outcome.cause, outcome.what, rows, error, outcome.sentence)


def _failures(found: Mapping[int, EnvReply | _Failed]) -> dict[int, _Failed]:
    """Failures by row, in order."""
    return {row: failed for row, failed in sorted(found.items()) if isinstance(failed, _Failed)}


def _spread(rows: Indices) -> list[int]:
    """Reorder the rows so that neighbours, often samples of one prompt that fail together, are apart."""
    stride = math.isqrt(len(rows))
    return [row for start in range(stride) for row in rows[start::stride]]


def _even_chunks(rows: Indices, max_chunks: int) -> list[Indices]:
    """At most `max_chunks` non-empty chunks in order, whose sizes differ by at most one."""
    num_chunks = min(max_chunks, len(rows))
    bounds = [len(rows) * index // num_chunks for index in range(num_chunks + 1)] if num_chunks else []
    return [rows[start:stop] for start, stop in pairwise(bounds)]
