"""A generator that new processes can import, with faults that a test switches on and off."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.models.generation.generation_worker import GenerationWorker
from lucidrl.models.lora import adapted_layers
from lucidrl.models.policy.config import PolicyConfig

SKIPPED, PERMUTED, NOT_SENT, STALE_HEAD = "skipped refit", "permuted tensor", "tensor not sent", "stale head"
TEMPERATURE, REPORTED_TRUNCATED, TOP_P_FORGOTTEN = "temperature lost", "reported truncated", "top-p forgotten"
FAULTS = (SKIPPED, PERMUTED, NOT_SENT, STALE_HEAD, TEMPERATURE, REPORTED_TRUNCATED, TOP_P_FORGOTTEN)
"""Those of a policy without adapters."""
ADAPTER_SCALE = "wrong scale of an adapter"
VICTIM = "model.layers.1.mlp.up_proj.weight"
HEAD = "model.embed_tokens.weight"


class FaultyGenerator(GenerationWorker):
    """Commits refits and samples with the chosen fault."""

    fault = ""

    def inject(self, fault: str) -> None:
        """Switch a fault on; "" switches all off."""
        self.fault = fault
        self.receiver.weights = self._true_weights
        config = self._config_of_generator
        self.engine.config = config.model_copy(update={"top_p": 1.0}) if fault == TOP_P_FORGOTTEN else config
        for layer in adapted_layers(self.engine.model).values():
            assert self._lora is not None
            layer.scaling = self._lora.alpha if fault == ADAPTER_SCALE else self._lora.scaling

    def __init__(self, config: PolicyConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._lora = config.lora
        self._config_of_generator = self.engine.config
        self._true_weights = self.receiver.weights

    def commit_refit(self, version: int) -> None:
        if self.fault == SKIPPED:
            self.receiver.version = self.engine.policy_version = version
            return
        live = self.receiver._live
        before = {name: parameter.data.clone() for name, parameter in live.items()}
        super().commit_refit(version)
        if self.fault == PERMUTED:
            live[VICTIM].data = live[VICTIM].data.flip(0)
        elif self.fault == NOT_SENT:
            live[VICTIM].data = before[VICTIM]
        elif self.fault == STALE_HEAD:  # an engine whose loader received everything, but that keeps its own head
            received = [(name, parameter.data.clone()) for name, parameter in live.items()]
            self.receiver.weights = lambda: received
            live[HEAD].data = before[HEAD]

    def report_refit(self) -> Any:
        with self._faulty_temperature():
            return super().report_refit()

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        with self._faulty_temperature():
            output = super().generate(data, greedy)
        if self.fault == REPORTED_TRUNCATED:
            output["logprobs"] = self._renormalised(output)
        return output

    def _faulty_temperature(self) -> Any:
        return _Temperature(self.engine.model, self.fault == TEMPERATURE)

    @torch.no_grad()
    def _renormalised(self, output: BatchedDataDict[Any]) -> torch.Tensor:
        """Divide the probability of each sampled token by the probability of all tokens that top-p keeps."""
        ids, lengths = output["output_ids"], output["unpadded_sequence_lengths"]
        logits = self.engine.model(ids, lengths, frozenset({"logits"})).logits.double()
        result = output["logprobs"].clone()
        for row, position in self._sampled(output):
            probabilities = logits[row, position - 1].softmax(-1).sort(descending=True).values.tolist()
            mass = 0.0
            for probability in probabilities:
                if mass >= self.engine.config.top_p:
                    break
                mass += probability
            result[row, position] -= torch.tensor(mass).log()
        return result

    def _sampled(self, output: BatchedDataDict[Any]) -> Iterable[tuple[int, int]]:
        for row, (end, count) in enumerate(
            zip(output["unpadded_sequence_lengths"].tolist(), output["generation_lengths"].tolist(), strict=True)
        ):
            yield from ((row, position) for position in range(end - count, end))


class _Temperature:
    """Context in which a model has temperature 1."""

    def __init__(self, model: Any, is_on: bool) -> None:
        self._model, self._is_on, self._before = model, is_on, model.transform

    def __enter__(self) -> None:
        if self._is_on:
            self._model.transform = replace(self._before, temperature=1.0)

    def __exit__(self, *error: object) -> None:
        self._model.transform = self._before
