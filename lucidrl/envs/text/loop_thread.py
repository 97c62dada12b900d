"""An asyncio event loop in a daemon thread, for synchronous code that calls asynchronous code."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Owns one running event loop; it lives until `stop`, and never keeps the interpreter from exiting."""

    def __init__(self, name: str) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._stop_requested = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self, wait_s: float) -> None:
        """Cancel what runs and end the loop, waiting at most `wait_s`; a blocked loop ends when it is free again."""
        # A loop that has already ended needs no more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop_requested.set)
        self._thread.join(wait_s)

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._stop_requested.wait())
