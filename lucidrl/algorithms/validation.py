"""Validation: held-out prompts, answered greedily and judged by the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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

    def state_dict(self) -> dict[str, Any]:
        """What the environment keeps over a run; of the collector, validation uses nothing else that changes."""
        return self.collector.runner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.collector.runner.load_state_dict(state)
