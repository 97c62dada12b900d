"""Watches the steps that metrics come with."""

from __future__ import annotations

from collections.abc import Iterable

from lucidrl.utils.logger.values import WarnOnce


class StepOrder:
    """Says once if a metric comes twice for a step or goes back; both values are recorded all the same."""

    def __init__(self, warn_once: WarnOnce) -> None:
        self._warn_once = warn_once
        self._last_step_of: dict[str, int] = {}

    def note(self, names: Iterable[str], step: int) -> None:
        last_step_of = self._last_step_of
        for name in names:
            last = last_step_of.get(name)
            if last is not None and step <= last:
                self._complain(name, step, last)
            last_step_of[name] = step

    def _complain(self, name: str, step: int, last: int) -> None:
        how = "twice" if step == last else f"after step {last}"
        self._warn_once(
            how.split()[0],
            "metric %s came %s for step %d; all values are kept, the later line counts (said once)",
            name, how, step,
        )  # fmt: skip
