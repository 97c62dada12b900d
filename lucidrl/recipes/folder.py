"""The run folder: the one place where a run writes, claimed before anything heavy is loaded.

Its `logs/driver.log` has what the driver logged, beside the logs of the ranks.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shlex
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import orjson

from lucidrl import __version__
from lucidrl.errors import ConfigError
from lucidrl.recipes.configs import BaseRunConfig, RunConfig
from lucidrl.utils.logger.folders import get_next_experiment_dir
from lucidrl.utils.logger.redact import redacted, redacted_text
from lucidrl.utils.secrets import write_private_text

log = logging.getLogger(__name__)

CONFIG_NAME, CHECKPOINTS_NAME, LOGS_NAME, LOCK_NAME = "config.yaml", "checkpoints", "logs", "run.lock"
DRIVER_LOG_NAME = "driver.log"
_MAX_LOCK_BYTES = 4096
_MAX_NAME_BYTES = 255
_OURS = "lucidrl"


def create_run_folder(config: BaseRunConfig) -> Path:
    """Make the folder of a new run and write its resolved config there.

    Raises:
        ConfigError: for a name that leaves the root, a folder that holds a run already, or one that cannot be written.
    """
    try:
        check_run_name(config.run)
        if config.run.name is None:
            folder = Path(get_next_experiment_dir(str(config.run.root / config.algorithm)))
        else:
            folder = config.run.root / config.run.name
            folder.mkdir(parents=True, exist_ok=True)
        os.close(os.open(folder / CONFIG_NAME, os.O_CREAT | os.O_EXCL))  # of several runs, one gets the folder
        update_run_config(folder, config)
    except FileExistsError as error:
        raise _taken(config.run) from error
    except OSError as error:
        raise _unwritable(config.run.root, error) from error
    return folder


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Hold the run folder for this process; the hold ends with the process, however that ends.

    Meanwhile the folder's `run.lock` says who holds it. One that is found unlocked was left by a process that was
    killed, and is taken over.

    Raises:
        ConfigError: if another process holds the folder, naming it.
    """
    path = folder / LOCK_NAME
    descriptor = _locked_file(path)
    try:
        if left := os.pread(descriptor, _MAX_LOCK_BYTES, 0):
            log.info("taking over %s from %s, which has ended without a word", folder, _owner(left))
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _own_entry(), 0)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error}); see to the disk, then start again") from error
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _locked_file(path: Path) -> int:
    """Lock the file, made if there is none; the lock ends when the descriptor is closed."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error}); give a run folder that can be") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _owner(os.pread(descriptor, _MAX_LOCK_BYTES, 0))
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                problem = f"{path.parent} is in use by {owner}; wait for it to end, or start another run"
            else:
                problem = f"{path} cannot be locked ({error}); put runs on a file system with locks"
            raise ConfigError(problem) from error
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # whoever held it removed it just now; another one has its name, or none


def _own_entry() -> bytes:
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    return orjson.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since})


def _owner(entry: bytes) -> str:
    """Who wrote an entry, in words; a lock is held for a moment before its entry is there."""
    try:
        found = orjson.loads(entry)
        return f"process {found['pid']} on {found['host']} since {found['since']}"
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "another process"


def check_run_name(run: RunConfig) -> None:
    """Refuse a run name that no file system takes, or that leads out of the folder of runs."""
    for key, path in (("run.root", str(run.root)), ("run.name", run.name or "")):
        if "\0" in path:
            raise ConfigError(f"{key}={path!r} has a NUL character, which no file name may have; take it out")
        longest = max((os.fsencode(part) for part in path.split("/")), key=len)
        if len(longest) > _MAX_NAME_BYTES:
            raise ConfigError(
                f"{key}={path[:20]}... has a name of {len(longest)} bytes, and file systems take at most "
                f"{_MAX_NAME_BYTES}; shorten it"
            )
    if run.name is None:
        return
    root = run.root.resolve()
    folder = (run.root / run.name).resolve()
    if folder == root or not folder.is_relative_to(root):
        raise ConfigError(f"run.name={run.name!r} leaves run.root={str(run.root)!r}; give a name without '..' or '/'")


def check_can_create(run: RunConfig) -> None:
    """Refuse a root below which no run folder could be made, or a name that is taken; creates nothing that stays."""
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
    """The file with the config a run was started with.

    Raises:
        ConfigError: if there is none.
    """
    if not (folder / CONFIG_NAME).is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no {CONFIG_NAME}; give the folder of an earlier run")
    return folder / CONFIG_NAME


def update_run_config(folder: Path, config: BaseRunConfig) -> None:
    """Record the settings that a resumed run goes on with, so that the next resume starts from them."""
    write_private_text(folder / CONFIG_NAME, config.to_yaml())


def _taken(run: RunConfig) -> ConfigError:
    folder = run.root / (run.name or "")
    return ConfigError(f"{folder} holds a run already; continue it with --resume, or choose another run.name")


def _unwritable(root: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"run.root={str(root)!r} cannot be written ({error}); choose a writable folder with run.root=..."
    )


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
