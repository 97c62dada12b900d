"""`logs/driver.log`: what the program that drives a run said, beside the logs of its ranks."""

from __future__ import annotations

import logging
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lucidrl import __version__
from lucidrl.errors import ConfigError
from lucidrl.recipes.run_folder import CONFIG_NAME, LOGS_NAME
from lucidrl.utils.logger.redact import redacted, redacted_text

DRIVER_LOG_NAME = "driver.log"
_OURS = "lucidrl"


@contextmanager
def driver_log(folder: Path) -> Iterator[None]:
    """Append to the log of the run in `folder` meanwhile.

    It gets our records from INFO on and warnings of everybody, and with them the command, and the error that ended it
    with its traceback; all without secrets.

    Raises:
        ConfigError: if the file cannot be written.
    """
    handler = _handler(folder / LOGS_NAME / DRIVER_LOG_NAME)
    root, ours = logging.getLogger(), logging.getLogger(_OURS)
    level = ours.level
    ours.setLevel(min(ours.getEffectiveLevel(), logging.INFO))
    root.addHandler(handler)
    try:
        process = f"process {os.getpid()} on {socket.gethostname()}"
        settings = f"settings in {folder / CONFIG_NAME}"
        _write(handler, logging.INFO, f"lucidrl {__version__}, {process}, {settings}: {_command()}")
        yield
        _write(handler, logging.INFO, "ended well")
    except BaseException as error:
        _write(handler, logging.ERROR, f"ended by {type(error).__name__}", error)
        raise
    finally:
        root.removeHandler(handler)
        ours.setLevel(level)
        handler.close()


def _command() -> str:
    """As it was typed, without values of settings that are secrets: a whole argument each, whatever is in it."""
    words = []
    for word in sys.argv:
        name, equals, value = word.partition("=")
        words.append(f"{name}={redacted({name: value})[name]}" if equals else word)
    return shlex.join(words)


def _handler(path: Path) -> logging.Handler:
    try:
        path.parent.mkdir(exist_ok=True)
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error}); give a run folder that can be") from error
    handler.setLevel(logging.INFO)
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name.partition(".")[0] == _OURS)
    handler.setFormatter(_WithoutSecrets("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    return handler


def _write(handler: logging.Handler, level: int, text: str, error: BaseException | None = None) -> None:
    """To the file only: the terminal shows the beginning and the end of a run in its own way."""
    about = None if error is None else (type(error), error, error.__traceback__)
    handler.handle(logging.LogRecord(__name__, level, __file__, 0, text, (), about))


class _WithoutSecrets(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redacted_text(super().format(record))
