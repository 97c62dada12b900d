"""How often workers that were lost may be restarted."""

from __future__ import annotations

import threading

from lucidrl.errors import ConfigError


class Restarts:
    """Counts restarts, in all and in a row.

    Args:
        max_restarts: consecutive restarts of one worker without a success in between.
        setting: the name of that limit, for errors.
    """

    def __init__(self, max_restarts: int, setting: str = "max_restarts"):
        if max_restarts < 0:
            raise ConfigError(f"{setting}={max_restarts} is negative; give 0 to never restart, or a positive number")
        self.max_restarts, self.setting = max_restarts, setting
        self.total = 0
        """Restarts so far, of all workers."""
        self._in_a_row: dict[int, int] = {}
        self._lock = threading.Lock()

    def take(self, number: int) -> bool:
        """Count a restart of a worker; False if it has none left."""
        with self._lock:
            in_a_row = self._in_a_row.get(number, 0)
            if in_a_row >= self.max_restarts:
                return False
            self._in_a_row[number] = in_a_row + 1
            self.total += 1
            return True

    def succeeded(self, number: int) -> None:
        """A worker finished something: it has all its restarts again."""
        with self._lock:
            self._in_a_row.pop(number, None)

    def described(self, number: int) -> str:
        """How many a worker has had, for a log line."""
        return f"restart {self._in_a_row.get(number, 0)} of at most {self.max_restarts} in a row"
