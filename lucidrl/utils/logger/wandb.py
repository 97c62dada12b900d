"""Copies the run to Weights & Biases, online or on disk for `wandb sync`."""

from __future__ import annotations

import atexit
import glob
import io
import logging
import os
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from pydantic import ValidationError

from lucidrl.errors import ConfigError
from lucidrl.utils.imports import require_package
from lucidrl.utils.logger.code_snapshot import tracked_text_files, uncommitted_diff
from lucidrl.utils.logger.config import WandbConfig, validated
from lucidrl.utils.logger.interface import Tracker
from lucidrl.utils.logger.redact import redacted
from lucidrl.utils.logger.values import PlainMetrics, finite_histogram, jsonable
from lucidrl.utils.suggestions import unknown_key

if TYPE_CHECKING:
    import wandb

log = logging.getLogger(__name__)

_STEP = "step"
_OWN_KEYS = ("log_code", "log_diffs")  # of `WandbConfig`; all others are arguments of `wandb.init`
_EXIT_GRACE_S = 2
_INIT_TIMEOUT_S = 30
_MOST_TABLE_ROWS = 256


class WandbLogger(Tracker):
    """Sends scalars, histograms (of lists), the nested configuration, figures and tables to a run of Weights & Biases.

    Plots against the records' field `step` (or step metric), because W&B's own counter drops steps that repeat or go
    back. If the server cannot be reached, the run stays on disk for `wandb sync`.

    Args:
        cfg: see `WandbConfig`.
        log_dir: folder of W&B's files; by default W&B's choice.

    Raises:
        ConfigError: if wandb is missing, or refuses the settings or the credentials; it never prompts for a key.
    """

    run: wandb.Run
    """The W&B run."""

    def __init__(self, cfg: WandbConfig, log_dir: Optional[str] = None) -> None:  # noqa: UP045
        require_package("wandb", "tracking by wandb")
        # wandb reports its own errors, for offline runs too, and delays the exit by ten seconds if the server does not
        # reply. Only this variable turns that off.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        cfg = validated(WandbConfig, cfg)
        super().__init__()
        self._axis_of: dict[str, str] = {}
        with _service_files_in(log_dir):
            # For the whole process: before a run exists, its settings do not apply to messages and prompts.
            wandb.setup(settings=wandb.Settings(silent=True))
        self._exit_guard = _ExitGuard()
        self.run = _started_run(cfg, log_dir)
        self.run.define_metric("*", step_metric=_STEP)
        if cfg.get("log_code"):
            self._log_code()
        if cfg.get("log_diffs"):
            self._log_diffs()

    def _log_diffs(self) -> None:
        """Save the uncommitted changes below the working directory as the run's file `diff.patch`."""
        self._save_from_git(lambda root: {"diff.patch": diff} if (diff := uncommitted_diff(root)) else {})

    def _log_code(self) -> None:
        """Save the text files that git tracks below the working directory as the run's files `code/…`."""
        self._save_from_git(lambda root: {f"code/{name}": text for name, text in tracked_text_files(root).items()})

    def define_metric(self, name: str, step_metric: Optional[str] = None) -> None:  # noqa: UP045
        """Plot the metric `name` (or all that match, as in `val/*`) against `step_metric`, as W&B defines it."""
        self.run.define_metric(name, step_metric=step_metric)

    def _write_metrics(self, metrics: PlainMetrics, step: int, step_metric: str | None) -> None:
        import wandb

        record: dict[str, Any] = {}
        for name, value in metrics.items():
            if name == _STEP:
                self._warn_once(name, "metric %s is not logged: the name is reserved; use a prefix", name)
                continue
            # By full name: the pattern "*" would win over another one such as "ray/*".
            if step_metric and name != step_metric and self._axis_of.get(name) != step_metric:
                self.define_metric(name, step_metric)
                self._axis_of[name] = step_metric
            if not isinstance(value, list):
                record[name] = value
            elif histogram := finite_histogram(value):
                record[name] = wandb.Histogram(np_histogram=histogram)
        if step_metric not in record:  # a separate axis must not move this one
            record[_STEP] = step
        self.run.log(record)

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        self.run.config.update(jsonable(params), allow_val_change=True)

    def _write_png(self, png: bytes, step: int, name: str) -> None:
        import wandb
        from PIL import Image

        picture = Image.open(io.BytesIO(png))
        self.run.log({name: wandb.Image(picture), _STEP: step})

    def log_table(self, columns: Mapping[str, Sequence[Any]], step: int, name: str) -> None:
        """Log the first rows as a `wandb.Table`; W&B shows the table of the newest step."""
        import wandb

        rows = [list(row) for row in islice(zip(*columns.values(), strict=True), _MOST_TABLE_ROWS)]
        self.run.log({name: wandb.Table(columns=list(columns), data=rows), _STEP: step})

    def finish(self) -> None:
        self.run.finish()
        self._exit_guard.release()

    def _save_from_git(self, read: Callable[[Path], dict[str, bytes]]) -> None:
        """Save files of the work tree with the run; copies, because the work tree will change."""
        try:
            files = read(Path.cwd())
        except (OSError, subprocess.SubprocessError) as error:
            self._warn_once("git", "the code is not saved with the run: git cannot read %s (%s)", Path.cwd(), error)
            return
        for name, content in files.items():
            path = Path(self.run.dir) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            self.run.save(glob.escape(str(path)), base_path=self.run.dir, policy="now")


@contextmanager
def _service_files_in(log_dir: str | None) -> Iterator[None]:
    """If W&B's service process starts in the block, let it log below `log_dir` instead of the home folder.

    The variable is set only in the block, because it also moves the artifact cache, which user code may rely on.
    """
    if log_dir is None or "WANDB_CACHE_DIR" in os.environ:
        yield
        return
    os.environ["WANDB_CACHE_DIR"] = str(Path(log_dir).absolute() / "cache")
    try:
        yield
    finally:
        os.environ.pop("WANDB_CACHE_DIR", None)


def _started_run(cfg: WandbConfig, log_dir: str | None) -> wandb.Run:
    """Start or continue the run of `cfg`; offline if the server does not reply."""
    from wandb.errors import AuthenticationError, CommError, UsageError

    arguments = _init_arguments(cfg, log_dir)
    try:
        return _init(arguments)
    except (AuthenticationError, UsageError) as error:
        raise ConfigError(
            f"W&B refuses the run ({error}); run `wandb login`, set WANDB_API_KEY, or set tracking.wandb.mode=offline"
        ) from error
    except CommError as error:
        # Under another id: for wandb, the first one stays in use until the process ends.
        run_id = arguments["id"] or uuid.uuid4().hex
        run = _init(arguments | {"id": f"{run_id}-offline", "mode": "offline"})
        command = f"wandb sync --id {run_id} {Path(run.dir).parent}"
        log.warning("W&B cannot be reached, the run stays on disk; send it later with `%s` (%s)", command, error)
        return run


def _init_arguments(cfg: WandbConfig, log_dir: str | None) -> dict[str, Any]:
    """The arguments of `wandb.init`: our defaults, overridden by `cfg`."""
    given = {name: value for name, value in cfg.items() if name not in _OWN_KEYS}
    if isinstance(config := given.get("config"), Mapping):
        given["config"] = jsonable(redacted(config))
    folder = Path(log_dir).absolute() if log_dir else None
    is_branch = "resume_from" in given or "fork_from" in given  # neither of them goes with `resume`
    ours = {
        "project": "lucidrl",
        "name": folder.parent.name if folder else None,
        "id": uuid.uuid4().hex,
        "resume": None if is_branch else "allow",
        "dir": folder,
        "reinit": "create_new",  # keep a run open that the user's code started
    }
    # `resume_from` itself names the run.
    return ours | given | ({"id": None} if "resume_from" in given else {})


def _init(arguments: dict[str, Any]) -> wandb.Run:
    import wandb

    if arguments["dir"]:
        Path(arguments["dir"]).mkdir(parents=True, exist_ok=True)
    # New settings per call: wandb changes them.
    return wandb.init(**arguments | {"settings": _settings(arguments.get("settings"))})


def _settings(given: Any) -> wandb.Settings:
    """The `wandb.Settings` of the run: the defaults of this logger, overridden by `given`."""
    import wandb

    ours = wandb.Settings(
        silent=True,
        console="off",
        # Long enough for a slow network, short enough to fall back to offline in a short run.
        init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", _INIT_TIMEOUT_S)),
        x_disable_stats=True,  # `monitor_gpus` records the machines, under the same names for every tracker
        # The command line, the packages and the repository are private unless requested.
        x_disable_meta=True,
        x_save_requirements=False,
        disable_git=True,
        save_code=False,
    )
    try:
        ours.update_from_settings(given if isinstance(given, wandb.Settings) else wandb.Settings(**(given or {})))
    except ValidationError as error:
        raise ConfigError("\n".join(_complaint(problem) for problem in error.errors())) from None
    except TypeError:
        raise ConfigError("WandbConfig.settings must be a mapping of names to values, or wandb.Settings") from None
    return ours


def _complaint(problem: Any) -> str:
    """The sentence for an invalid setting, without its value, which may be a secret."""
    import wandb

    path = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        return unknown_key(path, [[name] for name in wandb.Settings.model_fields], "WandbConfig.settings.")
    return f"WandbConfig.settings.{'.'.join(path)} is not valid: {problem['msg']}"


class _ExitGuard:
    """Lets the process exit if the W&B server does not reply.

    At exit, wandb waits for its service process, which waits for the server: 90 seconds during `init`, forever with
    unsent records. Unless our run was finished, a thread kills the service after a few seconds; unsent records stay on
    disk. The timeouts of wandb would also apply during the run.
    """

    def __init__(self) -> None:
        self._is_needed = True
        self._is_over = threading.Event()
        # Hooks run in reverse order, so register after `wandb.setup`. No thread can be started at exit.
        atexit.register(self._is_over.set)
        threading.Thread(target=self._wait, name="lucidrl-wandb-exit", daemon=True).start()

    def release(self) -> None:
        """Leave the exit to wandb; does nothing once the exit has begun."""
        if not self._is_over.is_set():
            self._is_needed = False
            atexit.unregister(self._is_over.set)
            self._is_over.set()

    def _wait(self) -> None:
        import psutil

        self._is_over.wait()
        if not self._is_needed:
            return
        time.sleep(_EXIT_GRACE_S)
        for child in psutil.Process().children():
            if child.name().startswith("wandb-core"):
                child.kill()
