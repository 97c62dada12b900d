"""Where an environment runs: in worker processes that can be killed and restarted, or in the driver."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

from lucidrl.data.datasets import Prompt
from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.interfaces import Arguments, Hosting
from lucidrl.distributed.workers.pool import PoolWorker, WorkerPool
from lucidrl.envs.text.config import EnvConfig
from lucidrl.envs.text.interfaces import EnvRequest, TextEnv
from lucidrl.envs.text.registry import make_env, split_prompts
from lucidrl.envs.text.worker import EnvState, EnvWorker, Outcome, Scored
from lucidrl.errors import ConfigError, EnvironmentFailure, LostWorkerError
from lucidrl.utils.watching import wait_watching

Calls = Sequence[Sequence[EnvRequest]]
"""Of one worker, made concurrently."""

_CLOSE_TIMEOUT_S = 0.5

T = TypeVar("T")


class EnvHost(ABC):
    """The workers of an environment."""

    name: str
    """What errors call the environment."""
    num_workers: int

    @property
    @abstractmethod
    def num_restarts(self) -> int:
        """Restarts of workers so far."""

    @abstractmethod
    def prompts(self) -> Sequence[Prompt] | None:
        """The environment's own; None if it brings none."""

    @abstractmethod
    def score(
        self, calls: Mapping[int, Calls], timeout_s: float, grace_s: float, watch: Callable[[], None]
    ) -> dict[int, list[list[Outcome]] | LostWorkerError]:
        """Let workers score their calls, all at the same time.

        Args:
            calls: by number of the worker.
            timeout_s: timeout of a call; one that awaits is cancelled then.
            grace_s: how much longer a worker may take to answer; one that does not is lost.
            watch: see `wait_watching`.

        Returns:
            Outcomes of every request of every call, or how the worker was lost.
        """

    @abstractmethod
    def restart_lost(self) -> None:
        """Restart lost workers; they continue from the state after their last scored calls.

        Raises:
            LucidError: if that is not possible, or was done too often.
        """

    @abstractmethod
    def states(self) -> list[EnvState]:
        """Of every worker."""

    @abstractmethod
    def load_states(self, states: Sequence[EnvState]) -> None:
        """Continue from states, one for each worker."""

    def move_logs(self, folder: Path) -> None:  # noqa: B027 - what runs in the driver has no log
        """Write the workers' logs to another folder from now on."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers; may be called twice."""


class WorkersHost(EnvHost):
    """The environment in worker processes.

    Args:
        config: which environment, and how many workers.
        cluster: threads and start timeout; where the workers run, if there are several.
        log_dir: for `env_N.log` with the output of worker N.
        seed: of the workers' random generators.

    Raises:
        ConfigError: if the environment cannot be made, or would lose its state in several workers.
    """

    def __init__(
        self, config: EnvConfig, cluster: ClusterConfig, *, log_dir: Path | None = None, seed: int = 0
    ) -> None:
        self.name, self.num_workers = config.name, config.num_workers
        self._start_timeout_s = cluster.start_timeout_s
        self._states: dict[int, EnvState] = {}
        if self.num_workers == 1:
            cluster = _on_this_machine(cluster)
        make = partial(make_env, config.name, config.kwargs)
        hosting = Hosting(
            role="environment worker",
            name="env",
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
                on_start=self._bring_state,
            )
        except LostWorkerError as error:
            raise ConfigError(f"{self.name} cannot be made: {error}") from error
        except ConfigError as error:  # a mistake in the settings is one sentence, wherever it was found
            raise ConfigError(str(error)) from error.__cause__
        try:
            _check_state_is_kept(config, self._states[0])
        except ConfigError:
            self._pool.shutdown()
            raise

    @property
    def num_restarts(self) -> int:
        return self._pool.num_restarts

    def prompts(self) -> Sequence[Prompt] | None:
        try:
            return self._pool.submit(0, "prompts", timeout_s=self._start_timeout_s).result()
        except ConfigError as error:  # one sentence, without where its worker's output is
            raise ConfigError(str(error)) from error
        except LostWorkerError as error:
            limit = f"cluster.start_timeout_s={self._start_timeout_s:g}"
            what = f"did not return within {limit}" if error.timed_out else f"ended its worker: {error}"
            raise ConfigError(f"{self.name}.prompts {what}; fix it, or set env.prompts_file") from error

    def score(
        self, calls: Mapping[int, Calls], timeout_s: float, grace_s: float, watch: Callable[[], None]
    ) -> dict[int, list[list[Outcome]] | LostWorkerError]:
        futures = {
            number: self._pool.submit(number, "score", of_worker, timeout_s, timeout_s=timeout_s + grace_s)
            for number, of_worker in calls.items()
        }
        try:
            wait_watching(futures.values(), watch, until_one_raises=False)
            return {number: self._outcomes(number, future) for number, future in futures.items()}
        except BaseException:  # Ctrl-C too: the workers are in the middle of something
            self._pool.kill()
            raise

    def restart_lost(self) -> None:
        self._pool.restart_lost()

    def states(self) -> list[EnvState]:
        return [self._states[number] for number in range(self.num_workers)]

    def load_states(self, states: Sequence[EnvState]) -> None:
        def load(worker: PoolWorker) -> None:
            worker.run("load_state", states[worker.number])
            self._states[worker.number] = worker.run("state")

        self._pool.each(load)

    def move_logs(self, folder: Path) -> None:
        self._pool.move_logs(folder)

    def shutdown(self) -> None:
        self._pool.shutdown()

    def _bring_state(self, worker: PoolWorker) -> None:
        if worker.number in self._states:
            worker.run("load_state", self._states[worker.number])
        else:
            self._states[worker.number] = worker.run("state")

    def _outcomes(self, number: int, future: Future[Scored]) -> list[list[Outcome]] | LostWorkerError:
        try:
            scored = future.result()
        except LostWorkerError as loss:
            return loss
        assert scored.state is not None
        self._states[number] = scored.state
        self._pool.workers[number].succeeded()
        return scored.outcomes


class DriverHost(EnvHost):
    """The environment in this process, in a thread of its own: code that blocks cannot be interrupted."""

    num_workers = 1
    num_restarts = 0

    def __init__(self, env: TextEnv) -> None:
        self.name = type(env).__name__
        self._worker = EnvWorker(lambda: env, self.name)
        self._thread = _DaemonThread(f"{self.name}-environment")
        self._is_blocked = False

    def prompts(self) -> Sequence[Prompt] | None:
        return self._worker.prompts()

    def score(
        self, calls: Mapping[int, Calls], timeout_s: float, grace_s: float, watch: Callable[[], None]
    ) -> dict[int, list[list[Outcome]] | LostWorkerError]:
        (of_worker,) = calls.values()
        future = self._thread.submit(lambda: self._worker.score(of_worker, timeout_s))
        if wait_watching([future], watch, timeout_s=timeout_s + grace_s):
            self._is_blocked = True
            loss = LostWorkerError(f"its thread in the driver is still busy after {timeout_s + grace_s:g} s")
            loss.timed_out = True
            return {0: loss}
        return {0: future.result().outcomes}

    def restart_lost(self) -> None:
        if self._is_blocked:
            raise EnvironmentFailure(
                "a call blocks the driver's thread of the environment and cannot be interrupted; set "
                "env.isolation=process, where its worker is killed, or put what blocks into asyncio.to_thread"
            )

    def states(self) -> list[EnvState]:
        return [self._worker.state()]

    def load_states(self, states: Sequence[EnvState]) -> None:
        self._worker.load_state(states[0])

    def shutdown(self) -> None:
        self._thread.close(self._worker.shutdown, timeout_s=0 if self._is_blocked else _CLOSE_TIMEOUT_S)


class _DaemonThread:
    """Runs one function after the other; never keeps the interpreter from exiting."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        if self._is_closed:
            raise RuntimeError("the EnvRunner is closed; make a new one to step the environment")
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._work.put(work)
        return future

    def close(self, last: Callable[[], None], timeout_s: float) -> None:
        """Run a last function and end; may be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._work.put(last)
            self._work.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def start_host(
    config: EnvConfig, cluster: ClusterConfig | None = None, *, log_dir: Path | None = None, seed: int = 0
) -> EnvHost:
    """Make the environment where the configuration says; see `WorkersHost`."""
    if config.is_isolated:
        return WorkersHost(config, cluster or ClusterConfig(), log_dir=log_dir, seed=seed)
    return DriverHost(make_env(config.name, config.kwargs))


def start_first_worker(config: EnvConfig, cluster: ClusterConfig, seed: int = 0) -> EnvHost:
    """Make the environment once, before a run is known to start: for its prompts, and for the run if one is enough.

    Args:
        cluster: threads and start timeout of its worker.
        seed: of the run; the constructor of an environment may draw.

    Raises:
        ConfigError: if the environment cannot be made.
    """
    host = start_host(config.model_copy(update={"num_workers": 1}), cluster, seed=seed)
    try:
        _check_state_is_kept(config, host.states()[0])
    except BaseException:
        host.shutdown()
        raise
    return host


def prompts_of(host: EnvHost, config: EnvConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Training and validation prompts: of `prompts_file` if given, otherwise the environment's own.

    Raises:
        ConfigError: if there are no prompts.
        DataError: if they cannot be used.
    """
    return split_prompts(host.prompts() if config.prompts_file is None else None, config)


def _check_state_is_kept(config: EnvConfig, state: EnvState) -> None:
    if config.num_workers > 1 and state.env is not None:
        raise ConfigError(
            f"env.num_workers={config.num_workers} needs an environment that keeps nothing, but {config.name} has a "
            "state_dict, and every worker would have a state of its own; set env.num_workers=1, or take state_dict out"
        )


def _on_this_machine(cluster: ClusterConfig) -> ClusterConfig:
    return ClusterConfig(num_threads=cluster.num_threads, start_timeout_s=cluster.start_timeout_s)
