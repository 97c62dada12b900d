"""A replica of vLLM that new processes can import, with faults that a test switches on and off."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from lucidrl.models.generation.vllm_worker import VllmWorker
from tests.unit.models.policy import faulty_generators as faulty

FAULTS = (
    faulty.SKIPPED,
    faulty.PERMUTED,
    faulty.NOT_SENT,
    faulty.STALE_HEAD,
    faulty.TEMPERATURE,
    faulty.TOP_P_FORGOTTEN,
)
TIED_HEAD = "lm_head.weight"


class FaultyVllm(VllmWorker):
    """Loads weights and samples with the chosen fault."""

    fault = ""

    def inject(self, fault: str) -> None:
        """Switch a fault on; "" switches all off."""
        if (fault == faulty.TEMPERATURE) != (self.fault == faulty.TEMPERATURE):
            temperature = self.engine._config.temperature
            factor = temperature if fault == faulty.TEMPERATURE else 1 / temperature
            self.engine._engine.apply_model(partial(_multiply_logits, factor))
        is_forgotten = fault == faulty.TOP_P_FORGOTTEN
        self._own_config = getattr(self, "_own_config", self.engine._config)
        changed = self._own_config.model_copy(update={"top_p": 1.0})
        self.engine._config = changed if is_forgotten else self._own_config
        self.fault = fault

    def commit_refit(self, version: int) -> None:
        loaded = self.receiver._loaded
        super().commit_refit(version)
        if self.fault == faulty.SKIPPED:
            self.receiver._loaded = loaded
        elif self.fault == faulty.NOT_SENT:
            self.receiver._loaded = {n: t for n, t in self.receiver._loaded.items() if n != faulty.VICTIM}
        elif self.fault == faulty.PERMUTED:
            old = self.receiver._loaded
            self.receiver._loaded = {n: t.flip(0) if n == faulty.VICTIM else t for n, t in old.items()}

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self.fault == faulty.SKIPPED:
            return
        left_out = {faulty.NOT_SENT: faulty.VICTIM, faulty.STALE_HEAD: TIED_HEAD}.get(self.fault)
        changed = ((name, tensor) for name, tensor in weights if name != left_out)
        if self.fault == faulty.PERMUTED:
            changed = ((name, tensor.flip(0) if name == faulty.VICTIM else tensor) for name, tensor in changed)
        super()._load(changed)


def _multiply_logits(factor: float, model: torch.nn.Module) -> None:
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    def multiply(_module: Any, _inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits * factor

    for module in model.modules():
        if isinstance(module, LogitsProcessor):
            module.register_forward_hook(multiply)
