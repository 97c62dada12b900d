"""Ends what nobody ended: with the interpreter, and in forked processes."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import Protocol


class Mortal(Protocol):
    """What has to be ended."""

    def finish(self) -> None:
        """End it; may be called twice."""

    def forget(self) -> None:
        """Take it as ended already, without touching what belongs to another process."""


_alive: weakref.WeakSet[Mortal] = weakref.WeakSet()
_is_registered = False


def end_with_process(thing: Mortal) -> None:
    """Have `thing` finished at the end of the process if it still exists then, and forgotten in forked ones."""
    global _is_registered
    if not _is_registered:
        _is_registered = True
        # Whatever imports this one at the end would find it too late for hooks of its own.
        import concurrent.futures.thread  # noqa: F401

        # While threads can still be started, which is before the usual hooks run. Nothing but this private name offers
        # that; without it, the usual hooks are a little late.
        getattr(threading, "_register_atexit", atexit.register)(_finish_all)
        os.register_at_fork(after_in_child=_forget_all)
    _alive.add(thing)


def _finish_all() -> None:
    for thing in list(_alive):
        thing.finish()


def _forget_all() -> None:
    for thing in list(_alive):
        thing.forget()
    _alive.clear()
