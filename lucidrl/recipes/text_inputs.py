"""Inputs of a language-model run: environment, rows, tokenizer and facts of the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lucidrl.data.datasets import Example, Messages, Preference, Prompt, naming
from lucidrl.data.interfaces import LLMMessageLogType
from lucidrl.data.items import Skip
from lucidrl.data.loading import (
    dataset_of_answers,
    dataset_of_preferences,
    dataset_of_prompts,
    example_dataset,
    preference_dataset,
    prompt_dataset,
)
from lucidrl.data.messages import render_prompt, supervised_example
from lucidrl.data.stream import Dataset, Survey
from lucidrl.data.tools import with_tools
from lucidrl.envs.text.config import EnvConfig
from lucidrl.envs.text.registry import checked_prompts
from lucidrl.envs.text.workers import EnvWorkers, InProcessEnv, start_env
from lucidrl.errors import DataError
from lucidrl.models.loading import ModelFacts, model_facts, policy_tokenizer
from lucidrl.recipes.configs import ExampleRunConfig, RolloutRunConfig, SFTRunConfig
from lucidrl.recipes.inputs import PythonInputs
from lucidrl.recipes.preference_configs import PreferenceRunConfig
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

    def __init__(self, config: RolloutRunConfig | ExampleRunConfig, python: PythonInputs | None = None) -> None:
        silence_progress_bars()
        self._config = config
        self._python = python or PythonInputs()

    @property
    def uses_env(self) -> bool:
        """Whether the run uses an environment; runs on written rows of a file or a Python program use none."""
        return not (isinstance(self._config, ExampleRunConfig) and self._has_rows)

    @property
    def _has_rows(self) -> bool:
        return self._config.data.file is not None or self._python.rows is not None

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
        if not self._has_rows:
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

    @cached_property
    def preferences(self) -> Dataset[Preference]:
        """Preferences of `data.file`, of a Python program, or made from the environment's prompts and answers."""
        data, seed = self._config.data, self._config.seed
        if self.uses_env:
            return dataset_of_preferences(self._env_prompts, data, seed=seed, validation=self._env_validation)
        assert isinstance(self._config, PreferenceRunConfig), "other runs have no preferences"
        return preference_dataset(
            data,
            seed=seed,
            paired=self._config.is_paired,
            rows=self._python.rows,
            validation_rows=self._python.validation_rows,
            length=self.length,
        )

    @property
    def rows(self) -> Dataset[Any]:
        """What the run trains on."""
        if isinstance(self._config, PreferenceRunConfig):
            return self.preferences
        return self.examples if isinstance(self._config, SFTRunConfig) else self.prompts

    def token_ids(self, item: Prompt | Example | Preference) -> list[int]:
        """Tokens of a prompt or example, or of the longer completion of a preference, as the model reads them."""
        with naming(item):
            if isinstance(item, Prompt):
                return render_prompt(self.chat_tokenizer, item.messages)
            if isinstance(item, Preference):
                written = [[*item.prompt, *one] for one in (item.chosen, item.rejected) if one is not None]
            else:
                written = [[*item.messages]]
            logs = [supervised_example(self.chat_tokenizer, messages) for messages in written]
        ids = [[token for message in log for token in message["token_ids"].tolist()] for log in logs]
        return max(ids, key=len)

    def length(self, item: Prompt | Example | Preference) -> int:
        """Number of tokens of `token_ids`."""
        return len(self.token_ids(item))

    def tokenize_preference(self, preference: Preference, completion: Messages) -> LLMMessageLogType:
        """The message log of a preference's prompt with a completion.

        Raises:
            DataError: it does not fit the model's context.
        """
        with naming(preference):
            log = supervised_example(self.chat_tokenizer, [*preference.prompt, *completion])
        self.check_fits(sum(len(message["token_ids"]) for message in log), preference.label)
        return log

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
        dataset: Dataset[Any] = self.prompts if self.uses_env else self.rows
        items = [item for _, item in dataset.spread(_MOST_SEARCHED) if not isinstance(item, Skip)]
        opening = [next((m["content"] for m in item.messages if m["role"] == "user"), "") for item in items]
        return min(
            (text for text in opening if 0 < len(text.strip()) <= _LONGEST_SHOWN), key=len, default="your prompt"
        )


def silence_progress_bars() -> None:
    """Hide the progress bars of transformers, which would interrupt the output of lucidrl."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
