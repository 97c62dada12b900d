"""Inputs of a language-model run, and checks of these inputs before any weights are loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.table import Table
from transformers import PreTrainedTokenizerBase

from lucidrl.data.datasets import Example, Prompt, naming
from lucidrl.data.interfaces import LLMMessageLogType
from lucidrl.data.items import Skip
from lucidrl.data.loading import dataset_of_answers, dataset_of_prompts, example_dataset, prompt_dataset
from lucidrl.data.messages import render_prompt, supervised_example
from lucidrl.data.stream import Dataset, Survey
from lucidrl.data.tools import with_tools
from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.ray_resources import check_can_be_placed, is_to_be_started
from lucidrl.envs.text.config import EnvConfig
from lucidrl.envs.text.registry import checked_prompts
from lucidrl.envs.text.workers import EnvWorkers, InProcessEnv, start_env
from lucidrl.errors import ConfigError, DataError
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.generation.separate import check_nodes, generator_hostings, generator_nodes
from lucidrl.models.generation.vllm_settings import check_vllm, is_installed
from lucidrl.models.loading import DTYPES, ModelFacts, empty_model, model_facts, policy_tokenizer
from lucidrl.models.policy.policy import check_optimizer, trained_shapes, worker_class_of
from lucidrl.models.tensor_parallel import check_tensor_parallel
from lucidrl.recipes.configs import RolloutRunConfig, SFTRunConfig, TextRunConfig
from lucidrl.recipes.inputs import PythonInputs
from lucidrl.recipes.memory import estimate_memory_gib
from lucidrl.recipes.training_run import check_run_can_start, checkpoint_on_disk
from lucidrl.rewards.config import check_fits_functions, env_kwargs, seconds_per_sample
from lucidrl.rewards.env import RewardEnv
from lucidrl.rewards.interfaces import SampleTime
from lucidrl.tools.config import ToolConfig, seconds_of_tools, tool_env_kwargs
from lucidrl.tools.env import ToolEnv
from lucidrl.tools.functions import schemas_of
from lucidrl.utils.random_state import seed_everything

_LONGEST_SHOWN = 200
_MOST_SEARCHED = 1000


class TextInputs:
    """Environment, prompts, tokenizer and facts of the model; each is created once, at its first use."""

    def __init__(self, config: RolloutRunConfig | SFTRunConfig, python: PythonInputs | None = None) -> None:
        silence_progress_bars()
        self._config = config
        self._python = python or PythonInputs()

    @property
    def uses_env(self) -> bool:
        """Whether prompts and rewards come from an environment; false for SFT on rows of a file or a Python program."""
        has_rows = self._config.data.file is not None or self._python.rows is not None
        return not (isinstance(self._config, SFTRunConfig) and has_rows)

    @cached_property
    def _host(self) -> EnvWorkers:
        seed_everything(self._config.seed)  # an environment in this process may draw random numbers
        if self._python.rewards or self._python.tools:
            check_fits_functions(self._config.env, len(self._python.rewards) + len(self._python.tools))
            return InProcessEnv(self._env_of_objects())
        return start_env(self._env, self._config.cluster, num_workers=1, seed=self._config.seed)

    @cached_property
    def _env(self) -> EnvConfig:
        """Settings of the environment, with the rewards of the run as arguments."""
        config = self._config
        if not config.reward:
            return config.env
        if config.tools:
            kwargs = tool_env_kwargs(config.tools, config.tool_use, config.reward, config.max_turns)
        else:
            kwargs = env_kwargs(config.reward)
        return config.env.model_copy(update={"kwargs": kwargs})

    def _env_of_objects(self) -> RewardEnv | ToolEnv:
        """The environment with reward functions and tools that are Python objects."""
        config, functions = self._config, self._python.rewards
        if not (tools := self._tools):
            return RewardEnv(config.reward, functions)
        return ToolEnv(tools, config.reward, functions, config.tool_use, config.max_turns)

    @property
    def _tools(self) -> list[ToolConfig | Callable[..., Any]]:
        return [*self._config.tools, *self._python.tools]

    @property
    def seconds_per_sample(self) -> list[SampleTime]:
        """Upper bounds on the time that rewards and tools need per sample."""
        config = self._config
        rewards = [*config.reward, *config.tool_use.turn_reward]
        return seconds_per_sample(rewards) + seconds_of_tools(self._tools, config.tool_use)

    def environment(self, log_dir: Path) -> EnvWorkers:
        """Return the environment of the run.

        With one worker, it is the worker that reads the prompts; several workers are started anew.
        """
        config = self._config
        if config.env.num_workers == 1:
            self._host.move_logs(log_dir)
            return self._host
        self.close()
        return start_env(self._env, config.cluster, log_dir=log_dir, seed=config.seed)

    def close(self) -> None:
        """Shut down the environment that was started for the prompts; may be called twice."""
        if "_host" in vars(self):
            self._host.shutdown()

    def check_rewards(self, host: EnvWorkers | None = None) -> None:
        """Raise ConfigError if the environment cannot score completions of the first prompt.

        Args:
            host: the environment of the run; by default the one that was started for the prompts.
        """
        found = (item for _, item in self.prompts.spread(_MOST_SEARCHED) if isinstance(item, Prompt))
        if prompt := next(found, None):
            (host or self._host).check_prompt(prompt)

    @cached_property
    def facts(self) -> ModelFacts:
        return model_facts(self._config.policy.model_name, self._config.policy.trust_remote_code)

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and completion: those of the model, or fewer if the engine holds fewer."""
        return min(self.facts.context_length, self._config.policy.generation.vllm.get("max_model_len", math.inf))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return policy_tokenizer(self._config.policy)

    @cached_property
    def chat_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that renders messages: with tools, its chat template describes them."""
        return self.with_tools(self.tokenizer)

    def with_tools(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
        """Return the tokenizer, or a copy whose chat template describes the tools of the run."""
        return with_tools(tokenizer, schemas_of(self._tools)) if self._tools else tokenizer

    @cached_property
    def _env_prompts(self) -> Sequence[Prompt]:
        return checked_prompts(self._host.prompts(), self._config.env, self._env_validation)

    @cached_property
    def _env_validation(self) -> Sequence[Prompt] | None:
        return self._host.validation_prompts()

    @cached_property
    def prompts(self) -> Dataset[Prompt]:
        """Prompts of `data.file`, of a Python program, or of the environment."""
        _ = self._host  # so that a preflight checks the environment even if a file has the prompts
        data, seed, rows = self._config.data, self._config.seed, self._python.rows
        if data.file is None and rows is None:
            return dataset_of_prompts(self._env_prompts, data, seed=seed, validation=self._env_validation)
        validation = self._python.validation_rows
        return prompt_dataset(data, seed=seed, rows=rows, validation_rows=validation, length=self.length)

    @cached_property
    def examples(self) -> Dataset[Example]:
        """Examples of `data.file`, of a Python program, or the environment's prompts with their reference answers."""
        data, seed = self._config.data, self._config.seed
        if self.uses_env:
            return dataset_of_answers(self._env_prompts, data, seed=seed, validation=self._env_validation)
        rows, validation = self._python.rows, self._python.validation_rows
        return example_dataset(data, seed=seed, rows=rows, validation_rows=validation, length=self.length)

    @property
    def rows(self) -> Dataset[Any]:
        """What the run trains on."""
        return self.examples if isinstance(self._config, SFTRunConfig) else self.prompts

    def token_ids(self, item: Prompt | Example) -> list[int]:
        """Tokens of a prompt or example, as the model reads them."""
        with naming(item):
            if isinstance(item, Prompt):
                return render_prompt(self.chat_tokenizer, item.messages)
            log = supervised_example(self.chat_tokenizer, item.messages)
        return [token for message in log for token in message["token_ids"].tolist()]

    def length(self, item: Prompt | Example) -> int:
        """Number of tokens of a prompt or example."""
        return len(self.token_ids(item))

    def tokenize(self, example: Example) -> LLMMessageLogType:
        """The message log of an example.

        Raises:
            DataError: it does not fit the model's context.
        """
        with naming(example):
            log = supervised_example(self.chat_tokenizer, example.messages)
        self.check_fits(sum(len(message["token_ids"]) for message in log), example.label)
        return log

    def check_fits(self, num_tokens: int, label: str, room: int = 0) -> None:
        """Raise DataError if a prompt or example, plus `room` new tokens, does not fit the model's context."""
        limit = self.context_length
        if num_tokens + room > limit:
            raise DataError(
                f"{label} has {num_tokens} tokens and does not fit the context of {limit} tokens; shorten or "
                f"remove it, or skip such rows of a file with data.max_prompt_tokens={limit - room}"
            )

    @cached_property
    def survey(self) -> Survey:
        """Lengths, split and filters of the rows, from reading all rows or a sample of them."""
        return self.rows.survey(self.length)

    def read(self) -> None:
        """Read every input of the run that was not read before."""
        _ = self.tokenizer, self.facts, self.rows

    @property
    def example_prompt(self) -> str:
        """The shortest first user message of some prompts or examples; a placeholder if all are long."""
        dataset: Dataset[Any] = self.prompts if self.uses_env else self.examples
        items = [item for _, item in dataset.spread(_MOST_SEARCHED) if not isinstance(item, Skip)]
        opening = [next((m["content"] for m in item.messages if m["role"] == "user"), "") for item in items]
        return min(
            (text for text in opening if 0 < len(text.strip()) <= _LONGEST_SHOWN), key=len, default="your prompt"
        )


def silence_progress_bars() -> None:
    """Hide the progress bars of transformers, which would interrupt the output of lucidrl."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


@dataclass(frozen=True)
class Preflight:
    """Findings of the preflight."""

    facts: ModelFacts
    num_trained: int | None
    """Parameters of the adapters; None without LoRA."""
    unit: str
    """What the data consists of: prompts or examples."""
    data: Survey
    """The rows that were read."""
    memory_gib: dict[str, float]
    """Estimated memory by purpose."""
    checkpoint: str
    """Size of a checkpoint on disk."""

    def table(self) -> Table:
        table = Table("model and data", "", box=None, pad_edge=False)
        table.add_row("architecture", self.facts.architecture)
        table.add_row("parameters", f"{self.facts.num_parameters / 1e6:,.1f} million")
        if self.num_trained is not None:
            share = self.num_trained / (self.facts.num_parameters + self.num_trained)
            table.add_row("trained (LoRA)", f"{self.num_trained / 1e6:,.3g} million in adapters, {share:.1%} of all")
        table.add_row("context", f"{self.facts.context_length:,} tokens")
        data = self.data
        if not data.is_complete:
            table.add_row("checked", f"{data.num_checked:,} of {data.num_rows:,} rows, evenly spread")
        table.add_row("training", f"{data.estimate(data.num_train)} {self.unit}")
        table.add_row("held out", f"{data.estimate(data.num_held_out)} {self.unit}")
        for reason, number in data.skipped.items():
            table.add_row(f"dropped by {reason}", f"{data.estimate(number)} rows")
        table.add_row(f"longest of the {self.unit}", f"{data.longest:,} tokens")
        for what, size in self.memory_gib.items():
            table.add_row(f"memory: {what}", f"{size:.2f} GiB")
        table.add_row("memory: total (estimate)", f"{sum(self.memory_gib.values()):.2f} GiB")
        table.add_row("checkpoint on disk", self.checkpoint)
        return table


def preflight(config: RolloutRunConfig | SFTRunConfig, inputs: TextInputs | None = None) -> Preflight:
    """Check run folder, trackers, Ray cluster, model folder, tokenizer, environment and prompts; load no weights.

    Of a dataset with more than `MOST_SURVEYED` rows it reads that many, evenly spread.

    Raises:
        LucidError: for the first problem that would stop the run.
    """
    check_run_can_start(config)
    inputs = inputs or TextInputs(config)
    policy = config.policy
    check_placement(policy.generation, config.env, config.cluster)
    # Under Ray, the replicas may run on machines with other packages; they check vLLM when they start.
    if policy.generation.engine == "vllm" and (is_installed() or not config.cluster.uses_ray):
        check_vllm(policy)
    check_optimizer(policy.with_total_steps(config.max_steps))
    facts = inputs.facts
    layout = worker_class_of(policy).layout_of(policy, config.cluster.num_workers)
    if layout.tp > 1:
        parallel = policy.dtensor_cfg
        check_tensor_parallel(
            empty_model(policy.model_name, DTYPES[policy.precision], policy.trust_remote_code),
            layout.tp,
            sequence_parallel=parallel.sequence_parallel,
            custom_plan=parallel.custom_parallel_plan,
        )
    if not isinstance(config, SFTRunConfig):
        inputs.check_rewards()
    survey = inputs.survey
    room = 0 if isinstance(config, SFTRunConfig) else 1
    inputs.check_fits(survey.longest, survey.longest_label, room)
    longest_row = survey.longest + room * config.max_turns * policy.generation.max_new_tokens
    _check_budgets(config, min(inputs.context_length, longest_row))
    num_trained = None if policy.lora is None else sum(shape.numel() for shape in trained_shapes(policy).values())
    memory = estimate_memory_gib(config, facts, survey.longest, num_trained)
    num_saved = facts.num_parameters if num_trained is None else num_trained
    checkpoint = checkpoint_on_disk(config, (num_saved, policy))
    unit = "examples" if isinstance(config, SFTRunConfig) else "prompts"
    return Preflight(facts, num_trained, unit, survey, memory, checkpoint)


def check_placement(generation: GenerationConfig, env: EnvConfig, cluster: ClusterConfig) -> None:
    """Raise ConfigError if the cluster lacks resources for policy ranks, generators and env workers together."""
    generators = generator_hostings(generation)
    if generators:
        check_nodes(generation, cluster)
    if not cluster.uses_ray:
        return
    num_env_workers = env.num_workers if env.num_workers > 1 else 0  # a single one stays on the driver's machine
    check_can_be_placed(cluster, generators, lambda ids: generator_nodes(generation, ids), num_env_workers)
    if generators and generation.nodes == "other" and is_to_be_started(cluster):
        raise ConfigError(
            "policy.generation.nodes=other needs nodes beside those of the policy ranks, but a local cluster has one "
            "node; set cluster.address, or remove policy.generation.nodes"
        )


def _check_budgets(config: TextRunConfig, longest_row: int) -> None:
    """Raise ConfigError if the longest possible row does not fit a micro-batch."""
    if config.token_batching is None:
        return
    name, batching = config.token_batching
    for key in ("train_mb_tokens", "logprob_mb_tokens"):
        budget = getattr(batching, key)
        if budget < longest_row:
            raise ConfigError(
                f"{name}.{key}={budget} is less than the longest possible row of {longest_row} tokens; "
                "raise it, or lower policy.generation.max_new_tokens"
            )
