"""Replay buffers by protocol: collectors extend them, a training loop draws from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from lucidrl.collectors import Collector
from lucidrl.envs import GymEnv, SerialEnv
from lucidrl.errors import ConfigError


class LikeTorchRL:
    """Calls and results of TorchRL's `TensorDictReplayBuffer`: entries along the first dim, indices out."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._entries: list[TensorDictBase] = []

    def extend(self, tensordicts: TensorDictBase, *, update_priority: bool | None = None) -> torch.Tensor:
        first = len(self._entries)
        self._entries += tensordicts.unbind(0)
        return torch.arange(first, len(self._entries))

    def sample(self, batch_size: int | None = None, return_info: bool = False, include_info: Any = None) -> Any:
        indices = torch.randint(len(self._entries), (batch_size or self._batch_size,))
        drawn = torch.stack([self._entries[index] for index in indices])
        index = indices.view(-1, *[1] * (drawn.dim() - 1)).expand(drawn.shape)
        return (drawn, {"index": index}) if return_info else drawn.set("index", index)

    def __len__(self) -> int:
        return len(self._entries)


def make_env() -> SerialEnv:
    return SerialEnv(2, lambda: GymEnv("CartPole-v1"))


def test_single_frames_are_drawn_after_postproc_flattens_the_batches():
    buffer = LikeTorchRL(batch_size=5)
    collector = Collector(
        make_env(),
        frames_per_batch=6,
        total_frames=18,
        postproc=lambda batch: batch.reshape(-1),
        replay_buffer=buffer,
        seed=0,
    )
    collected = torch.cat([batch["observation"] for batch in collector])
    collector.shutdown()
    assert len(buffer) == 18
    drawn = buffer.sample()
    assert drawn.shape == (5,)
    assert drawn["observation"].equal(collected[drawn["index"]])


def test_without_postproc_an_entry_is_the_time_line_of_an_env():
    buffer = LikeTorchRL(batch_size=3)
    collector = Collector(make_env(), frames_per_batch=6, total_frames=12, replay_buffer=buffer, seed=0)
    batches = list(collector)
    collector.shutdown()
    assert len(buffer) == 4
    assert buffer.sample().shape == (3, batches[0].shape[-1])


def test_an_object_that_cannot_store_is_refused_before_anything_is_collected():
    with pytest.raises(ConfigError, match=r"replay_buffer=<object .* has no method extend"):
        Collector(make_env(), frames_per_batch=6, replay_buffer=object())
