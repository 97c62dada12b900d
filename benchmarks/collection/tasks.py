"""The tasks, the policy of all systems, and the bare loops.

The policy is a plain module of two layers of 64. Its action has the encoding of the environment: one-hot for CartPole,
torques for Pendulum.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

FRAMES = 1000
"""Frames per batch, for every system."""
NUM_ENVS = 8
TASKS = ("CartPole-v1", "Pendulum-v1")

Collect = Callable[[], int]
"""Collects one batch, and returns its number of frames."""
Subject = Callable[[str], AbstractContextManager[Collect]]
"""What is measured: takes a task and returns a context that collects its frames."""


class CartPolePolicy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(4, 2)

    def forward(self, observation: Tensor) -> Tensor:
        return one_hot(self.layers(observation).argmax(-1), 2)


class PendulumPolicy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(3, 1)

    def forward(self, observation: Tensor) -> Tensor:
        return 2 * torch.tanh(self.layers(observation))


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def make_policy(task: str) -> nn.Module:
    torch.manual_seed(0)
    return CartPolePolicy() if task == "CartPole-v1" else PendulumPolicy()


def make_env(task: str) -> gymnasium.Env:
    """Without gymnasium's checker, which is for developers of environments."""
    return gymnasium.make(task, disable_env_checker=True)


def for_gymnasium(task: str, action: Tensor) -> Any:
    """The action as the gymnasium environment takes it."""
    if task != "CartPole-v1":
        return action.numpy()
    index = action.argmax(-1)
    return index.numpy() if index.ndim else index.item()


class Storage:
    """Preallocated tensors [T, *B, ...], one per entry of a frame."""

    def __init__(self, observation: Tensor, action: Tensor, num_steps: int):
        batch = observation.shape[:-1]
        self.observation = observation.new_empty(num_steps, *observation.shape)
        self.next_observation = torch.empty_like(self.observation)
        self.action = action.new_empty(num_steps, *action.shape)
        self.reward = torch.empty(num_steps, *batch)
        self.terminated = torch.empty(num_steps, *batch, dtype=torch.bool)
        self.truncated = torch.empty_like(self.terminated)


@contextmanager
def bare_loop(task: str) -> Iterator[Collect]:
    """The reference of every ratio: one gymnasium environment, the policy, and frames in preallocated tensors."""
    env, policy = make_env(task), make_policy(task)
    root = torch.from_numpy(env.reset(seed=0)[0])
    stored = Storage(root, policy(root), FRAMES)

    @torch.no_grad()
    def collect() -> int:
        nonlocal root
        for t in range(FRAMES):
            action = policy(root)
            array, reward, terminated, truncated, _ = env.step(for_gymnasium(task, action))
            observation = torch.from_numpy(array)
            stored.observation[t] = root
            stored.action[t] = action
            stored.reward[t] = float(reward)
            stored.terminated[t] = terminated
            stored.truncated[t] = truncated
            stored.next_observation[t] = observation
            root = torch.from_numpy(env.reset()[0]) if terminated or truncated else observation
        return FRAMES

    yield collect
    env.close()


def vector_loop(kind: type[gymnasium.vector.VectorEnv]) -> Subject:
    """The bare loop over a vector environment of gymnasium."""

    @contextmanager
    def subject(task: str) -> Iterator[Collect]:
        envs: Any = kind([partial(make_env, task)] * NUM_ENVS)  # type: ignore[call-arg]
        policy = make_policy(task)
        root = torch.from_numpy(envs.reset(seed=0)[0])
        stored = Storage(root, policy(root), FRAMES // NUM_ENVS)

        @torch.no_grad()
        def collect() -> int:
            nonlocal root
            for t in range(FRAMES // NUM_ENVS):
                action = policy(root)
                array, reward, terminated, truncated, _ = envs.step(for_gymnasium(task, action))
                observation = torch.from_numpy(array)
                stored.observation[t] = root
                stored.action[t] = action
                stored.reward[t] = torch.from_numpy(reward)
                stored.terminated[t] = torch.from_numpy(terminated)
                stored.truncated[t] = torch.from_numpy(truncated)
                stored.next_observation[t] = observation
                root = observation
            return FRAMES

        yield collect
        envs.close()

    return subject


def bare_loops(number: int) -> Subject:
    """Bare loops in separate processes: the upper bound of a collector that sends no frames."""

    @contextmanager
    def subject(task: str) -> Iterator[Collect]:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(number)]
        for _, theirs in pipes:
            context.Process(target=serve_bare_loop, args=(task, theirs), daemon=True).start()

        def collect() -> int:
            for ours, _ in pipes:
                ours.send(True)
            return sum(ours.recv() for ours, _ in pipes)

        yield collect
        for ours, _ in pipes:
            ours.send(False)

    return subject


def serve_bare_loop(task: str, driver: Connection) -> None:
    torch.set_num_threads(1)
    with bare_loop(task) as collect:
        while driver.recv():
            driver.send(collect())
