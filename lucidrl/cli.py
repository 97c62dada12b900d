"""The command line: `lucidrl grpo`, `distill`, `sft`, `ppo`, `generate`, `eval`, `play`, `check`, `runs` and more.

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
OVERRIDES_HELP = (
    "Settings, such as `seed=3`. docs/configuration-reference.md lists all of them; "
    "`lucidrl check --algorithm NAME` prints their values."
)
Overrides = Annotated[list[str] | None, typer.Argument(help=OVERRIDES_HELP, metavar="KEY=VALUE", show_default=False)]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file whose settings override the preset.", show_default=False)
]
Preset = Annotated[
    str | None, typer.Option("--preset", help="Preset to start from, such as demo or task.", show_default=False)
]
Resume = Annotated[
    Path | None, typer.Option("--resume", help="Run folder to continue, with its settings.", show_default=False)
]
Explain = Annotated[bool, typer.Option("--explain", help="Print where every setting came from.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"lucidrl {__version__}")
        raise typer.Exit


@app.command()
def grpo(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: Preset = None,
    resume: Resume = None,
    explain: Explain = False,
) -> None:
    """Train a language model with GRPO on an environment that scores its completions.

    Examples:

        lucidrl grpo
        lucidrl grpo policy.model_name=FOLDER data.file=prompts.jsonl reward=my_rewards:exact
        lucidrl grpo --resume runs/grpo/exp_001 grpo.max_steps=1000

    The first trains the built-in tiny model on two-digit addition (preset `demo`). With another model, the
    preset is `chat`; with your own environment, dataset or reward, it is `task`, unless you name a preset or a config
    file. KEY=VALUE overrides --config, which overrides the preset. Ctrl-C finishes the step, saves it and stops.
    `profile.steps=3:5` records steps 3 and 4 in `traces/`.
    """
    _launch("grpo", overrides, config, preset, resume, explain)


@app.command()
def distill(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: Preset = None,
    resume: Resume = None,
    explain: Explain = False,
) -> None:
    """Train a language model on its own samples with the token probabilities of a teacher (on-policy distillation).

    Examples:

        lucidrl distill teacher.model_name=runs/grpo/exp_001
        lucidrl distill policy.model_name=FOLDER teacher.model_name=FOLDER data.file=prompts.jsonl reward=math
        lucidrl distill --resume runs/distill/exp_001 distill.max_steps=400

    The teacher is a model folder or a run with the same vocabulary. `distill.reward_coefficient` adds rewards.
    """
    _launch("distill", overrides, config, preset, resume, explain)


@app.command()
def sft(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: Preset = None,
    resume: Resume = None,
    explain: Explain = False,
) -> None:
    """Fine-tune a language model on written examples (supervised fine-tuning).

    Examples:

        lucidrl sft policy.model_name=FOLDER data.file=examples.jsonl sft.max_steps=200
        lucidrl sft --resume runs/sft/exp_001 sft.max_steps=400

    Each line of the file is {"messages": [...]} or {"prompt": "...", "completion": "..."}. Without `data.file` the
    examples are the environment's prompts with their reference answers.
    """
    _launch("sft", overrides, config, preset, resume, explain)


@app.command()
def ppo(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: Preset = None,
    resume: Resume = None,
    explain: Explain = False,
) -> None:
    """Train a control policy with PPO on a gymnasium environment.

    Examples:

        lucidrl ppo
        lucidrl ppo --preset pendulum
        lucidrl ppo env.name=Acrobot-v1 collector.frames_per_batch=4096 ppo.max_steps=50
        lucidrl ppo --resume runs/ppo/exp_001 ppo.max_steps=200

    The first trains on CartPole-v1 (preset `cartpole`). Observations must be one array; actions must be discrete or an
    array of real numbers. Each step collects `collector.frames_per_batch` frames from `env.num_envs` environments and
    trains `ppo.num_epochs` epochs on them in minibatches of `ppo.minibatch_frames`. `policy.*` and `critic.*` set the
    two networks and their optimizers.
    """
    _launch("ppo", overrides, config, preset, resume, explain)


def _launch(
    algorithm: str, overrides: Overrides, config: ConfigFile, preset: Preset, resume: Resume, explain: bool
) -> None:
    from lucidrl.recipes.run import launch

    launch(algorithm, config, preset, overrides or [], resume, explain)


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


@app.command()
def check(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: Preset = None,
    algorithm: Annotated[str, typer.Option(help="Command to check: grpo, distill, sft or ppo.")] = "grpo",
    explain: Explain = False,
    generate: Annotated[
        bool,
        typer.Option("--generate", help="Also load the model, generate, and compare generation with the policy."),
    ] = False,
) -> None:
    """Check the settings of a run without starting it.

    Examples:

        lucidrl check policy.model_name=FOLDER collector.samples_per_prompt=16
        lucidrl check --generate policy.model_name=FOLDER policy.generation.placement=separate
        lucidrl check --algorithm ppo env.name=Acrobot-v1
        lucidrl check --explain policy.model_name=FOLDER lr=1e-5

    Reads the model's config, tokenizer, environment and prompts, but loads no weights and writes nothing. Prints all
    settings, the batch sizes, and estimates of memory and checkpoint size.

    With --generate, it starts policy and generators of `lucidrl grpo`, refits twice without training in between, and
    completes 8 prompts, greedily and sampled, with at most 32 tokens. It compares checksums of the weights, versions,
    log-probabilities and tokens with the policy, prints a table, and names the fault if they differ. The exit status is
    then 1. Use it before the first run with an engine, a model or a machine that is new to you.
    """
    from lucidrl.recipes.run import check_run

    if not check_run(algorithm, config, preset, overrides or [], explain, generate):
        raise typer.Exit(1)


data_app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help="Look at a dataset before training.")
app.add_typer(data_app, name="data")


@data_app.command()
def show(
    settings: Annotated[
        list[str], typer.Argument(metavar="FILE [KEY=VALUE]...", help=f"Dataset, as in data.file. {OVERRIDES_HELP}")
    ],
    rows: Annotated[int, typer.Option(min=0, help="Rows to print.")] = 3,
    algorithm: Annotated[str, typer.Option(help="grpo shows prompts, sft shows examples.")] = "grpo",
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
