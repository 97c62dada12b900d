"""The workers of an environment: processes that the driver can kill and restart, or a thread of the driver."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lucidrl.data.datasets import Prompt
from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.interfaces import Arguments, Hosting
from lucidrl.distributed.workers.outcomes import START
from lucidrl.distributed.workers.pool import PoolWorker, WorkerPool
from lucidrl.envs.text.config import EnvConfig
from lucidrl.envs.text.interfaces import EnvRequest, TextEnv
from lucidrl.envs.text.registry import make_env
from lucidrl.envs.text.slices import SlicedCalls
from lucidrl.envs.text.worker import EnvState, EnvWorker, Outcome, Scored
from lucidrl.errors import ConfigError, EnvironmentFailure, LostWorkerError
from lucidrl.profiling.worker_times import worker_clock
from lucidrl.utils.nsys import ENV
from lucidrl.utils.watching import wait_watching

Calls = Sequence[Sequence[EnvRequest]]
"""Batches of requests for one worker, which calls the environment with all of them concurrently."""

_GRACE_S = 2.0
"""Time after the timeout of its calls until a worker that does not reply counts as lost."""
_CLOSE_TIMEOUT_S = 0.5


class EnvWorkerPool:
    """An environment in worker processes.

    Args:
        cluster: threads, start timeout and, for several workers, the launcher and nodes.
        num_workers: start this many instead of `config.num_workers`, such as one to read prompts.
        log_dir: folder of `env_N.log`, the output of worker N.
        seed: seed of the workers' random generators.

    Raises:
        ConfigError: if the environment cannot be made, or has state and `config.num_workers` is above 1.
    """

    def __init__(
        self,
        config: EnvConfig,
        cluster: ClusterConfig,
        *,
        num_workers: int | None = None,
        log_dir: Path | None = None,
        seed: int = 0,
    ) -> None:
        self.name, self.num_workers = config.name, num_workers or config.num_workers
        self._config = config
        self._start_timeout_s = cluster.start_timeout_s
        self._states: dict[int, EnvState] = {}
        if self.num_workers == 1:  # on this machine
            cluster = ClusterConfig(num_threads=cluster.num_threads, start_timeout_s=cluster.start_timeout_s)
        make = partial(make_env, config.name, config.kwargs)
        hosting = Hosting(
            role="environment worker",
            name=ENV,
            log_dir=log_dir,
            log_name="env",
            start_method="forkserver",
            imports_main=config.name.startswith("__main__:"),
            preload=[__name__, "lucidrl.utils.random_state"],
            call_setting="env.timeout_s",
        )
        try:
            self._pool = WorkerPool(
                EnvWorker,
                [Arguments((make, self.name, seed, number)) for number in range(self.num_workers)],
                cluster=cluster.of_one(with_gpus=False),
                hosting=hosting,
                max_restarts=config.max_restarts,
                setting="env.",
                on_start=self._restore_state,
            )
            self._sliced = SlicedCalls(self._pool, _GRACE_S, self._states.__setitem__)
        except LostWorkerError as error:
            raise ConfigError(f"{self.name} cannot be made: {error}") from error
        except ConfigError as error:  # one sentence, without notes about the worker
            raise ConfigError(str(error)) from error.__cause__

    @property
    def num_restarts(self) -> int:
        """Restarts of workers so far."""
        return self._pool.num_restarts

    def prompts(self) -> Sequence[Prompt] | None:
        """Prompts of the environment; None if it has no method `prompts`."""
        return self._prompts_of("prompts")

    def validation_prompts(self) -> Sequence[Prompt] | None:
        """Validation prompts of the environment; None if it has no method for them."""
        return self._prompts_of("validation_prompts")

    def _prompts_of(self, method: str) -> Sequence[Prompt] | None:
        try:
            return self._pool.submit(0, method, timeout_s=self._start_timeout_s).result()
        except ConfigError as error:  # one sentence, without notes about the worker
            raise ConfigError(str(error)) from error
        except LostWorkerError as error:
            limit = f"cluster.start_timeout_s={self._start_timeout_s:g}"
            what = f"did not return within {limit}" if error.timed_out else f"ended its worker: {error}"
            raise ConfigError(f"{self.name}.{method} {what}; fix it, or set data.file") from error

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ConfigError if the environment has a check and cannot score completions of the prompt."""
        try:
            self._pool.submit(0, "check_prompt", prompt, timeout_s=self._start_timeout_s).result()
        except ConfigError as error:  # one sentence, without notes about the worker
            raise ConfigError(str(error)) from error

    def score(
        self, calls: Mapping[int, Calls], timeout_s: float, watch: Callable[[], None]
    ) -> dict[int, list[list[Outcome]] | LostWorkerError]:
        """Score the calls of all workers at the same time; for one thread at a time.

        Args:
            calls: calls by index of the worker.
            timeout_s: timeout of a call; the pool kills a worker that does not reply soon after it.
            watch: see `wait_watching`.

        Returns:
            By index of the worker: outcomes per call and request, or the error of a lost worker.
        """
        futures = {
            number: self._pool.submit(number, "score", of_worker, timeout_s, timeout_s=timeout_s + _GRACE_S)
            for number, of_worker in calls.items()
        }
        try:
            with worker_clock.waiting():
                wait_watching(futures.values(), watch, until_one_raises=False)
            return {number: self._outcomes(number, future) for number, future in futures.items()}
        except BaseException:  # such as Ctrl-C: the workers are busy
            self._pool.kill()
            raise

    def score_concurrently(
        self, calls: Mapping[int, Calls], timeout_s: float
    ) -> dict[int, list[list[Outcome]] | LostWorkerError]:
        """As `score`, for several threads at a time; a worker runs the calls of all of them together."""
        futures = {
            number: [self._sliced.start(number, call, timeout_s) for call in of_worker]
            for number, of_worker in calls.items()
        }
        found: dict[int, list[list[Outcome]] | LostWorkerError] = {}
        for number, of_worker in futures.items():
            try:
                found[number] = [future.result() for future in of_worker]
            except LostWorkerError as loss:
                found[number] = loss
        return found

    def restart_lost(self) -> None:
        """Restart lost workers; each continues from the state that it had after its last successful `score`.

        Raises:
            LucidError: if a worker does not start, or used up its `max_restarts`.
        """
        self._pool.restart_lost()

    def states(self) -> list[EnvState]:
        """Return the state of every worker after its last successful `score`."""
        return [self._states[number] for number in range(self.num_workers)]

    def load_states(self, states: Sequence[EnvState]) -> None:
        """Continue from states, one per worker."""

        def load(worker: PoolWorker) -> None:
            self._run_in_time(worker, "load_state", states[worker.number])
            self._states[worker.number] = self._run_in_time(worker, "state")

        self._pool.each(load)

    def move_logs(self, folder: Path) -> None:
        """Write the workers' logs to another folder from now on."""
        self._pool.move_logs(folder)

    def start_gpu_profiling(self) -> None:
        """Start recording the spans of the requested workers; see `lucidrl.utils.nsys`."""
        self._pool.start_gpu_profiling()

    def stop_gpu_profiling(self) -> None:
        """Stop recording, if any worker records."""
        self._pool.stop_gpu_profiling()

    def shutdown(self) -> None:
        """Shut down the workers; may be called twice."""
        self._pool.shutdown()

    def _restore_state(self, worker: PoolWorker) -> None:
        if worker.number in self._states:
            self._run_in_time(worker, "load_state", self._states[worker.number])
            return
        state: EnvState = self._run_in_time(worker, "state")
        if self._config.num_workers > 1 and state.env is not None:
            problem = f"env.num_workers={self._config.num_workers} needs an environment without state"
            raise ConfigError(f"{problem}, but {self.name} has state_dict; set env.num_workers=1, or remove state_dict")
        self._states[worker.number] = state

    def _run_in_time(self, worker: PoolWorker, method: str, *args: Any) -> Any:
        """Call a method that is part of the start, with the timeout of the start."""
        return worker.run(method, *args, timeout_s=self._start_timeout_s, phase=START)

    def _outcomes(self, number: int, future: Future[Scored]) -> list[list[Outcome]] | LostWorkerError:
        try:
            scored = future.result()
        except LostWorkerError as loss:
            return loss
        self._states[number] = scored.state
        self._pool.workers[number].succeeded()
        return scored.outcomes


class InProcessEnv:
    """An environment in the driver's process, with the methods of `EnvWorkerPool`.

    The event loop runs in a daemon thread. A call that blocks cannot be killed, but `score` returns after the timeout.
    """

    num_workers = 1
    num_restarts = 0

    def __init__(self, env: TextEnv) -> None:
        self.name = type(env).__name__
        self._worker = EnvWorker(lambda: env, self.name)
        self._loop = self._worker.loop.get_loop()
        self._thread = threading.Thread(target=self._run_loop, name=f"{self.name}-environment", daemon=True)
        self._thread.start()
        self._is_blocked = False

    def prompts(self) -> Sequence[Prompt] | None:
        return self._worker.prompts()

    def validation_prompts(self) -> Sequence[Prompt] | None:
        return self._worker.validation_prompts()

    def check_prompt(self, prompt: Prompt) -> None:
        self._worker.check_prompt(prompt)

    def score(
        self, calls: Mapping[int, Calls], timeout_s: float, watch: Callable[[], None]
    ) -> dict[int, list[list[Outcome]] | LostWorkerError]:
        if self._loop.is_closed():
            raise RuntimeError("the EnvRunner is closed; make a new one to step the environment")
        future = asyncio.run_coroutine_threadsafe(self._worker.score_calls(calls[0], timeout_s), self._loop)
        if wait_watching([future], watch, timeout_s=timeout_s + _GRACE_S):
            self._is_blocked = True
            loss = LostWorkerError(
                f"the thread of the environment in the driver is still busy after {timeout_s + _GRACE_S:g} s"
            )
            loss.timed_out = True
            return {0: loss}
        return {0: future.result()}

    def score_concurrently(
        self, calls: Mapping[int, Calls], timeout_s: float
    ) -> dict[int, list[list[Outcome]] | LostWorkerError]:
        return self.score(calls, timeout_s, watch=lambda: None)

    def restart_lost(self) -> None:
        if self._is_blocked:
            remedy = "set env.isolation=process, or put the blocking code into asyncio.to_thread"
            raise EnvironmentFailure(f"a call blocks the environment's thread and cannot be killed; {remedy}")

    def states(self) -> list[EnvState]:
        return [self._worker.state()]

    def load_states(self, states: Sequence[EnvState]) -> None:
        self._worker.load_state(states[0])

    def move_logs(self, folder: Path) -> None:
        """Do nothing: output of the environment goes to the driver."""

    def start_gpu_profiling(self) -> None:
        """Do nothing: the driver records the environment with its own spans."""

    def stop_gpu_profiling(self) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(0 if self._is_blocked else _CLOSE_TIMEOUT_S)

    def _run_loop(self) -> None:
        self._loop.run_forever()
        self._worker.shutdown()


EnvWorkers = EnvWorkerPool | InProcessEnv


def start_env(
    config: EnvConfig,
    cluster: ClusterConfig | None = None,
    *,
    num_workers: int | None = None,
    log_dir: Path | None = None,
    seed: int = 0,
) -> EnvWorkers:
    """Start the environment in worker processes or in the driver, as configured; see `EnvWorkerPool`."""
    if config.is_isolated:
        return EnvWorkerPool(config, cluster or ClusterConfig(), num_workers=num_workers, log_dir=log_dir, seed=seed)
    return InProcessEnv(make_env(config.name, config.kwargs))
