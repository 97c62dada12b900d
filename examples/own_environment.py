r"""A text environment of your own: sort the digits of a number.

From the root of the repository, with the embedded model and the environment's own prompts:

    lucidrl grpo env.name=examples.own_environment:SortDigits

with longer numbers, with the prompts of a file, with your own model:

    lucidrl grpo env.name=examples.own_environment:SortDigits env.kwargs.num_digits=4
    lucidrl grpo env.name=examples.own_environment:SortDigits data.file=examples/prompts.jsonl \
        data.validation_fraction=0.25
    lucidrl grpo env.name=examples.own_environment:SortDigits policy.model_name=FOLDER

The embedded model only knows additions, so the reward climbs slowly. It starts higher after some supervised steps on
the reference answers of the prompts:

    lucidrl sft env.name=examples.own_environment:SortDigits run.name=sort-sft sft.max_steps=60 \
        policy.optimizer.kwargs.lr=1e-3 policy.generation.max_new_tokens=8
    lucidrl grpo --preset demo env.name=examples.own_environment:SortDigits run.name=sort-grpo \
        policy.model_name=runs/sort-sft/checkpoints/step_60/policy
"""

import itertools
from collections.abc import Sequence

from lucidrl.data.datasets import Prompt
from lucidrl.envs.text.interfaces import EnvReply, EnvRequest


class SortDigits:
    """One turn: the reward is the share of digits in the right place, 0 for a completion of another length.

    Args:
        num_digits: digits per number.
    """

    def __init__(self, num_digits: int = 3):
        self._num_digits = num_digits

    def prompts(self) -> list[Prompt]:
        """All numbers of that many digits, leading zeros included."""
        numbers = ("".join(digits) for digits in itertools.product("0123456789", repeat=self._num_digits))
        return [
            Prompt(
                prompt_id=number,
                messages=({"role": "user", "content": f"sort {number}="},),
                info={"answer": "".join(sorted(number))},
            )
            for number in numbers
        ]

    async def step(self, batch: Sequence[EnvRequest]) -> list[EnvReply]:
        return [_score(request.completion.strip(), request.info["answer"]) for request in batch]


def _score(completion: str, expected: str) -> EnvReply:
    num_right = sum(given == wanted for given, wanted in zip(completion, expected, strict=False))
    reward = num_right / len(expected) if len(completion) == len(expected) else 0.0
    return EnvReply(reward, metrics={"accuracy": float(completion == expected)})
