"""The rollouts of stable-baselines3, with its own policy of the same size, which also returns values and log-probs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import CallbackList

from collection.tasks import FRAMES, Collect


@contextmanager
def collect_rollouts(task: str) -> Iterator[Collect]:
    model = PPO("MlpPolicy", task, n_steps=FRAMES, batch_size=FRAMES, seed=0, device="cpu")
    _, callback = model._setup_learn(total_timesteps=10**9, callback=CallbackList([]))

    def collect() -> int:
        model.collect_rollouts(model.env, callback, model.rollout_buffer, n_rollout_steps=FRAMES)
        return FRAMES

    yield collect
    model.env.close()


SUBJECTS = {"PPO.collect_rollouts": collect_rollouts}
