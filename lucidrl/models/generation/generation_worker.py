"""A generator in a process of its own, with its own copy of the policy's weights."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from transformers import PreTrainedTokenizerBase

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.weight_buckets import BucketHandle, TensorInfo
from lucidrl.distributed.weight_group import WeightGroup
from lucidrl.errors import ConfigError, RefitError
from lucidrl.models.generation.builtin import BuiltinGenerator
from lucidrl.models.generation.interfaces import GenerationDatumSpec, GenerationOutputSpec
from lucidrl.models.generation.receiver import WeightReceiver
from lucidrl.models.loading import DTYPES, load_model
from lucidrl.models.logprobs import LogprobModel
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.introspection import device_id
from lucidrl.profiling.recording import Recording
from lucidrl.utils.device import default_device
from lucidrl.utils.nsys import GENERATION, is_recorded, worker_name


class GenerationWorker:
    """One of the generators of a policy. They do not know each other, and join no process group of the policy.

    The model is loaded as the policy's is: that gives the buffers that are not sent, and weights to compute with before
    the first refit, version 0.

    Args:
        config: of the policy.
        seed: of the weights of an untrained model, and of draws without keys, which differ between generators.
        first_gpu: number of the first generator's GPU on this machine, where there are any.
    """

    def __init__(self, config: PolicyConfig, tokenizer: PreTrainedTokenizerBase, seed: int = 0, first_gpu: int = 0):
        number = int(os.environ.get("LOCAL_RANK", "0"))
        if torch.cuda.is_available():
            _use_gpu(first_gpu + number)
        device = default_device()
        model = load_model(
            config.model_name, DTYPES[config.precision], seed=seed, trust_remote_code=config.trust_remote_code
        )
        scorer = LogprobModel(model.requires_grad_(False), config.generation.temperature).to(device)
        self._device = device
        self._recording = Recording(worker_name(GENERATION, number))
        self._weight_group: WeightGroup | None = None
        self._announced: list[TensorInfo] = []
        self._generator = BuiltinGenerator(scorer, tokenizer, config.generation, seed + number)
        # On a CPU, all processes of the machine find the weights under the number of the first.
        self.receiver = WeightReceiver(model, device_id(device, number if device.type == "cuda" else 0))

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete the prompts with the weights of the last refit; see `BuiltinGenerator`."""
        return self._generator.generate(data, greedy)

    def begin_refit(self, version: int) -> float:
        """Expect the weights of a version; returns the bytes that buckets on their way may take here."""
        self.receiver.begin(version)
        return self.receiver.free_bytes()

    def take_weights(self, handles: Mapping[str, tuple[bool, BucketHandle]]) -> str | None:
        """Take a packed bucket; what went wrong, if anything did.

        That is not raised, since a worker's error ends its process, and this one has a whole version to go on with.
        """
        try:
            self.receiver.take(handles)
        except RefitError as error:
            return str(error)
        return None

    def join_collective(self, ip: str, port: int, rank: int, world_size: int, timeout_s: float) -> None:
        """Meet the policy's first rank and the other generators; see `WeightGroup.join`."""
        self._weight_group = WeightGroup.join(ip, port, rank, world_size, self._device, timeout_s)

    def prepare_collective(self, info: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """What will be broadcast: the policy's answer to `prepare_info_for_collective`."""
        self._announced = [TensorInfo(name, tuple(shape), dtype) for name, (shape, dtype) in info.items()]

    def receive_weights(self) -> str | None:
        """Take what the policy broadcasts meanwhile; what went wrong, if anything did, as from `take_weights`."""
        if self._weight_group is None:
            raise RefitError("weights were to be received before join_collective; call that and prepare_collective")
        try:
            self._weight_group.receive(self._announced, self.receiver)
        except RefitError as error:
            return str(error)
        return None

    def commit_refit(self, version: int) -> None:
        """Generate with the new weights from now on."""
        self.receiver.commit(version)
        self._generator.weight_version = version

    def checksum(self) -> str:
        """SHA-256 of the weights in use."""
        return self.receiver.checksum()

    def start_gpu_profiling(self) -> None:
        """Record this generator from now on, unless names were asked for and its own is none of them."""
        if is_recorded(self._recording.name):
            self._recording.start()

    def stop_gpu_profiling(self) -> None:
        """Write what was recorded; harmless if nothing was."""
        self._recording.stop()

    def shutdown(self) -> None:
        """Stop profiling and leave the policy's weight group; may be called twice."""
        self.stop_gpu_profiling()
        if self._weight_group is not None:
            self._weight_group.close()


def _use_gpu(number: int) -> None:
    if number >= torch.cuda.device_count():
        raise ConfigError(
            f"there is no GPU {number} for a generator: this machine has {torch.cuda.device_count()}, and every "
            "generator needs its own, with policy.generation.refit=collective one that no rank of the policy has; "
            "lower policy.generation.num_workers"
        )
    torch.cuda.set_device(number)
