"""Checks of a language-model run before any weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from lucidrl.data.stream import Survey
from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.ray_resources import check_can_be_placed, is_to_be_started
from lucidrl.envs.text.config import EnvConfig
from lucidrl.errors import ConfigError
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.generation.separate import check_nodes, generator_hostings, generator_nodes
from lucidrl.models.generation.vllm_settings import check_tensor_parallel_size, check_vllm, is_installed
from lucidrl.models.loading import DTYPES, ModelFacts, empty_model
from lucidrl.models.policy.policy import check_optimizer, trained_shapes, worker_class_of
from lucidrl.models.tensor_parallel import check_tensor_parallel
from lucidrl.recipes.configs import ExampleRunConfig, RolloutRunConfig, TextRunConfig
from lucidrl.recipes.memory import estimate_memory_gib
from lucidrl.recipes.preference_configs import PreferenceRunConfig
from lucidrl.recipes.text_inputs import TextInputs
from lucidrl.recipes.training_run import check_run_can_start, checkpoint_on_disk

_LONGEST_SHOWN = 200
_MOST_SEARCHED = 1000


@dataclass(frozen=True)
class Preflight:
    """Findings of the preflight."""

    facts: ModelFacts
    num_trained: int | None
    """Parameters of the adapters; None without LoRA."""
    unit: str
    """What the data consists of: prompts, examples or preferences."""
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


def preflight(config: RolloutRunConfig | ExampleRunConfig, inputs: TextInputs | None = None) -> Preflight:
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
    if (num_ranks := policy.generation.ranks_per_replica) > 1:
        model = empty_model(policy.model_name, DTYPES[policy.precision], policy.trust_remote_code)
        check_tensor_parallel_size(num_ranks, model.config)
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
    is_sampled = isinstance(config, RolloutRunConfig)
    if is_sampled:
        inputs.check_rewards()
    survey, room = inputs.survey, int(is_sampled)
    inputs.check_fits(survey.longest, survey.longest_label, room)
    longest_row = survey.longest + room * config.max_turns * policy.generation.max_new_tokens
    _check_budgets(config, min(inputs.context_length, longest_row))
    num_trained = None if policy.lora is None else sum(shape.numel() for shape in trained_shapes(policy).values())
    memory = estimate_memory_gib(config, facts, survey.longest, num_trained)
    num_saved = facts.num_parameters if num_trained is None else num_trained
    checkpoint = checkpoint_on_disk(config, (num_saved, policy))
    unit = "prompts" if is_sampled else "preferences" if isinstance(config, PreferenceRunConfig) else "examples"
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
    """Raise ConfigError if the longest possible row, or a pair of such rows, does not fit a micro-batch."""
    if config.token_batching is None:
        return
    name, batching = config.token_batching
    is_paired = isinstance(config, PreferenceRunConfig)
    lower = "policy.generation.max_new_tokens" if isinstance(config, RolloutRunConfig) else "data.max_prompt_tokens"
    for key, rows in (("train_mb_tokens", 2 if is_paired else 1), ("logprob_mb_tokens", 1)):
        budget = getattr(batching, key)
        if budget < rows * longest_row:
            longest = f"two rows of {longest_row} tokens, which a pair may have"
            if rows == 1:
                longest = f"the longest possible row of {longest_row} tokens"
            raise ConfigError(f"{name}.{key}={budget} is less than {longest}; raise it, or lower {lower}")
