"""The command line: `lucidrl grpo`, `sft`, `ppo`, `generate`, `check`.

Heavy imports are inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lucidrl import __version__
from lucidrl.errors import ConfigError, DataError, LucidError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Train language models and control policies with reinforcement learning, and see what each step did.",
    epilog="Start with `lucidrl grpo`: it trains the embedded model on arithmetic in a few minutes, on a CPU. "
    "`lucidrl ppo` learns to balance a pole in seconds.",
)

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
OVERRIDES_HELP = "Settings as `key=value`, such as `seed=3`. `lucidrl check --algorithm NAME` prints all of them."
Overrides = Annotated[
    list[str] | None, typer.Argument(help=OVERRIDES_HELP, metavar="[KEY=VALUE]...", show_default=False)
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file with settings.", show_default=False)]
Preset = Annotated[str | None, typer.Option("--preset", help="Named settings to start from.", show_default=False)]
Resume = Annotated[
    Path | None,
    typer.Option("--resume", help="Run folder to continue from its newest checkpoint.", show_default=False),
]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"lucidrl {__version__}")
        raise typer.Exit


@app.command()
def grpo(overrides: Overrides = None, config: ConfigFile = None, preset: Preset = None, resume: Resume = None) -> None:
    """Train with GRPO.

    Without settings it trains the embedded tiny model on two-digit addition (preset `demo`). For a model of your own:

        lucidrl grpo policy.model_name=FOLDER env.name=my_module:MyEnv env.prompts_file=prompts.jsonl

    Settings come from the preset, then from --config, then from KEY=VALUE. With neither --preset nor --config the
    preset is `demo` for the embedded model and `chat` for any other. Everything is written to a run folder below
    `runs/`; Ctrl-C finishes the step and saves. `profile.steps=3:5` records the steps 3 and 4 in its `traces/`.
    """
    _launch("grpo", overrides, config, preset, resume)


@app.command()
def sft(overrides: Overrides = None, config: ConfigFile = None, preset: Preset = None, resume: Resume = None) -> None:
    """Train on written conversations.

    For a model and conversations of your own:

        lucidrl sft policy.model_name=FOLDER data.file=conversations.jsonl sft.max_steps=200

    A line of the file is {"messages": [...]} or {"prompt": "...", "completion": "..."}. Without a file, the
    environment's prompts with their known answers are learned. `profile.steps=3:5` records the steps 3 and 4 in
    `traces/` of the run folder.
    """
    _launch("sft", overrides, config, preset, resume)


@app.command()
def ppo(overrides: Overrides = None, config: ConfigFile = None, preset: Preset = None, resume: Resume = None) -> None:
    """Train a control policy with PPO.

    Without settings it learns CartPole-v1 (preset `cartpole`). `pendulum` has continuous actions:

        lucidrl ppo --preset pendulum

    Any env of gymnasium with one array of observations, and actions that are a choice or numbers:

        lucidrl ppo env.name=Acrobot-v1 collector.frames_per_batch=4096 ppo.max_steps=50

    A step collects `collector.frames_per_batch` frames from `env.num_envs` envs, then goes over them
    `ppo.num_epochs` times in minibatches of `ppo.minibatch_frames`. The policy and the critic are two networks
    with settings of their own: `policy.optimizer.kwargs.lr=1e-3`, `critic.hidden_sizes=[128,128]`. Validation plays
    `validation.num_episodes` episodes without exploring. `profile.steps=3:5` records the steps 3 and 4, frame by frame,
    in `traces/` of the run folder. Ctrl-C finishes the step and saves; go on with

        lucidrl ppo --resume runs/ppo/exp_001 ppo.max_steps=200
    """
    _launch("ppo", overrides, config, preset, resume)


def _launch(algorithm: str, overrides: Overrides, config: ConfigFile, preset: Preset, resume: Resume) -> None:
    from lucidrl.recipes.run import launch

    launch(algorithm, config, preset, overrides or [], resume)


@app.command()
def generate(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a model folder.")],
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT...", help="Prompts; `-` reads one per line from standard input.")
    ],
    samples: Annotated[int, typer.Option(min=1, help="Completions per prompt; one alone is the likeliest.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of the draws.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest completion.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
) -> None:
    """Complete prompts with a trained model.

    It uses the newest checkpoint of a run, and prints the completions in the order of the prompts:

        lucidrl generate runs/grpo/exp_001 "12+30=" "40+2="
        lucidrl generate runs/grpo/exp_001 - < prompts.txt

    `-` reads one prompt per line from standard input; empty lines are left out. Write `--` before a prompt that begins
    with a dash.
    """
    given = _with_standard_input(prompts)
    from lucidrl.recipes.generate import Sampling, completions

    for completion in completions(source, given, Sampling(samples, temperature, max_new_tokens, seed)):
        typer.echo(completion)


def _with_standard_input(prompts: list[str]) -> list[str]:
    """The prompts, with the lines of standard input in the place of `-`."""
    if prompts.count("-") > 1:
        raise ConfigError("- is given twice, but standard input can be read only once; give it once")
    if "-" not in prompts:
        return prompts
    try:
        lines = [line.rstrip("\r\n") for line in sys.stdin if line.strip()]
    except UnicodeDecodeError as error:
        raise DataError(f"standard input is not valid UTF-8 ({error}); give one prompt per line as text") from error
    if not lines:
        raise DataError("standard input has no prompts; write one per line")
    return [prompt for given in prompts for prompt in (lines if given == "-" else [given])]


@app.command()
def check(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: Preset = None,
    algorithm: Annotated[str, typer.Option(help="The command to check: grpo, sft or ppo.")] = "grpo",
) -> None:
    """Validate a run without starting it.

    Reads config, tokenizer and prompts, or makes an env, but loads no weights; prints the resolved settings, the batch
    arithmetic and an estimate of the memory. It takes the settings that the run would:

        lucidrl check policy.model_name=FOLDER collector.samples_per_prompt=16
        lucidrl check --algorithm ppo env.name=Acrobot-v1
    """
    from lucidrl.recipes.run import check_run

    check_run(algorithm, config, preset, overrides or [])


def main() -> None:
    """Entry point: errors of ours are one message, not a traceback."""
    from lucidrl.recipes.display import outlive_readers

    outlive_readers()
    try:
        app()
    except LucidError as error:
        notes = "".join(f"\n({note})" for note in getattr(error, "__notes__", ()))  # for instance which rank raised
        typer.secho(f"error: {error}{notes}", fg="red", err=True)
        sys.exit(2)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            typer.secho("interrupted: what was not saved before is lost", fg="red", err=True)
        raise


if __name__ == "__main__":
    main()
