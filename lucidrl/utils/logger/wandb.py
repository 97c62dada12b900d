"""Weights & Biases gets a copy of the run, sent while it goes on or kept on disk for `wandb sync`."""

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, TypeVar

from pydantic import ValidationError

from lucidrl.errors import ConfigError
from lucidrl.utils.imports import require_package
from lucidrl.utils.logger.code_snapshot import tracked_text_files, uncommitted_diff
from lucidrl.utils.logger.config import WandbConfig, validated
from lucidrl.utils.logger.redact import redacted
from lucidrl.utils.logger.tracker import Tracker
from lucidrl.utils.logger.values import PlainMetrics, finite_histogram, jsonable
from lucidrl.utils.suggestions import unknown_key

if TYPE_CHECKING:
    import wandb

log = logging.getLogger(__name__)

T = TypeVar("T")

_STEP = "step"
_OWN_KEYS = ("log_code", "log_diffs")  # of `WandbConfig`; all others are arguments of `wandb.init`
_EXIT_GRACE_S = 2
_INIT_TIMEOUT_S = 30


class WandbLogger(Tracker):
    """Sends scalars, histograms (of lists), the nested configuration and figures to a run of Weights & Biases.

    Records have the field `step` (or their step metric), which they are plotted against; W&B's own counter only numbers
    them, because it would drop a step that comes twice or goes back. A server that cannot be reached leaves the run on
    disk, for `wandb sync`.

    Args:
        cfg: see `WandbConfig`.
        log_dir: folder of W&B's files; by default its own choice.

    Raises:
        ConfigError: if wandb is not installed, or refuses the settings or the credentials. Nobody is ever asked for
            an API key.
    """

    run: wandb.Run
    """The run itself, for what is not offered here."""

    def __init__(self, cfg: WandbConfig, log_dir: Optional[str] = None) -> None:  # noqa: UP045
        require_package("wandb", "tracking by wandb")
        # wandb's reports about itself, sent for offline runs too, keep the process from ending for ten seconds if the
        # server does not answer. This variable is their only switch.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        cfg = validated(WandbConfig, cfg)
        super().__init__()
        self._axis_of: dict[str, str] = {}
        with _service_files_in(log_dir):
            # Silent for the whole process: what wandb says (and asks) before a run exists knows no settings of a run.
            wandb.setup(settings=wandb.Settings(silent=True))
        self._exit_guard = _ExitGuard()
        self.run = _started_run(cfg, log_dir)
        self.run.define_metric("*", step_metric=_STEP)
        if cfg.get("log_code"):
            self._log_code()
        if cfg.get("log_diffs"):
            self._log_diffs()

    def _log_diffs(self) -> None:
        """Keep the uncommitted changes below the working directory as the file `diff.patch` of the run."""
        if diff := self._from_git(uncommitted_diff):
            self._save_file("diff.patch", diff)

    def _log_code(self) -> None:
        """Keep the text files that git tracks below the working directory as files `code/…` of the run."""
        for name, content in (self._from_git(tracked_text_files) or {}).items():
            self._save_file(f"code/{name}", content)

    def define_metric(self, name: str, step_metric: Optional[str] = None) -> None:  # noqa: UP045
        """Plot the metric `name` (or all that match, as in `val/*`) against `step_metric`, as W&B defines it."""
        self.run.define_metric(name, step_metric=step_metric)

    def _write_metrics(self, metrics: PlainMetrics, step: int, step_metric: str | None) -> None:
        record: dict[str, Any] = {}
        for name, value in metrics.items():
            if name == _STEP:
                self._warn_once(name, "metric %s is not logged: every record has its own; give it a prefix", name)
                continue
            if step_metric and name != step_metric:
                self._plot_against(step_metric, name)
            if isinstance(value, list):
                self._add_histogram(record, name, value)
            else:
                record[name] = value
        if step_metric not in record:  # what has an axis of its own must not move this one
            record[_STEP] = step
        self.run.log(record)

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        self.run.config.update(jsonable(params), allow_val_change=True)

    def _write_png(self, png: bytes, step: int, name: str) -> None:
        import wandb
        from PIL import Image

        picture = Image.open(io.BytesIO(png))
        self.run.log({name: wandb.Image(picture), _STEP: step})

    def finish(self) -> None:
        self.run.finish()
        self._exit_guard.release()

    def _plot_against(self, step_metric: str, name: str) -> None:
        # By full name: the pattern "*" would win over another one such as "ray/*".
        if self._axis_of.get(name) != step_metric:
            self.define_metric(name, step_metric)
            self._axis_of[name] = step_metric

    @staticmethod
    def _add_histogram(record: dict[str, Any], name: str, values: list[Any]) -> None:
        import wandb

        histogram = finite_histogram(values)
        if histogram is not None:
            record[name] = wandb.Histogram(np_histogram=histogram)

    def _from_git(self, read: Callable[[Path], T]) -> T | None:
        try:
            return read(Path.cwd())
        except (OSError, subprocess.SubprocessError) as error:
            self._warn_once("git", "the code is not kept with the run: git cannot read %s (%s)", Path.cwd(), error)
            return None

    def _save_file(self, name: str, content: bytes) -> None:
        """Keep `content` as a file of the run; a copy in its folder, since the work tree will change."""
        path = Path(self.run.dir) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self.run.save(glob.escape(str(path)), base_path=self.run.dir, policy="now")


@contextmanager
def _service_files_in(log_dir: str | None) -> Iterator[None]:
    """Have the service, if it starts meanwhile, keep its own log below `log_dir` and not in the home folder.

    Only meanwhile: the variable also moves the cache of artifacts, which the user's own code may rely on.
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
    """The run that `cfg` describes, new or continued; an offline one if the server does not answer."""
    from wandb.errors import AuthenticationError, CommError, UsageError

    arguments = _init_arguments(cfg, log_dir)
    try:
        return _init(arguments)
    except (AuthenticationError, UsageError) as error:
        raise ConfigError(
            f"W&B refuses the run ({error}); log in with `wandb login`, set WANDB_API_KEY, or choose the mode offline "
            "(tracking.wandb.mode=offline)"
        ) from error
    except CommError as error:
        # Under another id, because wandb takes the first one to be in use until the process ends.
        run_id = arguments["id"] or uuid.uuid4().hex
        run = _init(arguments | {"id": f"{run_id}-offline", "mode": "offline"})
        command = f"wandb sync --id {run_id} {Path(run.dir).parent}"
        log.warning("W&B cannot be reached, the run is kept on disk; send it later with `%s` (%s)", command, error)
        return run


def _init_arguments(cfg: WandbConfig, log_dir: str | None) -> dict[str, Any]:
    """All arguments of `wandb.init` but the settings' defaults: ours, and over them what is given."""
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
        "reinit": "create_new",  # a run that the user's own code has open stays as it is
    }
    # What is resumed from names the run itself.
    return ours | given | ({"id": None} if "resume_from" in given else {})


def _init(arguments: dict[str, Any]) -> wandb.Run:
    import wandb

    if arguments["dir"]:
        Path(arguments["dir"]).mkdir(parents=True, exist_ok=True)
    # Made anew for each call, which changes them.
    return wandb.init(**arguments | {"settings": _settings(arguments.get("settings"))})


def _settings(given: Any) -> wandb.Settings:
    """Our settings, and over them those that are given."""
    import wandb

    ours = wandb.Settings(
        silent=True,
        console="off",
        # Long enough for a slow network, and short enough that also a short run is kept offline without one.
        init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", _INIT_TIMEOUT_S)),
        x_disable_stats=True,  # `monitor_gpus` records the machines, under the same names for every tracker
        # The command line, the packages and the repository are nobody else's business unless asked for.
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
    """Lets the process end although a server does not answer.

    wandb ends its service process in an `atexit` hook and waits for it, and the service waits for the server: a
    minute and a half if `init` was still going on, without end if there are records to send. Therefore a thread gives
    the hook a few seconds and then kills the service, unless our run was finished; what could not be sent is on disk.
    The timeouts that wandb offers would also cut short those who can wait.
    """

    def __init__(self) -> None:
        self._is_needed = True
        self._is_over = threading.Event()
        # Hooks run in reverse order, so this one must come after that of `wandb.setup`. The thread must exist already:
        # none can be started at exit.
        atexit.register(self._is_over.set)
        threading.Thread(target=self._wait, name="lucidrl-wandb-exit", daemon=True).start()

    def release(self) -> None:
        """Leave the end of the process to wandb; too late once it has begun, when wandb ends whatever waits."""
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
