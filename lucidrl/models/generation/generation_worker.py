"""A generator in a separate process, with its own copy of the policy's weights."""

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
from lucidrl.utils.nsys import GENERATION, worker_name
from lucidrl.utils.recorded import Recorded


class GenerationWorker(Recorded):
    """One generator replica. It joins no process group of the policy.

    It loads the model as the policy does, for the buffers that no refit sends and for the weights of version 0.
    Methods of a refit return problems instead of raising them: a raised error would end the process, which still has
    a complete version.

    Args:
        config: config of the policy.
        seed: of the weights of an untrained model, and of rows without draw keys.
        number: number of this replica.
        gpu: number of its GPU among the visible ones, if there are any.
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
        # On a CPU, the policy offers weights to all processes of a node under local rank 0.
        self._device_id = device_id(device, 0)
        self._recording = Recording(worker_name(GENERATION, number))
        self._weight_group: WeightGroup | None = None
        self._announced: list[TensorInfo] = []
        self._generator = BuiltinGenerator(scorer, tokenizer, config.generation, seed)
        self.receiver = WeightReceiver(model, self._device_id)

    def report_place(self) -> Place:
        """Node and device of this process."""
        return place_with(self._device_id)

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete the prompts with the weights of the last refit; see `BuiltinGenerator`."""
        return self._generator.generate(data, greedy)

    def begin_refit(self, version: int) -> float:
        """Prepare to take the weights of a version; returns the free bytes of this process's device."""
        self.receiver.begin(version)
        return float(free_bytes(self._device))

    def take_weights(self, handles: Mapping[str, tuple[bool, BucketHandle]]) -> str | None:
        """Take a packed bucket; returns the problem, if any."""
        return problem_of(lambda: self.receiver.take(handles))

    def prepare_collective(self, info: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Set the tensors that the policy will broadcast: the result of its `prepare_info_for_collective`."""
        self._announced = [TensorInfo(name, tuple(shape), dtype) for name, (shape, dtype) in info.items()]

    def join_collective(self, ip: str, port: int, rank: int, world_size: int, timeout_s: float) -> str | None:
        """Leave the current weight group and join another, see `WeightGroup.join`; returns the problem, if any."""

        def join() -> None:
            self._leave_collective()
            self._weight_group = WeightGroup.join(ip, port, rank, world_size, self._device, timeout_s)

        return problem_of(join)

    def receive_weights(self) -> str | None:
        """Receive the weights that the policy broadcasts; returns the problem, if any."""
        group = self._weight_group
        if group is None:
            raise RefitError("receive_weights was called before join_collective; call that and prepare_collective")
        return problem_of(lambda: group.receive(self._announced, self.receiver))

    def commit_refit(self, version: int) -> None:
        """Use the new weights from the next `generate` on."""
        self.receiver.commit(version)
        self._generator.policy_version = version

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
            f"there is no GPU {number} for a generator: this machine has {torch.cuda.device_count()}; each generator "
            "needs a GPU, and with policy.generation.refit=collective one that no rank of the policy uses; lower "
            "policy.generation.num_workers"
        )
    torch.cuda.set_device(number)
