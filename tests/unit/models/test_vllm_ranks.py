"""A replica of vLLM sleeps while the policy trains, and commits a refit on all of its ranks or on none.

vLLM itself is replaced by a class that notes the calls it gets; its ranks receive weights as in a run.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lucidrl.distributed.shared_memory import SharedMemory
from lucidrl.distributed.weight_buckets import Bucket, BucketHandle, TensorInfo
from lucidrl.errors import RefitError
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.generation import vllm, vllm_worker
from lucidrl.models.generation.interfaces import GenerationRequest
from lucidrl.models.generation.vllm import VllmEngine
from lucidrl.models.generation.vllm_rank import VllmRank
from lucidrl.models.generation.vllm_worker import LOAD_FAILED, VllmWorker
from lucidrl.models.loading import load_model
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.introspection import device_id

TOKENIZER = embedded_tokenizer()
DEVICE = torch.device("cpu")


class NotedRank(VllmRank):
    """A tensor parallel rank that notes when it loads weights."""

    def __init__(self, rank: int, calls: list[str]) -> None:
        self.rank, self.device, self._calls = rank, DEVICE, calls
        self.fails = False

    def reload_weights(self, weights_iterator: Any) -> None:
        self._calls.append(f"load on rank {self.rank}")
        if self.fails:
            raise KeyError("no such layer")
        self.loaded = dict(weights_iterator)


class NotedVllm:
    """What `VllmEngine` uses of vLLM's engine; completes no request."""

    def __init__(self, num_ranks: int) -> None:
        self.calls: list[str] = []
        self.ranks = [NotedRank(rank, self.calls) for rank in range(num_ranks)]
        self.model_config = SimpleNamespace(max_model_len=512)
        self.output_processor = SimpleNamespace(request_states={})
        core = SimpleNamespace(model_executor=SimpleNamespace())
        self.engine_core = SimpleNamespace(engine_core=core, shutdown=lambda: None)

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return [getattr(rank, method)(*args) for rank in self.ranks]

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep at level {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {' and '.join(tags)}")

    def add_request(self, *_: Any) -> None:
        self.calls.append("request")

    def step(self) -> list[Any]:
        return []

    def __getattr__(self, name: str) -> Any:
        """Every other method, without effect."""
        return lambda *args, **kwargs: None


@pytest.fixture
def start(monkeypatch):
    """Return a function that starts a replica on GPUs, or on a CPU."""
    monkeypatch.setattr(vllm, "check_vllm", lambda config: None)
    monkeypatch.setattr(vllm, "_started", lambda arguments, num_ranks: NotedVllm(num_ranks))
    monkeypatch.setattr(VllmEngine, "_prompt", lambda *_: None)
    monkeypatch.setattr(VllmEngine, "_parameters", lambda *_: None)

    def started(num_ranks: int = 1, *, with_gpus: bool = True, sleep: bool = True) -> tuple[VllmWorker, NotedVllm]:
        gpus = range(num_ranks) if with_gpus else None
        monkeypatch.setattr(vllm_worker, "VllmEngine", lambda config, tokenizer, seed, _: VllmEngine(*found, gpus))
        arguments = {"tensor_parallel_size": num_ranks}
        generation = {"engine": "vllm", "placement": "separate", "sleep": sleep, "vllm": arguments}
        found = (PolicyConfig(model_name="embedded", generation=generation), TOKENIZER, 0)
        worker = VllmWorker(*found)
        engine = worker.engine._engine
        assert isinstance(engine, NotedVllm)
        return worker, engine

    return started


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return dict(load_model("embedded", torch.float32).named_parameters())


@pytest.fixture
def stage(weights):
    """Return a function that lets a replica take the weights of a version, without some of the last ones."""
    memories = []

    def staged(worker: VllmWorker, version: int, left_out: int = 0) -> None:
        sent = dict(list(weights.items())[: len(weights) - left_out])
        bucket = Bucket.of([TensorInfo(name, tuple(t.shape), t.dtype) for name, t in sent.items()])
        memory = SharedMemory(bucket.size_bytes)
        memories.append(memory)
        bucket.pack(sent.values(), memory.tensor)
        worker.begin_refit(version)
        handle = BucketHandle(bucket, memory.handle, version, None)
        assert worker.take_weights({device_id(DEVICE, 0): (True, handle)}) is None

    yield staged
    for memory in memories:
        memory.close()


def generate(worker: VllmWorker) -> None:
    request = GenerationRequest("row", torch.tensor([1, 2, 3]), 0)
    worker.advance([request], [], 0.0)
    worker.engine.abort(["row"])


def test_a_refit_wakes_the_weights_before_the_load_and_the_cache_after_it(start, stage):
    worker, engine = start()
    worker.release_memory()
    worker.release_memory()  # asleep already
    stage(worker, 1)
    assert engine.calls == ["sleep at level 1"]  # nothing wakes while weights are staged
    worker.commit_refit(1)
    generate(worker)
    assert engine.calls == ["sleep at level 1", "wake weights", "load on rank 0", "wake kv_cache", "request"]


def test_a_request_without_a_refit_wakes_everything(start):
    worker, engine = start()
    worker.release_memory()
    generate(worker)
    generate(worker)
    assert engine.calls == ["sleep at level 1", "wake weights and kv_cache", "request", "request"]


def test_after_a_failed_refit_the_old_version_sleeps_and_wakes_whole(start, stage, weights):
    worker, engine = start()
    stage(worker, 1)
    worker.commit_refit(1)
    loaded = engine.ranks[0].loaded
    worker.release_memory()
    stage(worker, 2, left_out=1)
    engine.calls.clear()
    with pytest.raises(RefitError, match="version 2 is incomplete"):
        worker.commit_refit(2)
    generate(worker)
    assert engine.calls == ["wake weights and kv_cache", "request"]
    assert engine.ranks[0].loaded is loaded
    assert worker.engine.policy_version == 1


def test_a_sleeping_replica_keeps_no_copy_of_the_weights(start, weights):
    worker, engine = start()
    receiver = engine.ranks[0].refit_rank.receiver
    worker.begin_refit(1)
    for name, tensor in weights.items():  # as after a broadcast, which is copied
        receiver.put(name, tensor)
    worker.commit_refit(1)
    assert receiver._own.keys() == dict(receiver.weights()).keys() == weights.keys()
    worker.release_memory()
    assert not receiver._own
    assert not dict(receiver.weights())


def test_a_replica_does_not_sleep_while_it_has_requests(start):
    worker, engine = start()
    worker.engine.submit([GenerationRequest("row", torch.tensor([1, 2, 3]), 0)])
    worker.release_memory()
    assert engine.calls == ["request"]


def test_without_the_setting_or_a_gpu_nothing_sleeps(start, caplog):
    caplog.set_level(logging.WARNING)
    worker, engine = start(sleep=False)
    worker.release_memory()
    assert engine.calls == []
    assert caplog.text == ""
    worker, engine = start(with_gpus=False)
    worker.release_memory()
    generate(worker)
    assert engine.calls == ["request"]
    [record] = caplog.records
    assert "policy.generation.sleep has no effect, because vLLM cannot free the memory of a CPU" in record.message


def test_no_rank_loads_a_version_that_is_incomplete_on_one_of_them(start, stage):
    worker, engine = start(num_ranks=2)
    stage(worker, 1)
    last = engine.ranks[1].refit_rank.receiver
    last._staged.popitem()
    with pytest.raises(RefitError, match="version 1 is incomplete"):
        worker.commit_refit(1)
    assert engine.calls == []
    stage(worker, 2)
    worker.commit_refit(2)
    assert engine.calls == ["load on rank 0", "load on rank 1"]
    assert [rank.version for rank in worker.report_weights()] == [2, 2]


@pytest.fixture
def exits(monkeypatch):
    """The exit codes with which the process of a replica would have exited."""
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise SystemExit

    for module in (vllm, vllm_worker):
        monkeypatch.setattr(module.os, "_exit", leave)
        monkeypatch.setattr(module.logging, "shutdown", lambda: None)
    return codes


def test_a_replica_exits_if_one_rank_fails_to_load(start, stage, exits):
    worker, engine = start(num_ranks=2)
    engine.ranks[1].fails = True
    stage(worker, 1)
    with pytest.raises(SystemExit):
        worker.commit_refit(1)
    assert exits == [LOAD_FAILED]


@pytest.mark.parametrize("call", ["sleep", "wake_up"])
@pytest.mark.parametrize("is_alive", [False, True])
def test_a_replica_exits_if_it_loses_a_rank_while_it_falls_asleep_or_wakes(start, exits, monkeypatch, call, is_alive):
    worker, engine = start(num_ranks=2)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Executor failed.")

    if call == "wake_up":
        worker.release_memory()
    worker.engine._ranks = [SimpleNamespace(is_alive=lambda: is_alive)]
    monkeypatch.setattr(engine, call, fail)
    with pytest.raises(RuntimeError if is_alive else SystemExit):
        worker.release_memory() if call == "sleep" else generate(worker)
    assert exits == ([] if is_alive else [vllm._RANK_LOST])
