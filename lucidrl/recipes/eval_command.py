"""`lucidrl eval`: its arguments. The work is in `lucidrl.recipes.evaluate`, which is imported at use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from lucidrl.errors import ConfigError


def eval_command(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN_OR_MODEL [RUN_OR_MODEL] [KEY=VALUE]...",
            help="Run folder, RUN@best, checkpoint, model folder or hub:ORG/NAME; two are compared. KEY=VALUE changes "
            "settings, which docs/configuration-reference.md lists.",
            show_default=False,
        ),
    ],
    checkpoint: Annotated[
        str | None,
        typer.Option(help="Checkpoint of the run: a step, newest, best or all; default: newest.", show_default=False),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(help="Completions per prompt: 1 is greedy, more are sampled.", show_default=False),
    ] = None,
    sampled: Annotated[bool, typer.Option("--sampled", help="Sample even one completion per prompt.")] = False,
    by: Annotated[
        str | None, typer.Option(help="Column of the data by which results are split.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the results; default: below eval/ in the run folder.", show_default=False),
    ] = None,
) -> None:
    """Evaluate a run or model, or compare two: accuracy, pass@k, maj@k, each with an interval.

    Examples:

        lucidrl eval runs/grpo/exp_001
        lucidrl eval runs/grpo/exp_001 --samples 8
        lucidrl eval runs/grpo/exp_001 --checkpoint all
        lucidrl eval runs/grpo/exp_001 runs/grpo/exp_002
        lucidrl eval FOLDER data.file=test.jsonl reward=math --by level

    A run is evaluated on its held-out validation prompts, with its own settings. With data.file=..., every row of the
    file is evaluated. A model needs reward=... or env.name=... too. Two models complete the same prompts; the
    difference is tested with a paired bootstrap. The same command continues an evaluation that was stopped.
    """
    # Path.exists raises if the name is too long, which the value of a setting may be.
    sources = [word for word in words if "=" not in word or os.path.exists(word)]
    settings = [word for word in words if word not in sources]
    if not sources:
        raise ConfigError("no run or model is named; write `lucidrl eval RUN_OR_MODEL`")
    from rich.console import Console

    from lucidrl.recipes.eval_plan import EvalOptions, plan_of_sources
    from lucidrl.recipes.eval_report import EvalDisplay, show_report
    from lucidrl.recipes.evaluate import run_plan
    from lucidrl.utils.logger import configure_rich_logging

    configure_rich_logging(level="WARNING", show_path=False)
    plan = plan_of_sources(sources, settings, EvalOptions(checkpoint, samples, sampled, by, output))
    console = Console()
    with EvalDisplay(console) as display:
        report = run_plan(plan, display)
    show_report(console, plan, report)
