"""Collectors: gather frames in this process and in several, with weights that change.

python examples/collectors.py
python examples/collectors.py --workers 4 --frames 4000
"""

import argparse
from collections.abc import Sequence

import torch
from torch import nn

from lucidrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from lucidrl.envs import EnvCreator, GymEnv, RewardSum, SerialEnv, StepCounter, TransformedEnv
from lucidrl.envs.transforms import Compose


class Actor(nn.Module):
    """Draws one of two actions, one-hot; collectors call it with the observation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        drawn = torch.distributions.Categorical(logits=self.linear(observation)).sample()
        return nn.functional.one_hot(drawn, 2)


def make_env() -> TransformedEnv:
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(max_steps=200), RewardSum()))


def one_process(num_frames: int) -> None:
    """Eight envs that step together in this process: batches are [envs, time]."""
    collector = Collector(SerialEnv(8, make_env), Actor(), frames_per_batch=400, total_frames=num_frames, seed=0)
    for batch in collector:
        lengths = batch["next", "step_count"][batch["next", "done"]].float()
        print(f"one process: batch {list(batch.shape)}, {len(lengths)} episodes, mean length {lengths.mean():.1f}")
    collector.shutdown()


def several_processes(num_frames: int, num_workers: int) -> None:
    """A share of each batch from every worker, with the same weights: batches are [workers, time]."""
    actor = Actor()
    factories = [EnvCreator(make_env)] * num_workers
    collector = MultiSyncCollector(factories, actor, frames_per_batch=400, total_frames=num_frames, seed=0)
    for version, batch in enumerate(collector):
        assert (batch["collector", "policy_version"] == version).all()
        print(f"{num_workers} processes: batch {list(batch.shape)}, policy version {version}")
        with torch.no_grad():  # a training step would change the weights
            actor.linear.weight.mul_(0.9)
        collector.update_policy_weights_()  # workers use them from their next batch on
    collector.shutdown()


def while_you_train(num_frames: int, num_workers: int) -> None:
    """A whole batch from the first worker that is ready; workers collect while this process trains."""
    factories = [EnvCreator(make_env)] * num_workers
    collector = MultiAsyncCollector(factories, Actor(), frames_per_batch=200, total_frames=num_frames)
    frames = sum(batch.numel() for batch in collector)
    print(f"{num_workers} processes, asynchronous: {frames} frames")
    collector.shutdown()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--frames", type=int, default=800)
    args = parser.parse_args(argv)
    one_process(args.frames)
    several_processes(args.frames, args.workers)
    while_you_train(args.frames, args.workers)


if __name__ == "__main__":
    main()
