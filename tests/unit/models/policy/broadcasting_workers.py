"""Policy workers that new processes can import."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch

from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker


class KilledInBroadcast(DTensorPolicyWorker):
    """Is killed in its second broadcast, when most of the weights have been sent."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._num_broadcasts = 0
        self._full_stream, self.export.stream = self.export.stream, self._stream  # type: ignore[method-assign]

    def _stream(self, *args: Any) -> Iterator[tuple[str, torch.Tensor]]:
        self._num_broadcasts += 1
        weights = list(self._full_stream(*args))
        for number, (name, tensor) in enumerate(weights):
            if self._num_broadcasts == 2 and number == len(weights) - 1:
                time.sleep(0.3)  # let the sent tensors arrive
                os.kill(os.getpid(), signal.SIGKILL)
            yield name, tensor
