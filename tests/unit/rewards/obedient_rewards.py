"""Verifiers and reward functions of tests, by the names of the library; processes import them."""

from __future__ import annotations

import os
import time
from typing import Any

from lucidrl.envs.text.interfaces import EnvRequest
from lucidrl.rewards.env import RewardEnv
from lucidrl.rewards.verifiers import VERIFIERS, VerifierEntry
from lucidrl.utils.config import Config
from tests.unit.rewards.hostile import Obedient


class ObedientConfig(Config):
    problem: str = ""


def obedient(config: ObedientConfig) -> Obedient:
    return Obedient(config.problem)


ENTRIES = {
    "pooled": VerifierEntry(obedient, ObedientConfig, runs_in_pool=True),
    "inline": VerifierEntry(obedient, ObedientConfig, runs_in_pool=False),
}


class ObedientEnv(RewardEnv):
    """A RewardEnv with the verifiers above, also in a worker process."""

    def __init__(self, **kwargs: Any) -> None:
        VERIFIERS.update(ENTRIES)
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
