"""A generator in a separate process, with a copy of the policy's weights.

A refit stages the new weights beside the weights in use, then swaps in all of them at once. So the model never computes
with weights of two versions. After an interrupted refit, the next refit drops the staged weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.checksums import checksums_of
from lucidrl.distributed.shared_memory import AttachedMemory, DeviceMemoryHandle, MemoryHandle, open_device_memory
from lucidrl.distributed.weight_buckets import (
    BucketHandle,
    TensorInfo,
    checksum_of,
    copy_weights,
    digest_of,
    free_bytes,
)
from lucidrl.distributed.weight_group import WeightGroup, problem_of
from lucidrl.distributed.workers.place import Place, place_with
from lucidrl.errors import ConfigError, RefitError
from lucidrl.models.generation.builtin import BuiltinGenerator
from lucidrl.models.generation.interfaces import GenerationDatumSpec, GenerationOutputSpec, RefitReport
from lucidrl.models.generation.probe import probe_tokens
from lucidrl.models.loading import DTYPES, load_model
from lucidrl.models.logprobs import LogprobModel
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.introspection import device_id
from lucidrl.profiling.recording import Recording
from lucidrl.profiling.spans import span
from lucidrl.utils.device import default_device
from lucidrl.utils.nsys import GENERATION, worker_name
from lucidrl.utils.recorded import Recorded


class WeightReceiver:
    """Stages new weights for a model; the model keeps its current weights until `commit`.

    Weights in shared host memory are used in place: the sender does not overwrite memory in use, and the memory
    outlives the sender. All other weights are copied into memory of this process.

    Args:
        model: the model whose weights are replaced; its current weights are version 0.
        device_id: id of this process's device; see `introspection.device_id`.
    """

    def __init__(self, model: nn.Module, device_id: str):
        self.version = 0
        """Version of the weights in use."""
        self._live = dict(model.named_parameters())
        self._device = next(iter(self._live.values())).device
        self._device_id = device_id
        self._incoming: int | None = None
        self._staged: dict[str, torch.Tensor] = {}
        """Weights of the incoming version that have arrived so far."""
        self._shared: dict[str, AttachedMemory] = {}
        """The sender's memory with the version in use, by the handle's token; empty if this version was copied."""
        self._incoming_shared: dict[str, AttachedMemory] = {}
        self._released: dict[str, AttachedMemory] = {}
        """The sender's memory with the previous version; the sender may reuse it for the next version."""
        self._own: dict[str, torch.Tensor] = {}
        """Memory of this process that the incoming version is copied to."""

    def begin(self, version: int) -> None:
        """Expect all weights of `version`; drop weights that were staged before."""
        self._incoming, self._staged = version, {}
        for memory in self._incoming_shared.values():
            memory.release()
        self._incoming_shared = {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Stage a copy of one weight. On a GPU, the copy runs asynchronously on the current stream."""
        self._check(name, tensor)
        if name not in self._own:
            self._own[name] = torch.empty_like(self._live[name].data)
        copy_weights([(self._own[name], tensor)])
        self._staged[name] = self._own[name]

    @span("refit")
    def take(self, handles: Mapping[str, tuple[bool, BucketHandle]]) -> None:
        """Stage a packed bucket; the sender may reuse its device memory as soon as this returns.

        Args:
            handles: results of `get_weights_ipc_handles`, by device id.
        """
        if self._device_id not in handles:
            raise RefitError(
                f"the policy has weights for the devices {', '.join(sorted(handles)) or 'none'}, but this generator is "
                f"on {self._device_id}; use the same devices, or set policy.generation.refit=collective"
            )
        _, handle = handles[self._device_id]
        if handle.version != self._incoming:
            raise RefitError(
                f"a bucket has version {handle.version}, but version {self._incoming} is expected; begin the refit "
                "with the version that the policy sends"
            )
        memory = self._opened(handle.memory)[: handle.bucket.size_bytes]
        if handle.digest is not None and (found := digest_of(memory)) != handle.digest:
            raise RefitError(
                f"a bucket of version {handle.version} ({handle.bucket.tensors[0].name} and "
                f"{len(handle.bucket.tensors) - 1} more) has SHA-256 {found[:12]}…, not {handle.digest[:12]}…: it was "
                "changed in transit; the generator keeps its current weights, refit again"
            )
        for name, tensor in handle.bucket.unpack(memory):
            if memory.is_cpu:
                self._check(name, tensor)
                self._staged[name] = tensor
            else:
                self.put(name, tensor)
        self._wait_for_copies()

    @span("refit")
    def commit(self, version: int) -> None:
        """Swap in the staged weights, without a copy.

        Raises:
            RefitError: a weight is missing; the model keeps its current weights.
        """
        if version != self._incoming:
            raise RefitError(
                f"version {version} cannot be committed: the current refit is for version {self._incoming}; begin the "
                f"refit with version {version}"
            )
        if missing := [name for name in self._live if name not in self._staged]:
            raise RefitError(
                f"version {version} is incomplete: {missing[0]} is missing ({len(missing)} of {len(self._live)} "
                f"weights); the generator keeps version {self.version}, refit again"
            )
        self._wait_for_copies()
        before = {name: parameter.data for name, parameter in self._live.items()}
        for name, parameter in self._live.items():
            parameter.data = self._staged[name]
        # The next version is copied to the memory of the previous one, unless one of the two is in the sender's memory.
        self._own = {} if self._shared or self._incoming_shared else before
        for memory in self._shared.values():
            memory.release()
        self._released, self._shared, self._incoming_shared = self._shared, self._incoming_shared, {}
        self.version, self._incoming, self._staged = version, None, {}

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return names and tensors of the weights in use."""
        return self._live.items()

    def checksum(self) -> str:
        """Return the SHA-256 of the weights in use; see `checksum_of`."""
        return checksum_of(self._live.items())

    def _opened(self, handle: MemoryHandle) -> torch.Tensor:
        """Return the sender's memory as bytes; keep host memory reserved as long as its version is in use."""
        if isinstance(handle, DeviceMemoryHandle):
            return open_device_memory(handle)
        known = self._incoming_shared.get(handle.token) or self._released.get(handle.token)
        memory = self._incoming_shared[handle.token] = known or AttachedMemory(handle)
        memory.hold()
        return memory.tensor

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        if name not in self._live:
            raise RefitError(f"this model has no weight {name}; use the same model for generator and policy")
        own = self._live[name]
        if (tensor.shape, tensor.dtype) != (own.shape, own.dtype):
            raise RefitError(
                f"{name} has shape {tuple(tensor.shape)} and {tensor.dtype} in the policy, but {tuple(own.shape)} and "
                f"{own.dtype} in this generator; use the same model and precision for both"
            )

    def _wait_for_copies(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class GenerationWorker(Recorded):
    """One generator replica. It joins no process group of the policy.

    The replica loads the model as the policy does: a refit sends no buffers, and the loaded weights are version 0.
    Refit methods return a problem as text. They do not raise an error, because an error ends the process, and after a
    failed refit the process can still generate with its current weights.

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
        if torch.cuda.is_available():
            if gpu >= torch.cuda.device_count():
                raise ConfigError(
                    f"there is no GPU {gpu} for a generator: this machine has {torch.cuda.device_count()}; each "
                    "generator needs a GPU, and with policy.generation.refit=collective one that no rank of the policy "
                    "uses; lower policy.generation.num_workers"
                )
            torch.cuda.set_device(gpu)
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
        """Return the node and device of this process."""
        return place_with(self._device_id)

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete the prompts with the weights of the last refit; see `BuiltinGenerator`."""
        return self._generator.generate(data, greedy)

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
        """Use the new weights from the next `generate` on."""
        self.receiver.commit(version)
        self._generator.policy_version = version

    @span("guard")
    @torch.no_grad()
    def report_refit(self) -> RefitReport:
        """Return version and checksums of the weights in use, and the log-probabilities of the probe text."""
        model = self._generator.model
        probe = torch.tensor([probe_tokens(self._generator.tokenizer)], device=self._device)
        outputs = model(probe, torch.tensor([probe.shape[1]], device=self._device))
        weights = checksums_of(self.receiver.weights())
        return RefitReport(self.receiver.version, weights, outputs.logprobs[0, 1:].float().cpu())

    def shutdown(self) -> None:
        """Stop profiling and leave the policy's weight group; may be called twice."""
        self.stop_gpu_profiling()
        self._leave_collective()

    def _leave_collective(self) -> None:
        if self._weight_group is not None:
            self._weight_group.close()
            self._weight_group = None
