"""Runs of language models: create policy, environment, collector and algorithm from the settings."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Table

from lucidrl.algorithms.config import AdvantageEstimator
from lucidrl.algorithms.examples import ExampleTraining, supervised_batch
from lucidrl.algorithms.grpo import GRPO
from lucidrl.algorithms.health import HealthMonitor, HealthSettings
from lucidrl.algorithms.loop import TrainingLoop
from lucidrl.algorithms.mismatch import StepGuard
from lucidrl.algorithms.validation import ExampleValidator, PromptValidator, Validator
from lucidrl.collectors.config import TextCollectorConfig
from lucidrl.collectors.groups import Rules
from lucidrl.collectors.in_flight import GroupsInFlight
from lucidrl.collectors.text import TextCollector
from lucidrl.collectors.turns import Turns
from lucidrl.data.datasets import Example
from lucidrl.data.sources import with_pinned_names
from lucidrl.distributed.workers.ray_cluster import connected
from lucidrl.envs.text.runner import EnvRunner
from lucidrl.errors import ConfigError
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.generation.continuous import ContinuousGenerator, stall_timeout_s
from lucidrl.models.generation.interfaces import GenerationInterface
from lucidrl.models.generation.refit_guard import RefitGuard
from lucidrl.models.generation.separate import SeparateGenerator
from lucidrl.models.policy.interfaces import Role
from lucidrl.models.policy.policy import Policy
from lucidrl.models.reward_scorer import named_model
from lucidrl.models.sources import with_resolved_names
from lucidrl.recipes.configs import DistillRunConfig, ExampleRunConfig, GRPORunConfig, RolloutRunConfig, SFTRunConfig
from lucidrl.recipes.generation_check import GenerationFindings, check_generation
from lucidrl.recipes.inputs import PythonInputs
from lucidrl.recipes.preflight import check_placement, preflight
from lucidrl.recipes.text_inputs import TextInputs
from lucidrl.recipes.training_run import RunParts, TrainingRun
from lucidrl.rewards.config import RewardConfig
from lucidrl.rewards.interfaces import REWARD_MODEL
from lucidrl.rewards.verifiers.answers import answer_reader
from lucidrl.utils.nsys import ProfilablePolicy
from lucidrl.utils.run_folder import LOGS_NAME

C = TypeVar("C", bound=RolloutRunConfig | ExampleRunConfig)
E = TypeVar("E", bound=ExampleRunConfig)
R = TypeVar("R", bound=RolloutRunConfig)


class TextRun(TrainingRun[C]):
    """A run of a language model."""

    def __init__(self, config: C, python: PythonInputs | None = None) -> None:
        rewards = tuple(map(_with_resolved_model, config.reward))
        names = {
            "policy": with_resolved_names(config.policy),
            "data": with_pinned_names(config.data),
            "reward": rewards,
        }
        resolved: Any = config.model_copy(update=names)
        super().__init__(resolved)
        self._inputs = TextInputs(self.config, python)
        self._profiled: list[ProfilablePolicy] = []
        """Generators and environment workers."""
        self._refit_guard: RefitGuard | None = None
        """That of separate generators."""

    def preflight(self) -> Table:
        return preflight(self.config, self._inputs).table()

    def next_commands(self, folder: Path) -> list[list[str]]:
        if self.config.has_tools:  # `generate` has no tools
            return [["lucidrl", "eval", str(folder)]] if self.config.reward else []
        prompt = self._inputs.example_prompt
        prompts = ["--", prompt] if prompt.startswith("-") else [prompt]
        return [["lucidrl", "generate", str(folder), *prompts]]

    def close(self) -> None:
        self._inputs.close()

    def _prepare(self, stack: ExitStack) -> None:
        self._inputs.read()
        cluster = self.config.cluster
        if cluster.uses_ray:  # before the logger looks for nodes to monitor
            stack.enter_context(connected(cluster.address, cluster.allow_open_dashboard))
            # The preflight could not check a cluster that was just started, and a resume has no preflight.
            check_placement(self.config.policy.generation, self.config.env, cluster)

    def _policy(self, parts: RunParts, *, init_reference: bool = False, role: Role = "policy") -> Policy:
        config = self.config
        policy = parts.stack.enter_context(
            Policy(
                config.policy.with_total_steps(config.max_steps),
                self._inputs.tokenizer,
                cluster=config.cluster,
                log_dir=parts.folder / LOGS_NAME,
                init_reference_model=init_reference,
                seed=config.seed,
                role=role,
            )
        )
        if blind := policy.group.blind_nodes:  # the first checkpoint would lack the shards of their ranks
            raise ConfigError(
                f"node {', '.join(blind)} cannot see {parts.folder}, where its ranks write their checkpoint shards; "
                "set run.root to a folder on a file system that all nodes share"
            )
        return policy

    def _collector(self, parts: RunParts, policy: Policy, config: TextCollectorConfig) -> TextCollector:
        env = self.config.env
        generator = self._generator(parts, policy)  # first, in the order of `check_placement`
        host = self._inputs.environment(parts.folder / LOGS_NAME / "env")
        self._profiled.append(host)
        self._inputs.check_rewards(host)
        spare_s = self._inputs.seconds_per_sample
        # Only this thread may use the policy, but other threads wait for the environment of an asynchronous run.
        watch = (lambda: None) if isinstance(generator, ContinuousGenerator) else policy.check
        runner = EnvRunner(
            host,
            env.timeout_s,
            env.max_concurrency,
            env.on_error,
            watch,
            spare_s,
            is_concurrent=isinstance(generator, ContinuousGenerator),
        )
        parts.stack.callback(runner.close)
        runner.state_dict()  # if the state cannot be saved, raise now and not at the first checkpoint
        in_flight = None
        if isinstance(generator, ContinuousGenerator):
            in_flight = self._in_flight(generator, runner, config)
        collector = TextCollector(
            generator,
            runner,
            self._inputs.chat_tokenizer,
            self._inputs.prompts,
            config,
            context_length=self._inputs.context_length,
            seed=self.config.seed,
            in_flight=in_flight,
        )
        parts.stack.callback(collector.shutdown)
        return collector

    def _in_flight(
        self, generator: ContinuousGenerator, runner: EnvRunner, config: TextCollectorConfig
    ) -> GroupsInFlight:
        assert isinstance(self.config, RolloutRunConfig)
        generation, env = self.config.policy.generation, self.config.env
        rules = Rules(
            self.config.update.async_,
            prompts_per_step=config.prompts_per_step,
            samples_per_prompt=config.samples_per_prompt,
            max_steps=self.config.max_steps,
            rows_per_generator=generation.max_concurrent_rows,
            max_open=config.max_concurrent_samples,
            restarts_in_flight=generation.in_flight == "abort",
        )
        return GroupsInFlight(
            generator,
            runner,
            self._inputs.prompts,
            Turns(self._inputs.chat_tokenizer, self._inputs.context_length, config.max_turns),
            rules,
            num_env_calls=env.max_concurrency,
            stall_timeout_s=stall_timeout_s(generation, self.config.cluster) + env.timeout_s,
            seed=self.config.seed,
        )

    def _prompt_validator(self, collector: TextCollector) -> PromptValidator | None:
        """Make the validator on held-out prompts; None if there are none."""
        prompts, validation = self._inputs.prompts, self.config.validation
        if not validation.num_prompts or not prompts.holds_out:
            return None
        return PromptValidator(collector, prompts, validation, answer_reader(self.config.reward))

    def _generator(self, parts: RunParts, policy: Policy) -> GenerationInterface:
        """Return the policy itself, or generators in separate processes."""
        config = self.config
        if config.policy.generation.placement == "policy":
            return policy
        generation, log_dir = config.policy.generation, parts.folder / LOGS_NAME
        replicas = f"{generation.num_workers} {generation.engine} replica{'s' if generation.num_workers > 1 else ''}"
        parts.watcher.announce(f"starting {replicas}; logs: {log_dir / 'generation'}")
        started = time.perf_counter()
        generator = SeparateGenerator(
            policy, config.policy, self._inputs.tokenizer, cluster=config.cluster, log_dir=log_dir, seed=config.seed
        )
        parts.watcher.announce(f"started {replicas} in {time.perf_counter() - started:.0f} s")
        self._profiled.append(parts.stack.enter_context(generator))
        self._refit_guard = generator.guard
        if isinstance(config, RolloutRunConfig) and config.update.async_.max_staleness > 0:
            return ContinuousGenerator(
                generator,
                self._inputs.tokenizer.pad_token_id,
                config.seed,
                step_timeout_s=generation.step_timeout_s,
                first_timeout_s=config.cluster.start_timeout_s,
                stall_timeout_s=stall_timeout_s(generation, config.cluster),
            )
        return generator

    def _loop(
        self, parts: RunParts, policy: Policy, validator: Validator | None, health: HealthMonitor | None = None
    ) -> TrainingLoop:
        return parts.loop(policy, validator, self._profiled, self.config.tracking.print_samples_every, health)


def _with_resolved_model(reward: RewardConfig) -> RewardConfig:
    if (folder := reward.model_folder) is None:
        return reward
    return reward.model_copy(update={"name": f"{REWARD_MODEL}{named_model(folder)}"})


class RolloutRun(TextRun[R]):
    """A run that trains on samples of the policy."""

    def check_generation(self) -> GenerationFindings:
        return check_generation(self.config, self._inputs)

    def _parts_of_grpo(self, parts: RunParts) -> dict[str, Any]:
        """Create the parts that `GRPO` and its extensions share."""
        config = self.config
        policy = self._policy(parts, init_reference=config.update.needs_reference)
        collector = self._collector(parts, policy, config.collector)
        validator = self._prompt_validator(collector)
        return {
            "config": config.update.with_constant_length(config.policy.generation.max_new_tokens),
            "loop": self._loop(parts, policy, validator, HealthMonitor(_health_settings(config))),
            "policy": policy,
            "collector": collector,
            "pad_id": self._inputs.tokenizer.pad_token_id,
            "guard": StepGuard(policy, config.policy, self._refit_guard),
            "updates_per_epoch": config.updates_per_step // config.num_epochs,
            "dump_samples_every": config.tracking.dump_samples_every,
            "plot_mismatch_every": config.tracking.plot_mismatch_every,
        }


class GRPORun(RolloutRun[GRPORunConfig]):
    """`lucidrl grpo`"""

    def _build(self, parts: RunParts) -> GRPO:
        return GRPO(**self._parts_of_grpo(parts))


def _health_settings(config: RolloutRunConfig) -> HealthSettings:
    generation = config.policy.generation
    return HealthSettings(
        max_new_tokens=generation.max_new_tokens,
        samples_per_prompt=config.collector.samples_per_prompt,
        rows_per_step=config.rows_per_step,
        temperature=generation.temperature,
        entropy_coefficient=config.update.loss.entropy_coefficient,
        has_group_baseline=config.update.advantages.estimator is not AdvantageEstimator.PLAIN,
        has_teacher=isinstance(config, DistillRunConfig) and config.distill.teacher_coefficient > 0,
    )


class ExampleRun(TextRun[E]):
    """A run that trains on written rows."""

    def resolve(self) -> E:
        if self.config.steps.epochs is not None:
            survey, limit = self._inputs.survey, self.config.data.limit
            num_examples = round(survey.num_train * survey.num_rows / survey.num_checked)  # exact if all were checked
            steps = self.config.steps.for_examples(num_examples if limit is None else min(num_examples, limit))
            self.config = self.config.model_copy(update={self.config.algorithm: steps})
        return self.config


class SFTRun(ExampleRun[SFTRunConfig]):
    """`lucidrl sft`"""

    def _build(self, parts: RunParts) -> ExampleTraining[Example]:
        config, inputs = self.config, self._inputs
        pad_id: int = inputs.tokenizer.pad_token_id
        policy = self._policy(parts)
        by_prompts = None
        if inputs.uses_env:
            by_prompts = self._prompt_validator(
                self._collector(parts, policy, TextCollectorConfig(max_turns=config.max_turns))
            )
        num_examples, validator = config.validation.num_prompts, None
        if num_examples and inputs.examples.holds_out:
            validator = ExampleValidator(
                policy, NLLLoss(), inputs.examples, num_examples, inputs.tokenize, pad_id, by_prompts
            )
        loop, batch_of = self._loop(parts, policy, validator), partial(supervised_batch, inputs.tokenize, pad_id)
        number = config.sft.examples_per_step
        return ExampleTraining(loop, policy, inputs.examples, number, batch_of, NLLLoss())
