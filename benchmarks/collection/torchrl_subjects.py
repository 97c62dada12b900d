"""The collectors of TorchRL; AsyncBatchedCollector also with its fastest options: processes and a policy server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torchrl.collectors import AsyncBatchedCollector
from torchrl.envs import GymEnv

from collection.documented_subjects import NUM_WORKERS, Documented, batches_of, tensordict_policy
from collection.tasks import FRAMES, Collect


@contextmanager
def async_batched_processes(task: str) -> Iterator[Collect]:
    collector = AsyncBatchedCollector(
        [partial(GymEnv, task)] * NUM_WORKERS,
        policy_factory=partial(tensordict_policy, task),
        frames_per_batch=FRAMES,
        env_backend="multiprocessing",
        transport="auto",
    )
    yield batches_of(collector)
    collector.shutdown()


SUBJECTS = {
    **Documented("torchrl", tensordict_policy, "collectors.distributed").subjects,
    "AsyncBatchedCollector x2, processes": async_batched_processes,
}
