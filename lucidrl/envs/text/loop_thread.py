"""An asyncio event loop in a daemon thread, for synchronous code that calls asynchronous code."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Owns one running event loop; it lives until `stop`, and never keeps the interpreter from exiting."""

    def __init__(self, name: str) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._loop.set_default_executor(_DaemonThreads())
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


class _DaemonThreads(ThreadPoolExecutor):
    """Runs what `asyncio.to_thread` is given in daemon threads: the interpreter waits for those of the base class when
    it exits, also for a call that was left behind at its deadline and never returns."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future
