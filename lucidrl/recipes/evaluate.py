"""Evaluate models: complete prompts with each of them, score the completions, estimate and compare.

`lucidrl eval` and `TextTrainer.evaluate` call this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from lucidrl.algorithms.estimates import CONFIDENCE, Comparison, Estimate, compare, estimates_of, values_by_prompt
from lucidrl.algorithms.loop import StopRequest
from lucidrl.algorithms.validation import read_answers
from lucidrl.collectors.config import TextCollectorConfig
from lucidrl.collectors.rollouts import sample_metrics
from lucidrl.collectors.text import TextCollector
from lucidrl.data.sources import with_pinned_names
from lucidrl.distributed.workers.ray_cluster import connected
from lucidrl.envs.text.runner import EnvRunner
from lucidrl.errors import EnvironmentFailure, LucidError
from lucidrl.models.loading import model_facts, policy_tokenizer
from lucidrl.models.policy.policy import Policy
from lucidrl.recipes.eval_folder import (
    COMPARISON_NAME,
    EvalFolder,
    SavedSample,
    categories_of,
    digest_of,
    digest_of_prompts,
    write_json,
)
from lucidrl.recipes.eval_plan import ALL, Candidate, EvalOptions, EvalPlan, TextConfig, chosen_prompts, plan_of_sources
from lucidrl.recipes.text_inputs import TextInputs
from lucidrl.rewards.verifiers.answers import answer_reader
from lucidrl.utils.allocator import keep_freed_memory
from lucidrl.utils.logger.redact import redacted
from lucidrl.utils.random_state import seed_everything
from lucidrl.utils.run_folder import LOGS_NAME, occupied

EVAL_NAME = "eval"
"""Folder of evaluations in a run folder."""
COMPARED = ("accuracy", "reward")
STOPPING = "finishing this batch; a second signal stops at once"


class EvalWatcher(Protocol):
    """Observes an evaluation, such as the display of the command line."""

    def on_start(self, name: str, num_finished: int, num_prompts: int) -> None: ...

    def on_batch(self, num_finished: int) -> None: ...

    def announce(self, message: str) -> None: ...


class _Nowhere:
    """Shows nothing."""

    def on_start(self, name: str, num_finished: int, num_prompts: int) -> None: ...

    def on_batch(self, num_finished: int) -> None: ...

    def announce(self, message: str) -> None: ...


@dataclass(frozen=True)
class EvalResult:
    """The result of one model."""

    name: str
    model: str
    step: int | None
    """Step of the checkpoint, if the model is one of a run."""
    folder: Path
    num_prompts: int
    samples_per_prompt: int
    is_greedy: bool
    estimates: dict[str, Estimate]
    """`reward`, `accuracy`, and with several samples per prompt `avg_at_k`, `pass_at_1`, `pass_at_2`, `maj_at_k`."""
    metrics: dict[str, float]
    """Means over all samples, by the names of validation metrics, and quantiles of the lengths."""
    by: dict[str, dict[str, Estimate]]
    """Estimates by category of the column `by`."""
    category_sizes: dict[str, int]
    """Prompts by category."""
    values: dict[str, np.ndarray] = field(repr=False)
    """Value of each estimate for every prompt [P]."""

    def to_json(self) -> dict[str, Any]:
        """Return what result.json holds."""
        kept = {key: value for key, value in vars(self).items() if key not in ("values", "estimates", "by", "folder")}
        by = {name: {key: asdict(one) for key, one in found.items()} for name, found in self.by.items()}
        estimates = {name: asdict(estimate) for name, estimate in self.estimates.items()}
        return {**kept, "confidence": CONFIDENCE, "estimates": estimates, "by": by}


@dataclass(frozen=True)
class EvalReport:
    """The results of an evaluation, one per model or checkpoint."""

    results: list[EvalResult]
    comparisons: list[Comparison]
    """Paired comparisons of the second result (B) with the first (A), if two models were named."""

    @property
    def result(self) -> EvalResult:
        """The first result."""
        return self.results[0]


def evaluate(
    *sources: str | Path, settings: Sequence[str] = (), watcher: EvalWatcher | None = None, **options: Any
) -> EvalReport:
    """Evaluate a run, checkpoint or model, or compare two of them on the same prompts; the same as `lucidrl eval`.

    Args:
        sources: one or two run folders, `RUN@best`, checkpoints or models.
        settings: `key=value` strings that change the settings of the run, or give those of a model.
        watcher: observes the progress.
        options: fields of `EvalOptions`, such as `samples=8`.

    Raises:
        LucidError: a source, setting or option is wrong, or the evaluation was stopped; a further call continues it.

    Example:
        >>> evaluate("runs/grpo/exp_001", samples=8).result.estimates["pass_at_8"].value
    """
    return run_plan(plan_of_sources(sources, settings, EvalOptions(**options)), watcher)


def run_plan(plan: EvalPlan, watcher: EvalWatcher | None = None) -> EvalReport:
    """Evaluate all candidates of a plan, one after the other, on the same prompts."""
    first = plan.config_of(plan.candidates[0])
    config = first.model_copy(update={"data": with_pinned_names(first.data)})
    with ExitStack() as stack:
        keep_freed_memory()
        if config.num_threads is not None:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(config.num_threads)
        if config.cluster.uses_ray:
            stack.enter_context(connected(config.cluster.address, config.cluster.allow_open_dashboard))
        inputs = TextInputs(config, plan.python)
        stack.callback(inputs.close)
        evaluator = _Evaluator(plan, config, inputs, watcher or _Nowhere(), stack)
        results = [evaluator.result_of(candidate) for candidate in plan.candidates]
    if len(results) != 2 or plan.options.checkpoint == ALL:
        return EvalReport(results, [])
    a, b = results
    comparisons = _compared(a, b)
    content = {"a": a.name, "b": b.name, "comparisons": [one.to_json() for one in comparisons]}
    write_json(Path(plan.options.output or b.folder) / COMPARISON_NAME, content)
    return EvalReport(results, comparisons)


class _Evaluator:
    """Evaluates candidates with one environment and one list of prompts."""

    def __init__(
        self, plan: EvalPlan, config: TextConfig, inputs: TextInputs, watcher: EvalWatcher, stack: ExitStack
    ) -> None:
        self._plan, self._config, self._inputs, self._watcher = plan, config, inputs, watcher
        self._stack = stack
        self._prompts = chosen_prompts(plan, inputs.prompts)
        self._prompts_digest = digest_of_prompts(self._prompts)
        by = plan.options.by
        self._categories = None if by is None else categories_of(self._prompts, by)
        self._read_answer = answer_reader(config.reward)
        self._runner: EnvRunner | None = None
        self._first_state: dict[str, Any] = {}
        self._check: Callable[[], None] = lambda: None

    def result_of(self, candidate: Candidate) -> EvalResult:
        """Evaluate a candidate; prompts that an earlier call has finished are not completed again."""
        settings = self._settings_of(candidate)
        folder = EvalFolder(self._folder_of(candidate, settings), settings)
        folder.create()
        with occupied(folder.path):
            folder.open()
            num_prompts = len(self._prompts)
            self._watcher.on_start(candidate.name, folder.num_finished, num_prompts)
            if folder.num_finished < num_prompts:
                self._complete(candidate, folder)
            result = self._analysed(candidate, folder)
            folder.write_result(result.to_json())
        return result

    def _complete(self, candidate: Candidate, folder: EvalFolder) -> None:
        """Complete and score the prompts that are not finished."""
        config, plan = self._plan.config_of(candidate), self._plan
        tokenizer = policy_tokenizer(config.policy)
        runner = self._started(folder.path / LOGS_NAME)
        runner.load_state_dict(folder.env_state or self._state_of(candidate))
        seed_everything(config.seed)
        with Policy(
            config.policy,
            tokenizer,
            cluster=config.cluster,
            log_dir=folder.path / LOGS_NAME,
            init_optimizer=False,
            init_reference_model=False,
            seed=config.seed,
        ) as policy:
            self._check = policy.check
            collector = TextCollector(
                policy,
                runner,
                self._inputs.with_tools(tokenizer),
                self._prompts,
                TextCollectorConfig(max_turns=config.max_turns),
                context_length=model_facts(config.policy.model_name, config.policy.trust_remote_code).context_length,
                seed=config.seed,
            )
            collector.check(self._prompts[folder.num_finished :])
            size = config.validation.prompts_per_batch
            with StopRequest(self._watcher.announce, STOPPING) as stop:
                for start in range(folder.num_finished, len(self._prompts), size):
                    if stop.is_set:
                        raise _stopped(folder, len(self._prompts))
                    batch = self._prompts[start : start + size]
                    samples = collector.evaluate(batch, samples_per_prompt=plan.samples, greedy=plan.is_greedy).samples
                    read_answers(samples, self._read_answer)
                    groups = [samples[row : row + plan.samples] for row in range(0, len(samples), plan.samples)]
                    folder.append(groups, runner.state_dict())
                    self._watcher.on_batch(folder.num_finished)

    def _started(self, log_dir: Path) -> EnvRunner:
        """Return the runner of the environment, which all candidates share."""
        if self._runner is None:
            env = self._config.env
            host = self._inputs.environment(log_dir / "env")
            self._inputs.check_rewards(host)
            spare_s = self._inputs.seconds_per_sample
            runner = EnvRunner(host, env.timeout_s, env.max_concurrency, env.on_error, lambda: self._check(), spare_s)
            self._stack.callback(runner.close)
            self._runner, self._first_state = runner, runner.state_dict()
        return self._runner

    def _state_of(self, candidate: Candidate) -> dict[str, Any]:
        """Return the state in which the environment starts: that of the checkpoint, such as a curriculum's level."""
        saved = candidate.checkpoint.state if candidate.checkpoint is not None else {}
        saved = saved.get("collector", saved)
        is_same = "env" in self._first_state and "env" in saved and not self._plan.given.has_any_of("env")
        return {**self._first_state, "env": saved["env"]} if is_same else self._first_state

    def _settings_of(self, candidate: Candidate) -> dict[str, Any]:
        """Return everything that completions and rewards depend on."""
        config, plan = self._plan.config_of(candidate), self._plan
        policy, generation = config.policy, config.policy.generation
        sampling = ("max_new_tokens", "temperature", "top_k", "top_p", "stop_strings", "stop_token_ids")
        model = policy.model_dump(mode="json", include={"tokenizer", "pad_token", "precision"})
        settings = {
            "model": str(Path(candidate.model).resolve()) if Path(candidate.model).is_dir() else candidate.model,
            "model files": _files_of(candidate.model),
            **{key: value for key, value in model.items() if value is not None},
            "samples": plan.samples,
            "greedy": plan.is_greedy,
            "prompts": f"{len(self._prompts)} prompts {self._prompts_digest}",
            "env": {"name": config.env.name, "kwargs": config.env.kwargs},
            "env.timeout_s": config.env.timeout_s,
            "env.on_error": config.env.on_error,
            "reward": [reward.model_dump(mode="json") for reward in config.reward],
            "python": plan.python.described(),
            "seed": config.seed,
            "max_turns": config.max_turns,
            **(config.model_dump(mode="json", include={"tools", "tool_use"}) if config.has_tools else {}),
            "prompts_per_batch": config.validation.prompts_per_batch,
            **generation.model_dump(mode="json", include=set(sampling)),
        }
        return redacted(settings)

    def _folder_of(self, candidate: Candidate, settings: Mapping[str, Any]) -> Path:
        output, label = self._plan.options.output, candidate.name.rpartition("/")[2].replace(" ", "_").replace(":", "_")
        if output is not None:
            position = self._plan.candidates.index(candidate)
            root = Path(output)
            return root if len(self._plan.candidates) == 1 else root / f"{position + 1}-{label}"
        step = f"step_{candidate.checkpoint.step}" if candidate.checkpoint is not None else label
        root = candidate.run or self._config.run.root
        return root / EVAL_NAME / f"{step}-{digest_of(settings)}"

    def _analysed(self, candidate: Candidate, folder: EvalFolder) -> EvalResult:
        groups, plan = folder.groups(), self._plan
        samples = [sample for group in groups for sample in group]
        if all(sample.is_dropped for sample in samples):
            raise EnvironmentFailure(
                f"the environment scored none of the {len(samples)} samples in {folder.path}; fix the environment and "
                "remove the folder, or change a setting such as env.timeout_s, to evaluate again"
            )
        values = values_by_prompt(groups, plan.samples, plan.config.validation.solved_at)
        rows_of: dict[str, list[int]] = {}
        for row, category in enumerate(self._categories or ()):
            rows_of.setdefault(category, []).append(row)
        by = {
            category: estimates_of({name: values_P[rows] for name, values_P in values.items()})
            for category, rows in sorted(rows_of.items())
        }
        return EvalResult(
            name=candidate.name,
            model=candidate.model,
            step=candidate.checkpoint.step if candidate.checkpoint is not None else None,
            folder=folder.path,
            num_prompts=len(groups),
            samples_per_prompt=plan.samples,
            is_greedy=plan.is_greedy,
            estimates=estimates_of(values),
            metrics={**sample_metrics(samples), **_lengths(samples)},
            by=by,
            category_sizes={category: len(rows_of[category]) for category in by},
            values=values,
        )


def _compared(a: EvalResult, b: EvalResult) -> list[Comparison]:
    """Compare by accuracy, and also by reward if rewards differ from accuracies."""
    is_binary = all(np.array_equal(one.values["accuracy"], one.values["reward"], equal_nan=True) for one in (a, b))
    return [compare(name, a.values[name], b.values[name]) for name in COMPARED[: 1 if is_binary else 2]]


def _lengths(samples: Sequence[SavedSample]) -> dict[str, float]:
    tokens = [sample.num_sampled_tokens for sample in samples if not sample.is_dropped]
    middle, long = np.quantile(tokens, [0.5, 0.95])
    return {"answer_tokens_median": float(middle), "answer_tokens_p95": float(long), "answer_tokens_max": max(tokens)}


def _files_of(model: str) -> str:
    """Describe the version of a model's files; empty for a model of the package or the hub."""
    folder = Path(model)
    if not folder.is_dir():
        return ""
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    return digest_of({path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files})


def _stopped(folder: EvalFolder, num_prompts: int) -> LucidError:
    return LucidError(
        f"stopped after {folder.num_finished} of {num_prompts} prompts, which are in {folder.path}; run the same "
        "command to continue"
    )
