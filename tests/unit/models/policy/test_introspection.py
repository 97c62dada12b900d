"""A worker reports its memory, device and weights correctly, and writes readable traces."""

from __future__ import annotations

import json
import mmap
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.tensor import DTensor

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.workers import place
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.policy import introspection
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from lucidrl.models.policy.introspection import CudaMemory, ProcessMemory, device_id
from lucidrl.profiling.settings import FOLDER_VARIABLE
from lucidrl.utils import nsys

MEMORY = ("memory_allocated_mb", "memory_reserved_mb", "memory_peak_mb", "memory_total_mb")
SLACK_MB = 12
LAYOUTS = {"dp2": {}, "tp2": {"tensor_parallel_size": 2}}


def megabytes(number: int) -> torch.Tensor:
    """Allocate memory outside the heap: resident at once, returned to the system when freed."""
    return torch.frombuffer(mmap.mmap(-1, number << 20), dtype=torch.uint8).fill_(1)


@pytest.fixture
def worker(make_worker):
    return make_worker()


@pytest.fixture
def traces(tmp_path, monkeypatch):
    folder = tmp_path / "not" / "there yet"
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    return folder


def score(worker: DTensorPolicyWorker) -> torch.Tensor:
    rows = BatchedDataDict({"input_ids": torch.full((2, 6), 5), "input_lengths": torch.tensor([6, 4])})
    return worker.get_logprobs(rows)["logprobs"]


def test_a_worker_is_alive(worker):
    assert worker.is_alive() is True


# Memory


def test_allocated_memory_follows_the_process(worker):
    before = worker.get_gpu_info()["memory_allocated_mb"]
    held = megabytes(50)
    during = worker.get_gpu_info()["memory_allocated_mb"]
    del held
    after = worker.get_gpu_info()["memory_allocated_mb"]
    assert during - before == pytest.approx(50, abs=SLACK_MB)
    assert after == pytest.approx(before, abs=SLACK_MB)


def test_the_peak_includes_freed_memory_until_it_is_reset(worker):
    worker.reset_peak_memory_stats()
    before = worker.get_gpu_info()
    assert before["memory_peak_mb"] == pytest.approx(before["memory_allocated_mb"], abs=SLACK_MB)
    megabytes(50)
    assert worker.get_gpu_info()["memory_peak_mb"] - before["memory_peak_mb"] == pytest.approx(50, abs=SLACK_MB)
    worker.reset_peak_memory_stats()
    assert worker.get_gpu_info()["memory_peak_mb"] == pytest.approx(before["memory_peak_mb"], abs=SLACK_MB)


def test_without_a_kernel_reset_only_growth_past_the_old_peak_is_exact(monkeypatch, tmp_path):
    memory = ProcessMemory()
    memory.reset_peak()
    megabytes(100)
    monkeypatch.setattr(introspection, "_CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    memory.reset_peak()
    start = memory.read()
    assert start.memory_peak_mb == pytest.approx(start.memory_allocated_mb, abs=SLACK_MB)

    held = megabytes(50)
    seen = memory.read()
    del held
    assert seen.memory_peak_mb - start.memory_peak_mb == pytest.approx(50, abs=SLACK_MB)
    assert memory.read().memory_peak_mb == seen.memory_peak_mb

    megabytes(150)
    assert memory.read().memory_peak_mb - start.memory_peak_mb == pytest.approx(150, abs=SLACK_MB)


def test_gpu_info_on_a_cpu_is_about_process_and_host(worker, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "node7")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    info = worker.get_gpu_info()
    assert (info["rank"], info["world_size"], info["device"]) == (0, 1, "cpu")
    allocated, reserved, peak, total = (info[name] for name in MEMORY)
    assert 0 < allocated == reserved <= peak < total
    assert total == pytest.approx(psutil.virtual_memory().total / 2**20)
    assert info["environment"]["MASTER_ADDR"] == "node7"
    assert info["environment"]["CUDA_VISIBLE_DEVICES"] is None
    assert info["parameter_devices"]["model.embed_tokens.weight"] == "cpu"
    json.dumps(info)


def test_on_cuda_the_numbers_are_those_of_torchs_allocator_in_megabytes(monkeypatch):
    properties = type("Properties", (), {"total_memory": 80 << 30, "uuid": "1b2c"})()
    readings = {"memory_allocated": 1, "memory_reserved": 2, "max_memory_allocated": 3}
    for name, value in readings.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device = torch.device("cuda", 0)
    use = CudaMemory(device).read()
    assert [getattr(use, name) for name in MEMORY] == [1, 2, 3, 80 * 1024]
    assert device_id(device, local_rank=3) == "GPU-1b2c"


# Device


def test_a_cpu_device_id_is_stable_and_unique_per_local_rank_and_host(worker, monkeypatch):
    own = worker.report_device_id()
    assert own == device_id(torch.device("cpu"), 0)
    assert own.startswith("CPU-")
    assert own.endswith("-0")
    others = {own, device_id(torch.device("cpu"), 1)}
    monkeypatch.setattr(place.socket, "gethostname", lambda: "another-host")
    others.add(device_id(torch.device("cpu"), 0))
    for name, value in place.node_environment("one of several nodes of this host", "10.0.0.1").items():
        monkeypatch.setenv(name, value)
    others.add(device_id(torch.device("cpu"), 0))
    assert len(others) == 4


# Weights


@pytest.mark.parametrize("architecture", ["llama", "llama_untied"])
def test_the_state_dict_is_the_hugging_face_models_own(make_worker, architecture):
    worker = make_worker(architecture)
    expected = worker.model.model.state_dict()
    state = worker.return_state_dict()
    assert list(state) == list(expected)
    assert all(state[name].data_ptr() == tensor.data_ptr() for name, tensor in expected.items())


def assert_noisy(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Check that every weight moved by N(0, 0.01); return the noise."""
    noise = {name: (after[name] - before[name]).double() for name in before}
    for name, values in noise.items():
        assert values.count_nonzero() > 0.99 * values.numel(), name
    everything = torch.cat([values.flatten() for values in noise.values()])
    assert everything.std().item() == pytest.approx(0.01, rel=0.05)
    assert abs(everything.mean().item()) < 0.001
    return noise


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_noise_moves_every_weight_and_the_optimizer_follows(make_worker, weights_of, precision):
    worker = make_worker(precision=precision)
    before = weights_of(worker)
    worker._add_noise_to_weights()
    noisy = weights_of(worker)
    if precision == "float32":
        assert_noisy(before, noisy)
    worker.optimizer.step()  # without gradients it only writes master weights back, if any
    for name, weights in weights_of(worker).items():
        assert torch.equal(weights, noisy[name]), name
        assert not torch.equal(weights, before[name]), name


def test_noise_of_equal_shapes_and_of_two_calls_differs(make_worker, weights_of):
    worker = make_worker(init_optimizer=False)
    before = weights_of(worker)
    worker._add_noise_to_weights()
    once = weights_of(worker)
    worker._add_noise_to_weights()
    twice = weights_of(worker)
    first, second = ({name: new[name] - old[name] for name in old} for old, new in ((before, once), (once, twice)))
    query = "model.layers.{}.self_attn.q_proj.weight"
    pairs = [(first[query.format(0)], first[query.format(1)]), (first[query.format(0)], second[query.format(0)])]
    for one, other in pairs:
        assert abs(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]) < 0.2


def noisy_weights(parallel: dict[str, Any]) -> dict[str, Any]:
    """Return full weights before and after noise, this rank's shards, and its reports."""
    config = PolicyConfig(model_name="embedded", precision="float32", dtensor_cfg=parallel)
    worker = DTensorPolicyWorker(config, embedded_tokenizer(), init_reference_model=False, seed=1)
    before = {name: tensor.clone() for name, tensor in worker.sharding.full_weights()}
    torch.manual_seed(40 + worker.rank)  # only rank 0's seed matters
    worker._add_noise_to_weights()
    return {
        "before": before,
        "after": {name: tensor.detach().clone() for name, tensor in worker.sharding.full_weights()},
        "info": worker.get_gpu_info(),
        "device_id": worker.report_device_id(),
        **parts_and_wholes(worker.return_state_dict()),
    }


def parts_and_wholes(state: dict[str, Any]) -> dict[str, Any]:
    sharded = {name: tensor for name, tensor in state.items() if isinstance(tensor, DTensor)}
    return {
        "parts": {name: tensor.to_local().clone() for name, tensor in sharded.items()},
        "wholes": {name: tensor.full_tensor() for name, tensor in sharded.items()},
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_noise_is_the_same_on_two_ranks_as_on_one(two_ranks, layout):
    one = noisy_weights({})["after"]
    results = two_ranks(noisy_weights, LAYOUTS[layout])
    for result in results:
        assert_noisy(result["before"], result["after"])
        assert result["after"].keys() == one.keys()
        for name, tensor in result["after"].items():
            assert torch.equal(tensor, one[name]), name


def test_noise_leaves_the_copies_of_tensor_parallel_ranks_equal(two_ranks):
    first, second = two_ranks(noisy_weights, LAYOUTS["tp2"])
    copies = [name for name, part in first["parts"].items() if part.shape == first["wholes"][name].shape]
    assert any("norm" in name for name in copies)
    for name in copies:
        assert torch.equal(first["parts"][name], second["parts"][name]), name


def test_each_of_two_ranks_reports_its_device_and_holds_its_shards(two_ranks):
    results = two_ranks(noisy_weights, LAYOUTS["dp2"])
    for rank, result in enumerate(results):
        assert (result["info"]["rank"], result["info"]["world_size"]) == (rank, 2)
        assert result["info"]["environment"]["LOCAL_RANK"] == str(rank)
        for name, tensor in result["after"].items():
            assert torch.equal(result["wholes"][name], tensor), name
            assert 0 < result["parts"][name].numel() < tensor.numel(), name
    assert len({result["device_id"] for result in results}) == 2


# Profiles


def test_the_trace_holds_the_operators_of_a_forward_pass(worker, traces):
    worker.start_gpu_profiling()
    score(worker)
    worker.stop_gpu_profiling()
    trace, _ = sorted(traces.iterdir())
    assert trace.name.startswith("policy-0_")
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"aten::embedding", "aten::linear", "logprobs"} <= names


def test_a_worker_that_is_not_selected_does_not_record(worker, traces, monkeypatch):
    monkeypatch.setattr(nsys, "NRL_NSYS_WORKER_PATTERNS", "policy-1,*generation*")
    monkeypatch.setattr(nsys, "NRL_NSYS_PROFILE_STEP_RANGE", "1:2")
    worker.start_gpu_profiling()
    worker.stop_gpu_profiling()
    assert not traces.exists()


def test_shutdown_writes_the_profile_that_is_running(worker, traces):
    worker.start_gpu_profiling()
    score(worker)
    worker.shutdown()
    worker.shutdown()
    trace, _ = sorted(traces.iterdir())
    assert json.loads(trace.read_text())["traceEvents"]
