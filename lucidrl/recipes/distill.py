"""Runs of on-policy distillation: GRPO's run with a teacher."""

from __future__ import annotations

from functools import cached_property

from rich.table import Table
from transformers import PreTrainedTokenizerBase

from lucidrl.algorithms.distill import Distillation
from lucidrl.distributed.config import ClusterConfig
from lucidrl.errors import ConfigError
from lucidrl.models.loading import ModelFacts, load_tokenizer, model_facts
from lucidrl.models.policy.policy import Policy
from lucidrl.models.sources import resolved_name
from lucidrl.recipes.configs import DistillRunConfig
from lucidrl.recipes.inputs import PythonInputs
from lucidrl.recipes.language import RolloutRun
from lucidrl.recipes.memory import GIB
from lucidrl.recipes.preflight import preflight
from lucidrl.recipes.training_run import RunParts
from lucidrl.utils.nsys import TEACHER
from lucidrl.utils.run_folder import LOGS_NAME


class DistillRun(RolloutRun[DistillRunConfig]):
    """`lucidrl distill`"""

    def __init__(self, config: DistillRunConfig, python: PythonInputs | None = None) -> None:
        name = config.teacher.model_name
        if name is None:
            raise ConfigError(
                "teacher.model_name is not set; set it to the model that scores the samples, such as a Hugging Face "
                "model folder or a run folder"
            )
        teacher = config.teacher.model_copy(update={"model_name": resolved_name(name, "teacher.model_name")})
        super().__init__(config.model_copy(update={"teacher": teacher}), python)

    def preflight(self) -> Table:
        config, inputs = self.config, self._inputs
        found = preflight(config, inputs)
        self._check_teacher()
        settings = config.teacher.policy(config.policy)
        width = {"float64": 8, "float32": 4}.get(settings.precision, 2)
        found.memory_gib["teacher weights"] = self._facts.num_parameters * width / GIB
        return found.table()

    @cached_property
    def _facts(self) -> ModelFacts:
        return model_facts(str(self.config.teacher.model_name), self.config.teacher.trust_remote_code)

    @cached_property
    def _teacher_tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(str(self.config.teacher.model_name), None, self.config.teacher.trust_remote_code)

    def _check_teacher(self) -> None:
        """Raise ConfigError if the teacher cannot score the student's tokens."""
        config, inputs = self.config, self._inputs
        check_same_vocabulary(inputs.tokenizer, self._teacher_tokenizer)
        num_ids = len(inputs.tokenizer)
        for key, facts in (("policy.model_name", inputs.facts), ("teacher.model_name", self._facts)):
            if facts.vocabulary < num_ids:
                raise ConfigError(
                    f"{key}: the model has logits for {facts.vocabulary:,} tokens, but its tokenizer has {num_ids:,}; "
                    "restore its files"
                )
        if config.distill.divergence == "top_k" and config.distill.top_k > num_ids:
            raise ConfigError(
                f"distill.top_k={config.distill.top_k} is more than the {num_ids} tokens of the vocabulary; set at "
                f"most distill.top_k={num_ids}"
            )
        if self._facts.context_length < inputs.context_length:
            longest = inputs.survey.longest + config.max_turns * config.policy.generation.max_new_tokens
            if longest > self._facts.context_length:
                raise ConfigError(
                    f"a sample may have {longest:,} tokens, but the teacher's context has "
                    f"{self._facts.context_length:,}; lower policy.generation.max_new_tokens, or choose another teacher"
                )

    def _build(self, parts: RunParts) -> Distillation:
        self._check_teacher()  # a resumed run has no preflight
        teacher = self._teacher(parts)
        return Distillation(**self._parts_of_grpo(parts), teacher=teacher, num_ids=len(self._inputs.tokenizer))

    def _teacher(self, parts: RunParts) -> Policy:
        config, teacher = self.config, self.config.teacher
        is_separate = teacher.placement == "separate"
        cluster = ClusterConfig()
        if is_separate:
            cluster = config.cluster.of_one().model_copy(update={"num_workers": teacher.num_workers})
        policy = Policy(
            teacher.policy(config.policy),
            self._teacher_tokenizer,
            cluster=cluster,
            log_dir=parts.folder / LOGS_NAME,
            init_optimizer=False,
            init_reference_model=False,
            seed=config.seed,
            name=TEACHER,
            own_processes=is_separate,
        )
        if is_separate:
            self._profiled.append(policy)
        return parts.stack.enter_context(policy)


def check_same_vocabulary(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError, naming the first difference, unless both tokenizers have the same token for every id."""
    tokens, of_teacher = (
        {number: token for token, number in tokenizer.get_vocab().items()} for tokenizer in (student, teacher)
    )
    for number in sorted({*tokens, *of_teacher}):
        if tokens.get(number) != of_teacher.get(number):
            ours, theirs = (
                "missing" if found is None else repr(found) for found in (tokens.get(number), of_teacher.get(number))
            )
            raise ConfigError(
                f"the teacher has another vocabulary than the student: token {number} is {theirs}, but in the student "
                f"{ours}; choose a teacher with the student's tokenizer"
            )
