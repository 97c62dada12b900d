"""What collectors with worker processes share."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import util
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from lucidrl.collectors.base import CollectorOptions, FrameCollector, check_calls, method_of
from lucidrl.collectors.single import Collector
from lucidrl.collectors.weights import Device, check_weights, shapes_of, weights_of
from lucidrl.collectors.worker import Batch
from lucidrl.collectors.workers import CollectorWorkers, WorkerPlan
from lucidrl.distributed.workers.process import pickled
from lucidrl.envs.base import MAX_SEED
from lucidrl.envs.creator import EnvFactory, env_creators
from lucidrl.envs.stacked import check_alike
from lucidrl.envs.tensordicts import tensordict_of
from lucidrl.errors import ConfigError
from lucidrl.profiling.hook import ProfileSettings
from lucidrl.profiling.ranges import _maybe_record_function


class BatchOrder(ABC):
    """Decides which workers collect the frames of a batch, and when."""

    @abstractmethod
    def frames_of_worker(self, frames_per_batch: int, num_workers: int) -> int:
        """Most frames of one worker in a batch."""

    @abstractmethod
    def envs_per_step(self, workers: CollectorWorkers) -> int:
        """Envs that step together; the frames of a batch are a multiple of this."""

    @abstractmethod
    def next_batch(self, workers: CollectorWorkers, num_frames: int, num_wanted: Callable[[int], int]) -> Batch | None:
        """The next batch; None at the end.

        Args:
            num_frames: collected so far.
            num_wanted: maps the frames requested so far to those of the next batch; 0 at the end.
        """


class MultiCollector(FrameCollector):
    """Runs a `Collector` with its own env in each of several worker processes; iterate to get batches.

    Envs, policy and `post_collect_hook` run in the workers; `split_trajs`, `postproc` and `replay_buffer` apply in the
    driver, to whole batches. Trajectory numbers are unique over all workers. Envs, policy and hook are pickled by
    cloudpickle: they may be local functions and lambdas.

    Args:
        create_env_fn: one factory per worker, or one for all with `num_workers`.
        policy: every worker has a copy. `update_policy_weights_` updates the weights of an `nn.Module`; any other
            callable stays as it was pickled.
        order: decides which workers collect a batch.
        create_env_kwargs: of the factories; one mapping for all, or one per worker.
        num_workers: number of processes, if there is only one factory.
        num_threads: torch threads per worker.
        timeout_s: of a batch, and of a call to the workers.
        start_timeout_s: of the start of all workers.
        arguments: as for `Collector`.

    Raises:
        WorkerError: here and in all calls, if a worker raises, exits or times out; its cause is the worker's traceback.
            A worker's `LucidError` keeps its type. All workers have ended then.
    """

    def __init__(
        self,
        create_env_fn: EnvFactory | Sequence[EnvFactory],
        policy: Any,
        order: BatchOrder,
        *,
        env_device: Device = None,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        num_workers: int | None = None,
        num_threads: int = 1,
        timeout_s: float = 60.0,
        start_timeout_s: float = 60.0,
        **arguments: Any,
    ):
        options = CollectorOptions(**arguments)
        super().__init__(options)
        for name, seconds in (("timeout_s", timeout_s), ("start_timeout_s", start_timeout_s)):
            if not seconds > 0:
                raise ConfigError(f"{name}={seconds} is not above 0; give a number of seconds")
        if num_workers is None:
            if not isinstance(create_env_fn, list | tuple):
                raise ConfigError(
                    "create_env_fn is one factory for all workers; set num_workers, or give a list of factories"
                )
            num_workers = len(create_env_fn)
        self.num_workers = num_workers
        creators = env_creators(num_workers, create_env_fn, create_env_kwargs)
        self.policy, self._order = policy, order
        shared_arguments = {
            "policy": policy,
            "frames_per_batch": order.frames_of_worker(options.frames_per_batch, num_workers),
            "device": options.device,
            "storing_device": "cpu",  # batches travel through host memory
            "policy_device": options.policy_device,
            "env_device": env_device,
            "init_random_frames": options.init_random_frames,
            "max_frames_per_traj": options.max_frames_per_traj,
            "reset_at_each_iter": options.reset_at_each_iter,
            "exploration_type": options.exploration_type,
            "post_collect_hook": options.post_collect_hook,
            "trajectory_stride": num_workers,
        }
        self._weight_shapes = shapes_of(policy)
        plan = WorkerPlan(
            pickled("the policy or the hook", shared_arguments),
            [
                pickled(f"create_env_fn of worker {index}", {"create_env_fn": creator, "first_trajectory": index})
                for index, creator in enumerate(creators)
            ],
            num_threads=num_threads,
            base_seed=int(torch.randint(2**62, ())),  # so torch.manual_seed in the driver seeds the workers
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
        )
        self.workers = self._start_workers(plan)
        # Runs when the collector is garbage, and at exit before multiprocessing waits for processes to end.
        util.Finalize(self, self.workers.shutdown, exitpriority=0)
        try:
            check_alike(self.workers.specs, lambda index: f"the env of worker {index}")
            options.warn_if_rounded(order.envs_per_step(self.workers))
            if options.seed is not None:
                self.set_seed(options.seed)
        except BaseException:
            self.shutdown()
            raise

    def update_policy_weights_(self, policy_or_weights: Any = None, *, version: int | None = None) -> None:
        """Publish weights; every worker takes the newest ones, whole, when it begins a batch.

        Args:
            policy_or_weights: a state dict, a TensorDict of parameters, or a module to take them from; by default the
                collector's policy.
            version: what batches are stamped with; by default one more than before.
        """
        if policy_or_weights is None:
            policy_or_weights = self.policy if isinstance(self.policy, nn.Module) else {}
        elif not isinstance(self.policy, nn.Module):
            raise ConfigError("the policy has no weights to update; give the collector an nn.Module")
        version = self.policy_version + 1 if version is None else version
        with _maybe_record_function(f"{type(self).__name__}.update_policy_weights_"):
            weights = weights_of(policy_or_weights)
            check_weights(weights, self._weight_shapes)
            self.workers.publish(weights, version)
        self.policy_version = version

    def set_seed(self, seed: int) -> int:
        """Seed every worker differently: its env, and the generators of torch, numpy and Python in its process.

        New episodes begin with each worker's next batch; batches that a worker already collects stay as they are.

        Returns:
            The first unused seed.
        """
        seeds = itertools.accumulate((specs.num_seeds for specs in self.workers.specs[:-1]), initial=seed)
        return self.map_fn("set_seed", [(each % (MAX_SEED + 1),) for each in seeds])[-1]

    def reset(self) -> None:
        """Begin new episodes with each worker's next batch."""
        self._call_all("reset")

    def set_post_collect_hook(self, hook: Callable[[TensorDictBase], object] | None) -> None:
        """Call this hook in the worker with each of its batches from now on, instead of an earlier one."""
        self._call_all("set_post_collect_hook", hook)

    def disable_profile(self) -> None:
        """Let the workers write the traces recorded so far and stop recording; may be called twice."""
        if self.workers.recording:
            self._call_all("disable_profile")

    def set_profiling_enabled(self, enabled: bool) -> None:
        """Show or hide the per-frame ranges of all workers from now on; they must be armed there."""
        self._call_all("set_profiling_enabled", enabled)

    def map_fn(self, name: str, list_of_args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call the method `name` of every worker's `Collector`, each with its own arguments, between two rollouts.

        Returns:
            The results, by worker.
        """
        check_calls(list_of_args, self.num_workers)
        method_of(Collector, name)
        return self.workers.call(name, [pickled(f"the arguments of {name}", args) for args in list_of_args])

    def state_dict(self) -> dict[str, Any]:
        """Progress as plain values."""
        workers = self._call_all("state_dict")
        return {"num_frames": self.num_frames, "policy_version": self.policy_version, "workers": workers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from this state with new episodes. Load the policy first: its weights are published."""
        if len(state["workers"]) != self.num_workers:
            raise ConfigError(
                f"the state has {len(state['workers'])} workers, but the collector has {self.num_workers}; "
                "resume with the number of workers that it was saved with"
            )
        while self.workers.requested:  # batches of the episodes that end here
            self.workers.next_batch()
        self.map_fn("load_state_dict", [(worker,) for worker in state["workers"]])
        self.num_frames = state["num_frames"]
        self.update_policy_weights_(version=state["policy_version"])

    def shutdown(self) -> None:
        """Shut down the workers; those that are busy are killed after seconds. May be called twice."""
        self.workers.shutdown()

    def _start_workers(self, plan: WorkerPlan) -> CollectorWorkers:
        return CollectorWorkers(plan)

    def _next_batch(self) -> TensorDictBase | None:
        batch = self._order.next_batch(self.workers, self.num_frames, self._num_wanted)
        return None if batch is None else self._stored(batch)

    def _stored(self, batch: Batch) -> TensorDictBase:
        """Count a batch and move it to its device."""
        self.num_frames += math.prod(batch.batch_size)
        return tensordict_of(batch.entries, batch.batch_size, self._storing_device)

    def _call_all(self, name: str, *args: Any) -> list[Any]:
        return self.map_fn(name, [args] * self.num_workers)

    def _start_profile(self, settings: ProfileSettings) -> None:
        calls = [(settings, index) for index in range(self.num_workers)]
        for index, obstacle in enumerate(self.map_fn("profile_obstacle", calls)):
            if obstacle is not None:
                raise ConfigError(f"worker {index} cannot be recorded: {obstacle}")
        self.map_fn("start_profile", calls)
