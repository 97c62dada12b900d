"""RayCollector: workers on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from lucidrl.collectors.base import armed
from lucidrl.collectors.multi import MultiCollector
from lucidrl.collectors.worker import WorkerPlan
from lucidrl.collectors.workers import CollectorWorkers
from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.interfaces import Hosting
from lucidrl.distributed.workers.ray_cluster import VARIABLE, connected
from lucidrl.distributed.workers.ray_resources import reserved
from lucidrl.envs.creator import EnvFactory
from lucidrl.errors import ConfigError
from lucidrl.utils.imports import require_package

Options = Mapping[str, Any]
"""Options of `ray.remote`."""

_RESERVED = (
    "allow_out_of_order_execution",
    "concurrency_groups",
    "get_if_exists",
    "lifetime",
    "max_concurrency",
    "max_pending_calls",
    "max_restarts",
    "max_task_retries",
    "name",
    "namespace",
)
"""Options that users may not pass: the collector sets names, lifetime, concurrency and restarts of the actors."""


class RayCollector(MultiCollector):
    """Runs a `Collector` with a separate env in each of several workers on the nodes of a Ray cluster; iterate to get
    batches.

        ray.init("auto")
        collector = RayCollector([make_env] * 8, policy, frames_per_batch=4000, total_frames=1_000_000, sync=True)
        for batch in collector:
            train(batch)
            collector.update_policy_weights_()
        collector.shutdown()

    Each worker is a child process of a Ray actor, which reserves the worker's resources. If the program has not called
    `ray.init`, the collector joins the cluster that RAY_ADDRESS names and leaves it at `shutdown`; without RAY_ADDRESS
    it starts a local cluster and stops it at `shutdown`. Nodes need the packages that envs and policy import; workers
    look for the modules of the program at the driver's paths.

    Args:
        sync: True collects batches as `MultiSyncCollector` does, bit-exact for the same seed; False as
            `MultiAsyncCollector` does.
        remote_options: passed to `ray.remote` for the actors, such as `num_cpus`, `num_gpus` or `runtime_env`; one
            mapping for all, or one per worker. By default an actor reserves one CPU; in a local cluster that the
            collector starts, it reserves almost nothing.
        max_restarts: most consecutive restarts of one worker without a batch in between. The driver restarts a worker
            if its process exits or times out, or if its node is lost. The restarted worker gets the newest weights,
            the hook and the unfinished calls, and begins new, unseeded episodes. A worker that raises is not restarted.
        create_env_fn, policy, arguments: see `MultiCollector`; `cat_results` is among the arguments.

    Raises:
        ConfigError: the cluster lacks resources for the actors; no actor was started.
        WorkerError: see `MultiCollector`; the error also names the node.
    """

    def __init__(
        self,
        create_env_fn: EnvFactory | Sequence[EnvFactory],
        policy: Any = None,
        *,
        sync: bool = False,
        remote_options: Options | Sequence[Options] | None = None,
        max_restarts: int = 0,
        **arguments: Any,
    ):
        require_package("ray", "RayCollector")
        if max_restarts < 0:
            raise ConfigError(f"max_restarts={max_restarts} is negative; set 0 to never restart, or a positive number")
        self._remote_options, self._max_restarts = remote_options, max_restarts
        super().__init__(create_env_fn, policy, sync=sync, **arguments)

    @property
    def num_restarts(self) -> int:
        """Restarts so far, of all workers."""
        return self.workers.num_restarts

    def _start_workers(self, plan: WorkerPlan) -> CollectorWorkers:
        options = _options_by_worker(self._remote_options, len(plan.own_arguments))
        options = [{"num_gpus": 0, **armed(each)} for each in options]
        with ExitStack() as held:
            # If VARIABLE names a cluster, join it, as `ray.init` does.
            is_own_ray = held.enter_context(connected(VARIABLE, allow_open_dashboard=True, shows_output=True))
            _check_resources(options, is_own_ray)
            return CollectorWorkers(
                replace(plan, ray_options=options, max_restarts=self._max_restarts, release=held.pop_all().close)
            )


def _options_by_worker(remote_options: Options | Sequence[Options] | None, num_workers: int) -> list[Options]:
    """Return one mapping per worker, from one mapping for all workers or a list of mappings.

    Raises:
        ConfigError: `remote_options` has another type, or an option that the collector sets itself.
    """
    given = remote_options if isinstance(remote_options, list | tuple) else [remote_options or {}] * num_workers
    if len(given) != num_workers:
        raise ConfigError(
            f"remote_options has {len(given)} entries for {num_workers} workers; pass one mapping, or one per worker"
        )
    for options in given:
        if not isinstance(options, Mapping):
            raise ConfigError(
                f"remote_options has {options!r}, which is not a mapping; pass options of ray.remote such as "
                '{"num_cpus": 1}'
            )
        if reserved_names := [name for name in _RESERVED if name in options]:
            raise ConfigError(
                f"remote_options has {reserved_names[0]}, which the collector sets itself; remove it (the collector's "
                "argument max_restarts sets the number of restarts)"
            )
    return list(given)


def _check_resources(options: Sequence[Options], is_own_ray: bool) -> None:
    """Check, before any worker is started, that the cluster has resources for all workers together.

    Raises:
        ConfigError: the resources do not suffice; the message names the required and the free resources.
    """
    cluster = ClusterConfig(launcher="ray")
    with ExitStack() as held:
        for number, each in enumerate(options):
            hosting = Hosting(first_number=number, pool_size=len(options), size_setting="num_workers", ray_options=each)
            held.enter_context(reserved(cluster, is_own_ray, hosting))
