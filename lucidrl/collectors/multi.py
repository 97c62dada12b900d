"""Collectors with worker processes: MultiSyncCollector and MultiAsyncCollector."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import util
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from lucidrl.collectors.base import CollectorOptions, FrameCollector, check_calls, method_of
from lucidrl.collectors.single import Collector
from lucidrl.collectors.weights import Device, check_weights, shapes_of, weights_of
from lucidrl.collectors.worker import Batch, CatResults, WorkerPlan, joined
from lucidrl.collectors.workers import CollectorWorkers
from lucidrl.distributed.workers.process import pickled
from lucidrl.envs.base import MAX_SEED, check_seed
from lucidrl.envs.creator import EnvFactory, env_creators
from lucidrl.envs.serial import check_alike
from lucidrl.envs.tensordicts import tensordict_of
from lucidrl.errors import ConfigError
from lucidrl.profiling.hook import ProfileSettings
from lucidrl.profiling.ranges import _maybe_record_function


class MultiCollector(FrameCollector):
    """Runs a `Collector` with a separate env in each of several worker processes; iterate to get batches.

    Envs, policy and `post_collect_hook` run in the workers. `split_trajs`, `postproc` and `replay_buffer` run in the
    driver, on whole batches. Trajectory numbers are unique over all workers. Envs, policy and hook are pickled with
    cloudpickle, so they may be local functions and lambdas.

    Args:
        create_env_fn: a list with one factory per worker, or one factory for `num_workers` workers.
        policy: every worker gets a copy. `update_policy_weights_` updates the weights of an `nn.Module`; another
            callable cannot be updated.
        sync: True collects batches as `MultiSyncCollector` does, False as `MultiAsyncCollector` does.
        cat_results: see `MultiSyncCollector`.
        create_env_kwargs: arguments of the factories; one mapping for all, or one per worker.
        num_workers: number of worker processes, if `create_env_fn` is one factory.
        num_threads: torch threads per worker.
        timeout_s: timeout of a batch, and of a call to the workers.
        start_timeout_s: timeout of the start of all workers.
        arguments: other arguments of `Collector`.

    Raises:
        WorkerError: a worker raised, exited or timed out; every method can raise this. The cause of the error is the
            worker's traceback. A `LucidError` of a worker keeps its type. The collector has ended all workers.
    """

    def __init__(
        self,
        create_env_fn: EnvFactory | Sequence[EnvFactory],
        policy: Any = None,
        *,
        sync: bool,
        cat_results: CatResults = "stack",
        env_device: Device = None,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        num_workers: int | None = None,
        num_threads: int = 1,
        timeout_s: float = 60.0,
        start_timeout_s: float = 300.0,
        **arguments: Any,
    ):
        options = CollectorOptions(**arguments)
        super().__init__(options)
        for name, seconds in (("timeout_s", timeout_s), ("start_timeout_s", start_timeout_s)):
            if not seconds > 0:
                raise ConfigError(f"{name}={seconds} is not above 0; set a positive number of seconds")
        _check_cat_results(cat_results, sync)
        if num_workers is None:
            if not isinstance(create_env_fn, list | tuple):
                raise ConfigError("create_env_fn is one factory for all workers; set num_workers, or pass a list")
            num_workers = len(create_env_fn)
        self.num_workers = num_workers
        creators = env_creators(num_workers, create_env_fn, create_env_kwargs)
        if sync and options.frames_per_batch < num_workers:
            raise ConfigError(
                f"frames_per_batch={options.frames_per_batch} leaves some of {num_workers} workers without a frame; "
                f"set frames_per_batch to at least {num_workers}"
            )
        self.policy, self._is_sync, self._cat_results = policy, sync, cat_results
        self._weight_shapes = shapes_of(policy)
        plan = WorkerPlan(
            pickled("the policy or the hook", self._worker_arguments(env_device)),
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
        # Runs when the collector is garbage-collected, and at exit before multiprocessing waits for processes to end.
        util.Finalize(self, self.workers.shutdown, exitpriority=0)
        try:
            check_alike(self.workers.specs, lambda index: f"the env of worker {index}")
            options.warn_if_rounded(self._envs_per_step)
            if options.seed is not None:
                self.set_seed(options.seed)
        except BaseException:
            self.shutdown()
            raise

    def update_policy_weights_(self, policy_or_weights: Any = None, *, version: int | None = None) -> None:
        """Publish weights. Every worker loads the newest published weights when it begins a batch, never during one.

        Args:
            policy_or_weights: a state dict, a TensorDict of parameters, or a module with the weights; by default the
                collector's policy.
            version: policy version of frames collected with these weights; by default one more than before.
        """
        if policy_or_weights is None:
            policy_or_weights = self.policy if isinstance(self.policy, nn.Module) else {}
        elif not isinstance(self.policy, nn.Module):
            raise ConfigError("the policy is not an nn.Module, so it has no weights to update; use an nn.Module")
        version = self.policy_version + 1 if version is None else version
        with _maybe_record_function(f"{type(self).__name__}.update_policy_weights_"):
            weights = weights_of(policy_or_weights)
            check_weights(weights, self._weight_shapes)
            self.workers.publish(weights, version)
        self.policy_version = version

    def set_seed(self, seed: int) -> int:
        """Seed every worker differently: the env, and the random generators of torch, numpy and Python in the process.

        New episodes begin with each worker's next batch. A batch that a worker is already collecting does not change.

        Returns:
            The first unused seed.
        """
        check_seed(seed)
        seeds = itertools.accumulate((specs.num_seeds for specs in self.workers.specs[:-1]), initial=seed)
        return self.map_fn("set_seed", [(each % (MAX_SEED + 1),) for each in seeds])[-1]

    def reset(self) -> None:
        """Begin new episodes with each worker's next batch."""
        self._call_all("reset")

    def set_post_collect_hook(self, hook: Callable[[TensorDictBase], object] | None) -> None:
        """Set the hook that each worker calls with its batches; it replaces the previous hook."""
        self._call_all("set_post_collect_hook", hook)

    def disable_profile(self) -> None:
        """Let the workers write the traces recorded so far and stop recording; may be called twice."""
        if self.workers.recording:
            self._call_all("disable_profile")

    def set_profiling_enabled(self, enabled: bool) -> None:
        """Turn the per-frame profiling ranges of all workers on or off; see `lucidrl.profiling.gate`."""
        self._call_all("set_profiling_enabled", enabled)

    def start_gpu_profiling(self) -> None:
        """Record the spans of the requested workers, after their current rollout; see `lucidrl.utils.nsys`."""
        self.workers.pool.start_gpu_profiling()

    def stop_gpu_profiling(self) -> None:
        """Stop recording, after the current rollout of the workers that record."""
        self.workers.pool.stop_gpu_profiling()

    def map_fn(self, name: str, list_of_args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call the method `name` of every worker's `Collector`, between two rollouts.

        Args:
            list_of_args: one tuple of arguments per worker.

        Returns:
            The results, in the order of the workers.
        """
        check_calls(list_of_args, self.num_workers)
        method_of(Collector, name)
        return self.workers.call(name, [pickled(f"the arguments of {name}", args) for args in list_of_args])

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as plain values. Env states are not included, so new episodes begin after a resume."""
        workers = self._call_all("state_dict")
        return {"num_frames": self.num_frames, "policy_version": self.policy_version, "workers": workers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from this state with new episodes. Load the policy's weights first: this call publishes them."""
        if len(state["workers"]) != self.num_workers:
            raise ConfigError(
                f"the state has {len(state['workers'])} workers, but the collector has {self.num_workers}; "
                f"resume with {len(state['workers'])} workers"
            )
        while self.workers.requested:  # drop batches of episodes that are not continued
            self.workers.next_batch()
        self.map_fn("load_state_dict", [(worker,) for worker in state["workers"]])
        self.num_frames = state["num_frames"]
        self.update_policy_weights_(version=state["policy_version"])

    def shutdown(self) -> None:
        """Shut down the workers; kill workers that stay busy for a few seconds. May be called twice."""
        self.workers.shutdown()

    def _worker_arguments(self, env_device: Device) -> dict[str, Any]:
        """Arguments of every worker's `Collector`."""
        options = self._options
        return {
            "policy": self.policy,
            "frames_per_batch": math.ceil(options.frames_per_batch / (self.num_workers if self._is_sync else 1)),
            "device": options.device,
            "storing_device": "cpu",  # batches travel through host memory
            "policy_device": options.policy_device,
            "env_device": env_device,
            "init_random_frames": options.init_random_frames,
            "max_frames_per_traj": options.max_frames_per_traj,
            "reset_at_each_iter": options.reset_at_each_iter,
            "exploration_type": options.exploration_type,
            "post_collect_hook": options.post_collect_hook,
            "trajectory_stride": self.num_workers,
        }

    def _start_workers(self, plan: WorkerPlan) -> CollectorWorkers:
        return CollectorWorkers(plan)

    @property
    def _envs_per_step(self) -> int:
        """Number of envs that step together; the number of frames in a batch is a multiple of it."""
        env_batch_size = self.workers.specs[0].batch_size
        if not self._is_sync:
            return math.prod(env_batch_size)
        has_equal_shares = self._cat_results == "stack" or env_batch_size
        return self.num_workers * math.prod(env_batch_size) if has_equal_shares else 1

    def _whole_steps(self, num_frames: int) -> int:
        return math.ceil(num_frames / self._envs_per_step) * self._envs_per_step

    def _next_batch(self) -> TensorDictBase | None:
        if not self._is_sync:
            batch = self._async_batch()
        else:
            num_frames = self._num_wanted(self.num_frames)
            batch = self._sync_batch(num_frames) if num_frames else None
        return None if batch is None else self._stored(batch)

    def _sync_batch(self, num_frames: int) -> Batch:
        """Let all workers collect frames at the same time, and join the results to one batch."""
        least, rest = divmod(self._whole_steps(num_frames), self.num_workers)
        shares = [least + (index < rest) for index in range(self.num_workers)]
        busy = [index for index, share in enumerate(shares) if share]
        for index in busy:
            self.workers.request(index, shares[index], self.num_frames)
        batches = dict(self.workers.next_batch() for _ in busy)
        return joined([batches[index] for index in busy], self._cat_results)

    def _async_batch(self) -> Batch | None:
        """Return the batch of the worker that finishes first; keep all workers busy."""
        for index in range(self.num_workers):
            if index not in self.workers.requested:
                self._request(index, self.num_frames)
        if not self.workers.requested:
            return None
        index, batch = self.workers.next_batch()
        self._request(index, self.num_frames + batch.num_frames)
        return batch

    def _request(self, index: int, num_frames: int) -> None:
        """Request the next batch of a worker, unless collected and requested frames already reach `total_frames`."""
        num_before = num_frames + sum(self.workers.requested.values())
        if wanted := self._num_wanted(num_before):
            self.workers.request(index, self._whole_steps(wanted), num_before)

    def _stored(self, batch: Batch) -> TensorDictBase:
        """Count the frames of a batch and move it to the storing device."""
        self.num_frames += batch.num_frames
        return tensordict_of(batch.entries, batch.batch_size, self._storing_device)

    def _call_all(self, name: str, *args: Any) -> list[Any]:
        return self.map_fn(name, [args] * self.num_workers)

    def _start_profile(self, settings: ProfileSettings) -> None:
        calls = [(settings, index) for index in range(self.num_workers)]
        for index, obstacle in enumerate(self.map_fn("profile_obstacle", calls)):
            if obstacle is not None:
                raise ConfigError(f"worker {index} cannot be recorded: {obstacle}")
        self.map_fn("start_profile", calls)


class MultiSyncCollector(MultiCollector):
    """Each batch has frames of every worker, collected at the same time with the same weights.

        collector = MultiSyncCollector([make_env] * 4, policy, frames_per_batch=4000, total_frames=1_000_000)
        for batch in collector:  # [4, 1000]
            train(batch)
            collector.update_policy_weights_()
        collector.shutdown()

    Args:
        cat_results: how the frames of the workers are joined.
            "stack": batches [workers, *env batch, time] with equally many frames per worker; `frames_per_batch` and
            `total_frames` are rounded up.
            0: concatenated along the first dim. For envs without batch dims this is time, and the workers' frame
            counts may differ by one.
            -1: concatenated along time.
            Concatenating along time marks the last frame of each worker as truncated, so that advantages do not mix
            two workers; the trajectory continues in the next batch.
        create_env_fn, policy, arguments: see `MultiCollector`.
    """

    def __init__(
        self,
        create_env_fn: EnvFactory | Sequence[EnvFactory],
        policy: Any = None,
        *,
        cat_results: CatResults = "stack",
        **arguments: Any,
    ):
        super().__init__(create_env_fn, policy, sync=True, cat_results=cat_results, **arguments)

    def rollout(self, num_frames: int | None = None) -> TensorDictBase:
        """Return a batch of `num_frames`, by default `frames_per_batch`, before post-processing."""
        return self._stored(self._sync_batch(self._num_or_default(num_frames)))


class MultiAsyncCollector(MultiCollector):
    """Each batch comes from one worker, the first to finish.

    All workers collect all the time, even while the consumer trains. So a batch may be collected with older weights;
    ("collector", "policy_version") is the version of these weights.

        collector = MultiAsyncCollector([make_env] * 4, policy, frames_per_batch=1000, total_frames=1_000_000)
        for batch in collector:
            train(batch)
            collector.update_policy_weights_()
        collector.shutdown()

    See `MultiCollector` for the arguments.
    """

    def __init__(self, create_env_fn: EnvFactory | Sequence[EnvFactory], policy: Any = None, **arguments: Any):
        super().__init__(create_env_fn, policy, sync=False, **arguments)


def _check_cat_results(cat_results: CatResults, sync: bool) -> None:
    if cat_results not in ("stack", 0, -1):
        raise ConfigError(
            f"cat_results={cat_results!r} is not known; use 'stack' for a worker dim, 0 to concatenate the workers' "
            "frames along the first dim, or -1 to concatenate them along time"
        )
    if not sync and cat_results != "stack":
        raise ConfigError(f"cat_results={cat_results!r} is for synchronous collectors; remove it")
