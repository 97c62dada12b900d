"""RayCollector: workers on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from lucidrl.collectors.base import armed
from lucidrl.collectors.batch_orders import AsyncOrder, CatResults, SyncOrder
from lucidrl.collectors.multi import MultiCollector
from lucidrl.collectors.workers import CollectorWorkers, RayPlan, WorkerPlan
from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.interfaces import Hosting
from lucidrl.distributed.workers.ray_cluster import VARIABLE, connected
from lucidrl.distributed.workers.ray_resources import reserved
from lucidrl.envs.creator import EnvFactory
from lucidrl.errors import ConfigError
from lucidrl.utils.imports import require_package

Options = Mapping[str, Any]
"""Of `ray.remote`."""

_DECIDED = (
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
"""Options that the collector decides: what the actors are called, how long they live, what they do in which order."""


class RayCollector(MultiCollector):
    """Workers that each run a `Collector` on an env of their own, on any node of a cluster; iterate to get batches.

        ray.init("auto")
        collector = RayCollector([make_env] * 8, policy, frames_per_batch=4000, total_frames=1_000_000, sync=True)
        for batch in collector:
            train(batch)
            collector.update_policy_weights_()
        collector.shutdown()

    Each worker is a process below a Ray actor that holds its resources. If the program has not called `ray.init`, the
    collector joins the cluster that RAY_ADDRESS names, or starts a local one, and leaves or ends it at `shutdown`.
    Nodes have the packages that envs and policy import; they look for the program's own modules where the driver has
    them.

    Args:
        create_env_fn, policy: as for `MultiCollector`.
        sync: whether all workers collect their share of each batch at the same time, as in `MultiSyncCollector`, with
            the same seed to the bit; otherwise each batch is one worker's, as in `MultiAsyncCollector`.
        cat_results: as for `MultiSyncCollector`, with `sync`.
        remote_options: of `ray.remote` for the actors, such as `num_cpus`, `num_gpus`, `resources` or `runtime_env`;
            one mapping for all, or one for each. By default an actor asks for one CPU, and for next to nothing in a
            local cluster that the collector starts.
        max_restarts: consecutive restarts of one worker without a batch in between. A worker whose process exits or
            times out, or whose node is lost, is restarted with the newest weights and the hook, and gets its
            unanswered request again; it begins new episodes, unseeded. Workers that raise are not restarted.
        arguments: as for `MultiCollector`.

    Raises:
        ConfigError: if the cluster lacks what the actors ask for, before any is started.
        WorkerError: see `MultiCollector`; it names the node too.
    """

    def __init__(
        self,
        create_env_fn: EnvFactory | Sequence[EnvFactory],
        policy: Any = None,
        *,
        sync: bool = False,
        cat_results: CatResults = "stack",
        remote_options: Options | Sequence[Options] | None = None,
        max_restarts: int = 0,
        **arguments: Any,
    ):
        require_package("ray", "RayCollector")
        if max_restarts < 0:
            raise ConfigError(f"max_restarts={max_restarts} is negative; give 0 to never restart, or a positive number")
        self._remote_options, self._max_restarts = remote_options, max_restarts
        super().__init__(create_env_fn, policy, SyncOrder(cat_results) if sync else AsyncOrder(), **arguments)

    @property
    def num_restarts(self) -> int:
        """Restarts so far, of all workers."""
        return self.workers.num_restarts

    def _start_workers(self, plan: WorkerPlan) -> CollectorWorkers:
        options = _options_by_worker(self._remote_options, len(plan.own_arguments))
        options = [{"num_gpus": 0, **armed(each)} for each in options]
        with ExitStack() as held:
            # A cluster that the variable names is joined as it is, as by `ray.init`.
            is_own_ray = held.enter_context(connected(VARIABLE, allow_open_dashboard=True, shows_output=True))
            _check_room(options, is_own_ray)
            return CollectorWorkers(plan, RayPlan(options, self._max_restarts, held.pop_all().close))


def _options_by_worker(remote_options: Options | Sequence[Options] | None, num_workers: int) -> list[Options]:
    """One mapping for each worker, from one for all or a list of them.

    Raises:
        ConfigError: if it is something else, or has what the collector decides.
    """
    given = remote_options if isinstance(remote_options, list | tuple) else [remote_options or {}] * num_workers
    if len(given) != num_workers:
        raise ConfigError(
            f"remote_options has {len(given)} entries for {num_workers} workers; give one mapping, or one for each"
        )
    for options in given:
        if not isinstance(options, Mapping):
            raise ConfigError(
                f"remote_options has {options!r}, which is no mapping; give options of ray.remote such as "
                '{"num_cpus": 1}'
            )
        if decided := [name for name in _DECIDED if name in options]:
            raise ConfigError(
                f"remote_options has {decided[0]}, which the collector decides; leave it out (restarts of a worker "
                "are limited by the collector's own argument max_restarts)"
            )
    return list(given)


def _check_room(options: Sequence[Options], is_own_ray: bool) -> None:
    """Refuse workers for which the cluster has no room, all together, before any is started.

    Raises:
        ConfigError: with what was asked for and what is free.
    """
    cluster = ClusterConfig(launcher="ray")
    with ExitStack() as held:
        for number, each in enumerate(options):
            hosting = Hosting(first_number=number, pool_size=len(options), size_setting="num_workers", ray_options=each)
            held.enter_context(reserved(cluster, is_own_ray, hosting))
