"""An environment that does in its process what the answers say; tests of its actors share it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path

from lucidrl.envs.text.interfaces import EnvReply, EnvRequest


class UnpicklableError(Exception):
    def __init__(self, left: str, right: str):
        super().__init__(f"{left} and {right}")
        self.lock = threading.Lock()


def request(answer: str, number: int = 0) -> EnvRequest:
    return EnvRequest(f"s{number}", [{"role": "assistant", "content": answer}], info={}, turn=1)


def requests(*answers: str) -> list[EnvRequest]:
    return [request(answer, number) for number, answer in enumerate(answers)]


class Judge:
    """Rewards an answer that says nothing special with its length.

    Args:
        only_in: the one process in which it can be made, if not in all.
        leaves: it ends any other process, instead of raising there.
    """

    def __init__(self, only_in: int | None = None, leaves: bool = False):
        if leaves and only_in != os.getpid():
            sys.exit(3)
        if only_in not in (None, os.getpid()):
            raise OSError("there is no judge here")
        sys.stdout.write("the judge is here\n")

    async def step(self, batch):
        for each in batch:
            await _do(each.answer)
        return [EnvReply(float(len(each.answer)), metrics={"pid": os.getpid()}) for each in batch]


async def _do(answer: str) -> None:
    what, _, argument = answer.partition(" ")
    if what == "raise":
        raise KeyError("no such reward")
    if what == "unpicklable":
        raise UnpicklableError("wheel", "axle")
    if what == "exit":
        sys.exit(1)
    if what == "hang":
        await asyncio.sleep(60)
    if what == "block":
        time.sleep(60)
    if what == "wait":
        await asyncio.sleep(float(argument))
    if what == "die":
        sys.stdout.write("about to die\n")
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "once":  # in whichever process comes first
        try:
            Path(argument).touch(exist_ok=False)
        except FileExistsError:
            return
        await _do("die")
