"""The command line: `lucidrl grpo`, `sft`, `dpo`, `ppo`, `generate`, `eval`, `play`, `check`, `runs` and more.

Commands import what they need when they run, so `--help` prints at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lucidrl import __version__
from lucidrl.errors import ConfigError, LucidError
from lucidrl.recipes.clean_command import clean_command
from lucidrl.recipes.eval_command import eval_command
from lucidrl.recipes.merge_command import merge_command
from lucidrl.recipes.training_commands import OVERRIDES_HELP, check, distill, dpo, grpo, ppo, reward_model, sft
from lucidrl.report.report_command import report_command
from lucidrl.report.runs_command import compare_command, runs_command
from lucidrl.report.timeline_command import timeline_command

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="""Post-train language models and control policies with reinforcement learning.

    Examples:

        lucidrl grpo     train the built-in tiny model on arithmetic: a few minutes on a CPU
        lucidrl ppo      train a policy that balances a pole: under a minute

    Every run writes metrics, samples and checkpoints to its own folder below `runs/`.
    """,
    epilog="`lucidrl COMMAND --help` shows examples; docs/configuration-reference.md lists all settings.",
)

INTERRUPTED = 130  # exit code after Ctrl-C, by shell convention


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"lucidrl {__version__}")
        raise typer.Exit


for command in (grpo, distill, sft, dpo, reward_model, ppo):
    app.command()(command)


@app.command()
def generate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="Run folder (its newest checkpoint), checkpoint, model folder or hub:ORG/NAME."
        ),
    ],
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT", help="Prompts; `-` reads one per line from standard input.", show_default=False
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="File of prompts, as data.file: rows with the column `prompt` or `messages`. A file with another "
            "extension, such as .txt, has one prompt per line.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="With --file: write a JSONL file, each row with its `completion`.", show_default=False),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Talk with the model.")] = False,
    samples: Annotated[int, typer.Option(min=1, help="Completions per prompt: 1 is greedy, more are sampled.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.01, help="Sampling temperature.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per completion.")] = 64,
    seed: Annotated[int, typer.Option(help="Sampling seed.")] = 0,
) -> None:
    """Complete prompts with a trained language model.

    Examples:

        lucidrl generate runs/grpo/exp_001 "12+30=" "40+2="
        lucidrl generate runs/grpo/exp_001 - < prompts.txt
        lucidrl generate runs/grpo/exp_001 --file prompts.jsonl --output completions.jsonl
        lucidrl generate runs/grpo/exp_001@best --chat --max-new-tokens 256

    Prints the completions in the order of the prompts. Empty lines are skipped. Write `--` before a prompt that begins
    with a dash. In a chat, `/reset` starts a new conversation, and `/exit` or Ctrl-D ends it.
    """
    given = [name for name, is_set in (("PROMPT", prompts), ("--file", file), ("--chat", chat)) if is_set]
    if len(given) != 1:
        raise ConfigError(f"{' and '.join(given) or 'no prompts'} given; write one of PROMPT..., --file FILE, --chat")
    if output is not None and file is None:
        raise ConfigError("--output needs prompts from a file; name the file with --file")
    if chat and samples > 1:
        raise ConfigError(f"--samples {samples} does not apply to --chat, which has one reply per message; remove it")
    from lucidrl.recipes.generate import Sampling, chat_on_terminal, complete_file, completions, with_standard_input

    sampling = Sampling(samples, temperature, max_new_tokens, seed)
    if chat:
        return chat_on_terminal(source, sampling)
    own_prompts = with_standard_input(prompts or [])
    completed = complete_file(source, file, sampling, output) if file else completions(source, own_prompts, sampling)
    for completion in completed:
        typer.echo(completion)
    return None


app.command()(check)
app.command("eval")(eval_command)
app.command("merge")(merge_command)
app.command("timeline")(timeline_command)


@app.command()
def play(
    source: Annotated[str, typer.Argument(metavar="RUN", help="Run folder of `lucidrl ppo` (its newest checkpoint).")],
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to play.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first episode; each later episode adds 1.")] = 0,
    max_frames: Annotated[int, typer.Option(min=1, help="Frames after which an episode is cut off.")] = 10_000,
    video: Annotated[
        Path | None, typer.Option(help="Record the episodes in this file, .mp4 or .gif.", show_default=False)
    ] = None,
) -> None:
    """Play episodes with a trained control policy.

    Examples:

        lucidrl play runs/ppo/exp_001
        lucidrl play runs/ppo/exp_001@best --episodes 1 --video episode.mp4

    The policy takes its likeliest action in every frame. Prints the return of each episode (the sum of its rewards) and
    the mean return.
    """
    from lucidrl.recipes.play import play as played

    returns: list[float] = []
    for number, episode in enumerate(played(source, episodes, seed, max_frames, video), 1):
        returns.append(episode.reward)
        cut = ", cut off" if episode.is_cut else ""
        typer.echo(f"episode {number}: return {episode.reward:.2f}, {episode.length} frames{cut}")
    typer.echo(f"mean return of {len(returns)} episodes: {sum(returns) / len(returns):.2f}")
    if video is not None:
        typer.echo(f"video: {video}")


data_app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help="Look at a dataset before training.")
app.add_typer(data_app, name="data")


@data_app.command()
def show(
    settings: Annotated[
        list[str], typer.Argument(metavar="FILE [KEY=VALUE]...", help=f"Dataset, as in data.file. {OVERRIDES_HELP}")
    ],
    rows: Annotated[int, typer.Option(min=0, help="Rows to print.")] = 3,
    algorithm: Annotated[str, typer.Option(help="grpo shows prompts, sft examples, dpo preferences.")] = "grpo",
) -> None:
    """Print the first prompts of a dataset as the model reads them, their lengths, and which rows are dropped.

    Examples:

        lucidrl data show train.parquet data.prompt=question policy.model_name=FOLDER
        lucidrl data show --algorithm sft examples.jsonl data.max_prompt_tokens=2048

    Reads at most 20,000 evenly spread rows.
    """
    from lucidrl.recipes.data_show import show_data

    has_file = "=" not in settings[0]
    show_data(settings[0] if has_file else None, settings[has_file:], num_rows=rows, algorithm=algorithm)


app.command("runs")(runs_command)
app.command("compare")(compare_command)
app.command("report")(report_command)
app.command("clean")(clean_command)


def main() -> None:
    """Entry point; prints a LucidError as one message without a traceback."""
    from lucidrl.recipes.display import survive_closed_output

    survive_closed_output()
    try:
        app()
    except LucidError as error:
        notes = "".join(f"\n({note})" for note in getattr(error, "__notes__", ()))  # such as the rank that raised
        typer.secho(f"error: {error}{notes}", fg="red", err=True)
        sys.exit(2)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            typer.secho("interrupted: progress since the last checkpoint is lost", fg="red", err=True)
        raise


if __name__ == "__main__":
    main()
