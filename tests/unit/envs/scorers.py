"""Environments that do in their process what completions say; tests of environment workers share them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from lucidrl.data.datasets import Prompt
from lucidrl.distributed.config import ClusterConfig
from lucidrl.envs.text.config import EnvConfig
from lucidrl.envs.text.interfaces import EnvReply, EnvRequest
from lucidrl.envs.text.registry import checked_prompts
from lucidrl.envs.text.workers import start_env


def read_prompts(config: EnvConfig, cluster: ClusterConfig) -> Sequence[Prompt]:
    """As a run reads them."""
    pool = start_env(config, cluster, num_workers=1)
    try:
        return checked_prompts(pool.prompts(), config)
    finally:
        pool.shutdown()


class UnpicklableError(Exception):
    def __init__(self, left: str, right: str):
        super().__init__(f"{left} and {right}")
        self.lock = threading.Lock()


def request(completion: str, number: int = 0) -> EnvRequest:
    return EnvRequest(f"s{number}", [{"role": "assistant", "content": completion}], info={}, turn=1)


def requests(*completions: str) -> list[EnvRequest]:
    return [request(completion, number) for number, completion in enumerate(completions)]


class Scorer:
    """Rewards a completion that says nothing special with its length.

    Args:
        start: what to do in the constructor.
    """

    def __init__(self, start: str = ""):
        asyncio.run(_do(start))
        sys.stdout.write("the scorer is here\n")

    def prompts(self) -> list[Prompt]:
        return [Prompt(f"{number}", ({"role": "user", "content": f"{number}="},)) for number in range(20)]

    async def step(self, batch):
        for each in batch:
            await _do(each.completion)
        infos = {"unsendable": {"lock": threading.Lock()}}
        return [
            EnvReply(float(len(each.completion)), metrics={"pid": os.getpid()}, info=infos.get(each.completion))
            for each in batch
        ]


class Silent(Scorer):
    """Leaves instead of posing problems."""

    def prompts(self) -> list[Prompt]:
        os._exit(0)


class Counting(Scorer):
    """Keeps how many samples it has scored, and rewards a sample with that and with noise."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    async def step(self, batch):
        await super().step(batch)
        self.count += len(batch)
        return [EnvReply(self.count, metrics={"noise": random.random()}) for _ in batch]

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


async def _do(completion: str) -> None:
    what, _, argument = completion.partition(" ")
    if what == "raise":
        raise KeyError("no such reward")
    if what == "unpicklable":
        raise UnpicklableError("wheel", "axle")
    if what == "exit":
        sys.exit(3)
    if what == "leave":
        os._exit(0)
    if what == "hang":
        await asyncio.sleep(60)
    if what == "block":
        10**10**10  # holds the interpreter's lock, so that no other thread runs
    if what == "wait":
        await asyncio.sleep(float(argument))
    if what == "sleep":
        time.sleep(float(argument))
    if what == "die":
        sys.stdout.write("about to die\n")
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "once":  # in the process that comes first
        try:
            Path(argument).touch(exist_ok=False)
        except FileExistsError:
            return
        await _do("die")
