r"""PPO on a control environment of your own: push a cart to a target and stop there.

From the root of the repository, with the command line:

    lucidrl ppo env.name=examples.ppo_own_environment:PushCart-v0 ppo.max_steps=20 'env.kwargs={friction: 0.2}'

or as a program, which trains a few steps and plays one episode:

    python examples/ppo_own_environment.py --steps 20

`env.name=module:Id` imports the module, which registers the env with gymnasium.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from lucidrl.checkpoint.manager import CheckpointManager
from lucidrl.cli import app
from lucidrl.models.control.policy import ControlPolicy
from lucidrl.recipes.configs import PPORunConfig
from lucidrl.recipes.control import make_envs, spaces_of
from lucidrl.utils.config import load_config

SECONDS_PER_FRAME = 0.1


class PushCart(gymnasium.Env):
    """A cart on a line; each frame costs its distance from 0, so that a fast and gentle stop is best."""

    def __init__(self, friction: float = 0.1):
        self.friction = friction
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self._position, self._velocity = 0.0, 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        # Draw from self.np_random only: then a resumed run is bit-identical, even in the middle of an episode.
        self._position, self._velocity = float(self.np_random.uniform(-1, 1)), 0.0
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        force = float(np.clip(action[0], -1, 1))
        self._velocity += SECONDS_PER_FRAME * (force - self.friction * self._velocity)
        self._position += SECONDS_PER_FRAME * self._velocity
        reward = -abs(self._position)
        is_lost = abs(self._position) > 3
        return self._observation(), reward - 100 * is_lost, is_lost, False, {}

    def _observation(self) -> np.ndarray:
        return np.array([self._position, self._velocity], np.float32)


gymnasium.register("PushCart-v0", entry_point=PushCart, max_episode_steps=100)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--runs", default=None, help="folder for the run; by default a temporary one")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(args.runs or scratch)
        settings = [f"ppo.max_steps={args.steps}", f"run.root={root}", "run.name=push-cart"]
        app(["ppo", "env.name=PushCart-v0", *settings], standalone_mode=False)
        print(f"return of one episode: {episode_return(root / 'push-cart'):.1f}")


def episode_return(run: Path) -> float:
    """Play an episode with the policy of a finished run."""
    config = load_config(PPORunConfig, run / "config.yaml")
    envs, _ = make_envs(config.env, num_envs=1)
    policy = ControlPolicy(*spaces_of(envs, config.env.name), config.policy, config.critic)
    policy.load(CheckpointManager(run / "checkpoints").latest().path)
    episode = envs.rollout(100, policy.greedy)  # [1, T]
    envs.close()
    return episode["next", "reward"].sum().item()


if __name__ == "__main__":
    main()
