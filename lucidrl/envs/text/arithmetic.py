"""Arithmetic problems with one right answer."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from lucidrl.data.datasets import Prompt
from lucidrl.data.interfaces import ChatMessage
from lucidrl.data.reading import last_number
from lucidrl.envs.text.interfaces import EnvReply, EnvRequest
from lucidrl.utils.config import Config

Operation = Literal["+", "-", "*"]
OPERATIONS: dict[Operation, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class ArithmeticConfig(Config):
    """Problems, their prompts, and how completions are scored."""

    operations: tuple[Operation, ...] = Field(default=("+",), min_length=1)
    """Operations, each on all pairs of operands."""
    max_operand: NonNegativeInt = 99
    """Operands are 0 to this number."""
    num_problems: PositiveInt = 100_000
    """Maximum number of problems; if there are more, a random sample of this size."""
    seed: int = 0
    """Seed of the random sample."""
    template: str = "{problem}="
    """Text of the prompt; `{problem}` stands for the problem, such as 12+30."""
    system_prompt: str | None = None
    """System message before each problem, if any."""
    match: Literal["exact", "last_number"] = "exact"
    """`exact`: the completion must be the number alone; `last_number`: the last number in it counts."""

    @field_validator("operations")
    @classmethod
    def _each_once(cls, operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
        if len(set(operations)) < len(operations):
            raise ValueError(f"{list(operations)} names an operation twice; name each once")
        return operations

    @field_validator("template")
    @classmethod
    def _has_problem(cls, template: str) -> str:
        if "{problem}" not in template:
            raise ValueError(f"{template!r} has no {{problem}}; write it where the problem belongs")
        return template


class ArithmeticEnv:
    """One turn; reward 1 for the right number, otherwise 0."""

    def __init__(self, config: ArithmeticConfig) -> None:
        self._config = config

    def prompts(self) -> list[Prompt]:
        """All problems in a fixed order, or a random sample of `num_problems`."""
        config = self._config
        num_operands = config.max_operand + 1
        numbers: Sequence[int] = range(len(config.operations) * num_operands**2)
        if len(numbers) > config.num_problems:
            numbers = sorted(random.Random(config.seed).sample(numbers, config.num_problems))
        prompts = []
        for number in numbers:
            pair, which = divmod(number, len(config.operations))
            left, right = divmod(pair, num_operands)
            prompts.append(self._prompt(left, config.operations[which], right))
        return prompts

    async def step(self, batch: Sequence[EnvRequest]) -> list[EnvReply]:
        return [self._score(request) for request in batch]

    def _prompt(self, left: int, operation: Operation, right: int) -> Prompt:
        problem = f"{left}{operation}{right}"
        messages: list[ChatMessage] = []
        if self._config.system_prompt is not None:
            messages.append({"role": "system", "content": self._config.system_prompt})
        messages.append({"role": "user", "content": self._config.template.replace("{problem}", problem)})
        return Prompt(
            prompt_id=problem,
            messages=tuple(messages),
            info={"answer": OPERATIONS[operation](left, right)},
            # 30+12 reveals 12+30: a pair is held out in both orders.
            split_key=f"{min(left, right)}{operation}{max(left, right)}",
        )

    def _score(self, request: EnvRequest) -> EnvReply:
        expected = request.info["answer"]
        if self._config.match == "exact":
            answer: str | None = request.completion.strip()
            right = answer == str(expected)
        else:
            number = last_number(request.completion)
            answer = None if number is None else f"{number.normalize():f}"
            right = number == expected
        return EnvReply(reward=float(right), metrics={"accuracy": float(right)}, answer=answer)
