"""Base of generator replicas: place, profiling, and the calls of a refit. It joins no process group of the policy.

Refit methods return a problem as text. They do not raise an error, because an error ends the process, and after a
failed refit the process can still generate with its current weights.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.weight_buckets import BucketHandle
from lucidrl.distributed.weight_group import problem_of
from lucidrl.distributed.workers.place import Place
from lucidrl.errors import ConfigError
from lucidrl.models.generation.interfaces import (
    Completion,
    Engine,
    GenerationDatumSpec,
    GenerationOutputSpec,
    GenerationRequest,
    RankWeights,
    RefitReport,
)
from lucidrl.models.generation.probe import probe_tokens
from lucidrl.profiling.recording import Recording
from lucidrl.profiling.spans import span
from lucidrl.utils.nsys import GENERATION, worker_name
from lucidrl.utils.recorded import Recorded


class Replica(Recorded, ABC):
    """One generator replica, of one or several tensor parallel ranks.

    A subclass sets `engine`, generates and scores, and calls the `RefitRank` of each of its ranks.

    Args:
        number: index of this replica.
        tokenizer: chooses the tokens of the probe text.
    """

    engine: Engine

    def __init__(self, number: int, tokenizer: PreTrainedTokenizerBase):
        self._probe = probe_tokens(tokenizer)
        self._recording = Recording(worker_name(GENERATION, number))

    @abstractmethod
    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete the prompts with the weights of the last refit."""

    @span("generate")
    def advance(
        self, requests: Sequence[GenerationRequest], aborted: Sequence[str], seconds: float
    ) -> list[Completion]:
        """Forget aborted requests, admit new ones, and decode until a request finishes or `seconds` have passed."""
        self.engine.abort(aborted)
        self.engine.submit(requests)
        end = time.monotonic() + seconds
        finished: list[Completion] = []
        while self.engine.num_unfinished and not finished and time.monotonic() < end:
            finished = self.engine.step()
        return finished

    @abstractmethod
    def score(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return float32 log-probabilities of all tokens but the first, of the full distribution at the temperature."""

    def release_memory(self) -> None:
        """Free what only generation needs, until the next refit or request; by default nothing."""

    @abstractmethod
    def on_ranks(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `RefitRank` on all ranks at the same time; return the results, by rank.

        Raises:
            RefitError: of a rank; the other ranks have finished the call too.
        """

    def report_places(self) -> list[Place]:
        """Return node and device of each rank."""
        return self.on_ranks("place")

    def begin_refit(self, version: int) -> float:
        """Prepare to take the weights of a version; return the free bytes of the device with the least."""
        return min(self.on_ranks("begin", version))

    def take_weights(self, handles: Mapping[str, tuple[bool, BucketHandle]]) -> str | None:
        """Take a packed bucket; return the problem, if any."""
        return problem_of(lambda: self.on_ranks("take", handles))

    def prepare_collective(self, info: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Set the tensors that the policy will broadcast; `info` is the result of `prepare_info_for_collective`."""
        self.on_ranks("announce", info)

    def join_collective(self, ip: str, port: int, first_rank: int, world_size: int, timeout_s: float) -> str | None:
        """Leave the current weight group and join a new one with consecutive ranks; return the problem, if any.

        See `WeightGroup.join`.
        """
        return problem_of(lambda: self.on_ranks("join", ip, port, first_rank, world_size, timeout_s))

    def receive_weights(self) -> str | None:
        """Receive the weights that the policy broadcasts; return the problem, if any."""
        return problem_of(lambda: self.on_ranks("receive"))

    def commit_refit(self, version: int) -> None:
        """Use the new weights from the next token on; see `Engine.updating`."""
        self.on_ranks("check", version)
        with self.engine.updating(version):
            self.on_ranks("commit", version)

    @span("guard")
    def report_refit(self) -> RefitReport:
        """Return version and checksums of the weights in use, and the log-probabilities of the probe text."""
        return RefitReport(self.report_weights(), self.score(self._probe))

    def report_weights(self) -> list[RankWeights]:
        """Return version and checksums of the weights that each rank uses."""
        return self.on_ranks("weights")

    def shutdown(self) -> None:
        """Stop profiling and leave the policy's weight group; may be called twice."""
        self.stop_gpu_profiling()
        self.on_ranks("leave")


def check_gpus(first: int, count: int = 1) -> None:
    """Raise ConfigError if there are GPUs, but not all of the `count` GPUs from the index `first` on."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found and first + count > found:
        needed = f"GPU {first}" if count == 1 else f"GPUs {first} to {first + count - 1}"
        raise ConfigError(
            f"a generator needs {needed}, counted from 0, but this machine has {found}; each generator needs "
            "policy.generation.vllm.tensor_parallel_size GPUs (default 1), and with policy.generation.refit=collective "
            "GPUs that no rank of the policy uses; lower policy.generation.num_workers or the tensor parallel size"
        )
