"""Inputs of a language-model run, and the checks on them before any weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from lucidrl.data.datasets import Prompt, PromptOrder, example_of, load_examples
from lucidrl.data.interfaces import LLMMessageLogType
from lucidrl.data.messages import render_prompt, supervised_example
from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.ray_resources import check_can_be_placed, is_to_be_started
from lucidrl.envs.text.config import EnvConfig
from lucidrl.envs.text.registry import split_prompts
from lucidrl.envs.text.workers import EnvWorkers, start_env
from lucidrl.errors import ConfigError, DataError
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.generation.separate import check_nodes, generator_hostings, generator_nodes
from lucidrl.models.loading import DTYPES, ModelFacts, empty_model, model_facts, policy_tokenizer
from lucidrl.models.optim import PolicyOptimizer
from lucidrl.models.policy.policy import worker_class_of
from lucidrl.models.tensor_parallel import check_tensor_parallel
from lucidrl.recipes.configs import GRPORunConfig, SFTRunConfig, TextRunConfig
from lucidrl.recipes.inputs import PythonInputs
from lucidrl.recipes.training_run import check_run_can_start, checkpoint_on_disk
from lucidrl.utils.random_state import seed_everything

GIB = 2**30
_LONGEST_SHOWN = 200


class TextInputs:
    """Environment, prompts, tokenizer and facts of the model; each is created at first use, and only once."""

    def __init__(self, config: GRPORunConfig | SFTRunConfig, python: PythonInputs | None = None) -> None:
        silence_progress_bars()
        self._config = config
        self._python = python or PythonInputs()

    @property
    def uses_env(self) -> bool:
        """Whether prompts and rewards come from an environment; false for a file of examples."""
        return not isinstance(self._config, SFTRunConfig) or self._config.data.file is None

    @cached_property
    def _host(self) -> EnvWorkers:
        seed_everything(self._config.seed)  # an environment in this process may draw random numbers
        return start_env(self._config.env, self._config.cluster, num_workers=1, seed=self._config.seed)

    def environment(self, log_dir: Path) -> EnvWorkers:
        """Return the environment of the run; one worker is reused from reading the prompts, several are started."""
        config = self._config
        if config.env.num_workers == 1:
            self._host.move_logs(log_dir)
            return self._host
        self.close()
        return start_env(config.env, config.cluster, log_dir=log_dir, seed=config.seed)

    def close(self) -> None:
        """Shut down the environment that was started for the prompts; may be called twice."""
        if "_host" in vars(self):
            self._host.shutdown()

    @cached_property
    def facts(self) -> ModelFacts:
        return model_facts(self._config.policy.model_name, self._config.policy.trust_remote_code)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return policy_tokenizer(self._config.policy)

    @cached_property
    def prompts(self) -> tuple[list[Prompt], list[Prompt]]:
        """Training prompts and held-out prompts."""
        host, env = self._host, self._config.env  # the check makes the environment even if a file has the prompts
        return split_prompts(host.prompts() if env.prompts_file is None else None, env)

    @cached_property
    def validated(self) -> list[int]:
        """Indices of the held-out prompts that validation uses; the same in every run."""
        num_held_out = len(self.prompts[1])
        count = min(self._config.validation.num_prompts, num_held_out)
        return PromptOrder(num_held_out, seed=0).take(0, count) if count else []

    @property
    def validation_prompts(self) -> list[Prompt]:
        return [self.prompts[1][index] for index in self.validated]

    @cached_property
    def examples(self) -> tuple[list[LLMMessageLogType], list[LLMMessageLogType]]:
        """Tokenized training and held-out examples: of `data.file`, or the prompts with their reference answers."""
        if isinstance(self._config, SFTRunConfig) and self._config.data.file is not None:
            train, held_out = load_examples(self._config.data.file, self._config.data.validation_fraction)
        else:
            train, held_out = ([example_of(prompt) for prompt in side] for side in self.prompts)
        return (
            [supervised_example(self.tokenizer, messages) for messages in train],
            [supervised_example(self.tokenizer, messages) for messages in held_out],
        )

    def read(self) -> None:
        """Read every input of the run that was not read before."""
        _ = self.tokenizer, self.facts, self.examples if isinstance(self._config, SFTRunConfig) else self.prompts

    @property
    def example_prompt(self) -> str:
        """The shortest first user message of all prompts or examples; a placeholder if all are long."""
        sides = self.prompts if self.uses_env else self.examples
        logs = [prompt.messages if isinstance(prompt, Prompt) else prompt for side in sides for prompt in side]
        opening = [next((m["content"] for m in log if m["role"] == "user"), "") for log in logs]
        return min(
            (text for text in opening if 0 < len(text.strip()) <= _LONGEST_SHOWN), key=len, default="your prompt"
        )


def silence_progress_bars() -> None:
    """Hide the progress bars of transformers, which would break up our own output."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


@dataclass(frozen=True)
class Preflight:
    """Findings of the preflight."""

    facts: ModelFacts
    unit: str
    """What the data consists of: prompts or examples."""
    num_train: int
    num_held_out: int
    longest: int
    """Tokens of the longest prompt or example."""
    memory_gib: dict[str, float]
    """Estimated memory by purpose."""
    checkpoint: str
    """Size of a checkpoint on disk."""

    def table(self) -> Table:
        table = Table("model and data", "", box=None, pad_edge=False)
        table.add_row("architecture", self.facts.architecture)
        table.add_row("parameters", f"{self.facts.num_parameters / 1e6:,.1f} million")
        table.add_row("context", f"{self.facts.context_length:,} tokens")
        table.add_row("training", f"{self.num_train:,} {self.unit}")
        table.add_row("held out", f"{self.num_held_out:,} {self.unit}")
        table.add_row(f"longest of the {self.unit}", f"{self.longest:,} tokens")
        for what, size in self.memory_gib.items():
            table.add_row(f"memory: {what}", f"{size:.2f} GiB")
        table.add_row("memory: total (estimate)", f"{sum(self.memory_gib.values()):.2f} GiB")
        table.add_row("checkpoint on disk", self.checkpoint)
        return table


def preflight(config: GRPORunConfig | SFTRunConfig, inputs: TextInputs | None = None) -> Preflight:
    """Check run folder, trackers, Ray cluster, model folder, tokenizer, environment and every prompt; load no weights.

    Raises:
        LucidError: for the first problem that would stop the run.
    """
    check_run_can_start(config)
    inputs = inputs or TextInputs(config)
    policy = config.policy
    check_placement(policy.generation, config.env, config.cluster)
    PolicyOptimizer([torch.nn.Parameter(torch.zeros(1))], policy.with_total_steps(config.max_steps))
    facts, tokenizer = inputs.facts, inputs.tokenizer
    layout = worker_class_of(policy).layout_of(policy, config.cluster.num_workers)
    if layout.tp > 1:
        parallel = policy.dtensor_cfg
        check_tensor_parallel(
            empty_model(policy.model_name, DTYPES[policy.precision], policy.trust_remote_code),
            layout.tp,
            sequence_parallel=parallel.sequence_parallel,
            custom_plan=parallel.custom_parallel_plan,
        )
    if isinstance(config, SFTRunConfig):
        train, held_out = inputs.examples
        logs = [*train, *held_out]
        lengths = [(sum(len(m["token_ids"]) for m in log), f"example {log[0]['content'][:40]!r}") for log in logs]
        num_train, room = len(train), 0
    else:
        prompts, held_out_prompts = inputs.prompts
        every = [*prompts, *held_out_prompts]
        lengths = [(len(render_prompt(tokenizer, p.messages)), f"prompt {p.prompt_id!r}") for p in every]
        num_train, room = len(prompts), 1
    longest, name = max(lengths)
    if longest + room > facts.context_length:
        raise DataError(
            f"{name} has {longest} tokens and does not fit the model's context of {facts.context_length} tokens; "
            "shorten or remove it"
        )
    _check_budgets(config, min(facts.context_length, longest + room * policy.generation.max_new_tokens))
    memory = estimate_memory_gib(config, facts, longest)
    checkpoint = checkpoint_on_disk(config, (facts.num_parameters, policy))
    unit = "examples" if isinstance(config, SFTRunConfig) else "prompts"
    return Preflight(facts, unit, num_train, len(lengths) - num_train, longest, memory, checkpoint)


def check_placement(generation: GenerationConfig, env: EnvConfig, cluster: ClusterConfig) -> None:
    """Raise ConfigError if the cluster has no room for policy ranks, generators and environment workers together."""
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


def estimate_memory_gib(config: GRPORunConfig | SFTRunConfig, facts: ModelFacts, longest: int) -> dict[str, float]:
    """Estimate the memory of the main tensors; activations are a rule of thumb."""
    policy = config.policy
    width = DTYPES[policy.precision].itemsize
    parameters = facts.num_parameters
    tokens = policy.train_micro_batch_size * (longest + policy.generation.max_new_tokens)
    if config.token_batching is not None:
        tokens = config.token_batching[1].train_mb_tokens
    size_bytes = {
        "weights": parameters * width,
        "gradients": parameters * max(width, 4),
        "optimizer (AdamW)": parameters * {2: 12, 4: 8, 8: 16}[width],
        # About 16 activations of the hidden size per layer, and the logits kept for the backward pass.
        "activations": tokens * (facts.num_layers * 16 * facts.hidden_size * width + 2 * facts.vocabulary),
    }
    if isinstance(config, GRPORunConfig):
        rows = min(config.rows_per_step, policy.generation.max_concurrent_rows)
        cached = rows * policy.generation.max_new_tokens + config.collector.prompts_per_step * longest
        size_bytes["key-value cache"] = cached * facts.kv_elements_per_token * width
        if config.grpo.loss.kl_coefficient > 0:
            size_bytes["reference weights"] = parameters * width
        if policy.generation.placement == "separate":
            # A generator holds the next version beside the current one; generators on the policy's node share both.
            is_far = policy.generation.refit == "collective" or policy.generation.nodes == "other"
            copies = policy.generation.num_workers if is_far else 1
            size_bytes["generators"] = 2 * copies * parameters * width
    return {what: size / GIB for what, size in size_bytes.items()}
