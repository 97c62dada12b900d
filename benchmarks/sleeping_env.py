"""An environment that takes time: it sleeps as remote tools or sandboxes do, mostly briefly, at times for seconds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from lucidrl.envs.text.arithmetic import ArithmeticConfig, ArithmeticEnv
from lucidrl.envs.text.interfaces import EnvReply, EnvRequest

SHORTEST_S, LONGEST_S = 0.1, 3.0


class SleepingEnv(ArithmeticEnv):
    """Additions; every sample sleeps 0.1 to 3 seconds, drawn from a long-tailed distribution by its name."""

    def __init__(self) -> None:
        super().__init__(ArithmeticConfig(operations=("+",), max_operand=99))

    async def step(self, batch: Sequence[EnvRequest]) -> list[EnvReply]:
        return list(await asyncio.gather(*map(self._slow, batch)))

    async def _slow(self, request: EnvRequest) -> EnvReply:
        draw = random.Random(request.sample_id)
        await asyncio.sleep(min(LONGEST_S, SHORTEST_S * draw.paretovariate(1.0)))
        [reply] = await super().step([request])
        return reply
