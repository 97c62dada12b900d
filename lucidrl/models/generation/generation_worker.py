"""A replica of the built-in engine in a separate process, with a copy of the policy's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.models.generation.builtin import BuiltinGenerator
from lucidrl.models.generation.interfaces import GenerationDatumSpec, GenerationOutputSpec
from lucidrl.models.generation.receiver import WeightReceiver
from lucidrl.models.generation.refit_rank import RefitRank
from lucidrl.models.generation.replica import Replica, check_gpus
from lucidrl.models.loading import DTYPES, load_model
from lucidrl.models.logprobs import LogprobModel
from lucidrl.models.lora import add_adapters
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.introspection import device_id
from lucidrl.utils.device import default_device


class GenerationWorker(Replica):
    """A replica that computes with the forward pass that is trained.

    The replica loads the model as the policy does: a refit sends only the trained weights, without buffers, and the
    loaded weights are version 0.

    Args:
        config: config of the policy.
        seed: seed of the weights of an untrained model, and of the sampling of rows without `draw_keys`.
        number: index of this replica.
        gpu: index of the replica's GPU among the visible GPUs; ignored without a GPU.
    """

    def __init__(
        self,
        config: PolicyConfig,
        tokenizer: PreTrainedTokenizerBase,
        seed: int = 0,
        *,
        number: int = 0,
        gpu: int = 0,
    ):
        check_gpus(gpu)
        if torch.cuda.is_available():
            torch.cuda.set_device(gpu)
        super().__init__(number, tokenizer)
        self._device = default_device()
        model = load_model(
            config.model_name, DTYPES[config.precision], seed=seed, trust_remote_code=config.trust_remote_code
        )
        if config.lora is not None:
            add_adapters(model, config.lora, seed)
        sent = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        scorer = LogprobModel(model.requires_grad_(False), config.generation.temperature).to(self._device)
        self._generator = BuiltinGenerator(scorer, tokenizer, config.generation, seed)
        self.engine = self._generator.engine
        # On a CPU, the policy offers weights to all processes of a node under local rank 0.
        name = device_id(self._device, 0)
        self.receiver: WeightReceiver = WeightReceiver(model, name, sent)
        self._rank = RefitRank(self.receiver, self._device, name)

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete the prompts with the weights of the last refit; see `BuiltinGenerator`."""
        return self._generator.generate(data, greedy)

    @torch.no_grad()
    def score(self, tokens: Sequence[int]) -> torch.Tensor:
        row = torch.tensor([tokens], device=self._device)
        outputs = self._generator.model(row, torch.tensor([len(tokens)], device=self._device))
        return outputs.logprobs[0, 1:].float().cpu()

    def on_ranks(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self._rank, method)(*args)]
