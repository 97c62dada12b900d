"""Off-policy learning: a double DQN that balances a pole, with a collector that fills a replay buffer.

python examples/dqn_replay_buffer.py
python examples/dqn_replay_buffer.py --workers 2     # collects in two processes while this one trains

A replay buffer is any object with `extend(frames)` and `sample(batch_size)`. TorchRL's fits as it is:

    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(50_000))
"""

import argparse
import copy
from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import nn
from torch.nn.functional import one_hot, smooth_l1_loss

from lucidrl.collectors import Collector, MultiAsyncCollector
from lucidrl.envs import EnvCreator, GymEnv, RewardSum, SerialEnv, TransformedEnv

DISCOUNT, BATCH, UPDATES_PER_BATCH, TARGET_RATE = 0.99, 128, 16, 0.01


class Ring:
    """Keeps the newest frames, and draws uniformly."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.num_added = capacity, 0
        self._frames: TensorDict | None = None

    def __len__(self) -> int:
        return min(self.num_added, self.capacity)

    def extend(self, frames: TensorDict) -> None:
        if self._frames is None:
            self._frames = frames[:1].expand(self.capacity).clone()
        places = (torch.arange(len(frames)) + self.num_added) % self.capacity
        self._frames[places] = frames
        self.num_added += len(frames)

    def sample(self, batch_size: int) -> TensorDict:
        return self._frames[torch.randint(len(self), (batch_size,))]


class Actor(nn.Module):
    """Takes the action of the highest value, or with the probability `epsilon` a random one."""

    epsilon: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
        self.register_buffer("epsilon", torch.ones(()))  # a buffer travels with the weights

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        best = self.values(observation).argmax(-1)
        is_random = torch.rand(best.shape) < self.epsilon
        return one_hot(torch.where(is_random, torch.randint_like(best, 2), best), 2)


def loss_of(frames: TensorDict, values: nn.Module, target: nn.Module) -> torch.Tensor:
    """The error of the values of the actions taken, with the target network's estimate of what follows."""
    taken = (values(frames["observation"]) * frames["action"]).sum(-1)
    with torch.no_grad():
        best = values(frames["next", "observation"]).argmax(-1, keepdim=True)
        following = target(frames["next", "observation"]).gather(-1, best).squeeze(-1)
        is_over = frames["next", "terminated"].squeeze(-1)  # a truncated episode would go on
        wanted = frames["next", "reward"].squeeze(-1) + DISCOUNT * following * ~is_over
    return smooth_l1_loss(taken, wanted)


def make_env() -> TransformedEnv:
    return TransformedEnv(GymEnv("CartPole-v1"), RewardSum())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=25_000)
    parser.add_argument("--workers", type=int, default=0, help="processes that collect; 0: this process does")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    actor, buffer = Actor(), Ring(20_000)
    target = copy.deepcopy(actor.values)
    optimizer = torch.optim.Adam(actor.values.parameters(), lr=5e-4)
    options = {
        "frames_per_batch": 64,
        "total_frames": args.frames,
        "postproc": lambda batch: batch.reshape(-1),  # the buffer stores single frames
        "replay_buffer": buffer,
        "seed": 0,
    }
    if args.workers:
        collector = MultiAsyncCollector([EnvCreator(make_env)] * args.workers, actor, **options)
    else:
        collector = Collector(SerialEnv(8, make_env), actor, **options)
    returns: list[float] = []
    for number, batch in enumerate(collector, 1):
        returns += batch["next", "episode_reward"][batch["next", "done"]].tolist()
        actor.epsilon.fill_(max(0.02, 1 - collector.num_frames / 6000))
        for _ in range(UPDATES_PER_BATCH if len(buffer) > 1000 else 0):
            loss = loss_of(buffer.sample(BATCH), actor.values, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), actor.values.parameters(), strict=True):
                    slow.lerp_(fast, TARGET_RATE)
        collector.update_policy_weights_()
        if number % 40 == 0:
            recent = returns[-20:]
            print(f"{collector.num_frames:>6} frames: mean return {sum(recent) / len(recent):.0f}")
    collector.shutdown()


if __name__ == "__main__":
    main()
