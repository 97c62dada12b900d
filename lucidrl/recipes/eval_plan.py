"""Plan of an evaluation: which models or checkpoints complete which prompts, with which settings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lucidrl.checkpoint.config import CHECKPOINTS_NAME, CONFIG_NAME
from lucidrl.checkpoint.manager import Checkpoint, CheckpointManager
from lucidrl.data.datasets import Prompt
from lucidrl.data.items import Skip
from lucidrl.data.stream import Dataset
from lucidrl.errors import CheckpointError, ConfigError, DataError
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.sources import BEST, NEWEST, WEIGHTS, find_checkpoint, resolved_name
from lucidrl.recipes.configs import EvaluatedSFTConfig, GRPORunConfig, RolloutRunConfig, SFTRunConfig
from lucidrl.recipes.inputs import PythonInputs
from lucidrl.recipes.preference_configs import PreferenceRunConfig
from lucidrl.recipes.settings import ALGORITHMS, new_settings, resumed_settings
from lucidrl.utils.config import aliases_of
from lucidrl.utils.layers import Origins, merge_layers

ALL = "all"
TextConfig = RolloutRunConfig | SFTRunConfig


@dataclass(frozen=True)
class EvalOptions:
    """How models are evaluated.

    Raises:
        ConfigError: an option is invalid.
    """

    checkpoint: int | str | None = None
    """Checkpoints of a run: a step, `newest`, `best` or `all`; default: newest."""
    samples: int | None = None
    """Completions per prompt; default: `validation.samples_per_prompt` of the settings."""
    sampled: bool = False
    """Also sample if there is one completion per prompt; by default, a single completion is greedy."""
    by: str | None = None
    """Column of the data by which results are split."""
    output: str | Path | None = None
    """Folder of the results; default: `eval/` in the run folder, or `runs/eval/` for a model."""

    def __post_init__(self) -> None:
        if self.samples is not None and self.samples < 1:
            raise ConfigError(f"--samples {self.samples} completes no prompt; write 1 or more")
        if not _is_step(self.checkpoint) and self.checkpoint not in (None, NEWEST, BEST, ALL):
            raise ConfigError(f"--checkpoint {self.checkpoint} is not known; write a step, {BEST}, {NEWEST} or {ALL}")


@dataclass(frozen=True)
class Candidate:
    """A model to evaluate."""

    name: str
    """How tables name it, such as `exp_001 step 20`."""
    model: str
    """Resolved name of the model."""
    checkpoint: Checkpoint | None = None
    """The checkpoint, if the model is one of a run."""

    @property
    def run(self) -> Path | None:
        """Folder of its run."""
        return None if self.checkpoint is None else self.checkpoint.path.parent.parent


@dataclass(frozen=True)
class EvalPlan:
    """Candidates with the settings that all of them share."""

    config: TextConfig
    """Settings of the task."""
    candidates: list[Candidate]
    options: EvalOptions
    given: Origins = field(default_factory=Origins)
    """Settings that the caller gave for this evaluation."""
    python: PythonInputs = field(default_factory=PythonInputs)
    run: Path | None = None
    """The run whose settings `config` holds; None if it is that of a model."""

    @property
    def uses_all_rows(self) -> bool:
        """Whether every row of the data is evaluated, not only held-out ones: the caller named a file to evaluate."""
        is_split = self.given.of("data.validation_file") or self.given.of("data.validation_fraction")
        return self.given.of("data.file") is not None and not is_split

    @property
    def samples(self) -> int:
        """Completions per prompt."""
        return self.options.samples or self.config.validation.samples_per_prompt

    @property
    def is_greedy(self) -> bool:
        """Whether completions are greedy."""
        return self.samples == 1 and not self.options.sampled

    def config_of(self, candidate: Candidate) -> TextConfig:
        """Return the settings with the policy of a candidate; sampling is the same for all candidates."""
        policy = self.config.policy
        kept = {
            name: getattr(policy if self.given.of(f"policy.{name}") is not None else self._policy_of(candidate), name)
            for name in ("tokenizer", "pad_token", "precision", "trust_remote_code")
        }
        # One set of weights that never changes.
        in_policy = {"placement": "policy", "nodes": "any", "engine": "builtin", "vllm": {}}
        generation = policy.generation.model_copy(update=in_policy)
        whole_rows = policy.dtensor_cfg.model_copy(update={"sequence_parallel": False})
        # An adapter is merged into its base when the model is loaded.
        model = {"model_name": candidate.model, "lora": None}
        update = {**kept, **model, "generation": generation, "dtensor_cfg": whole_rows}
        return self.config.model_copy(update={"policy": policy.model_copy(update=update)})

    def _policy_of(self, candidate: Candidate) -> PolicyConfig:
        """Return the settings of a candidate's own policy, without those that the caller gave."""
        if candidate.run == self.run:
            return self.config.policy
        if candidate.run is not None:
            return settings_of_run(candidate.run).policy
        return PolicyConfig(precision=self.config.policy.precision)  # the tokenizer of a run does not fit any model


def plan_of_sources(
    sources: Sequence[str | Path],
    settings: Sequence[str] = (),
    options: EvalOptions | None = None,
    python: PythonInputs | None = None,
) -> EvalPlan:
    """Plan the evaluation of one or two runs, checkpoints or models.

    The settings are those of the first source that belongs to a run, changed by `settings`. If no source does,
    `settings` must name the task.

    Raises:
        LucidError: there is no such model, run or checkpoint, or the settings are invalid.
    """
    options = options or EvalOptions()
    if not 1 <= len(sources) <= 2:
        raise ConfigError(f"{len(sources)} models are named; name one, or two to compare")
    if options.checkpoint == ALL and len(sources) > 1:
        raise ConfigError(f"--checkpoint {ALL} evaluates one run, but {len(sources)} models are named; name one run")
    candidates = [candidate for source in sources for candidate in _candidates(str(source), options.checkpoint)]
    run = next((candidate.run for candidate in candidates if candidate.run is not None), None)
    schema: Any = GRPORunConfig
    if run is None:
        config: Any = _settings_of_model(candidates[0], settings)
    else:
        config = settings_of_run(run, settings)
        schema = type(config)
    given = merge_layers([], settings, resolve=False, aliases=aliases_of(schema)).origins
    python = python or PythonInputs()
    config = _with_task(config, run, given, python)
    if given.of("data.file") is not None:
        python = replace(python, rows=None, validation_rows=None)
    return EvalPlan(config, candidates, options, given, python, run)


def plan_of_config(config: TextConfig, options: EvalOptions, python: PythonInputs) -> EvalPlan:
    """Plan the evaluation of the model `policy.model_name` itself, without a run or checkpoint."""
    model = resolved_name(config.policy.model_name)
    return EvalPlan(config, [Candidate(config.policy.model_name, model)], options, python=python)


def chosen_prompts(plan: EvalPlan, dataset: Dataset[Prompt]) -> list[Prompt]:
    """Return the prompts to evaluate: held-out ones, or every row of a file that the caller named.

    Raises:
        DataError: there are none.
    """
    validation, state = plan.config.validation, plan.candidates[0].checkpoint
    if plan.uses_all_rows:
        rows = [item for _, item in dataset.spread(most_rows=2**62) if not isinstance(item, Skip)]
        count = validation.num_prompts if plan.given.of("validation.num_prompts") is not None else len(rows)
        chosen = sorted(random.Random(0).sample(range(len(rows)), min(count, len(rows))))
        prompts = [rows[row] for row in chosen]
    else:
        saved = state.state.get("collector", state.state) if state is not None else {}
        if "position" in saved and not plan.given.has_any_of("data"):
            dataset.load_state_dict(saved)  # version 0.1.0 held out other prompts
        prompts = dataset.held_out(validation.num_prompts)
    if prompts:
        return prompts
    if not validation.num_prompts:
        raise DataError("validation.num_prompts=0 leaves no prompts to evaluate; set validation.num_prompts=256")
    if plan.uses_all_rows:
        raise DataError(
            f"data.file={plan.config.data.title} has no prompts to evaluate; add rows, or change data.where"
        )
    raise DataError(
        "no prompts are held out, so there are none to evaluate; name a file with data.file=..., or set "
        "data.validation_fraction"
    )


def settings_of_run(run: Path, settings: Sequence[str] = ()) -> TextConfig:
    """Return the settings of a run of a language model, changed by `settings`."""
    from lucidrl.utils.config import merged_settings

    content = merged_settings(run / CONFIG_NAME, resolve=False)
    algorithm = next((name for name in ALGORITHMS if name in content), GRPORunConfig.algorithm)
    given = merge_layers([], settings, resolve=False, aliases=aliases_of(ALGORITHMS[algorithm])).origins
    without: list[str] = []
    if given.of("reward") is not None:  # a run has one source of rewards
        without = ["env.name", "env.kwargs"]
    elif given.of("env.name") is not None:
        without = ["reward", "env.kwargs"]
    if given.of("data.file") is not None:  # the validation rows of the run belong to its own file
        without = [*without, "data.validation_file"]
    schema = EvaluatedSFTConfig if algorithm == SFTRunConfig.algorithm else None
    config = resumed_settings(algorithm, run, settings, without, schema)
    if isinstance(config, PreferenceRunConfig):
        weights = f"{run}/checkpoints/step_{config.max_steps}/policy"
        raise ConfigError(
            f"{run} learned from preferences, so nothing says how its completions are scored; evaluate the weights of "
            f"a checkpoint, such as `lucidrl eval {weights} reward=... data.file=...`"
        )
    if not isinstance(config, RolloutRunConfig | SFTRunConfig):
        raise ConfigError(f"{run} is a run of {algorithm}, not of a language model; try `lucidrl play {run}`")
    return config


def _settings_of_model(candidate: Candidate, settings: Sequence[str]) -> TextConfig:
    given = merge_layers([], settings, resolve=False, aliases=aliases_of(GRPORunConfig)).origins
    if given.of("reward") is None and given.of("env.name") is None:
        raise ConfigError(
            f"{candidate.name} is a model, not a run, so nothing says how its completions are scored; set reward=... "
            "with data.file=..., such as reward=math data.file=test.jsonl, or env.name=..."
        )
    config: Any = new_settings("grpo", overrides=[*settings, f"policy.model_name={candidate.model}"])
    return config


def _with_task(config: TextConfig, run: Path | None, given: Origins, python: PythonInputs) -> TextConfig:
    """Check that the settings say how completions are scored, and that no Python object is missing."""
    is_scored_anew = given.of("reward") is not None or given.of("env.name") is not None
    if config.python_inputs and given.of("data.file") is not None and is_scored_anew:
        config = config.model_copy(update={"python_inputs": {}})
    if missing := [name for name in config.python_inputs if name not in python.described()]:
        raise ConfigError(
            f"{run} uses objects of a Python program ({', '.join(missing)}), which its settings cannot hold; evaluate "
            f"it with {config.trainer}(...).evaluate({str(run)!r}), or set data.file=... and reward=..."
        )
    has_examples = config.data.file is not None or python.rows is not None
    if isinstance(config, SFTRunConfig) and has_examples and not (config.reward or is_scored_anew):
        raise ConfigError(
            f"{run} learned from examples, so nothing says how its completions are scored; set reward=..., such as "
            "reward=exact, or env.name=..."
        )
    return config


def _candidates(source: str, which: int | str | None) -> list[Candidate]:
    found = find_checkpoint(source)
    if which is not None and (found is None or not (Path(source).expanduser() / CONFIG_NAME).is_file()):
        raise ConfigError(f"--checkpoint {which} needs a run folder, but {source} is not one; remove --checkpoint")
    if found is None:
        return [Candidate(source.rstrip("/"), resolved_name(source, "MODEL_OR_RUN"))]
    run = found.path.parent.parent
    if which == ALL:
        checkpoints = CheckpointManager(run / CHECKPOINTS_NAME).valid()
    elif which == BEST:
        checkpoints = [_known(find_checkpoint(f"{run}@{BEST}"))]
    elif which in (None, NEWEST):
        checkpoints = [found]
    else:
        checkpoints = [CheckpointManager(run / CHECKPOINTS_NAME).load(int(which))]
    for checkpoint in checkpoints:
        if not (checkpoint.path / WEIGHTS / "config.json").is_file():
            raise CheckpointError(f"{source} has no language model; try a control policy with `lucidrl play {run}`")
    return [
        Candidate(f"{run.name} step {checkpoint.step}", str(checkpoint.path / WEIGHTS), checkpoint)
        for checkpoint in checkpoints
    ]


def _known(checkpoint: Checkpoint | None) -> Checkpoint:
    assert checkpoint is not None  # None only if the source is not in a run folder
    return checkpoint


def _is_step(which: int | str | None) -> bool:
    return isinstance(which, int) or (isinstance(which, str) and which.isdecimal())
