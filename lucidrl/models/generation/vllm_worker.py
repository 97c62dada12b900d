"""A replica of vLLM in a separate process."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.models.generation.interfaces import GenerationDatumSpec, GenerationOutputSpec
from lucidrl.models.generation.replica import Replica, check_gpus
from lucidrl.models.generation.vllm import VllmEngine
from lucidrl.models.policy.config import PolicyConfig

_log = logging.getLogger(__name__)

LOAD_FAILED = 70
"""Exit code of a process whose engine holds a mixture of two versions."""


class VllmWorker(Replica):
    """A replica that generates with vLLM. Arguments are those of `GenerationWorker`.

    A refit stages all weights of a version in each tensor parallel rank; vLLM's loader reads them at the commit. If
    that fails on a rank, the process exits, because the engine may hold weights of two versions; the driver then
    restarts the replica and repeats the refit.
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
        size = config.generation.ranks_per_replica
        check_gpus(gpu, size)
        has_gpus = torch.cuda.is_available()
        if has_gpus and size == 1:  # with more ranks, this process computes nothing
            torch.cuda.set_device(gpu)
        super().__init__(number, tokenizer)
        gpus = range(gpu, gpu + size) if has_gpus else None
        self.engine: VllmEngine = VllmEngine(config, tokenizer, seed, gpus)

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete the prompts with the weights of the last refit; see `VllmEngine`."""
        return self.engine.generate(data, greedy)

    def score(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.engine.score(tokens)

    def release_memory(self) -> None:
        self.engine.sleep()

    def on_ranks(self, method: str, *args: Any) -> list[Any]:
        if method != "commit":
            return self.engine.on_ranks(method, *args)
        try:
            return self.engine.on_ranks(method, *args)
        except BaseException:
            _log.exception("vLLM failed to load weights; this process exits, because it may hold two versions")
            logging.shutdown()
            os._exit(LOAD_FAILED)

    def shutdown(self) -> None:
        super().shutdown()
        self.engine.shutdown()
