"""A gate for threads: many at a time, or one alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Lets many threads in together, or one alone, which goes before threads that come later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0
        self._num_wanting_alone = 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context inside which other threads may be inside too."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_wanting_alone)
            self._num_inside += 1
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Context inside which no other thread is inside."""
        with self._changed:
            self._num_wanting_alone += 1
            try:
                self._changed.wait_for(lambda: not self._num_inside)
                self._num_inside += 1
            except BaseException:
                self._num_wanting_alone -= 1
                raise
        try:
            yield
        finally:
            with self._changed:
                self._num_wanting_alone -= 1
            self._leave()

    def _leave(self) -> None:
        with self._changed:
            self._num_inside -= 1
            self._changed.notify_all()
