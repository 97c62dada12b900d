"""A generator in a process of its own, with its own copy of the policy's weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedTokenizerBase

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.weight_buckets import BucketHandle, TensorInfo, free_bytes
from lucidrl.distributed.weight_group import WeightGroup, problem_of
from lucidrl.distributed.workers.place import Place, place_with
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
        seed: of the weights of an untrained model, and of draws without keys.
        number: of this generator.
        gpu: number of its GPU among those that it sees, where there are any.
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
        if torch.cuda.is_available():
            _use_gpu(gpu)
        device = default_device()
        model = load_model(
            config.model_name, DTYPES[config.precision], seed=seed, trust_remote_code=config.trust_remote_code
        )
        scorer = LogprobModel(model.requires_grad_(False), config.generation.temperature).to(device)
        self._device = device
        # On a CPU, all processes of a node find the weights under the number of the first.
        self._device_id = device_id(device, 0)
        self._recording = Recording(worker_name(GENERATION, number))
        self._weight_group: WeightGroup | None = None
        self._announced: list[TensorInfo] = []
        self._generator = BuiltinGenerator(scorer, tokenizer, config.generation, seed)
        self.receiver = WeightReceiver(model, self._device_id)

    def report_place(self) -> Place:
        """Where this generator is, and on which device."""
        return place_with(self._device_id)

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete the prompts with the weights of the last refit; see `BuiltinGenerator`."""
        return self._generator.generate(data, greedy)

    def begin_refit(self, version: int) -> float:
        """Expect the weights of a version; returns the bytes that buckets on their way may take here."""
        self.receiver.begin(version)
        return float(free_bytes(self._device))

    def take_weights(self, handles: Mapping[str, tuple[bool, BucketHandle]]) -> str | None:
        """Take a packed bucket; what went wrong, if anything did.

        That is not raised, since a worker's error ends its process, and this one has a whole version to go on with.
        """
        return problem_of(lambda: self.receiver.take(handles))

    def join_collective(self, ip: str, port: int, rank: int, world_size: int, timeout_s: float) -> str | None:
        """Meet the policy's first rank and other generators, of a group that takes the place of one joined before; see
        `WeightGroup.join`. What went wrong, if anything did, as from `take_weights`."""

        def join() -> None:
            self._leave_collective()
            self._weight_group = WeightGroup.join(ip, port, rank, world_size, self._device, timeout_s)

        return problem_of(join)

    def prepare_collective(self, info: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """What will be broadcast: the policy's answer to `prepare_info_for_collective`."""
        self._announced = [TensorInfo(name, tuple(shape), dtype) for name, (shape, dtype) in info.items()]

    def receive_weights(self) -> str | None:
        """Take what the policy broadcasts meanwhile; what went wrong, if anything did, as from `take_weights`."""
        group = self._weight_group
        if group is None:
            raise RefitError("weights were to be received before join_collective; call that and prepare_collective")
        return problem_of(lambda: group.receive(self._announced, self.receiver))

    def commit_refit(self, version: int) -> None:
        """Generate with the new weights from now on."""
        self.receiver.commit(version)
        self._generator.policy_version = version

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
        self._leave_collective()

    def _leave_collective(self) -> None:
        if self._weight_group is not None:
            self._weight_group.close()
            self._weight_group = None


def _use_gpu(number: int) -> None:
    if number >= torch.cuda.device_count():
        raise ConfigError(
            f"there is no GPU {number} for a generator: this machine has {torch.cuda.device_count()}, and every "
            "generator needs its own, with policy.generation.refit=collective one that no rank of the policy has; "
            "lower policy.generation.num_workers"
        )
    torch.cuda.set_device(number)
