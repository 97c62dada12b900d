"""Verifiers and reward functions of tests, by the names of the library; processes import them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lucidrl.envs.text.interfaces import EnvRequest
from lucidrl.errors import ConfigError
from lucidrl.rewards.env import RewardEnv
from lucidrl.rewards.interfaces import Verifier
from tests.unit.rewards.hostile import Obedient


@dataclass(frozen=True)
class Entry:
    runs_in_pool: bool


VERIFIERS = {"pooled": Entry(True), "inline": Entry(False)}


def make_verifier(name: str, kwargs: Mapping[str, Any]) -> Verifier:
    if name not in VERIFIERS:
        raise ConfigError(f"unknown verifier {name!r}; did you mean pooled?")
    return Obedient(**kwargs)


class ObedientEnv(RewardEnv):
    """A RewardEnv with the verifiers above, also in a worker process."""

    def __init__(self, **kwargs: Any) -> None:
        sys.modules["lucidrl.rewards.verifiers"] = sys.modules[__name__]
        super().__init__(**kwargs)


def request(completion: str, number: int = 0, **row: Any) -> EnvRequest:
    log = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": completion, "token_ids": [7, 8, 9]}]
    return EnvRequest(f"p{number}#0", log, row, turn=1)


def requests(*completions: str, **row: Any) -> list[EnvRequest]:
    return [request(completion, number, **row) for number, completion in enumerate(completions)]


def exact(completion, answer, **row):
    match completion:
        case "hang":
            time.sleep(60)
        case "exit":
            os._exit(0)
        case "raise":
            raise ValueError("no idea")
    return completion == answer
