"""Base of generator replicas: place, profiling, and the calls of a refit. It joins no process group of the policy.

Refit methods return a problem as text. They do not raise an error, because an error ends the process, and after a
failed refit the process can still generate with its current weights.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.checksums import checksums_of
from lucidrl.distributed.weight_buckets import BucketHandle, TensorInfo, free_bytes
from lucidrl.distributed.weight_group import WeightGroup, problem_of
from lucidrl.distributed.workers.place import Place, place_with
from lucidrl.errors import ConfigError, RefitError
from lucidrl.models.generation.interfaces import (
    Completion,
    Engine,
    GenerationDatumSpec,
    GenerationOutputSpec,
    GenerationRequest,
    RefitReport,
)
from lucidrl.models.generation.probe import probe_tokens
from lucidrl.models.generation.receiver import StagedWeights
from lucidrl.models.policy.introspection import device_id
from lucidrl.profiling.recording import Recording
from lucidrl.profiling.spans import span
from lucidrl.utils.device import default_device
from lucidrl.utils.nsys import GENERATION, worker_name
from lucidrl.utils.recorded import Recorded


class Replica(Recorded, ABC):
    """One generator replica; a subclass sets `engine` and `receiver`, generates and scores.

    Args:
        number: index of this replica.
        tokenizer: chooses the tokens of the probe text.
    """

    engine: Engine
    receiver: StagedWeights

    def __init__(self, number: int, tokenizer: PreTrainedTokenizerBase):
        self._probe = probe_tokens(tokenizer)
        self._device = default_device()
        # On a CPU, the policy offers weights to all processes of a node under local rank 0.
        self._device_id = device_id(self._device, 0)
        self._recording = Recording(worker_name(GENERATION, number))
        self._weight_group: WeightGroup | None = None
        self._announced: list[TensorInfo] = []

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

    def report_place(self) -> Place:
        """Return the node and device of this process."""
        return place_with(self._device_id)

    def begin_refit(self, version: int) -> float:
        """Prepare to take the weights of a version; return the free bytes of this process's device."""
        self.receiver.begin(version)
        return float(free_bytes(self._device))

    def take_weights(self, handles: Mapping[str, tuple[bool, BucketHandle]]) -> str | None:
        """Take a packed bucket; return the problem, if any."""
        return problem_of(lambda: self.receiver.take(handles))

    def prepare_collective(self, info: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Set the tensors that the policy will broadcast; `info` is the result of `prepare_info_for_collective`."""
        self._announced = [TensorInfo(name, tuple(shape), dtype) for name, (shape, dtype) in info.items()]

    def join_collective(self, ip: str, port: int, rank: int, world_size: int, timeout_s: float) -> str | None:
        """Leave the current weight group and join a new one, see `WeightGroup.join`; return the problem, if any."""

        def join() -> None:
            self._leave_collective()
            self._weight_group = WeightGroup.join(ip, port, rank, world_size, self._device, timeout_s)

        return problem_of(join)

    def receive_weights(self) -> str | None:
        """Receive the weights that the policy broadcasts; return the problem, if any."""
        group = self._weight_group
        if group is None:
            raise RefitError(
                "receive_weights was called before join_collective; call prepare_collective and join_collective first"
            )
        return problem_of(lambda: group.receive(self._announced, self.receiver))

    def commit_refit(self, version: int) -> None:
        """Use the new weights from the next token on; see `Engine.updating`."""
        with self.engine.updating(version):
            self.receiver.commit(version)

    @span("guard")
    def report_refit(self) -> RefitReport:
        """Return version and checksums of the weights in use, and the log-probabilities of the probe text."""
        return RefitReport(self.receiver.version, checksums_of(self.receiver.weights()), self.score(self._probe))

    def shutdown(self) -> None:
        """Stop profiling and leave the policy's weight group; may be called twice."""
        self.stop_gpu_profiling()
        self._leave_collective()

    def _leave_collective(self) -> None:
        if self._weight_group is not None:
            self._weight_group.close()
            self._weight_group = None


def check_gpu(gpu: int) -> None:
    """Raise ConfigError if there are GPUs, but not the one with the index `gpu`."""
    if torch.cuda.is_available() and gpu >= torch.cuda.device_count():
        raise ConfigError(
            f"there is no GPU {gpu} for a generator: this machine has {torch.cuda.device_count()}; each generator "
            "needs a GPU, and with policy.generation.refit=collective one that no rank of the policy uses; lower "
            "policy.generation.num_workers"
        )
