"""RayCollector: workers that are actors of a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lucidrl.collectors.batch_orders import AsyncOrder, SyncOrder
from lucidrl.collectors.multi import MultiCollector
from lucidrl.collectors.ray_host import RayHost
from lucidrl.collectors.ray_options import Options, options_by_worker
from lucidrl.collectors.worker_host import WorkerPlan
from lucidrl.envs.creator import EnvFactory
from lucidrl.errors import ConfigError
from lucidrl.utils.imports import require_package


class RayCollector(MultiCollector):
    """Ray actors that each run a `Collector` on an env of their own, on any node of a cluster; iterate to get batches.

        ray.init("auto")
        collector = RayCollector([make_env] * 8, policy, frames_per_batch=4000, total_frames=1_000_000, sync=True)
        for batch in collector:
            train(batch)
            collector.update_policy_weights_()
        collector.shutdown()

    If the program has not called `ray.init`, a Ray of this machine is started for it, and ended at `shutdown`; or the
    cluster is joined that RAY_ADDRESS names. Nodes have the packages that envs and policy import; the program's own
    modules are looked for where the driver has them.

    Args:
        create_env_fn, policy: as for `MultiCollector`.
        sync: whether all workers collect their share of each batch at the same time, as in `MultiSyncCollector`, with
            the same seed to the bit; otherwise each batch is one worker's, as in `MultiAsyncCollector`.
        remote_options: of `ray.remote` for the actors, such as `num_cpus`, `num_gpus`, `resources` or `runtime_env`;
            one mapping for all, or one for each. By default an actor asks for one CPU, and in a Ray that is started
            for the program for none.
        max_restarts: how many actors that die are replaced, of all workers together. What takes an actor's place has
            the newest weights, and is asked for what that one did not give; it begins new episodes, unseeded. Actors
            that raise or hang are not replaced.
        arguments: as for `MultiCollector`.

    Raises:
        ConfigError: if the cluster has not what the actors ask for, before any is started.
        WorkerError: see `MultiCollector`; it names the node too.
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
            raise ConfigError(f"max_restarts={max_restarts} is no number of restarts; give 0 or more")
        self._order_class = SyncOrder if sync else AsyncOrder
        self._remote_options, self._max_restarts = remote_options, max_restarts
        super().__init__(create_env_fn, policy, **arguments)
        self._host.close_before_ray(self.workers.shutdown)

    @property
    def num_restarts(self) -> int:
        """How many actors died and were replaced so far."""
        return self._host.restarts.count

    def _make_host(self, plan: WorkerPlan) -> RayHost:
        self._host = RayHost(plan, options_by_worker(self._remote_options, plan.num_workers), self._max_restarts)
        return self._host
