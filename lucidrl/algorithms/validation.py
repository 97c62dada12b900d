"""Validation: held-out prompts, answered greedily and judged by the environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lucidrl.collectors.rollouts import Rollouts
from lucidrl.collectors.text import TextCollector
from lucidrl.data.datasets import Prompt
from lucidrl.profiling.spans import span


@dataclass(frozen=True)
class Validator:
    """Asks the same held-out prompts every time."""

    collector: TextCollector
    prompts: Sequence[Prompt]

    def run(self) -> Rollouts:
        with span("validate"):
            return self.collector.evaluate(self.prompts)
