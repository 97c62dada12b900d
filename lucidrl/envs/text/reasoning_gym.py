"""Tasks of reasoning-gym: a mixture of its datasets, scored by the scorers of reasoning-gym."""

from __future__ import annotations

import ast
import hashlib
import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from lucidrl.data.datasets import Prompt
from lucidrl.data.interfaces import ChatMessage
from lucidrl.data.order import shares
from lucidrl.data.reading import ParseFailure, last_boxed, last_number, last_tagged
from lucidrl.envs.text.interfaces import EnvReply, EnvRequest
from lucidrl.errors import ConfigError
from lucidrl.utils.config import Config
from lucidrl.utils.suggestions import closest, unknown_key

Split = Literal["train", "validation"]

MAX_ANSWER_CHARS = 10_000
"""Longer answers get reward 0 without being scored."""

_EVALUATED_LITERALS = (
    "algorithmic.binary_matrix",
    "algorithmic.number_sorting",
    "algorithmic.spiral_matrix",
    "algorithmic.string_insertion",
    "games.n_queens",
)
"""Modules whose scorers call `eval` on the answer, although their answers are only lists of literals."""
_EVALUATED_EXPRESSIONS = {
    "countdown",
    "intermediate_integration",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
}
"""Datasets whose scorers evaluate the answer with sympy, which can execute arbitrary Python."""
_EXPRESSION = re.compile(r"[\w\s+\-*/().,]*", re.ASCII)
_NAME = re.compile(r"[^\W\d]\w*", re.ASCII)
_FUNCTIONS = re.compile(r"a?(?:sin|cos|tan)h?|sec|csc|cot|exp|log|ln|sqrt|pi|Abs|sign")
_POWER = re.compile(r"\*\*\s*(?!(?:[a-zA-Z]\b|-?\d{1,2}\b|\(-?\d{1,2}(?:/\d{1,2})?\))(?!\s*\*\*))")
"""A power whose result may be huge."""


class ReasoningDatasetConfig(Config):
    """One dataset of the mixture."""

    name: str
    """Name in reasoning-gym, such as `chain_sum`."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Weight of the dataset: its fraction of the prompts is this weight divided by the sum of all weights."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Settings of the dataset, such as `{min_terms: 2}`; see its Config class in reasoning-gym."""


class ReasoningGymConfig(Config):
    """Which datasets of reasoning-gym to mix, how to prompt for them, and where the answer is in a completion."""

    datasets: tuple[ReasoningDatasetConfig, ...] = Field(min_length=1)
    """Datasets of the mixture; a plain name stands for `{name: ...}`."""
    size: PositiveInt = 2_000
    """Number of training prompts."""
    validation_size: NonNegativeInt = 200
    """Number of validation prompts; training leaves out their questions."""
    seed: int = 0
    """Seed of the training prompts."""
    validation_seed: int = 0
    """Seed of the validation prompts; independent of `seed`."""
    system_prompt: str | None = "Think step by step. Write your final answer between <answer> and </answer>."
    """System message before each question, if any."""
    answer_from: Literal["answer_tag", "boxed", "last_number", "whole"] = "answer_tag"
    r"""Where the answer is in a completion: the last `<answer>...</answer>`, the last `\boxed{...}`, the last number,
    or the whole text. White space at both ends is ignored."""

    @field_validator("datasets", mode="before")
    @classmethod
    def _from_names(cls, value: Any) -> Any:
        elements = [value] if isinstance(value, str) else value
        if not isinstance(elements, list | tuple):
            return elements
        return [{"name": element} if isinstance(element, str) else element for element in elements]

    @model_validator(mode="after")
    def _sizes_are_enough(self) -> Self:
        for what, size in (("size", self.size), ("validation_size", self.validation_size)):
            if 0 < size < len(self.datasets):
                raise ValueError(
                    f"{what}={size} is less than one prompt for each of {len(self.datasets)} datasets; raise {what}"
                )
        return self


class ReasoningGymEnv:
    """Environment with one turn; the reward is the score of the dataset's scorer, 0 for a completion without an answer.

    Metrics: `answered` (an answer was found and scored), `scorer_raised`, and `score_NAME` per dataset.

    Raises:
        ConfigError: if reasoning-gym is missing, or a dataset or one of its settings is unknown or invalid.
    """

    def __init__(self, config: ReasoningGymConfig) -> None:
        self._config = config
        self._datasets: dict[Split, list[Any]] = {
            "train": self._made("train", config.size),
            "validation": self._made("validation", config.validation_size),
        }
        names = [dataset.name for dataset in config.datasets]
        self._labels = [
            name if names.count(name) == 1 else f"{name}_{names[: position + 1].count(name)}"
            for position, name in enumerate(names)
        ]
        _replace_eval()

    def prompts(self) -> list[Prompt]:
        """The training prompts, without questions that are also validation prompts."""
        return self._both[0]

    def validation_prompts(self) -> list[Prompt]:
        return self._both[1]

    @cached_property
    def _both(self) -> tuple[list[Prompt], list[Prompt]]:
        """(training, validation) prompts. Generated once: some datasets return another entry the second time."""
        validation = list(self._prompts("validation"))
        held_out = {prompt.messages[-1]["content"] for prompt in validation}
        train = [prompt for prompt in self._prompts("train") if prompt.messages[-1]["content"] not in held_out]
        if not train:
            names = ", ".join(self._labels)
            problem = f"{names} have too few questions: all {self._config.size} for training occur in validation"
            raise ConfigError(f"{problem}; lower env.kwargs.validation_size, or add a dataset")
        return train, validation

    async def step(self, batch: Sequence[EnvRequest]) -> list[EnvReply]:
        return [self._score(request) for request in batch]

    def _made(self, split: Split, size: int) -> list[Any]:
        if not size:
            return []
        configs = self._config.datasets
        counts = shares(size, [dataset.weight for dataset in configs])
        seed = self._config.seed if split == "train" else self._config.validation_seed
        return [
            _dataset(dataset, f"env.kwargs.datasets.{position}", _seed(split, seed, position), count)
            for position, (dataset, count) in enumerate(zip(configs, counts, strict=True))
        ]

    def _prompts(self, split: Split) -> Iterator[Prompt]:
        prefix = "" if split == "train" else "validation-"
        for position, (label, dataset) in enumerate(zip(self._labels, self._datasets[split], strict=False)):
            for index in range(len(dataset)):
                entry = dataset[index]
                messages: list[ChatMessage] = []
                if self._config.system_prompt is not None:
                    messages.append({"role": "system", "content": self._config.system_prompt})
                messages.append({"role": "user", "content": entry["question"]})
                info = {"split": split, "dataset": position, "name": label, "index": index, **_written(entry)}
                yield Prompt(f"{prefix}{label}-{index}", tuple(messages), info)

    def _entry(self, info: dict[str, Any]) -> Any:
        """The dataset entry of a prompt, exactly as it was generated."""
        if "entry" in info:
            return ast.literal_eval(info["entry"])
        entry = self._datasets[info["split"]][info["dataset"]][info["index"]]
        if _fingerprint(entry) != info["fingerprint"]:
            name = self._config.datasets[info["dataset"]].name
            raise RuntimeError(f"{name} generated another question for index {info['index']} than before")
        return entry

    def _score(self, request: EnvRequest) -> EnvReply:
        position = request.info["dataset"]
        name, label = self._config.datasets[position].name, self._labels[position]
        answer = self._answer(request.completion)
        if answer is None or len(answer) > MAX_ANSWER_CHARS or not _may_be_evaluated(name, answer):
            return EnvReply(0.0, metrics={"answered": 0.0, "scorer_raised": 0.0, f"score_{label}": 0.0})
        entry = self._entry(request.info)
        raised = 0.0
        try:
            score = float(self._datasets[request.info["split"]][position].score_answer(answer, entry))
        except Exception:  # scorers raise for some malformed answers
            score, raised = 0.0, 1.0
        metrics = {"answered": 1.0, "scorer_raised": raised, f"score_{label}": score}
        return EnvReply(score, metrics=metrics, answer=answer)

    def _answer(self, completion: str) -> str | None:
        match self._config.answer_from:
            case "whole":
                return completion.strip() or None
            case "last_number":
                number = last_number(completion)
                return None if number is None else f"{number.normalize():f}"
            case "boxed":
                try:
                    found = last_boxed(completion)
                except ParseFailure:
                    return None
            case "answer_tag":
                found = last_tagged(completion)
        return None if found is None else found.strip()


def _dataset(config: ReasoningDatasetConfig, key: str, seed: int, size: int) -> Any:
    try:
        import reasoning_gym  # noqa: F401 - registers its datasets
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        remedy = 'pip install "lucidrl[reasoning]"'
        raise ConfigError(f"env.name=reasoning_gym needs reasoning-gym; {remedy}") from error
    known = sorted(DATASETS.keys() - {"composite"})
    if config.name not in known:
        close = closest(config.name, known)
        hint = f"did you mean {close}?" if close else f"the datasets are {', '.join(known)}"
        raise ConfigError(f"{key}: unknown dataset {config.name!r} of reasoning-gym; {hint}")
    settings = [field.name for field in fields(DATASETS[config.name][1])]
    for name in config.config:
        if name in ("seed", "size"):
            raise ConfigError(f"{key}.config.{name} is for all datasets together; set env.kwargs.{name}")
        if name not in settings:
            raise ConfigError(unknown_key([name], [[setting] for setting in settings], f"{key}.config."))
    try:
        return create_dataset(config.name, **config.config, seed=seed, size=size)
    except Exception as error:  # its checks are assertions
        problem = f"{key}.config={config.config} is not valid for {config.name}"
        raise ConfigError(f"{problem}: {type(error).__name__}: {error}") from error


def _seed(split: Split, seed: int, position: int) -> int:
    """Make a seed far from all others: datasets use seed + index for an entry, so close seeds would share entries."""
    digest = hashlib.sha256(f"{split}/{seed}/{position}".encode()).digest()
    return int.from_bytes(digest[:4]) >> 1


def _written(entry: Any) -> dict[str, str]:
    """Return the entry as a Python literal if that is exact; else its fingerprint, to check a regenerated entry.

    JSON would change tuples and keys. Some datasets cannot regenerate an entry in another process, because they depend
    on the order of sets.
    """
    text = repr(entry)
    try:
        if repr(ast.literal_eval(text)) == text:
            return {"entry": text}
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        pass
    return {"fingerprint": _fingerprint(entry)}


def _fingerprint(entry: Any) -> str:
    return hashlib.sha256(f"{entry['question']}\0{entry['answer']}".encode("utf-8", "surrogatepass")).hexdigest()


def _replace_eval() -> None:
    """Replace `eval` by `literal_eval` in the modules whose scorers evaluate answers."""
    for name in _EVALUATED_LITERALS:
        importlib.import_module(f"reasoning_gym.{name}")
        vars(sys.modules[f"reasoning_gym.{name}"])["eval"] = ast.literal_eval


def _may_be_evaluated(dataset: str, answer: str) -> bool:
    """Whether the answer may be passed to the scorer; a scorer that evaluates it gets only arithmetic."""
    if dataset not in _EVALUATED_EXPRESSIONS:
        return True
    names = [name for name in _NAME.findall(answer) if len(name) > 1]
    is_arithmetic = _EXPRESSION.fullmatch(answer) is not None and all(map(_FUNCTIONS.fullmatch, names))
    return is_arithmetic and _POWER.search(answer) is None and re.search(r"\.\s*[^\W\d]", answer) is None
