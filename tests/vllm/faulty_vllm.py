"""A replica of vLLM that new processes can import, with faults that a test switches on and off."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from lucidrl.models.generation.receiver import EngineReceiver
from lucidrl.models.generation.vllm_worker import VllmWorker
from tests.unit.models.policy import faulty_generators as faulty

FAULTS_OF_A_RANK = (faulty.SKIPPED, faulty.PERMUTED, faulty.NOT_SENT, faulty.STALE_HEAD, faulty.TEMPERATURE)
FAULTS = (*FAULTS_OF_A_RANK, faulty.TOP_P_FORGOTTEN)
TIED_HEAD = "lm_head.weight"


class FaultyVllm(VllmWorker):
    """Samples with the chosen fault; its ranks load weights with it."""

    def inject(self, fault: str, only_rank: int | None = None) -> None:
        """Switch a fault on, on all ranks or one; "" switches all off."""
        self.engine._engine.collective_rpc(partial(_inject, fault, self.engine._config.temperature, only_rank))
        is_forgotten = fault == faulty.TOP_P_FORGOTTEN
        self._own_config = getattr(self, "_own_config", self.engine._config)
        changed = self._own_config.model_copy(update={"top_p": 1.0})
        self.engine._config = changed if is_forgotten else self._own_config

    def num_threads_of_ranks(self) -> list[int]:
        found: list[int] = self.engine._engine.collective_rpc(_num_threads)
        return found


class FaultyReceiver(EngineReceiver):
    """Hands weights to the loader with the chosen fault, and reports what the loader got."""

    fault = ""

    def _use(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.fault == faulty.SKIPPED:
            return weights
        unused = super()._use(weights)
        if self.fault == faulty.NOT_SENT:
            self._loaded = {name: tensor for name, tensor in weights.items() if name != faulty.VICTIM}
        elif self.fault == faulty.PERMUTED:
            self._loaded = {name: _permuted(name, tensor) for name, tensor in weights.items()}
        return unused

    def altered(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        left_out = {faulty.NOT_SENT: faulty.VICTIM, faulty.STALE_HEAD: TIED_HEAD}.get(self.fault)
        for name, tensor in weights:
            if name != left_out:
                yield name, _permuted(name, tensor) if self.fault == faulty.PERMUTED else tensor


def _permuted(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flip(0) if name == faulty.VICTIM else tensor


def _num_threads(_rank: Any) -> int:
    return torch.get_num_threads()


def _inject(fault: str, temperature: float, only_rank: int | None, rank: Any) -> None:
    """Runs on every rank."""
    receiver = rank.refit_rank.receiver
    if not isinstance(receiver, FaultyReceiver):
        receiver.__class__ = FaultyReceiver
        receiver._load = lambda weights: rank.load_rank(receiver.altered(weights))
    before, receiver.fault = receiver.fault, fault if only_rank in (None, rank.rank) else ""
    if (receiver.fault == faulty.TEMPERATURE) != (before == faulty.TEMPERATURE):
        factor = temperature if receiver.fault == faulty.TEMPERATURE else 1 / temperature
        _multiply_logits(factor, rank.get_model())


def _multiply_logits(factor: float, model: torch.nn.Module) -> None:
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    def multiply(_module: Any, _inputs: Any, logits: torch.Tensor | None) -> torch.Tensor | None:
        return None if logits is None else logits * factor

    for module in model.modules():
        if isinstance(module, LogitsProcessor):
            module.register_forward_hook(multiply)
