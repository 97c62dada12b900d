"""Workers that are Ray actors, on whichever node of a cluster has room."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from lucidrl.collectors.parts import Weights
from lucidrl.collectors.ray_actor import CollectorActor, Past
from lucidrl.collectors.ray_options import Options, check_room, needs
from lucidrl.collectors.ray_weights import RayWeights
from lucidrl.collectors.ray_worker import RayArrivals, RayWorker
from lucidrl.collectors.remote import actor_class
from lucidrl.collectors.worker_host import WorkerPlan
from lucidrl.distributed.launchers.driver_program import own_paths, search_path_variable
from lucidrl.distributed.launchers.ray_connection import VARIABLE, connected
from lucidrl.distributed.launchers.ray_resources import described, free_on_nodes
from lucidrl.errors import ConfigError


class Restarts:
    """How many workers may be replaced, and were."""

    def __init__(self, most: int):
        self._most = most
        self._lock = threading.Lock()
        self.count = 0

    def take_one(self) -> str | None:
        """Which one it is, for a message; None if there is none left."""
        with self._lock:
            if self.count == self._most:
                return None
            self.count += 1
            return f"restart {self.count} of {self._most}"


class RayHost:
    """Starts actors; see `WorkerHost`.

    Args:
        options: of `ray.remote`, by worker.
        max_restarts: how many actors that died are replaced, of all workers together.

    Raises:
        ConfigError: if Ray refuses the options, or the cluster has no room for the actors; nothing was started then.
    """

    def __init__(self, plan: WorkerPlan, options: Sequence[Options], max_restarts: int):
        import ray

        self._own_arguments = plan.own_arguments
        self._process = plan.num_threads, plan.base_seed
        self.weights = RayWeights(plan.weights)
        self.restarts = Restarts(max_restarts)
        self.replies, self.batches = RayArrivals(), RayArrivals()
        self.timeout_s, self.start_timeout_s = plan.timeout_s, plan.start_timeout_s
        with ExitStack() as held:
            # Who names a cluster by the variable has asked for it as it is, as with `ray.init`.
            is_own_ray = held.enter_context(connected(VARIABLE, allow_open_dashboard=True, shows_output=True))
            # As processes do, actors share the cores of a machine that is theirs alone.
            self._options = [{"num_cpus": 0 if is_own_ray else 1, **each} for each in options]
            self._actor_classes = [_actor_class(index, each) for index, each in enumerate(self._options)]
            check_room(self._options, plan.start_timeout_s)
            self._shared_arguments: Any = ray.put(plan.shared_arguments)
            held.callback(self._release)
            self._held = held.pop_all()

    def start(self, index: int, plan: WorkerPlan) -> RayWorker:
        return RayWorker(self, index)

    def publish(self, weights: Weights, version: int) -> None:
        self.weights.publish(weights, version)

    def close_before_ray(self, shutdown: Callable[[], None]) -> None:
        """At exit, unless it is closed before: Ray leaves then too, and is faster than what was registered earlier."""
        atexit.register(shutdown)
        self._held.callback(atexit.unregister, shutdown)

    def close(self) -> None:
        self._held.close()

    def new_actor(self, index: int, num_earlier: int) -> Any:
        """Begin to make an actor for a worker that had so many; returns its handle."""
        stream = index + num_earlier * len(self._own_arguments)  # nobody repeats what another one drew
        return self._actor_classes[index].remote(*self._process, stream)

    def start_actor(self, actor: Any, index: int, past: Past) -> Any:
        """Let an actor make its collector; returns the reference to its answer."""
        return actor.start.remote(self._shared_arguments, self._own_arguments[index], past)

    def how_it_waits(self, index: int) -> str:
        """For an error, about a worker that has not been heard of: it may be waiting for what others hold."""
        import ray

        asked = needs(self._options[index])
        room = f" asking for {described(asked)} ({free_on_nodes(asked)})," if asked and ray.is_initialized() else ""
        return f"not heard of yet,{room}"

    def _release(self) -> None:
        """Leave nothing in Ray's object store."""
        self.weights.close()
        self._shared_arguments = None


def _actor_class(index: int, options: Options) -> Any:
    try:
        return actor_class(CollectorActor, options, search_path_variable(own_paths()))
    except (ValueError, TypeError) as error:  # as Ray sees fit
        raise ConfigError(
            f"Ray refuses remote_options of worker {index}: {error}; give options that ray.remote takes for actors"
        ) from error
