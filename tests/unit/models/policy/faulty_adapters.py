"""A generator that new processes can import, with a wrong scale of its adapters that a test switches on."""

from __future__ import annotations

from lucidrl.models.generation.generation_worker import GenerationWorker
from lucidrl.models.lora import adapted_layers


class WronglyScaledGenerator(GenerationWorker):
    def rescale(self, scaling: float) -> None:
        for layer in adapted_layers(self.engine.model).values():
            layer.scaling = scaling
