"""From the configuration of a language model's run to its parts, connected."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from lucidrl.algorithms.grpo import GRPO
from lucidrl.algorithms.loop import Watcher
from lucidrl.algorithms.sft import SFT
from lucidrl.algorithms.validation import Validator
from lucidrl.collectors.config import TextCollectorConfig
from lucidrl.collectors.text import TextCollector
from lucidrl.data.datasets import Prompt, PromptOrder
from lucidrl.data.examples import answered, load_examples
from lucidrl.data.messages import supervised_example
from lucidrl.distributed.launchers.ray_connection import connected
from lucidrl.envs.text.actor_pool import EnvActors
from lucidrl.envs.text.interfaces import TextEnv
from lucidrl.envs.text.registry import env_of, split_prompts
from lucidrl.envs.text.runner import EnvRunner
from lucidrl.errors import ConfigError
from lucidrl.models.generation.interfaces import GenerationInterface
from lucidrl.models.generation.separate import SeparateGenerator
from lucidrl.models.loading import model_facts, policy_tokenizer
from lucidrl.models.policy.policy import Policy
from lucidrl.recipes.configs import GRPORunConfig, SFTRunConfig, TextRunConfig
from lucidrl.recipes.parts import RunParts
from lucidrl.recipes.preflight import check_placement
from lucidrl.recipes.run_folder import LOGS_NAME


def run_grpo(config: GRPORunConfig, folder: Path, watcher: Watcher, resume: bool = False) -> int:
    """Run GRPO in a run folder; returns the last completed step."""
    with ExitStack() as stack:
        parts = _TextParts(config, folder, stack, watcher, resume, init_reference=config.grpo.loss.kl_coefficient > 0)
        train, held_out = parts.prompts()
        collector = parts.collector(train, config.collector)
        collector.check([*train, *held_out])
        loop = GRPO(
            config=config.grpo,
            validation=config.validation,
            policy=parts.policy,
            collector=collector,
            validator=Validator(collector, held_out),
            logger=parts.logger,
            saver=parts.saver,
            watcher=watcher,
            pad_id=parts.pad_id,
            on_policy=config.updates_per_step == 1,
            dump_samples_every=config.tracking.dump_samples_every,
            print_samples_every=config.tracking.print_samples_every,
            plot_mismatch_every=config.tracking.plot_mismatch_every,
            profiled=parts.generators,
        )
        parts.restore(loop)
        return loop.run()


def run_sft(config: SFTRunConfig, folder: Path, watcher: Watcher, resume: bool = False) -> int:
    """Run supervised fine-tuning in a run folder; returns the last completed step."""
    with ExitStack() as stack:
        parts = _TextParts(config, folder, stack, watcher, resume, init_reference=False)
        validator = None
        if config.data.file is not None:
            train, held_out = load_examples(config.data.file, config.data.validation_fraction)
            held_out = held_out[: config.validation.num_prompts]
        else:
            prompts, held_out_prompts = parts.prompts()
            train, held_out = (
                [answered(prompt) for prompt in prompts],
                [answered(prompt) for prompt in held_out_prompts],
            )
            validator = Validator(parts.collector(prompts, TextCollectorConfig()), held_out_prompts)
        if config.data.num_examples is not None and config.data.num_examples < len(train):
            train = [train[index] for index in PromptOrder(len(train), seed=0).take(0, config.data.num_examples)]
        loop = SFT(
            config=config.sft,
            validation=config.validation,
            policy=parts.policy,
            examples=[supervised_example(parts.tokenizer, messages) for messages in train],
            order=PromptOrder(len(train), config.seed),
            held_out=[supervised_example(parts.tokenizer, messages) for messages in held_out],
            validator=validator,
            logger=parts.logger,
            saver=parts.saver,
            watcher=watcher,
            pad_id=parts.pad_id,
            profiled=parts.generators,
        )
        parts.restore(loop)
        return loop.run()


class _TextParts:
    """What the runs of a language model are made of; `stack` ends what has to be ended."""

    def __init__(
        self,
        config: TextRunConfig,
        folder: Path,
        stack: ExitStack,
        watcher: Watcher,
        resume: bool,
        *,
        init_reference: bool,
    ) -> None:
        self._config = config
        self._folder = folder
        self._stack = stack
        if config.cluster.uses_ray:  # for all of the run, and before the logger asks what there is to monitor
            stack.enter_context(connected(config.cluster.address, config.cluster.allow_open_dashboard))
            # A Ray that was started just now, and that of a run that goes on, have not been asked before.
            check_placement(config.policy.generation, config.env, config.cluster)
        self._run = RunParts(config, folder, stack, watcher, resume)
        self.logger = self._run.logger
        self._env = env_of(config.env)
        self.tokenizer = policy_tokenizer(config.policy)
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
        self.saver = self._run.saver(self.policy)
        self.generators: list[SeparateGenerator] = []
        """Those in processes of their own."""

    def prompts(self) -> tuple[list[Prompt], list[Prompt]]:
        """Training prompts, and the held-out ones that validation asks: the same in every run."""
        train, held_out = split_prompts(self._env, self._config.env)
        count = min(self._config.validation.num_prompts, len(held_out))
        chosen = PromptOrder(len(held_out), seed=0).take(0, count) if count else []
        return train, [held_out[index] for index in chosen]

    def collector(self, prompts: list[Prompt], config: TextCollectorConfig) -> TextCollector:
        env = self._config.env
        facts = model_facts(self._config.policy.model_name, self._config.policy.trust_remote_code)
        generator = self._generator()  # first, as `check_placement` reserves: actors take any room
        runner = EnvRunner(self._judge(), env.deadline_s, env.max_concurrency, env.on_error, self.policy.check)
        runner.state_dict()  # one that cannot be saved is refused now, and not at the first checkpoint
        collector = TextCollector(
            generator,
            runner,
            self.tokenizer,
            prompts,
            config,
            context_length=facts.context_length,
            seed=self._config.seed,
        )
        self._stack.callback(collector.shutdown)
        return collector

    def _judge(self) -> TextEnv:
        """What judges answers: the environment itself, or its copies in actors."""
        config = self._config
        if not config.env.num_actors:
            return self._env
        return self._stack.enter_context(EnvActors(config.env, config.cluster, self._folder / LOGS_NAME / "env"))

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

    def restore(self, loop: GRPO | SFT) -> None:
        """Go on from the newest checkpoint, if the run is a resumed one."""
        self._run.restore(self.policy, loop)
