"""Policy workers that new processes can import."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from typing import Any

from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker


class KilledWhilePacking(DTensorPolicyWorker):
    """Is killed at the call for one bucket more than it may pack."""

    buckets_left: int | None = None

    def die_after(self, num_buckets: int) -> None:
        self.buckets_left = num_buckets

    def get_weights_ipc_handles(self, keys: Iterable[str]) -> dict[str, Any]:
        if self.buckets_left is not None:
            self.buckets_left -= 1
            if self.buckets_left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().get_weights_ipc_handles(keys)

    def checksum(self) -> str:
        return self.export.checksum()
