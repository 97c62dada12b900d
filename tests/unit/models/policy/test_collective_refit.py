"""A broadcast sends the policy's weights, from any number of ranks, to separate generators."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from pathlib import Path

import pytest
import torch

from lucidrl.distributed.weight_buckets import TensorInfo, checksum_of
from lucidrl.distributed.weight_group import WeightGroup
from lucidrl.distributed.workers.group import WorkerGroup
from lucidrl.errors import RefitError, WorkerError
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.generation.separate import SeparateGenerator
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from lucidrl.models.policy.fsdp1_policy_worker import FSDP1PolicyWorker
from lucidrl.models.policy.policy import Policy
from tests.unit.models.policy.broadcasting_workers import KilledInBroadcast
from tests.unit.models.policy.test_refit import checksums, policy_of

COLLECTIVE = {"placement": "separate", "refit": "collective", "verify_refit": True, "max_new_tokens": 8}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Kept:
    """A sink that keeps copies of the tensors it receives."""

    def begin(self, version):
        self.version, self.weights = version, {}

    def put(self, name, tensor):
        self.weights[name] = tensor.clone()


def receive_from_policy(port: int, announcement: Path, sink: Kept) -> None:
    with WeightGroup.join("127.0.0.1", port, 1, 2, torch.device("cpu"), 60) as group:
        until = time.monotonic() + 60
        while not announcement.exists() and time.monotonic() < until:
            time.sleep(0.05)
        info = pickle.loads(announcement.read_bytes())
        group.receive([TensorInfo(name, shape, dtype) for name, (shape, dtype) in info.items()], sink)


def broadcast_from_ranks(kind, options, port, announcement):
    """On a rank: change the weights and send them; return checksum and precision."""
    worker = kind(PolicyConfig(**options), embedded_tokenizer(), init_optimizer=False, init_reference_model=False)
    worker._add_noise_to_weights()
    worker.init_collective("127.0.0.1", port, 2)
    info = worker.prepare_info_for_collective()
    if worker.rank == 0:
        part = announcement.with_suffix(".part")
        part.write_bytes(pickle.dumps(info))
        part.rename(announcement)
    worker.export.set_header(7, True)
    worker.broadcast_weights_for_collective()
    checksum = worker.export.checksum()
    worker.export.close()
    return checksum, {str(dtype) for _, dtype in info.values()}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (DTensorPolicyWorker, {"precision": "bfloat16"}),
        (DTensorPolicyWorker, {"dtensor_cfg": {"tensor_parallel_size": 2}}),
        (FSDP1PolicyWorker, {"precision": "bfloat16", "dtensor_cfg": {"enabled": False}}),
    ],
)
def test_rank_0_sends_the_shards_of_all_ranks(two_ranks, tiny_model, tmp_path, kind, changes):
    options = {"model_name": tiny_model("llama"), **changes}
    port, announcement, sink = free_port(), tmp_path / "info", Kept()
    thread = threading.Thread(target=receive_from_policy, args=(port, announcement, sink))
    thread.start()
    results = two_ranks(broadcast_from_ranks, kind, options, port, announcement)
    thread.join(60)
    assert sink.version == 7
    precision = f"torch.{changes.get('precision', 'float32')}"
    assert results == [(checksum_of(sink.weights.items()), {precision})] * 2


@pytest.mark.slow
def test_generators_get_version_after_version_and_sample_from_it(tiny_model, make_rows, tokenizer):
    config = PolicyConfig(model_name=tiny_model("llama_untied"), generation={**COLLECTIVE, "num_workers": 2})
    with (
        Policy(config, tokenizer, init_optimizer=False, init_reference_model=False) as policy,
        SeparateGenerator(policy, config, tokenizer) as generator,
    ):
        for version in (1, 2):
            policy.group.run_all("_add_noise_to_weights")
            generator.update_weights(version)
            assert checksums(generator) == [checksum_of(policy.group.run_all("return_state_dict")[0].items())] * 2
        rows = make_rows()
        assert generator.generate(rows, greedy=True)["output_ids"].equal(policy.generate(rows, True)["output_ids"])
    assert generator.policy_version == 2


@pytest.mark.slow
def test_a_sender_killed_in_the_middle_leaves_the_generator_its_version(tiny_model, make_rows, tokenizer):
    config = PolicyConfig(model_name=tiny_model("llama"), generation=COLLECTIVE)
    rows, options = make_rows(), {"init_optimizer": False, "init_reference_model": False}
    with (
        WorkerGroup(KilledInBroadcast, (config, tokenizer), options, own_processes=True) as policy,
        SeparateGenerator(policy_of(policy), config, tokenizer) as generator,
    ):
        policy.run_all("_add_noise_to_weights")
        generator.update_weights(1)
        checksum, completions = (
            checksums(generator),
            generator.generate(rows, greedy=True),
        )
        policy.run_all("_add_noise_to_weights")
        start = time.monotonic()
        with pytest.raises(WorkerError, match=r"killed by SIGKILL.*in export.try_broadcast") as error:
            generator.update_weights(2)
        assert time.monotonic() - start < 60
        assert "a generator reported meanwhile: " in error.value.__notes__[0]
        assert checksums(generator) == checksum
        assert generator.generate(rows, greedy=True)["output_ids"].equal(completions["output_ids"])
        assert generator.policy_version == 1


def test_a_broadcast_before_anyone_has_joined_is_refused(make_worker):
    with pytest.raises(RefitError, match="before init_collective; call init_collective first, on every rank"):
        make_worker(init_optimizer=False).broadcast_weights_for_collective()
