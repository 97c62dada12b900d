"""Commits the checkpoints of a run while it goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from lucidrl.algorithms.interfaces import SavablePolicy
from lucidrl.checkpoint.manager import CheckpointManager, PendingCheckpoint
from lucidrl.errors import ConfigError
from lucidrl.profiling.spans import span

log = logging.getLogger(__name__)


class Saver:
    """Saves the policy, its optimizer, and plain state.

    The policy's workers write in the background. A checkpoint is committed, and reported as saved, when the loop next
    asks after they are done: only the thread of the loop may call the workers.

    Args:
        every: steps between checkpoints; 0 = only at the end.
        announce: is told of each checkpoint once it is committed.
        background: whether `save` returns when everything is copied; otherwise when it is committed.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        every: int,
        policy: SavablePolicy,
        announce: Callable[[str], None],
        *,
        background: bool = True,
    ) -> None:
        self.manager = manager
        self._every, self._policy, self._announce, self._background = every, policy, announce, background
        self._pending: PendingCheckpoint | None = None

    def check_metric(self, metrics: Mapping[str, float]) -> None:
        """Refuse a metric for the best checkpoint that validation does not measure."""
        if self.manager.metric is not None and self.manager.metric not in metrics:
            raise ConfigError(
                f"checkpoint.metric={self.manager.metric!r} is not measured in validation; "
                f"choose one of {', '.join(sorted(metrics))}"
            )

    def end_step(
        self, step: int, state_dict: Callable[[], Mapping[str, Any]], metrics: Mapping[str, float], *, is_last: bool
    ) -> None:
        """Commit what is written by now, and begin another checkpoint if it is time; the last step's is waited for.

        Args:
            state_dict: gives what is kept beside the policy; asked only if it is time.
            metrics: of a validation after this step, if there was one.
        """
        self.settle()
        if is_last or (self._every > 0 and step % self._every == 0):
            self.save(step, state_dict(), metrics)
        if is_last:
            self.finish()

    def save(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Begin a checkpoint, after the one before is committed."""
        self.finish()
        with span("save"):
            pending = self.manager.begin(step, state, metrics)
            try:
                self._policy.begin_save(pending.folder)
            except BaseException:
                pending.discard()
                raise
        self._pending = pending
        if not self._background:
            self.finish()

    def settle(self) -> None:
        """Commit what was begun if it is written; returns at once otherwise."""
        if self._pending is not None and self._policy.is_save_written():
            self.finish()

    def finish(self) -> None:
        """Wait for what was begun, and commit it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with span("save"):
            try:
                pending.commit(self._policy.finish_save())
            except BaseException:
                pending.discard()
                raise
        self._announce(f"saved step {pending.step}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A run that fails still commits what it began; one that is told to end at once does not wait for it."""
        if self._pending is None:
            return
        if kind is None or issubclass(kind, Exception):
            try:
                self.finish()
            except Exception:
                if kind is None:
                    raise
                log.warning("the checkpoint that was being written is lost", exc_info=True)
        else:
            self._pending.discard()
            self._pending = None
