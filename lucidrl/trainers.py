"""Training from Python: `GRPOTrainer`, `DistillTrainer`, `SFTTrainer` and `PPOTrainer`.

A trainer starts the same run as its command: the same settings, checks, run folder, display and checkpoints.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from lucidrl.checkpoint.config import CHECKPOINTS_NAME
from lucidrl.errors import CheckpointError, ConfigError
from lucidrl.recipes.arguments import (
    CommonArguments,
    Dataset,
    GRPOOptions,
    Reward,
    RunOptions,
    Settings,
    SFTOptions,
    config_layer,
    settings_of,
    split_inputs,
    unknown_argument,
)
from lucidrl.recipes.callbacks import Callback, Callbacks, StopTraining, TrainingResult
from lucidrl.recipes.configs import (
    BaseRunConfig,
    DistillRunConfig,
    GRPORunConfig,
    PPORunConfig,
    SFTRunConfig,
    TextRunConfig,
)
from lucidrl.recipes.run import start
from lucidrl.recipes.settings import new_settings, resumed_settings

if TYPE_CHECKING:
    from lucidrl.recipes.evaluate import EvalReport

__all__ = ["Callback", "DistillTrainer", "GRPOTrainer", "PPOTrainer", "SFTTrainer", "StopTraining", "TrainingResult"]


RUN_SETTINGS = {"seed": ["seed"], "run_name": ["run.name"], "output": ["run.root"]}
TEXT_SETTINGS = {
    **RUN_SETTINGS,
    "model": ["policy.model_name"],
    "dataset": ["data.file"],
    "validation_dataset": ["data.validation_file"],
    "prompt": ["data.prompt"],
    "tools": ["tools"],
    "learning_rate": ["policy.optimizer.kwargs.lr"],
}


class Trainer:
    """Base class of all trainers.

    Attributes:
        config: the settings of the run.
    """

    _schema: ClassVar[type[BaseRunConfig]]
    _settings: ClassVar[Mapping[str, Sequence[str]]]
    """The settings that each argument sets."""

    def __init__(self, arguments: Mapping[str, Any], common: CommonArguments) -> None:
        if unknown := [name for name in arguments if name not in self._settings]:
            known, trainer = [*self._settings, *CommonArguments.__annotations__], type(self).__name__
            raise ConfigError("\n".join(unknown_argument(name, trainer, known, self._schema) for name in unknown))
        self._common = common
        self._python, arguments = split_inputs(arguments)
        self._overrides = settings_of(arguments, self._settings)
        self._callbacks = Callbacks(common.callbacks)
        self._result: TrainingResult | None = None
        file, changes = config_layer(common.config, self._schema, is_resumed=False)
        objects = settings_of({"objects": self._python.described() or None}, {"objects": ["python_inputs"]})
        overrides = [*changes, *self._overrides, *objects]
        self.config = new_settings(self._schema.algorithm, file, common.preset, overrides)

    @property
    def run_folder(self) -> Path | None:
        """Folder of the run; None until `train` has created it."""
        return self._callbacks.run_folder

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One record per step that this trainer has trained: `step`, the metrics, and `validation/<name>` if validated.

        The first record is the validation before step 1. `metrics.jsonl` in the run folder also has the steps of other
        processes.
        """
        return self._callbacks.records

    def train(self, resume: bool | str | Path = False) -> TrainingResult:
        """Train until the last step, Ctrl-C, or a callback's `StopTraining`; return the outcome.

        The first Ctrl-C finishes the step, saves it and returns; the second one raises KeyboardInterrupt. A second call
        continues a run that was stopped.

        Args:
            resume: a run folder: continue that run with its saved settings; arguments of this trainer override them.
                True: continue the run that this trainer started or, if it started none, the saved run `run_name`.

        Raises:
            LucidError: the run cannot start or cannot continue.
        """
        folder = self._folder_to_resume(resume)
        if folder is not None:
            self.config = self._resumed_settings(folder)
        if folder != self.run_folder:
            self._callbacks = Callbacks(self._common.callbacks)
        self._result = start(
            self.config, resume=folder, python=self._python, callbacks=self._callbacks, display=self._common.display
        )
        return self._result

    def save(self, folder: str | Path) -> None:
        """Write the weights of the newest checkpoint as a Hugging Face folder, with the tokenizer.

        An existing model folder is replaced.

        Raises:
            ConfigError: nothing is trained yet, or the folder holds other files.
            CheckpointError: the run has no valid checkpoint.
        """
        from lucidrl.checkpoint.manager import CheckpointManager
        from lucidrl.checkpoint.staging import make_hidden_folder, put_in_place

        target, run_folder = Path(folder).absolute(), self._trained_folder("save")
        if target.exists() and not (target.is_dir() and (_is_model(target) or not any(target.iterdir()))):
            raise ConfigError(f"{folder} exists and is not a model folder; choose a new or empty folder")
        newest = CheckpointManager(run_folder / CHECKPOINTS_NAME).latest()
        if newest is None:
            raise CheckpointError(f"{run_folder} has no valid checkpoint; train with checkpoint.final=true")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            hidden = make_hidden_folder(target)
            try:
                shutil.copytree(newest.path / "policy", hidden, dirs_exist_ok=True)
                put_in_place(hidden, target)
            finally:
                shutil.rmtree(hidden, ignore_errors=True)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written ({error}); choose a writable folder") from error

    def _trained_folder(self, method: str) -> Path:
        if self.run_folder is None:
            raise ConfigError(f"nothing is trained yet; call train() before {method}()")
        return self.run_folder

    def _folder_to_resume(self, resume: bool | str | Path) -> Path | None:
        """Return the folder of the run to continue; None starts a new run."""
        if not isinstance(resume, bool):
            return Path(resume)
        if self._result is not None and self._result.is_complete:
            name, steps, folder = type(self).__name__, self._result.last_step, str(self.run_folder)
            raise ConfigError(
                f"the run in {folder} is complete, with {steps} steps; to train more steps, call "
                f"{name}(..., max_steps={2 * steps}).train(resume={folder!r})"
            )
        if self.run_folder is not None or not resume:
            return self.run_folder
        if self.config.run.name is None:
            raise ConfigError("resume=True needs a run: set run_name, or pass the folder as train(resume=FOLDER)")
        return self.config.run.root / self.config.run.name

    def _resumed_settings(self, folder: Path) -> BaseRunConfig:
        """Return the settings of an earlier run, changed by the arguments; `preset` is not applied again."""
        _, changes = config_layer(self._common.config, self._schema, is_resumed=True)
        return resumed_settings(self._schema.algorithm, folder, [*changes, *self._overrides])


class TextTrainer(Trainer):
    """Base class of the trainers of language models."""

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        samples: int = 1,
        temperature: float = 1.0,
        max_new_tokens: int = 64,
        seed: int = 0,
    ) -> list[str]:
        """Complete prompts with the newest checkpoint, as `lucidrl generate` does.

        Args:
            prompts: user messages, one per conversation.
            samples: completions per prompt; 1 decodes greedily.

        Returns:
            The completions, `samples` per prompt, in the order of the prompts.
        """
        from lucidrl.recipes.generate import Sampling, completions

        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        sampling = Sampling(samples, temperature, max_new_tokens, seed)
        return list(completions(self._trained_folder("generate"), texts, sampling))

    def evaluate(self, *sources: str | Path, settings: Mapping[str, Any] | None = None, **options: Any) -> EvalReport:
        """Evaluate as `lucidrl eval` does, with the data and reward functions of this trainer.

        Args:
            sources: one run, checkpoint or model, or two to compare; default: the newest checkpoint of this trainer's
                run or, before `train`, its model.
            settings: nested settings that change those of the run.
            options: fields of `EvalOptions`, such as `samples=8`, `by="level"` or `checkpoint="all"`.

        Raises:
            LucidError: a source, setting or option is wrong, or the evaluation was stopped; another call continues it.
        """
        from lucidrl.recipes.eval_report import evaluate_in_program

        _, changes = config_layer(settings, self._schema, is_resumed=False)
        found: Any = self.config  # a text trainer has a `TextRunConfig`
        own = () if sources or self.run_folder is None else (self.run_folder,)
        return evaluate_in_program(sources or own, changes, found, self._python, self._common.display, options)


class GRPOTrainer(TextTrainer):
    """Trains a language model with GRPO; the same as `lucidrl grpo`.

    Args:
        model: a Hugging Face folder, or `embedded`.
        rewards: functions that score completions, names of rewards, or a list of both; default: the environment
            `env.name` scores them.
        dataset: prompts as a file or as rows; default: the prompts of the environment.
        config: other settings, as a nested mapping, a `GRPORunConfig` or the path of a YAML file. A mapping changes
            single settings; a config object or file replaces the default preset.
        preset: name of the preset to start from. `config` overrides the preset; other arguments override both.
        callbacks: called during the run.
        display: show the run on the terminal or in the notebook; with False it is only logged.
        options: see `GRPOOptions`.

    Raises:
        ConfigError: an argument or a setting is wrong; the message lists all errors.

    Example:
        >>> trainer = GRPOTrainer("path/to/model", rewards=[exact], dataset="train.parquet", prompt="question")
        >>> trainer.train()
        >>> trainer.save("out")
    """

    _schema: ClassVar[type[TextRunConfig]] = GRPORunConfig
    _settings: ClassVar = {
        **TEXT_SETTINGS,
        "rewards": ["reward"],
        "answer": ["data.answer"],
        "max_steps": ["grpo.max_steps"],
    }

    def __init__(
        self,
        model: str | Path | None = None,
        rewards: Reward | Sequence[Reward] | None = None,
        dataset: Dataset | None = None,
        *,
        config: Settings | None = None,
        preset: str | None = None,
        callbacks: Sequence[Callback] = (),
        display: bool = True,
        **options: Unpack[GRPOOptions],
    ) -> None:
        arguments = {"model": model, "rewards": rewards, "dataset": dataset, **options}
        super().__init__(arguments, CommonArguments(config, preset, callbacks, display))


class DistillTrainer(GRPOTrainer):
    """`lucidrl distill`: trains a model on its samples with a `teacher`; other arguments are those of `GRPOTrainer`."""

    _schema = DistillRunConfig
    _settings: ClassVar = GRPOTrainer._settings | {
        "teacher": ["teacher.model_name"],
        "max_steps": ["distill.max_steps"],
    }


class SFTTrainer(TextTrainer):
    """Fine-tunes a language model on written examples; the same as `lucidrl sft`.

    Args:
        model: a Hugging Face folder, or `embedded`.
        dataset: examples as a file or as rows; default: the prompts of the environment with their answers.
        config: see `GRPOTrainer`, with `SFTRunConfig`.
        preset: see `GRPOTrainer`.
        callbacks: see `GRPOTrainer`.
        display: see `GRPOTrainer`.
        options: see `SFTOptions`.
    """

    _schema = SFTRunConfig
    _settings: ClassVar = {**TEXT_SETTINGS, "completion": ["data.completion"], "max_steps": ["sft.max_steps"]}

    def __init__(
        self,
        model: str | Path | None = None,
        dataset: Dataset | None = None,
        *,
        config: Settings | None = None,
        preset: str | None = None,
        callbacks: Sequence[Callback] = (),
        display: bool = True,
        **options: Unpack[SFTOptions],
    ) -> None:
        arguments = {"model": model, "dataset": dataset, **options}
        super().__init__(arguments, CommonArguments(config, preset, callbacks, display))


class PPOTrainer(Trainer):
    """Trains a control policy with PPO; the same as `lucidrl ppo`. `learning_rate` sets that of policy and critic.

    Args:
        env: id of a gymnasium environment; `module:Id` imports the module that registers it.
        config: see `GRPOTrainer`, with `PPORunConfig`.
        preset: see `GRPOTrainer`.
        callbacks: see `GRPOTrainer`.
        display: see `GRPOTrainer`.
        options: see `RunOptions`.
    """

    _schema = PPORunConfig
    _settings: ClassVar = {
        **RUN_SETTINGS,
        "env": ["env.name"],
        "learning_rate": ["policy.optimizer.kwargs.lr", "critic.optimizer.kwargs.lr"],
        "max_steps": ["ppo.max_steps"],
    }

    def __init__(
        self,
        env: str | None = None,
        *,
        config: Settings | None = None,
        preset: str | None = None,
        callbacks: Sequence[Callback] = (),
        display: bool = True,
        **options: Unpack[RunOptions],
    ) -> None:
        super().__init__({"env": env, **options}, CommonArguments(config, preset, callbacks, display))


def _is_model(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))
