"""The commands that start training runs, and `lucidrl check`; they import what they need when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

OVERRIDES_HELP = (
    "Settings, such as `seed=3`. docs/configuration-reference.md lists all of them; "
    "`lucidrl check --algorithm NAME` prints their values."
)
Overrides = Annotated[list[str] | None, typer.Argument(help=OVERRIDES_HELP, metavar="KEY=VALUE", show_default=False)]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file whose settings override the preset.", show_default=False)
]
Preset = Annotated[
    str | None,
    typer.Option("--preset", help="Preset to start from, such as demo, task, distill or pendulum.", show_default=False),
]
Resume = Annotated[
    Path | None, typer.Option("--resume", help="Run folder to continue, with its settings.", show_default=False)
]
Explain = Annotated[bool, typer.Option("--explain", help="Print where every setting came from.")]


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

    The teacher is a model folder or a run with the same vocabulary; `distill.reward_coefficient` adds rewards.
    """
    _launch("distill", overrides, config, preset, resume, explain)


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


def dpo(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: Preset = None,
    resume: Resume = None,
    explain: Explain = False,
) -> None:
    """Train a language model on preferences between written completions (DPO, IPO or KTO).

    Examples:

        lucidrl dpo
        lucidrl dpo policy.model_name=FOLDER data.file=preferences.jsonl
        lucidrl dpo data.file=labels.jsonl dpo.loss=kto dpo.reference=cached
        lucidrl dpo --resume runs/dpo/exp_001 dpo.max_steps=200

    Each line of the file is {"prompt": ..., "chosen": ..., "rejected": ...}, each a string or a list of messages; KTO
    also reads {"prompt": ..., "completion": ..., "label": true}. The first command trains the built-in model on pairs
    of sums (preset `dpo-demo`). `dpo.beta` ties the policy to the model that the run starts from.
    """
    _launch("dpo", overrides, config, preset, resume, explain)


def reward_model(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: Preset = None,
    resume: Resume = None,
    explain: Explain = False,
) -> None:
    """Train a reward model on preferences between written completions (Bradley-Terry).

    Examples:

        lucidrl reward-model
        lucidrl reward-model policy.model_name=FOLDER data.file=preferences.jsonl
        lucidrl reward-model --resume runs/reward_model/exp_001 reward_model.max_steps=200
        lucidrl grpo policy.model_name=FOLDER data.file=prompts.jsonl reward=model:runs/reward_model/exp_001

    Each line of the file is {"prompt": ..., "chosen": ..., "rejected": ...}, each a string or a list of messages. The
    first command uses the built-in model and pairs of sums (preset `reward-model-demo`); the last one trains a policy
    with the result. Checkpoints are folders of Hugging Face `...ForSequenceClassification` models with one label.
    """
    _launch("reward_model", overrides, config, preset, resume, explain)


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


def check(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: Preset = None,
    algorithm: Annotated[
        str, typer.Option(help="Command to check: grpo, distill, sft, dpo, reward-model or ppo.")
    ] = "grpo",
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
