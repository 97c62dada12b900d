"""The run folder: the one place where a run writes, claimed before anything heavy is loaded."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import orjson

from lucidrl.errors import ConfigError
from lucidrl.recipes.configs import BaseRunConfig, RunConfig
from lucidrl.utils.config import dump_yaml, load_config
from lucidrl.utils.logger.folders import get_next_experiment_dir

log = logging.getLogger(__name__)

CONFIG_NAME, CHECKPOINTS_NAME, LOGS_NAME, LOCK_NAME = "config.yaml", "checkpoints", "logs", "run.lock"
_MAX_LOCK_BYTES = 4096

C = TypeVar("C", bound=BaseRunConfig)


def create_run_folder(config: BaseRunConfig, algorithm: str) -> Path:
    """Make the folder of a new run and write its resolved config there.

    Raises:
        ConfigError: for a name that leaves the root, a folder that holds a run already, or one that cannot be written.
    """
    check_run_name(config.run)
    try:
        if config.run.name is None:
            folder = Path(get_next_experiment_dir(str(config.run.root / algorithm)))
        else:
            folder = config.run.root / config.run.name
            folder.mkdir(parents=True, exist_ok=True)
        _write_config(folder / CONFIG_NAME, config)
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
        if _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # whoever held it removed it just now; another one has its name, or none


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


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
    """Refuse a run name that leads out of the folder of runs."""
    if run.name is None:
        return
    root = run.root.resolve()
    folder = (run.root / run.name).resolve()
    if folder == root or not folder.is_relative_to(root):
        raise ConfigError(f"run.name={run.name!r} leaves run.root={str(run.root)!r}; give a name without '..' or '/'")


def check_can_create(run: RunConfig) -> None:
    """Refuse a root below which no run folder could be made, or a name that is taken; creates nothing that stays."""
    check_run_name(run)
    if run.name is not None and (run.root / run.name / CONFIG_NAME).exists():
        raise _taken(run)
    existing = next(path for path in [run.root.absolute(), *run.root.absolute().parents] if path.exists())
    try:
        if not existing.is_dir():
            raise NotADirectoryError(f"{existing} is a file")
        _check_writable(existing)
    except OSError as error:
        raise _unwritable(run.root, error) from error


def read_run_config(schema: type[C], folder: Path, overrides: list[str]) -> C:
    """The config a run was started with, changed by overrides."""
    return load_config(schema, run_config_path(folder), overrides=overrides)


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
    new = folder / f".{CONFIG_NAME}-{uuid.uuid4().hex}"
    _write_config(new, config)
    new.replace(folder / CONFIG_NAME)  # in one go: a run that is killed here can still be resumed


def _write_config(path: Path, config: BaseRunConfig) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(dump_yaml(config))
        file.flush()
        os.fsync(file.fileno())


def _check_writable(folder: Path) -> None:
    probe = folder / f".probe-{uuid.uuid4().hex}"
    descriptor = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    os.close(descriptor)
    probe.unlink()


def _taken(run: RunConfig) -> ConfigError:
    folder = run.root / (run.name or "")
    return ConfigError(f"{folder} holds a run already; continue it with --resume, or choose another run.name")


def _unwritable(root: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"run.root={str(root)!r} cannot be written ({error}); choose a writable folder with run.root=..."
    )
