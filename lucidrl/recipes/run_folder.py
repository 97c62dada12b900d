"""The run folder: the one place where a run writes, claimed before anything heavy is loaded."""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from lucidrl.errors import ConfigError
from lucidrl.recipes.configs import BaseRunConfig, RunConfig
from lucidrl.utils.config import dump_yaml, load_config
from lucidrl.utils.logger.folders import get_next_experiment_dir

CONFIG_NAME, CHECKPOINTS_NAME, LOGS_NAME = "config.yaml", "checkpoints", "logs"

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
        _write_config(folder, config, mode="x")
    except FileExistsError as error:
        raise _taken(config.run) from error
    except OSError as error:
        raise _unwritable(config.run.root, error) from error
    return folder


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Hold the run folder for this process; the hold ends with the process, however that ends.

    Raises:
        ConfigError: if another process holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ConfigError(f"{folder} is in use by another process; wait for it to end, or start another run") from error
    finally:
        os.close(descriptor)


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
    if not (folder / CONFIG_NAME).is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no {CONFIG_NAME}; give the folder of an earlier run")
    return load_config(schema, folder / CONFIG_NAME, overrides=overrides)


def update_run_config(folder: Path, config: BaseRunConfig) -> None:
    """Record the settings that a resumed run goes on with, so that the next resume starts from them."""
    _write_config(folder, config, mode="w")


def _write_config(folder: Path, config: BaseRunConfig, mode: str) -> None:
    with (folder / CONFIG_NAME).open(mode, encoding="utf-8") as file:
        file.write(dump_yaml(config))


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
