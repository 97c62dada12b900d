"""A refit over shared memory sends complete versions of a policy's weights to a generator process."""

from __future__ import annotations

import os
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from lucidrl.data.messages import render_prompt
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.process_group import gather_over
from lucidrl.distributed.shared_memory import NAME_PREFIX, AttachedMemory
from lucidrl.distributed.weight_buckets import plan_buckets
from lucidrl.distributed.workers.group import WorkerGroup
from lucidrl.errors import LostWorkerError, RefitError, WorkerError
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.generation.builtin import BuiltinGenerator
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.generation.receiver import WeightReceiver
from lucidrl.models.generation.refit import Refit, buckets_of_names
from lucidrl.models.generation.separate import SeparateGenerator
from lucidrl.models.loading import DTYPES, load_model
from lucidrl.models.logprobs import LogprobModel
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from lucidrl.models.policy.fsdp1_policy_worker import FSDP1PolicyWorker
from lucidrl.models.policy.policy import Policy
from tests.unit.models.policy.refitting_workers import KilledWhilePacking

SEPARATE = {"placement": "separate", "verify_refit": True, "refit_bucket_mb": 1, "max_new_tokens": 12}
NO_TRAINING = {"init_optimizer": False, "init_reference_model": False}
MODEL_BYTES = 3_270_000
"""The embedded model in float32: four buckets."""


def prompts() -> BatchedDataDict[Any]:
    texts = ["12+30=", "7+8=", "40+41=", "3+3="]
    ids = [render_prompt(embedded_tokenizer(), [{"role": "user", "content": text}]) for text in texts]
    rows = [torch.tensor(row) for row in ids]
    lengths = torch.tensor([len(row) for row in rows])
    return BatchedDataDict(
        {"input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), "input_lengths": lengths}
    )


def num_open_memories(pid: int) -> int:
    names = [os.readlink(entry) for entry in os.scandir(f"/proc/{pid}/fd") if os.path.islink(entry)]
    return sum(name.startswith(f"/memfd:{NAME_PREFIX}") for name in names)


def checksums(generator: SeparateGenerator) -> list[str]:
    return [worker.run("receiver.checksum") for worker in generator.pool.workers]


def policy_of(workers: WorkerGroup) -> Any:
    """Return the attributes of a `Policy` that a generator needs, for workers of another class."""
    return SimpleNamespace(
        group=workers,
        places=workers.run_all("report_place"),
        check=workers.check,
        is_ahead=False,
        update_weights=lambda version: None,
    )


# Several ranks


def refit_between_ranks(kind, options, bucket_bytes):
    """On a rank: receive all weights from rank 0's memory; return checksums of policy and receiver."""
    worker = kind(PolicyConfig(**options), embedded_tokenizer(), **NO_TRAINING)
    worker._add_noise_to_weights()
    model = load_model(worker.config.model_name, DTYPES[worker.config.precision])
    device_id = gather_over(worker.report_device_id(), worker.mesh.world)[0]
    receiver = WeightReceiver(model, device_id)
    receiver.begin(3)
    worker.export.set_header(3, True)
    worker.prepare_weights_for_ipc()
    for bucket in plan_buckets(worker.export.infos(), bucket_bytes):
        handles = worker.get_weights_ipc_handles([info.name for info in bucket.tensors])
        assert bool(handles) == (worker.rank == 0)
        receiver.take(gather_over(handles, worker.mesh.world)[0])
        gather_over(None, worker.mesh.world)  # both have read it
    receiver.commit(3)
    result = worker.export.checksum(), receiver.checksum(), str(next(model.parameters()).dtype)
    worker.export.close()
    return result


@pytest.mark.parametrize("model", ["llama", "llama_untied"])
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        (DTensorPolicyWorker, {}),
        (DTensorPolicyWorker, {"tensor_parallel_size": 2}),
        (FSDP1PolicyWorker, {"enabled": False}),
    ],
    ids=["fsdp2", "tp", "fsdp1"],
)
def test_full_weights_come_from_several_ranks(two_ranks, tiny_model, kind, parallel, precision, model):
    options = {"model_name": tiny_model(model), "precision": precision, "dtensor_cfg": parallel}
    results = two_ranks(refit_between_ranks, kind, options, 4000)  # buckets end within layers
    expected = results[0][0]
    assert results == [(expected, expected, f"torch.{precision}")] * 2


# One generator in another process


@pytest.fixture(scope="module")
def config():
    return PolicyConfig(model_name="embedded", generation=SEPARATE)


@pytest.fixture(scope="module")
def policy(config):
    with Policy(config, embedded_tokenizer(), **NO_TRAINING) as policy:
        yield policy


@pytest.fixture(scope="module")
def generator(policy, config):
    with SeparateGenerator(policy, config, embedded_tokenizer()) as generator:
        yield generator


@pytest.fixture
def worker(policy):
    """The policy's single rank, in this process."""
    return policy.group._worker


@pytest.fixture
def refit(generator, policy):
    """Change the policy's weights and send them to the generator."""

    def run() -> None:
        policy.group.run_all("_add_noise_to_weights")
        generator.update_weights(generator.policy_version + 1)

    return run


def test_before_the_first_refit_a_generator_has_the_weights_that_the_policy_started_from(generator, worker):
    assert generator.policy_version == 0
    assert checksums(generator) == [worker.export.checksum()]


def test_greedy_completions_equal_those_of_the_saved_weights(generator, policy, worker, refit, tmp_path):
    refit()
    assert checksums(generator) == [worker.export.checksum()]
    policy.group.run_all("save_checkpoint", str(tmp_path))
    saved = LogprobModel(load_model(str(tmp_path), torch.float32), temperature=1.0)
    expected = BuiltinGenerator(saved, embedded_tokenizer(), worker.config.generation).generate(prompts(), greedy=True)
    completions = generator.generate(prompts(), greedy=True)
    assert torch.equal(completions["output_ids"], expected["output_ids"])
    assert torch.equal(completions["logprobs"], expected["logprobs"])
    assert completions["policy_versions"].tolist() == [generator.policy_version] * 4


def test_a_later_refit_never_overwrites_weights_in_use(make_worker):
    num_open = num_open_memories(os.getpid())
    worker = make_worker(init_optimizer=False)
    receiver = WeightReceiver(load_model(worker.config.model_name, torch.float32), worker.report_device_id())
    for version in range(1, 7):
        worker._add_noise_to_weights()
        before = receiver.checksum()
        worker.export.set_header(version, True)
        sizes, _ = worker.prepare_weights_for_ipc()
        receiver.begin(version)
        for name, _ in sizes:
            receiver.take(worker.get_weights_ipc_handles([name]))
            assert receiver.checksum() == before
        if version % 3:  # every third one is interrupted
            receiver.commit(version)
            assert receiver.checksum() == worker.export.checksum() != before
    # Two versions, open and mapped at both ends: memory of interrupted refits was reused.
    assert num_open_memories(os.getpid()) - num_open == 2 * 2 * 2 * len(sizes)
    worker.shutdown()


def test_a_corrupt_bucket_is_refused_and_the_old_version_stays(generator, worker, refit, monkeypatch):
    before, version = checksums(generator), generator.policy_version
    pack = worker.get_weights_ipc_handles

    def pack_and_change(keys):
        handles = pack(keys)
        ((_, handle),) = handles.values()
        AttachedMemory(handle.memory).tensor[1000] ^= 1
        return handles

    monkeypatch.setattr(worker, "get_weights_ipc_handles", pack_and_change)
    with pytest.raises(RefitError, match=r"has SHA-256 \w+…, not \w+…: it was changed in transit"):
        refit()
    monkeypatch.undo()
    assert checksums(generator) == before
    assert generator.generate(prompts())["policy_versions"].unique().tolist() == [version] == [generator.policy_version]
    refit()
    assert checksums(generator) == [worker.export.checksum()] != before


@pytest.mark.slow
def test_fifty_refits_leak_no_memory(generator, refit):
    processes = psutil.Process(), psutil.Process(generator.pool.workers[0].process.pids[0])

    def counts() -> list[tuple[int, int]]:
        return [(num_open_memories(process.pid), process.num_fds()) for process in processes]

    for _ in range(4):
        refit()
    before = counts()
    resident = [process.memory_info().rss for process in processes]
    for _ in range(50):
        refit()
    assert counts() == before
    assert [memories for memories, _ in before] == [16, 16]  # two versions of four buckets, each open and mapped
    for process, resident_bytes in zip(processes, resident, strict=True):
        assert process.memory_info().rss - resident_bytes < 5 * MODEL_BYTES
    assert not [name for name in os.listdir("/dev/shm") if NAME_PREFIX in name]


def test_memory_that_is_too_small_is_freed(make_worker):
    before = num_open_memories(os.getpid())
    worker = make_worker(init_optimizer=False, precision="bfloat16")
    receiver = WeightReceiver(load_model(worker.config.model_name, torch.bfloat16), worker.report_device_id())
    for version, bucket_bytes in enumerate((2000, 2000, 10_000, 10_000, 10_000)):
        worker.export.set_header(version, False)
        worker.prepare_weights_for_ipc()
        receiver.begin(version)
        buckets = plan_buckets(worker.export.infos(), bucket_bytes)
        for bucket in buckets:
            receiver.take(worker.get_weights_ipc_handles([info.name for info in bucket.tensors]))
        receiver.commit(version)
    # Two versions at both ends, each bucket open and mapped.
    assert num_open_memories(os.getpid()) - before == 2 * 2 * 2 * len(buckets)
    worker.shutdown()
    del receiver
    assert num_open_memories(os.getpid()) == before


def test_a_repeated_request_uses_no_more_memory(make_worker):
    worker = make_worker(init_optimizer=False)
    worker.prepare_weights_for_ipc()
    handles = [worker.get_weights_ipc_handles(["model.norm.weight"]) for _ in range(2)]
    once = num_open_memories(os.getpid())
    handles += [worker.get_weights_ipc_handles(["model.norm.weight"]) for _ in range(20)]
    assert num_open_memories(os.getpid()) == once
    worker.shutdown()


@pytest.mark.slow
def test_a_policy_killed_between_buckets_leaves_the_old_version_complete(config):
    with (
        WorkerGroup(KilledWhilePacking, (config, embedded_tokenizer()), NO_TRAINING, own_processes=True) as workers,
        SeparateGenerator(policy_of(workers), config, embedded_tokenizer()) as generator,
    ):
        workers.run_all("_add_noise_to_weights")
        generator.update_weights(1)
        before, completions = (
            checksums(generator),
            generator.generate(prompts(), greedy=True),
        )
        assert before == workers.run_all("checksum")
        workers.run_all("_add_noise_to_weights")
        workers.run_all("die_after", 2)
        with pytest.raises(WorkerError, match=r"was killed by SIGKILL.*in get_weights_ipc_handles"):
            generator.update_weights(2)
        assert generator.policy_version == 1
        assert checksums(generator) == before
        again = generator.generate(prompts(), greedy=True)
        assert torch.equal(again["output_ids"], completions["output_ids"])
        assert again["policy_versions"].unique().tolist() == [1]


# Invalid calls


def test_handles_need_a_prepared_refit_and_known_names(make_worker):
    worker = make_worker(init_optimizer=False)
    with pytest.raises(RefitError, match="weights before prepare_weights_for_ipc; call prepare_weights_for_ipc first"):
        worker.get_weights_ipc_handles(["model.norm.weight"])
    worker.prepare_weights_for_ipc()
    with pytest.raises(RefitError, match=r"no weight 'lm_head\.weight' \(1 of 2 keys are unknown\)"):
        worker.get_weights_ipc_handles(["model.norm.weight", "lm_head.weight"])  # it is tied
    with pytest.raises(RefitError, match="called without keys; pass at least one name"):
        worker.get_weights_ipc_handles([])
    worker.shutdown()


def test_sizes_are_of_full_tensors_in_the_configured_precision(make_worker):
    worker = make_worker("llama_untied", precision="bfloat16", init_optimizer=False)
    sizes, free_bytes = worker.prepare_weights_for_ipc()
    weights = dict(worker.model.model.named_parameters())
    assert sizes == [(name, weight.numel() * 2) for name, weight in weights.items()]
    assert sum(size for _, size in sizes) < free_bytes <= psutil.virtual_memory().total


def test_handles_name_the_policys_device_and_are_packed(make_worker):
    worker = make_worker(init_optimizer=False)
    worker.prepare_weights_for_ipc()
    ((device, (is_packed, handle)),) = worker.get_weights_ipc_handles(["model.norm.weight"]).items()
    assert device == worker.report_device_id()
    assert is_packed
    ((_, packed),) = handle.bucket.unpack(AttachedMemory(handle.memory).tensor)
    assert torch.equal(packed, worker.model.model.model.norm.weight)
    worker.shutdown()


@pytest.mark.parametrize(("free_bytes", "num_buckets"), [(1 << 40, 2), (1400 << 10, 3), (1 << 20, 6), (600 << 10, 6)])
def test_buckets_are_as_large_as_the_config_and_half_the_free_memory_allow(free_bytes, num_buckets):
    sizes = [(f"weight {number}", 300 << 10) for number in range(6)]
    config = GenerationConfig(refit_bucket_mb=1)
    buckets = buckets_of_names(sizes, config, free_bytes)
    assert [name for names in buckets for name in names] == [name for name, _ in sizes]
    assert len(buckets) == num_buckets


def test_a_weight_that_does_not_fit_twice_is_refused_with_the_numbers():
    with pytest.raises(RefitError, match=r"b takes 3,000 bytes.*5,999 bytes free"):
        buckets_of_names([("a", 10), ("b", 3000)], GenerationConfig(), 5999)


@pytest.mark.parametrize("first", [None, LostWorkerError("exited")], ids=["after a success", "after a loss"])
def test_a_generator_that_raises_in_a_refit_ends_all_generators(first):
    killed = []
    pool = SimpleNamespace(kill=lambda: killed.append(True))
    refit = Refit(SimpleNamespace(group=None, places=[]), pool, {}, GenerationConfig(), timeout_s=60, guard=None)
    calls = [Future(), Future(), Future()]  # the last one never returns
    calls[0].set_result(None) if first is None else calls[0].set_exception(first)
    calls[1].set_exception(WorkerError("generator 1 failed in take_weights: out of memory"))
    with pytest.raises(WorkerError, match="out of memory"):
        refit._problem(calls)
    assert killed == [True]
