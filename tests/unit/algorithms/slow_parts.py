"""Parts that are slow on purpose, which new processes can import."""

from __future__ import annotations

import os
import time
from typing import Any

import torch


class SlowOnRank1(torch.optim.SGD):
    """An optimizer whose update is slow on rank 1."""

    def __init__(self, params: Any, lr: float = 0.1, slow_s: float = 0.0):
        super().__init__(params, lr=lr)
        self._slow_s = slow_s if os.environ.get("RANK") == "1" else 0.0

    def step(self, closure: Any = None) -> Any:
        time.sleep(self._slow_s)
        return super().step(closure)
