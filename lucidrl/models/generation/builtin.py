"""The built-in generator: completes batches with the built-in engine, in the process of the trained model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

from transformers import PreTrainedTokenizerBase

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.generation.engine import BuiltinEngine, evaluating
from lucidrl.models.generation.interfaces import GenerationDatumSpec, GenerationOutputSpec
from lucidrl.models.generation.synchronous import complete_batch
from lucidrl.models.logprobs import LogprobModel
from lucidrl.profiling.spans import span


class BuiltinGenerator:
    """Completes prompts with a `LogprobModel`, which may be trained between calls.

    Args:
        model: every call uses its current weights; the caller sets their version with `update_weights`.
        seed: seed of the sampling of rows without `draw_keys`.
        whole_weights: context manager for each call, inside which the model has its full weights.
    """

    num_restarts = 0
    refit_gb_per_s = None

    def __init__(
        self,
        model: LogprobModel,
        tokenizer: PreTrainedTokenizerBase,
        config: GenerationConfig,
        seed: int = 0,
        whole_weights: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self.engine = BuiltinEngine(model, tokenizer, config)
        self._pad_id = int(tokenizer.pad_token_id)
        self._seed, self._whole_weights = seed, whole_weights
        self.calls = 0
        """Number of `generate` calls so far; with `seed`, it seeds the sampling of rows without `draw_keys`."""

    @property
    def model(self) -> LogprobModel:
        return self.engine.model

    @property
    def policy_version(self) -> int:
        """Version of the weights."""
        return self.engine.policy_version

    def update_weights(self, version: int) -> None:
        """Set the version of the weights. Nothing is copied: generator and policy share the model."""
        self.engine.forget()
        self.engine.policy_version = version

    def release_memory(self) -> None:
        """Free the cache; see `GenerationInterface`."""
        self.engine.forget()

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete every prompt; see `GenerationDatumSpec` and `GenerationOutputSpec`.

        The memory of the cache is freed at the end, unless a row may be continued by the next call.
        """
        if not _any(data, "continues"):
            self.engine.forget()
        is_kept = False
        try:
            with self._whole_weights(), span("generate"), evaluating(self.model):
                output = complete_batch(
                    self.engine, data, pad_id=self._pad_id, seed=self._seed, call=self.calls, greedy=greedy
                )
            self.calls += 1
            is_kept = _any(data, "may_continue")
            return output
        finally:
            if not is_kept:
                self.engine.forget()


def _any(data: BatchedDataDict[GenerationDatumSpec], column: Literal["continues", "may_continue"]) -> bool:
    return column in data and bool(data[column].any())
