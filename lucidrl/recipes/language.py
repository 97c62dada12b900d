"""Runs of language models: from settings and inputs to a loop with its parts, connected."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from lucidrl.algorithms.grpo import GRPO
from lucidrl.algorithms.loop import TrainingLoop, Watcher
from lucidrl.algorithms.sft import SFT
from lucidrl.algorithms.validation import ExampleValidator, PromptValidator, Validator
from lucidrl.collectors.config import TextCollectorConfig
from lucidrl.collectors.text import TextCollector
from lucidrl.data.datasets import Prompt, PromptOrder
from lucidrl.distributed.workers.ray_cluster import connected
from lucidrl.envs.text.runner import EnvRunner
from lucidrl.errors import ConfigError
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.generation.interfaces import GenerationInterface
from lucidrl.models.generation.separate import SeparateGenerator
from lucidrl.models.policy.policy import Policy
from lucidrl.recipes.configs import GRPORunConfig, SFTRunConfig, TextRunConfig
from lucidrl.recipes.folder import LOGS_NAME
from lucidrl.recipes.parts import RunParts
from lucidrl.recipes.preflight import Preflight, TextInputs, check_placement, preflight

C = TypeVar("C", bound=GRPORunConfig | SFTRunConfig)


class _TextRun(ABC, Generic[C]):
    """A run that `lucidrl.recipes.run` checks and starts; both use the same inputs."""

    def __init__(self, config: C) -> None:
        self._config = config
        self._inputs = TextInputs(config)

    def preflight(self) -> Preflight:
        return preflight(self._config, self._inputs)

    @abstractmethod
    def loop(self, folder: Path, watcher: Watcher, resume: bool = False) -> AbstractContextManager[GRPO | SFT]:
        """The loop, ready to run; its parts end with the context."""

    def next_commands(self, folder: Path) -> list[list[str]]:
        prompt = self._inputs.example_prompt
        prompts = ["--", prompt] if prompt.startswith("-") else [prompt]
        return [["lucidrl", "generate", str(folder), *prompts]]

    def close(self) -> None:
        self._inputs.close()


class GRPORun(_TextRun[GRPORunConfig]):
    """`lucidrl grpo`"""

    @contextmanager
    def loop(self, folder: Path, watcher: Watcher, resume: bool = False) -> Iterator[GRPO]:
        config = self._config
        with ExitStack() as stack:
            has_reference = config.grpo.loss.kl_coefficient > 0
            parts = _TextParts(config, self._inputs, folder, stack, watcher, resume, init_reference=has_reference)
            train, _ = self._inputs.prompts
            held_out = self._inputs.validation_prompts
            collector = parts.collector(train, config.collector)
            collector.check([*train, *held_out])
            num_at_once = config.validation.prompts_per_batch
            validator = PromptValidator(collector, held_out, num_at_once) if held_out else None
            grpo = GRPO(
                config=config.grpo,
                loop=parts.loop(validator),
                policy=parts.policy,
                collector=collector,
                pad_id=parts.pad_id,
                on_policy=config.updates_per_step == 1,
                dump_samples_every=config.tracking.dump_samples_every,
                plot_mismatch_every=config.tracking.plot_mismatch_every,
            )
            parts.restore(grpo)
            yield grpo


class SFTRun(_TextRun[SFTRunConfig]):
    """`lucidrl sft`"""

    @contextmanager
    def loop(self, folder: Path, watcher: Watcher, resume: bool = False) -> Iterator[SFT]:
        config = self._config
        with ExitStack() as stack:
            parts = _TextParts(config, self._inputs, folder, stack, watcher, resume, init_reference=False)
            train, held_out = self._inputs.examples
            by_prompts = None
            if config.data.file is not None:
                held_out = held_out[: config.validation.num_prompts]
            else:
                held_out = [held_out[index] for index in self._inputs.validated]
                collector = parts.collector(self._inputs.prompts[0], TextCollectorConfig())
                by_prompts = PromptValidator(
                    collector, self._inputs.validation_prompts, config.validation.prompts_per_batch
                )
            if config.data.num_examples is not None and config.data.num_examples < len(train):
                train = [train[index] for index in PromptOrder(len(train), seed=0).take(0, config.data.num_examples)]
            validator = None
            if held_out:
                validator = ExampleValidator(parts.policy, NLLLoss(), held_out, parts.pad_id, by_prompts)
            sft = SFT(
                config=config.sft,
                loop=parts.loop(validator),
                policy=parts.policy,
                examples=train,
                order=PromptOrder(len(train), config.seed),
                pad_id=parts.pad_id,
            )
            parts.restore(sft)
            yield sft


def run_grpo(config: GRPORunConfig, folder: Path, watcher: Watcher, resume: bool = False) -> int:
    """Run GRPO in a run folder; returns the last completed step."""
    with GRPORun(config).loop(folder, watcher, resume) as loop:
        return loop.run()


def run_sft(config: SFTRunConfig, folder: Path, watcher: Watcher, resume: bool = False) -> int:
    """Run supervised fine-tuning in a run folder; returns the last completed step."""
    with SFTRun(config).loop(folder, watcher, resume) as loop:
        return loop.run()


class _TextParts:
    """What the runs of a language model are made of; `stack` ends what has to be ended."""

    def __init__(
        self,
        config: TextRunConfig,
        inputs: TextInputs,
        folder: Path,
        stack: ExitStack,
        watcher: Watcher,
        resume: bool,
        *,
        init_reference: bool,
    ) -> None:
        self._config = config
        self._inputs = inputs
        inputs.read()  # before the run is seeded: an environment that draws then changes nothing of what follows
        self._folder = folder
        self._stack = stack
        if config.cluster.uses_ray:  # for all of the run, and before the logger asks what there is to monitor
            stack.enter_context(connected(config.cluster.address, config.cluster.allow_open_dashboard))
            # A Ray that was started just now, and that of a run that goes on, have not been asked before.
            check_placement(config.policy.generation, config.env, config.cluster)
        self._run = RunParts(config, folder, stack, watcher, resume)
        self.tokenizer = inputs.tokenizer
        self.pad_id: int = self.tokenizer.pad_token_id
        self.policy = stack.enter_context(
            Policy(
                config.policy,
                self.tokenizer,
                cluster=config.cluster,
                log_dir=folder / LOGS_NAME,
                init_reference_model=init_reference,
                seed=config.seed,
            )
        )
        if blind := self.policy.group.blind_nodes:  # their share of the first checkpoint would be missing
            raise ConfigError(
                f"{folder} is not seen by node {', '.join(blind)}, whose ranks write their share of checkpoints there; "
                "set run.root to a folder on a file system that all nodes share"
            )
        self.generators: list[SeparateGenerator] = []
        """Those in processes of their own."""

    def collector(self, prompts: list[Prompt], config: TextCollectorConfig) -> TextCollector:
        env = self._config.env
        generator = self._generator()  # first, as `check_placement` reserves: environment workers take any room
        host = self._inputs.environment(self._folder / LOGS_NAME / "env")
        runner = EnvRunner(host, env.timeout_s, env.max_concurrency, env.on_error, self.policy.check)
        self._stack.callback(runner.close)
        runner.state_dict()  # one that cannot be saved is refused now, and not at the first checkpoint
        collector = TextCollector(
            generator,
            runner,
            self.tokenizer,
            prompts,
            config,
            context_length=self._inputs.facts.context_length,
            seed=self._config.seed,
        )
        self._stack.callback(collector.shutdown)
        return collector

    def _generator(self) -> GenerationInterface:
        """What answers prompts: the policy itself, or processes of their own."""
        config = self._config
        if config.policy.generation.placement == "policy":
            return self.policy
        generator = SeparateGenerator(
            self.policy,
            config.policy,
            self.tokenizer,
            cluster=config.cluster,
            log_dir=self._folder / LOGS_NAME,
            seed=config.seed,
        )
        self.generators.append(self._stack.enter_context(generator))
        return generator

    def loop(self, validator: Validator | None) -> TrainingLoop:
        config = self._config
        return self._run.loop(
            self.policy, config.validation, validator, self.generators, config.tracking.print_samples_every
        )

    def restore(self, algorithm: GRPO | SFT) -> None:
        """Go on from the newest checkpoint, if the run is a resumed one."""
        self._run.restore(self.policy, algorithm)
