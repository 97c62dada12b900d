"""The run folder: its creation, its settings, and the driver's log in `logs/driver.log`."""

from __future__ import annotations

import logging
import os
import shlex
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lucidrl import __version__
from lucidrl.checkpoint.config import CONFIG_NAME
from lucidrl.errors import ConfigError
from lucidrl.recipes.base_config import BaseRunConfig, RunConfig
from lucidrl.utils.logger.folders import get_next_experiment_dir, write_private_text
from lucidrl.utils.logger.redact import redacted, redacted_text
from lucidrl.utils.run_folder import DRIVER_LOG_NAME, LOGS_NAME

log = logging.getLogger(__name__)

_MAX_NAME_BYTES = 255
_OURS = "lucidrl"


def create_run_folder(config: BaseRunConfig) -> Path:
    """Create the folder of a new run and write its settings there.

    Raises:
        ConfigError: `run.name` is outside `run.root`, the folder has a run already, or it cannot be written.
    """
    try:
        check_run_name(config.run)
        if config.run.name is None:
            folder = Path(get_next_experiment_dir(str(config.run.root / config.algorithm)))
        else:
            folder = config.run.root / config.run.name
            folder.mkdir(parents=True, exist_ok=True)
        os.close(
            os.open(folder / CONFIG_NAME, os.O_CREAT | os.O_EXCL)
        )  # atomic: only one of several processes succeeds
        update_run_config(folder, config)
    except FileExistsError as error:
        raise _taken(config.run) from error
    except OSError as error:
        raise _unwritable(config.run.root, error) from error
    return folder


def check_run_name(run: RunConfig) -> None:
    """Raise ConfigError for a run name that is not a valid file name, or is outside `run.root`."""
    for key, path in (("run.root", str(run.root)), ("run.name", run.name or "")):
        if "\0" in path:
            raise ConfigError(f"{key}={path!r} has a NUL character, which file names cannot have; remove it")
        longest = max((os.fsencode(part) for part in path.split("/")), key=len)
        if len(longest) > _MAX_NAME_BYTES:
            raise ConfigError(
                f"{key}={path[:20]}... has a name of {len(longest)} bytes, but file systems allow at most "
                f"{_MAX_NAME_BYTES}; shorten it"
            )
    if run.name is None:
        return
    root = run.root.resolve()
    folder = (run.root / run.name).resolve()
    if folder == root or not folder.is_relative_to(root):
        raise ConfigError(f"run.name={run.name!r} leaves run.root={str(run.root)!r}; choose a name without '..' or '/'")


def check_can_create(run: RunConfig) -> None:
    """Raise ConfigError if the run folder cannot be created or has a run already; the check leaves no files."""
    try:
        check_run_name(run)
        if run.name is not None and (run.root / run.name / CONFIG_NAME).exists():
            raise _taken(run)
        existing = next(path for path in [run.root.absolute(), *run.root.absolute().parents] if path.exists())
        if not existing.is_dir():
            raise NotADirectoryError(f"{existing} is a file")
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise _unwritable(run.root, error) from error


def run_config_path(folder: Path) -> Path:
    """Return the file with the settings of a run; raise ConfigError if there is none."""
    if not (folder / CONFIG_NAME).is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no {CONFIG_NAME}; choose the folder of an earlier run")
    return folder / CONFIG_NAME


def update_run_config(folder: Path, config: BaseRunConfig) -> None:
    """Write the settings of the run; the next resume starts from them."""
    write_private_text(folder / CONFIG_NAME, config.to_yaml())


def _taken(run: RunConfig) -> ConfigError:
    folder = run.root / (run.name or "")
    return ConfigError(
        f"{folder} holds a run already; resume it (--resume, in Python train(resume=...)), or choose another run.name"
    )


def _unwritable(root: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"run.root={str(root)!r} cannot be written ({error}); choose a writable folder with run.root=..."
    )


@contextmanager
def driver_log(folder: Path) -> Iterator[None]:
    """Append to the driver's log: the command, lucidrl records from INFO, all warnings, and the traceback of a failure.

    Secrets are removed.

    Raises:
        ConfigError: the file cannot be written.
    """
    handler = _handler(folder / LOGS_NAME / DRIVER_LOG_NAME)
    root, ours = logging.getLogger(), logging.getLogger(_OURS)
    level = ours.level
    ours.setLevel(min(ours.getEffectiveLevel(), logging.INFO))
    root.addHandler(handler)
    try:
        process = f"process {os.getpid()} on {socket.gethostname()}"
        settings = f"settings in {folder / CONFIG_NAME}"
        _write(handler, logging.INFO, f"lucidrl {__version__}, {process}, {settings}: {command_line()}")
        yield
        _write(handler, logging.INFO, "finished")
    except BaseException as error:
        _write(handler, logging.ERROR, f"failed with {type(error).__name__}", error)
        raise
    finally:
        root.removeHandler(handler)
        ours.setLevel(level)
        handler.close()


def command_line() -> str:
    """Return the command line with the values of secret settings removed."""
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
        raise ConfigError(f"{path} cannot be written ({error}); choose a writable run folder") from error
    handler.setLevel(logging.INFO)
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name.partition(".")[0] == _OURS)
    handler.setFormatter(_WithoutSecrets("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    return handler


def _write(handler: logging.Handler, level: int, text: str, error: BaseException | None = None) -> None:
    """Write to the file only; the display reports start and end on the terminal."""
    about = None if error is None else (type(error), error, error.__traceback__)
    handler.handle(logging.LogRecord(__name__, level, __file__, 0, text, (), about))


class _WithoutSecrets(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redacted_text(super().format(record))
