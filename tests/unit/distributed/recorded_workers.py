"""A worker that records itself, for tests of the launcher and of faults."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from lucidrl.distributed.process_group import init_process_group_from_environment, leave_process_group
from lucidrl.profiling import clock
from lucidrl.profiling.recording import Recording
from lucidrl.profiling.spans import span
from lucidrl.utils.nsys import is_recorded, worker_name
from tests.unit.distributed.toy_workers import Plain


class Recorded(Plain):
    """A worker without a process group; its work is sums and sleep."""

    def __init__(self) -> None:
        super().__init__()
        self._recording = Recording(worker_name("worker", self.rank))

    def work(self, seconds: float = 0.0) -> None:
        with span("work"):
            torch.ones(3) + 1
        time.sleep(seconds)

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def start_gpu_profiling(self) -> None:
        if is_recorded(self._recording.name):
            self._recording.start()

    def stop_gpu_profiling(self) -> None:
        self._recording.stop()

    def shutdown(self) -> None:
        self._recording.stop()


class SlowlyWriting(Recorded):
    def shutdown(self) -> None:
        time.sleep(1.0)
        super().shutdown()


class Meeting(Recorded):
    """Ranks that meet at barriers.

    Args:
        ahead_s: how far the clock of rank 1 is ahead.
    """

    def __init__(self, ahead_s: float = 0.0) -> None:
        super().__init__()
        self.info = init_process_group_from_environment(60.0)
        if self.rank == 1:
            clock._anchor_ns += round(ahead_s * 1e9)

    def meet(self, num_times: int) -> list[int]:
        """Return when this rank left each barrier, on the clock that all processes of a machine share."""
        left_ns = []
        for _ in range(num_times):
            with span("barrier"):
                dist.barrier()
            left_ns.append(time.perf_counter_ns())
        return left_ns

    def shutdown(self) -> None:
        super().shutdown()
        leave_process_group(self.info)
