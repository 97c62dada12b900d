"""Offloaded weights and optimizer reload bit-exactly; calls that need them fail while they are offloaded.

These tests offload CPU tensors as if they were on a GPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import ConfigError
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from lucidrl.models.policy.fsdp1_policy_worker import FSDP1PolicyWorker
from lucidrl.models.policy.offload import HostMemory
from lucidrl.models.policy.worker import PolicyWorker
from tests.tiers import slow_except

ADAMW = {"optimizer": {"kwargs": {"lr": 0.01, "weight_decay": 0.1}}}
TP = {"dtensor_cfg": {"tensor_parallel_size": 2}}
LAYOUTS = {"fsdp2": (DTensorPolicyWorker, {}), "tp": (DTensorPolicyWorker, TP), "fsdp1": (FSDP1PolicyWorker, {})}


def make_worker(kind: type[PolicyWorker], options: dict[str, Any]) -> PolicyWorker:
    """Return a worker that offloads CPU tensors as if the CPU were an accelerator."""
    worker = kind(PolicyConfig(**ADAMW, **options), embedded_tokenizer(), seed=1)
    worker.offload.host_memory = HostMemory(takes=lambda tensor: True)
    return worker


def bytes_held(worker: PolicyWorker) -> tuple[int, int]:
    """Return the bytes of weights and buffers, and of the optimizer's tensors."""
    weights = worker.sharding.local_weights()
    optimizer = worker.optimizer.own_tensors() if worker.optimizer is not None else []
    return tuple(  # type: ignore[return-value]
        sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        for tensors in ([*weights, *worker.model.buffers()], optimizer)
    )


def state_of(worker: PolicyWorker) -> list[torch.Tensor]:
    weights = worker.sharding.local_weights()
    assert worker.optimizer is not None
    return [tensor.clone() for tensor in (*weights, *worker.optimizer.own_tensors())]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def recording(profiled: bool) -> AbstractContextManager[Any]:
    if not profiled:
        return nullcontext()
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True)


def round_trip(kind: type[PolicyWorker], options: dict[str, Any], rows: dict[str, Any], profiled: bool) -> list[bool]:
    """Train, offload and reload as in a refit, train again; compare with a worker that did not offload."""
    moved, stayed = make_worker(kind, options), make_worker(kind, options)
    data = BatchedDataDict(rows)
    with recording(profiled):
        for worker in (moved, stayed):
            worker.train(data, NLLLoss())
        weight_bytes, optimizer_bytes = bytes_held(moved)
        moved.offload_before_refit()
        claims = [bytes_held(moved) == (weight_bytes, 0)]
        claims.append(torch.equal(moved.get_logprobs(data)["logprobs"], stayed.get_logprobs(data)["logprobs"]))
        moved.offload_after_refit()
        claims.append(bytes_held(moved) == (0, 0))
        moved.prepare_for_lp_inference()
        claims.append(bytes_held(moved) == (weight_bytes, 0))
        for name in ("get_logprobs", "get_reference_policy_logprobs"):
            ours, theirs = getattr(moved, name)(data), getattr(stayed, name)(data)
            claims += [torch.equal(ours[key], theirs[key]) for key in ours]
        moved.prepare_for_training()
        claims.append(bytes_held(moved) == (weight_bytes, optimizer_bytes))
        claims.append(same(state_of(moved), state_of(stayed)))
        moved.offload_after_refit()
        moved.prepare_for_training()
        for worker in (moved, stayed):
            worker.train(data, NLLLoss())
    return [*claims, same(state_of(moved), state_of(stayed))]


@pytest.fixture
def rows(make_rows) -> dict[str, Any]:
    return make_rows().get_dict()


@pytest.mark.parametrize("profiled", slow_except([False, True], True))
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_round_trip_preserves_weights_optimizer_and_the_next_step(rows, precision, profiled):
    claims = round_trip(DTensorPolicyWorker, {"precision": precision}, rows, profiled)
    assert claims == [True] * len(claims)


@pytest.mark.parametrize("profiled", slow_except([False, True], False))
@pytest.mark.parametrize("name", slow_except(LAYOUTS, "fsdp2"))
def test_a_round_trip_on_two_ranks(two_ranks, rows, name, profiled):
    kind, layout = LAYOUTS[name]
    for claims in two_ranks(round_trip, kind, {"precision": "bfloat16", **layout}, rows, profiled):
        assert claims == [True] * len(claims)


def moves(kind: type[PolicyWorker], rows: dict[str, Any]) -> list[bool]:
    worker, data = make_worker(kind, {}), BatchedDataDict(rows)
    worker.train(data, NLLLoss())
    expected, (weight_bytes, optimizer_bytes) = state_of(worker), bytes_held(worker)
    buffer_bytes = sum(buffer.untyped_storage().nbytes() for buffer in worker.model.buffers())
    own_device = worker.device
    worker.offload._device = torch.device("cuda")
    claims = [worker.move_to_cpu(worker.model) is worker.model, bytes_held(worker) == (0, optimizer_bytes)]
    worker.device = torch.device("cuda")
    claims += [worker.move_to_cuda(worker.model) is worker.model, bytes_held(worker) == (weight_bytes, optimizer_bytes)]
    worker.move_buffer_to_device(worker.model, "cpu")
    claims.append(bytes_held(worker)[0] == weight_bytes - buffer_bytes)
    worker.move_buffer_to_device(worker.model, "cuda")
    worker.move_to_device(worker.model, "cpu")
    worker.move_to_device(worker.model, "cpu")
    worker.move_to_device(worker.model, "cuda:0")
    worker.device = own_device
    return [*claims, same(state_of(worker), expected)]


@pytest.mark.parametrize("kind", [DTensorPolicyWorker, FSDP1PolicyWorker])
def test_models_and_buffers_move_to_the_host_and_back(two_ranks, rows, kind):
    for claims in [moves(kind, rows), *two_ranks(moves, kind, rows)]:
        assert claims == [True] * len(claims)


def test_on_a_cpu_nothing_moves():
    worker = DTensorPolicyWorker(PolicyConfig(), embedded_tokenizer())
    memory = [parameter.data_ptr() for parameter in worker.model.parameters()]
    worker.offload_after_refit()
    assert worker.move_to_cuda(worker.move_to_cpu(worker.model)) is worker.model
    assert [parameter.data_ptr() for parameter in worker.model.parameters()] == memory


def test_another_device_is_refused():
    worker = DTensorPolicyWorker(PolicyConfig(), embedded_tokenizer())
    with pytest.raises(ConfigError, match=r"device='meta' is neither the host nor this worker's cpu"):
        worker.move_to_device(worker.model, "meta")


def test_calls_that_need_offloaded_tensors_are_refused_on_every_device(make_rows, tmp_path):
    worker = DTensorPolicyWorker(PolicyConfig(), embedded_tokenizer())
    data = make_rows()
    worker.offload_before_refit()
    with pytest.raises(ConfigError, match=r"needs the optimizer.*call prepare_for_training first"):
        worker.train(data, NLLLoss())
    assert worker.train(data, NLLLoss(), eval_mode=True)["global_loss"].isfinite().all()
    worker.offload_after_refit()
    for call in (
        lambda: worker.train(data, NLLLoss(), eval_mode=True),
        lambda: worker.get_logprobs(data),
        lambda: worker.get_reference_policy_logprobs(data),
        lambda: worker.generate(data),
        lambda: worker.save_checkpoint(str(tmp_path / "weights")),
        lambda: worker.load_checkpoint(str(tmp_path / "weights")),
    ):
        with pytest.raises(ConfigError, match=r"needs the weights.*call prepare_for_lp_inference or"):
            call()
    worker.prepare_for_training()
    worker.train(data, NLLLoss())
