"""A game of several turns: find a secret number from the hints "higher" and "lower"."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, PositiveInt

from lucidrl.data.datasets import Prompt
from lucidrl.data.reading import last_number
from lucidrl.envs.text.interfaces import EnvReply, EnvRequest
from lucidrl.utils.config import Config


class GuessingConfig(Config):
    """Size of the game."""

    max_number: int = Field(default=100, ge=2)
    """Secrets are 1 to this number."""
    max_turns: PositiveInt = 7
    """Maximum number of guesses; bisection of 1 to 100 needs at most 7."""


class GuessingEnv:
    """Reward 1 for guessing the secret in the first turn, 1/max_turns less for each further turn, 0 if not found."""

    def __init__(self, config: GuessingConfig) -> None:
        self._config = config

    def prompts(self) -> list[Prompt]:
        """One game per secret; all have the same prompt."""
        opening = (
            f"I think of a number from 1 to {self._config.max_number}. Guess it in at most {self._config.max_turns} "
            "turns. After each guess I say higher or lower. Reply with one number."
        )
        return [
            Prompt(f"secret-{secret}", ({"role": "user", "content": opening},), {"secret": secret})
            for secret in range(1, self._config.max_number + 1)
        ]

    async def step(self, batch: Sequence[EnvRequest]) -> list[EnvReply]:
        return [self._score(request) for request in batch]

    def _score(self, request: EnvRequest) -> EnvReply:
        secret, max_turns = request.info["secret"], self._config.max_turns
        guess = last_number(request.completion)
        if guess == secret and request.turn <= max_turns:
            reward = 1 - (request.turn - 1) / max_turns
            return EnvReply(reward, metrics={"found": 1.0, "turns": float(request.turn)})
        if request.turn >= max_turns:
            return EnvReply(reward=0.0, metrics={"found": 0.0, "turns": float(request.turn)})
        if guess is None:
            observation = f"That is not a number. Reply with one number from 1 to {self._config.max_number}."
        else:
            observation = "higher" if guess < secret else "lower"
        return EnvReply(reward=0.0, done=False, messages=({"role": "user", "content": observation},))
