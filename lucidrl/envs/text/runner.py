"""Steps a text environment batch by batch: spreads calls over its workers, retries samples, names those that fail."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

from lucidrl.distributed.workers.outcomes import RemoteTraceback
from lucidrl.envs.text.config import OnError
from lucidrl.envs.text.hosts import DriverHost, EnvHost
from lucidrl.envs.text.interfaces import EnvReply, EnvRequest, TextEnv
from lucidrl.envs.text.worker import Cause, EnvState, Failure
from lucidrl.errors import CheckpointError, EnvironmentFailure, LostWorkerError, WorkerError

logger = logging.getLogger(__name__)

_GRACE_S = 2.0
"""How long after the timeout of its calls a worker may take to answer before it is killed."""

Rows = Sequence[int]
"""Of the requests of a step."""


@dataclass(frozen=True)
class _Failed:
    """A sample that has no step result."""

    failure: Failure
    rows: Rows
    """Samples of the call, of which any may be the reason."""
    loss: LostWorkerError | None = None
    """How its worker was lost."""


@dataclass(frozen=True)
class _Lost:
    """Calls that a worker was busy with when it was lost."""

    calls: Sequence[Rows]
    error: LostWorkerError

    @property
    def rows(self) -> list[int]:
        return [row for call in self.calls for row in call]


class EnvRunner:
    """Steps an environment, wherever it runs.

    A call that raises, exceeds its timeout or returns the wrong number of replies fails for all its samples. With
    `on_error="fail"` that is raised at once. With "drop" the samples are retried one by one, so that a bad one costs
    its neighbours nothing; those that still fail are left out.

    A worker that does not answer in time is killed, and restarted like one that exited. Its samples are retried, at
    last one by one, so that the error names the sample that is the reason. An EnvironmentFailure that the environment
    raises is of the environment as a whole, and always raised.

    Args:
        env: scores completions; an environment itself runs in this process, see `start_host` for others. The runner
            ends it.
        timeout_s: timeout of a call.
        watch: see `wait_watching`; called while the environment is waited for.

    Attributes:
        counts: dropped samples by cause.
    """

    def __init__(
        self,
        env: TextEnv | EnvHost,
        timeout_s: float,
        max_concurrency: int,
        on_error: OnError,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self.counts: Counter[Cause] = Counter()
        self._host = env if isinstance(env, EnvHost) else DriverHost(env)
        self._timeout_s = timeout_s
        self._max_concurrency = max_concurrency
        self._on_error = on_error
        self._watch = watch
        self._lost: list[EnvRequest] = []
        """What workers were busy with that were lost last, until they are restarted."""

    @property
    def num_replaced(self) -> int:
        """Restarts of the environment's workers so far."""
        return self._host.num_restarts

    def step(self, requests: Sequence[EnvRequest]) -> list[EnvReply | None]:
        """Replies in the order of the requests; None for a dropped one.

        Raises:
            EnvironmentFailure: with `on_error="fail"`, naming environment, samples, turn and cause; with any, if the
                environment raises it, or its workers were lost too often.
        """
        found: dict[int, EnvReply | _Failed] = {}
        lost = self._ask(requests, _even_chunks(range(len(requests)), self._max_concurrency), found)
        # A worker that exits may be a victim of its machine: its calls are sent once more as they were.
        exited = [call for loss in lost if not loss.error.timed_out for call in loss.calls]
        lost = [loss for loss in lost if loss.error.timed_out] + self._ask(requests, exited, found)
        if self._on_error == "drop":
            for rows in _batches(_shared_failures(found), self._max_concurrency):
                lost += self._ask(requests, [[row] for row in rows], found)
        self._raise_first(requests, found)
        self._find_reasons(requests, lost, found)
        for failed in (found[row] for row in range(len(requests))):
            if isinstance(failed, _Failed):
                self._count_dropped(requests, failed)
        return [reply if isinstance(reply := found[row], EnvReply) else None for row in range(len(requests))]

    def state_dict(self) -> dict[str, Any]:
        """What the environment keeps over a run, as `env`, and the random states of its workers, as `env_random`.

        Raises:
            EnvironmentFailure: if the environment raises, or gives what a checkpoint cannot hold.
        """
        states = self._host.states()
        kept = {"env": json.loads(states[0].env)} if states[0].env is not None else {}
        drawn = [state.random for state in states if state.random is not None]
        return {**kept, "env_random": drawn} if drawn else kept

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the environment and its workers back what `state_dict` found.

        Raises:
            CheckpointError: if it was another environment's, by whether there is one or because this one raises.
        """
        now = self._host.states()
        if (now[0].env is not None) != ("env" in state):
            which, keeps = ("a", "keeps none") if "env" in state else ("no", "keeps one")
            raise CheckpointError(
                f"the checkpoint has {which} state of the environment, but {self._host.name} {keeps}; "
                "resume with the env.name it was saved with"
            )
        drawn: Sequence[Any] = state.get("env_random", [])
        if now[0].random is None or len(drawn) != len(now):
            if now[0].random is not None:
                logger.warning(
                    "the checkpoint holds random states of %d environment workers, and there are %d now: their random "
                    "generators start over from the seed",
                    len(drawn),
                    len(now),
                )
            drawn = [None] * len(now)
        kept = json.dumps(state["env"]) if "env" in state else None
        self._host.load_states([EnvState(kept, random) for random in drawn])

    def close(self) -> None:
        """End the environment's workers; may be called twice."""
        self._host.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _ask(
        self, requests: Sequence[EnvRequest], calls: Sequence[Rows], found: dict[int, EnvReply | _Failed]
    ) -> list[_Lost]:
        """Make calls concurrently, each worker its share; adds to what was found, and returns what was lost."""
        if not calls:
            return []
        self._restart_lost()
        shares = {number: calls[number :: self._host.num_workers] for number in range(self._host.num_workers)}
        messages = {
            number: [[requests[row] for row in call] for call in share] for number, share in shares.items() if share
        }
        answers = self._host.score(messages, self._timeout_s, _GRACE_S, self._watch)
        lost = []
        for number, answer in answers.items():
            if isinstance(answer, LostWorkerError):
                lost.append(_Lost(shares[number], answer))
                continue
            for call, outcomes in zip(shares[number], answer, strict=True):
                for row, outcome in zip(call, outcomes, strict=True):
                    if isinstance(outcome, Failure):
                        found[row] = _Failed(outcome, call if outcome.is_of_call else [row])
                    else:
                        found[row] = outcome
        self._lost = [requests[row] for loss in lost for row in loss.rows]
        return lost

    def _restart_lost(self) -> None:
        try:
            self._host.restart_lost()
        except (WorkerError, EnvironmentFailure) as error:
            raise EnvironmentFailure(
                f"{self._host.name}.step lost its worker ({_named(self._lost)}): {error}"
            ) from error

    def _find_reasons(
        self, requests: Sequence[EnvRequest], lost: Sequence[_Lost], found: dict[int, EnvReply | _Failed]
    ) -> None:
        """Retry samples of lost workers alone, to find those that the workers were lost for."""
        suspects: list[int] = []
        for loss in lost:
            if len(loss.rows) == 1:
                found[loss.rows[0]] = self._failed(loss)
            else:
                suspects += _spread(loss.rows)
        self._raise_first(requests, found)
        for rows in _batches(suspects, self._host.num_workers):
            for loss in self._ask(requests, [[row] for row in rows], found):
                found[loss.rows[0]] = self._failed(loss)
            self._raise_first(requests, found)

    def _failed(self, loss: _Lost) -> _Failed:
        if loss.error.timed_out:
            what = f"exceeded its timeout of {self._timeout_s:g} s and blocked its worker"
            return _Failed(Failure("deadline", what), loss.rows, loss.error)
        return _Failed(Failure("exited", "ended its worker"), loss.rows, loss.error)

    def _raise_first(self, requests: Sequence[EnvRequest], found: Mapping[int, EnvReply | _Failed]) -> None:
        """Raise the failure of the first sample that has one, unless such samples are dropped."""
        failed = next((found[row] for row in sorted(found) if isinstance(found[row], _Failed)), None)
        if isinstance(failed, _Failed) and self._on_error == "fail":
            remedy = "fix the environment, or leave such samples out with env.on_error=drop"
            cause = failed.loss or (RemoteTraceback(failed.failure.trace) if failed.failure.trace else None)
            detail = f": {failed.loss}" if failed.loss is not None else ""
            raise EnvironmentFailure(f"{self._described(requests, failed)}; {remedy}{detail}") from cause

    def _count_dropped(self, requests: Sequence[EnvRequest], failed: _Failed) -> None:
        cause = failed.failure.cause
        if cause not in self.counts:
            logger.warning(
                "%s; the sample is dropped, and later ones with this cause are only counted",
                self._described(requests, failed),
            )
        self.counts[cause] += 1

    def _described(self, requests: Sequence[EnvRequest], failed: _Failed) -> str:
        of_call = [requests[row] for row in failed.rows]
        return f"{self._host.name}.step {failed.failure.what} ({_named(of_call)}, turn {of_call[0].turn})"


def _named(requests: Sequence[EnvRequest]) -> str:
    ids = [request.sample_id for request in requests]
    shown = ", ".join(ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
    return f"{'sample' if len(ids) == 1 else 'samples'} {shown}"


def _shared_failures(found: Mapping[int, EnvReply | _Failed]) -> list[int]:
    """Samples of calls that failed as a whole, and had others."""
    return [row for row, failed in sorted(found.items()) if isinstance(failed, _Failed) and len(failed.rows) > 1]


def _spread(rows: Rows) -> list[int]:
    """The rows in another order: neighbours are often samples of one prompt, and fail in a row."""
    stride = math.isqrt(len(rows))
    return [row for start in range(stride) for row in rows[start::stride]]


def _batches(rows: Rows, size: int) -> list[Rows]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _even_chunks(rows: Rows, max_chunks: int) -> list[Rows]:
    """At most `max_chunks` non-empty chunks in order, whose sizes differ by at most one."""
    num_chunks = min(max_chunks, len(rows))
    bounds = [len(rows) * index // num_chunks for index in range(num_chunks + 1)] if num_chunks else []
    return [rows[start:stop] for start, stop in pairwise(bounds)]
