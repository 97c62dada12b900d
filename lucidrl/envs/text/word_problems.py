"""Short English word problems with one or two operations, made by a generator."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from pydantic import Field, PositiveInt

from lucidrl.data.datasets import Prompt
from lucidrl.data.interfaces import ChatMessage
from lucidrl.data.reading import ParseFailure, last_boxed, last_number
from lucidrl.envs.text.interfaces import EnvReply, EnvRequest
from lucidrl.utils.config import Config

NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hiro", "Ines", "Jonas", "Kofi", "Lena")
THINGS = ("apples", "books", "cards", "coins", "eggs", "flowers", "marbles", "pencils", "shells", "stamps")
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}


@dataclass(frozen=True)
class Story:
    """A problem without its numbers, names and things."""

    operations: str
    """Applied from left to right: `*-` is a * b - c."""
    text: str
    """`{a}`, `{b}` and `{c}` are the numbers."""


STORIES = (
    Story("+", "{name} has {a} {things}. {friend} gives {name} {b} more. How many {things} does {name} have now?"),
    Story("+", "{name} counts {a} {things} on Monday and {b} on Tuesday. How many {things} is that in total?"),
    Story("-", "{name} has {a} {things} and gives {b} of them to {friend}. How many {things} does {name} have left?"),
    Story("-", "{name} has {a} {things}. {friend} has {b} {things}. How many more {things} does {name} have?"),
    Story("*", "{name} fills {a} boxes with {b} {things} each. How many {things} are in the boxes?"),
    Story("*", "{name} buys {b} {things} every day. How many {things} does {name} buy in {a} days?"),
    Story("/", "{name} shares {a} {things} equally among {b} children. How many {things} does each child get?"),
    Story("/", "{name} packs {a} {things} into bags of {b}. How many bags does {name} fill?"),
    Story("+-", "{name} has {a} {things}, finds {b} more and loses {c}. How many {things} does {name} have now?"),
    Story("-+", "{name} has {a} {things}, gives {b} to {friend} and buys {c}. How many {things} does {name} have now?"),
    Story(
        "*+", "{name} has {c} {things} and buys {a} bags with {b} {things} each. How many {things} is that in total?"
    ),
    Story(
        "*-", "{name} buys {a} boxes of {b} {things} and gives {c} {things} to {friend}. How many {things} are left?"
    ),
)


class WordProblemsConfig(Config):
    """Problems, their prompts, and how completions are scored."""

    num_problems: PositiveInt = 5_000
    """Number of problems, in training and validation together."""
    max_operations: Literal[1, 2] = 2
    """Most operations per problem."""
    max_number: int = Field(default=50, ge=10, le=1_000)
    """All numbers are from 2 to this one, intermediate and final results included."""
    seed: int = 0
    """Seed of the generator."""
    system_prompt: str | None = (
        r"Solve the problem. Write the calculation, then the result in \boxed{}. Example: 3 + 4 = 7, so \boxed{7}"
    )
    """System message before each problem, if any."""
    format_reward: float = Field(default=0.1, ge=0, lt=1)
    r"""Reward of a completion whose last `\boxed{}` holds a wrong number."""


class WordProblemsEnv:
    r"""One turn; reward 1 if the number in the last `\boxed{}` is the result, `format_reward` if it is another number.

    The `answer` of a prompt is a worked solution that ends with `\boxed{}`, for supervised fine-tuning. Metrics:
    `accuracy`, and `boxed` (the last `\boxed{}` holds a number).
    """

    def __init__(self, config: WordProblemsConfig) -> None:
        self._config = config

    def prompts(self) -> list[Prompt]:
        """The problems; the same ones for the same settings."""
        generator = random.Random(self._config.seed)
        stories = [story for story in STORIES if len(story.operations) <= self._config.max_operations]
        return [self._prompt(number, generator, stories) for number in range(self._config.num_problems)]

    async def step(self, batch: Sequence[EnvRequest]) -> list[EnvReply]:
        return [self._score(request) for request in batch]

    def _prompt(self, number: int, generator: random.Random, stories: Sequence[Story]) -> Prompt:
        story = generator.choice(stories)
        numbers, results = _draw(story.operations, self._config.max_number, generator)
        name, friend = generator.sample(NAMES, 2)
        text = story.text.format(
            name=name, friend=friend, things=generator.choice(THINGS), **dict(zip("abc", numbers, strict=False))
        )
        messages: list[ChatMessage] = []
        if self._config.system_prompt is not None:
            messages.append({"role": "system", "content": self._config.system_prompt})
        messages.append({"role": "user", "content": text})
        lines = [
            f"{left} {operation} {right} = {result}"
            for left, operation, right, result in zip(
                [numbers[0], *results], story.operations, numbers[1:], results, strict=False
            )
        ]
        info = {
            "answer": "\n".join([*lines, rf"\boxed{{{results[-1]}}}"]),
            "result": results[-1],
            "operations": len(story.operations),
        }
        return Prompt(f"problem-{number}", tuple(messages), info, split_key=_calculation(story.operations, numbers))

    def _score(self, request: EnvRequest) -> EnvReply:
        number = _boxed_number(request.completion)
        is_right = number == request.info["result"]
        reward = 1.0 if is_right else self._config.format_reward if number is not None else 0.0
        metrics = {"accuracy": float(is_right), "boxed": float(number is not None)}
        return EnvReply(reward, metrics=metrics, answer=None if number is None else f"{number.normalize():f}")


def _draw(operations: str, max_number: int, generator: random.Random) -> tuple[list[int], list[int]]:
    """Draw numbers until every result is an integer within the bounds; return the numbers and the results."""
    while True:
        numbers = [generator.randint(2, max_number) for _ in range(len(operations) + 1)]
        results: list[int] = []
        value = numbers[0]
        for operation, operand in zip(operations, numbers[1:], strict=True):
            if operation == "/" and value % operand:
                break
            value = OPERATIONS[operation](value, operand)
            if not 2 <= value <= max_number:
                break
            results.append(value)
        else:
            return numbers, results


def _calculation(operations: str, numbers: Sequence[int]) -> str:
    """The calculation, as split key: all problems about 12 + 30 or 30 + 12 are held out together."""
    first = sorted(numbers[:2]) if operations[0] in "+*" else numbers[:2]
    return f"{operations} {' '.join(map(str, [*first, *numbers[2:]]))}"


def _boxed_number(completion: str) -> Decimal | None:
    r"""The number in the last `\boxed{}`, or None."""
    try:
        boxed = last_boxed(completion)
    except ParseFailure:
        return None
    return None if boxed is None else last_number(boxed)
