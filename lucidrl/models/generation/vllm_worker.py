"""A replica of vLLM in a separate process."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.models.generation.interfaces import GenerationDatumSpec, GenerationOutputSpec
from lucidrl.models.generation.receiver import EngineReceiver
from lucidrl.models.generation.replica import Replica, check_gpu
from lucidrl.models.generation.vllm import VllmEngine
from lucidrl.models.loading import DTYPES, empty_model
from lucidrl.models.policy.config import PolicyConfig

_log = logging.getLogger(__name__)

LOAD_FAILED = 70
"""Exit code of a process whose engine holds a mixture of two versions."""


class VllmWorker(Replica):
    """A replica that generates with vLLM. Arguments are those of `GenerationWorker`.

    A refit stages all weights of a version; vLLM's loader reads them at the commit. If that fails, the process exits,
    because the engine may hold weights of two versions; the driver then restarts the replica and repeats the refit.
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
        check_gpu(gpu)
        has_gpu = torch.cuda.is_available()
        if has_gpu:
            torch.cuda.set_device(gpu)
        super().__init__(number, tokenizer)
        self.engine: VllmEngine = VllmEngine(config, tokenizer, seed, gpu if has_gpu else None)
        model = empty_model(config.model_name, DTYPES[config.precision], config.trust_remote_code)
        self.receiver: EngineReceiver = EngineReceiver(model, self._device, self._device_id, self._load)

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete the prompts with the weights of the last refit; see `VllmEngine`."""
        return self.engine.generate(data, greedy)

    def score(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.engine.score(tokens)

    def shutdown(self) -> None:
        super().shutdown()
        self.engine.shutdown()

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        try:
            self.engine.load(weights)
        except BaseException:
            _log.exception("vLLM failed to load weights; this process exits, because it may hold two versions")
            logging.shutdown()
            os._exit(LOAD_FAILED)
