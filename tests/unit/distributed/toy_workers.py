"""Small workers that new processes can import."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from lucidrl.distributed.process_group import init_process_group_from_environment, leave_process_group, sum_over
from lucidrl.errors import LucidError
from lucidrl.profiling.spans import span


class Plain:
    """A worker without a process group."""

    def __init__(self, start: int = 0, *, step: int = 1):
        self.total = start
        self.step = step
        self.rank = int(os.environ.get("RANK", "0"))

    def add(self, amount: int, *, times: int = 1) -> int:
        self.total += self.step * amount * times
        return self.total

    def echo(self, value: Any) -> Any:
        return value

    def describe(self, value: torch.Tensor) -> tuple[str, tuple[int, ...], float]:
        return str(value.dtype), tuple(value.shape), float(value.float().sum())

    def pid(self) -> int:
        return os.getpid()

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def double(self, value: torch.Tensor) -> torch.Tensor:
        return 2 * value

    def num_threads(self) -> int:
        return torch.get_num_threads()

    def say(self, text: str) -> None:
        print(text)  # noqa: T201

    def raise_on(self, rank: int, error: BaseException) -> None:
        if self.rank == rank:
            raise error

    def return_lambda(self) -> Any:
        return lambda: None

    def sleep_on(self, rank: int, seconds: float) -> None:
        if self.rank == rank:
            time.sleep(seconds)

    def start_sleeper(self) -> int:
        """A process that inherits this one's connection."""
        pid = os.fork()
        if pid == 0:
            time.sleep(30)
            os._exit(0)
        return pid

    def shutdown(self) -> None:
        print("goodbye")  # noqa: T201


class Joined(Plain):
    """Joins the other ranks."""

    def __init__(self, timeout_s: float = 30.0):
        super().__init__()
        self.info = init_process_group_from_environment(timeout_s)
        assert init_process_group_from_environment(timeout_s) == self.info

    def sum_of_ranks(self) -> float:
        total = torch.tensor(float(self.info.rank))
        dist.all_reduce(total)
        return float(total)

    def reduce_unless(self, rank: int, seconds: float) -> None:
        """All others wait in a collective for the one that sleeps."""
        self.sleep_on(rank, seconds)
        dist.all_reduce(torch.zeros(1))

    def train_unless(self, rank: int, seconds: float) -> None:
        """Like a training step with spans: one rank is slow, all wait for it in a collective."""
        with span("train"):
            with span("forward"):
                self.sleep_on(rank, seconds)
            sum_over(torch.zeros(1), dist.group.WORLD)

    def raise_while_others_wait(self, rank: int) -> None:
        self.raise_on(rank, ValueError("a bad number"))
        dist.all_reduce(torch.zeros(1))

    def shutdown(self) -> None:
        leave_process_group(self.info)


class FailsToStart(Plain):
    def __init__(self, rank: int, error: BaseException):
        super().__init__()
        self.raise_on(rank, error)
        time.sleep(60)


class ExitsAtStart(Plain):
    def __init__(self) -> None:
        os._exit(7)


class HangsAtStart(Plain):
    def __init__(self) -> None:
        time.sleep(60)


class StubbornAtShutdown(Plain):
    def shutdown(self) -> None:
        time.sleep(60)


class TwoPartError(LucidError):
    """Cannot be unpickled: its constructor takes other arguments than Exception keeps."""

    def __init__(self, left: str, right: str):
        super().__init__(f"{left} and {right}")


def run_sleeper(folder: str, launcher: str = "local") -> subprocess.Popen[bytes]:
    """A driver of two busy workers, which writes their pids to `folder` and never exits."""
    code = f"from {__name__} import drive_forever; drive_forever({folder!r}, {launcher!r})"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def drive_forever(folder: str, launcher: Literal["local", "ray"]) -> None:
    from lucidrl.distributed.config import ClusterConfig
    from lucidrl.distributed.workers.group import WorkerGroup

    group = WorkerGroup(Plain, cluster=ClusterConfig(num_workers=2, launcher=launcher), log_dir=Path(folder))
    pids = group.run_all("pid")
    part = Path(folder, "part")
    part.write_text("\n".join(map(str, pids)))
    part.rename(Path(folder, "pids"))
    group.run_all("sleep_on", 0, 600.0)


def print_main() -> None:
    """What a new process sees of the program that started it, a line each."""
    main = sys.modules["__main__"]
    found = [main.Worker.number, os.getcwd(), " ".join(sys.argv)]  # type: ignore[attr-defined]
    found += [os.environ.get(name) for name in ("NCCL_DEBUG", "OMP_NUM_THREADS")]
    print(*found, sep="\n")  # noqa: T201
