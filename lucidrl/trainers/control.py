"""The trainer of control policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Unpack

from lucidrl.recipes.arguments import RunOptions, Settings
from lucidrl.recipes.callbacks import Callback
from lucidrl.recipes.configs import PPORunConfig
from lucidrl.trainers.base import RUN_SETTINGS, CommonArguments, Trainer


class PPOTrainer(Trainer):
    """Trains a control policy with PPO; the same as `lucidrl ppo`. `learning_rate` sets that of policy and critic.

    Args:
        env: id of a gymnasium environment; `module:Id` imports the module that registers it.
        config: see `GRPOTrainer`, with `PPORunConfig`.
        preset: see `GRPOTrainer`.
        callbacks: see `GRPOTrainer`.
        display: see `GRPOTrainer`.
        options: see `RunOptions`.
    """

    _schema = PPORunConfig
    _settings: ClassVar = {
        **RUN_SETTINGS,
        "env": ["env.name"],
        "learning_rate": ["policy.optimizer.kwargs.lr", "critic.optimizer.kwargs.lr"],
        "max_steps": ["ppo.max_steps"],
    }

    def __init__(
        self,
        env: str | None = None,
        *,
        config: Settings | None = None,
        preset: str | None = None,
        callbacks: Sequence[Callback] = (),
        display: bool = True,
        **options: Unpack[RunOptions],
    ) -> None:
        super().__init__({"env": env, **options}, CommonArguments(config, preset, callbacks, display))
