"""Weights of a policy in Ray's object store, where one copy serves all workers of a node."""

from __future__ import annotations

import threading
from typing import Any

from lucidrl.collectors.parts import Weights, check_weights
from lucidrl.distributed.launchers.messages import Message


class RayWeights:
    """The newest weights that were published; whoever is asked for a batch is given them, whole, if they are new to it.

    Args:
        weights: that the policy has to begin with.
    """

    def __init__(self, weights: Weights):
        self._shapes = {name: tensor.shape for name, tensor in weights.items()}
        self._lock = threading.Lock()
        self._num_published = 0
        self._newest: Any = None  # a reference
        self._is_closed = False

    def publish(self, weights: Weights, version: int) -> None:
        """Put them into the store, once; see `WorkerHost.publish`."""
        import ray

        check_weights(weights, self._shapes)
        with self._lock:
            if ray.is_initialized() and not self._is_closed:  # else whoever asks for the next batch is told
                content = {name: tensor.detach().cpu() for name, tensor in weights.items()}, version
                self._num_published, self._newest = self._num_published + 1, ray.put(Message.of(content))

    def newer_than(self, num_published: int) -> tuple[int, Any]:
        """How often some were published, and a reference to the newest; None if there were no more than so many."""
        with self._lock:
            return self._num_published, self._newest if self._num_published > num_published else None

    def close(self) -> None:
        """Leave nothing in the store, and put nothing there any more."""
        with self._lock:
            self._is_closed, self._newest = True, None
