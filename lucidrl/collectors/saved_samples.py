"""Samples as plain values in a checkpoint, exact to the last bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lucidrl.collectors.rollouts import Sample
from lucidrl.data.datasets import Prompt
from lucidrl.envs.text.interfaces import RewardComponent

_TENSORS = {"token_ids": torch.int64, "generation_logprobs": torch.float32, "policy_versions": torch.int64}
_PLAIN = ("reward", "turns", "is_done", "is_truncated", "is_dropped", "metrics", "answer")


def saved_sample(sample: Sample) -> dict[str, Any]:
    """Return a sample that is done as plain values, without its prompt and `info`, which only the environment read."""
    return {
        "index": sample.index,
        "logs": [[_saved_message(message) for message in log] for log in (*sample.earlier_logs, sample.log)],
        "components": {name: list(component) for name, component in sample.components.items()},
        **{name: getattr(sample, name) for name in _PLAIN},
    }


def restored_sample(prompt: Prompt, saved: Mapping[str, Any]) -> Sample:
    """Return the sample of a prompt from a result of `saved_sample`."""
    *earlier_logs, log = [[_restored_message(message) for message in log] for log in saved["logs"]]
    components = {name: RewardComponent(*component) for name, component in saved["components"].items()}
    plain = {name: saved[name] for name in _PLAIN}
    return Sample(prompt, saved["index"], log, {}, earlier_logs, components=components, **plain)


def _saved_message(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.tolist() if key in _TENSORS else value for key, value in message.items()}


def _restored_message(message: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: torch.tensor(value, dtype=_TENSORS[key]) if key in _TENSORS else value for key, value in message.items()
    }
