"""`Logger`: every record goes to the run folder and to each tracker that is switched on."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Optional

from lucidrl.utils.logger.config import LoggerConfig, TensorboardConfig, validated
from lucidrl.utils.logger.folders import path_inside
from lucidrl.utils.logger.interface import LoggerInterface
from lucidrl.utils.logger.jsonl import JsonlLogger
from lucidrl.utils.logger.rows import row_lines
from lucidrl.utils.logger.tensorboard import TensorboardLogger
from lucidrl.utils.logger.values import WarnOnce

log = logging.getLogger(__name__)


class Logger(LoggerInterface):
    """Records to `<log_dir>/metrics.jsonl` always, and to TensorBoard if enabled.

    Building it fails if a back end cannot start. Afterwards nothing it does stops a run: a back end that fails is
    reported once and switched off, the others go on.

    Example:
        >>> with Logger({"log_dir": "runs/a", "tensorboard_enabled": True}) as logger:
        ...     logger.log_metrics({"reward": 0.5}, step=1, prefix="train")
    """

    def __init__(self, cfg: LoggerConfig) -> None:
        cfg = validated(LoggerConfig, cfg)
        self._log_dir = Path(cfg["log_dir"])
        self._warn_once = WarnOnce()
        self._backends: list[LoggerInterface] = [JsonlLogger(self._log_dir / "metrics.jsonl")]
        if cfg["tensorboard_enabled"]:
            folder = str(self._log_dir / "tensorboard")
            settings = cfg.get("tensorboard") or TensorboardConfig(log_dir=folder)
            self._backends.append(TensorboardLogger(settings, log_dir=folder))

    def log_metrics(
        self,
        metrics: dict[str, Any],
        step: int,
        prefix: Optional[str] = "",  # noqa: UP045
        step_metric: Optional[str] = None,  # noqa: UP045
    ) -> None:
        self._each(lambda backend: backend.log_metrics(metrics, step, prefix, step_metric))

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self._each(lambda backend: backend.log_hyperparams(params))

    def log_plot(self, figure: Any, step: int, name: str) -> None:
        self._each(lambda backend: backend.log_plot(figure, step, name))

    def log_batched_dict_as_jsonl(self, to_log: Mapping[str, Any], filename: str) -> None:
        """Write the rows of a batch to `<log_dir>/<filename>`, one line a row with its fields and `idx`.

        Token-aligned tensors are cut to the row's `input_lengths` where the batch has them. An existing file is
        replaced.

        Raises:
            ConfigError: if the file name leads out of the log folder.
        """
        path = path_inside(self._log_dir, filename)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f".{path.name}.unfinished")
            with unfinished.open("wb") as file:
                file.writelines(row_lines(to_log, self._warn_once))
            unfinished.replace(path)
        except Exception as error:
            log.warning("the rows of %s are not logged: %r", path, error)

    def finish(self) -> None:
        """Write what is pending and close every back end; may be called twice."""
        if self._backends:
            self._each(lambda backend: backend.finish())
            self._backends.clear()

    def __enter__(self) -> Logger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.finish()

    def __del__(self) -> None:
        """A last net for a logger that nobody finished; `with` or `finish` is the way to end one."""
        # Not while the interpreter exits: TensorBoard's writer thread is gone by then and must not be waited for.
        if not sys.is_finalizing() and hasattr(self, "_backends"):
            self.finish()

    def _each(self, call: Callable[[LoggerInterface], None]) -> None:
        if not self._backends:
            self._warn_once("off", "nothing is recorded any more: the logger is finished or its back ends failed")
        for backend in list(self._backends):
            try:
                call(backend)
            except Exception as error:  # a tracker may break in any way, and the run matters more than its record
                self._backends.remove(backend)
                log.warning("%s is switched off after an error: %r", type(backend).__name__, error, exc_info=True)
