"""Environments and collectors of Lucid RL and TorchRL, which share the documented interface.

Only the root package of the imports differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from tensordict.nn import TensorDictModule

from collection.tasks import FRAMES, NUM_ENVS, Collect, Subject, make_policy

NUM_WORKERS = 2


class Documented:
    """The subjects of one system.

    Args:
        root: the root package of its imports.
        fallback_policy: makes the policy for environments with more entries than the observation and for
            AsyncBatchedCollector: a system may refuse a plain module there.
        ray_module: the module of its RayCollector, below the root.
    """

    def __init__(self, root: str, fallback_policy: Callable[[str], Any] = make_policy, ray_module: str = "collectors"):
        self.envs: Any = import_module(f"{root}.envs")
        self.collectors: Any = import_module(f"{root}.collectors")
        self.subjects: dict[str, Subject] = {
            "Collector": self.collector(self.env),
            "Collector, StepCounter and RewardSum": self.collector(self.transformed_env, fallback_policy),
            "Collector, TensorDict module as policy": self.collector(self.env, tensordict_policy),
            "Collector, SerialEnv x8": self.collector(self.serial_env),
            "Collector, ParallelEnv x8": self.collector(self.parallel_env),
            "MultiSyncCollector x2": self.multi_collector("MultiSyncCollector"),
            "MultiAsyncCollector x2": self.multi_collector("MultiAsyncCollector"),
            "AsyncBatchedCollector x2": self.multi_collector("AsyncBatchedCollector", fallback_policy),
            "RayCollector x2": self.ray_collector(import_module(f"{root}.{ray_module}")),
        }

    def env(self, task: str) -> Any:
        return self.envs.GymEnv(task)

    def transformed_env(self, task: str) -> Any:
        envs = self.envs
        return envs.TransformedEnv(self.env(task), envs.Compose(envs.StepCounter(), envs.RewardSum()))

    def serial_env(self, task: str) -> Any:
        return self.envs.SerialEnv(NUM_ENVS, partial(self.envs.GymEnv, task))

    def parallel_env(self, task: str) -> Any:
        return self.envs.ParallelEnv(NUM_ENVS, partial(self.envs.GymEnv, task))

    def collector(self, make_env: Callable[[str], Any], policy: Callable[[str], Any] = make_policy) -> Subject:
        @contextmanager
        def subject(task: str) -> Iterator[Collect]:
            env = make_env(task)
            collector = self.collectors.Collector(env, policy=policy(task), frames_per_batch=FRAMES, total_frames=-1)
            yield batches_of(collector)
            collector.shutdown()

        return subject

    def multi_collector(
        self, kind: str, policy: Callable[[str], Any] = make_policy, module: Any = None, total_frames: int = -1
    ) -> Subject:
        @contextmanager
        def subject(task: str) -> Iterator[Collect]:
            collector = getattr(module or self.collectors, kind)(
                [partial(self.envs.GymEnv, task)] * NUM_WORKERS,
                policy=policy(task),
                frames_per_batch=FRAMES,
                total_frames=total_frames,
            )
            yield batches_of(collector)
            collector.shutdown()

        return subject

    def ray_collector(self, module: Any) -> Subject:
        """Asynchronous, the default of both systems, in a local cluster. TorchRL's stops at once with -1 frames."""
        with_ray = self.multi_collector("RayCollector", module=module, total_frames=10**9)

        @contextmanager
        def subject(task: str) -> Iterator[Collect]:
            import ray

            ray.init(address="local", num_cpus=NUM_WORKERS, include_dashboard=False, log_to_driver=False)
            with with_ray(task) as collect:
                yield collect
            ray.shutdown()

        return subject


def tensordict_policy(task: str) -> Any:
    return TensorDictModule(make_policy(task), in_keys=["observation"], out_keys=["action"])


def batches_of(collector: Any) -> Collect:
    batches = iter(collector)
    return lambda: next(batches).numel()
