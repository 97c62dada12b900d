"""Run folders for tests, written by the parts that write those of real runs, without training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from functools import cache
from pathlib import Path

from lucidrl.checkpoint.manager import CheckpointManager
from lucidrl.recipes.folder import driver_log
from lucidrl.recipes.settings import new_settings
from lucidrl.utils.logger.jsonl import JsonlLogger

MACHINE = {"node.0.cpu.util": 50.0, "elapsed_s": 10.0}


def make_run(
    folder: Path,
    rewards: Mapping[int, float] | Iterable[float] = (0.25, 0.5),
    *overrides: str,
    algorithm: str = "grpo",
    error: BaseException | None = None,
    saved: Iterable[int] = (),
) -> Path:
    """A run with two steps, or as many as there are rewards; each step is validated, with twice the reward.

    Args:
        rewards: mean training rewards of the steps 1, 2, ..., or by step.
        overrides: settings.
        error: what the run failed with.
        saved: steps with a checkpoint.
    """
    by_step = rewards if isinstance(rewards, Mapping) else dict(enumerate(rewards, start=1))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(settings(algorithm, *overrides))
    with suppress(type(error) if error is not None else ()), driver_log(folder):
        log_steps(folder, by_step)
        for step in saved:
            metrics = {"reward": 2 * by_step[step]}
            with CheckpointManager(folder / "checkpoints", keep_last=99).saving(step, metrics=metrics) as checkpoint:
                (checkpoint / "policy").mkdir()
                (checkpoint / "policy" / "config.json").write_text("{}")
        if error is not None:
            raise error
    return folder


@cache
def settings(algorithm: str, *overrides: str) -> str:
    """The settings of a run with two steps, as YAML."""
    return new_settings(algorithm, overrides=[f"{algorithm}.max_steps=2", *overrides]).to_yaml()


def log_steps(folder: Path, rewards: Mapping[int, float]) -> None:
    """Append the metrics of steps and of their validations, as the training loop does."""
    with closing(_Metrics(folder / "metrics.jsonl")) as metrics:
        for step, reward in rewards.items():
            metrics.log_metrics({"train": {"reward": reward, "loss": -reward}, "time": {"step_s": 1.5}}, step)
            metrics.log_metrics({"reward": 2 * reward}, step, prefix="validation")


def log_machine(folder: Path, **changed: float) -> None:
    """Append a measurement of the machine, as the monitor does."""
    with closing(_Metrics(folder / "metrics.jsonl")) as metrics:
        measured = {f"machine/{name}": value for name, value in (MACHINE | changed).items()}
        metrics.log_metrics(measured, 10, step_metric="machine/elapsed_s")


class _Metrics(JsonlLogger):
    close = JsonlLogger.finish
