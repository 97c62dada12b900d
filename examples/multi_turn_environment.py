r"""A text environment with several turns: an addition, and a second attempt after a wrong result.

From the root of the repository:

    lucidrl grpo env.name=examples.multi_turn_environment:SecondAttempt collector.max_turns=2 grpo.max_steps=20

The environment repeats the problem after a wrong completion. A correct first attempt earns 1, a correct second attempt
half of it. `samples/` of the run folder shows the messages of both turns.
"""

import random
from collections.abc import Sequence
from functools import partial

from lucidrl.data.datasets import Prompt
from lucidrl.envs.text.interfaces import EnvReply, EnvRequest

MAX_TURNS = 2


class SecondAttempt:
    """Additions of two numbers, with one more attempt.

    Args:
        num_problems: number of different problems.
        max_operand: the largest number to add.
    """

    def __init__(self, num_problems: int = 500, max_operand: int = 99):
        self._num_problems = num_problems
        self._max_operand = max_operand

    def prompts(self) -> list[Prompt]:
        """The same problems in every run; `info` carries the reference answer to `step`."""
        draw = random.Random(0)
        operand = partial(draw.randint, 0, self._max_operand)
        pairs = {(operand(), operand()) for _ in range(self._num_problems)}
        return [
            Prompt(
                prompt_id=f"{a}+{b}",
                messages=({"role": "user", "content": f"{a}+{b}="},),
                info={"answer": str(a + b), "problem": f"{a}+{b}="},
            )
            for a, b in sorted(pairs)
        ]

    async def step(self, batch: Sequence[EnvRequest]) -> list[EnvReply]:
        return [self._score(request) for request in batch]

    def _score(self, request: EnvRequest) -> EnvReply:
        # A request carries all state of its sample, so `self` stays unchanged and batches may come in any order.
        is_correct = request.completion.strip() == request.info["answer"]
        if is_correct or request.turn == MAX_TURNS:
            reward = float(is_correct) / request.turn
            return EnvReply(reward, metrics={"accuracy": float(is_correct), "attempts": float(request.turn)})
        return EnvReply(reward=0.0, done=False, messages=({"role": "user", "content": request.info["problem"]},))
