"""Ranks on the nodes of a Ray cluster behave like ranks of this machine, and leave the cluster as it was."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import ray
import torch
from safetensors.torch import load_file

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers import ray_resources, ray_workers
from lucidrl.distributed.workers.group import WorkerGroup
from lucidrl.errors import ConfigError, DataError
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.loading import load_tokenizer
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.policy import Policy
from tests.ray.nodes import check_all_was_given_back, nodes_of
from tests.unit.distributed.toy_workers import Joined, Plain

TWO_NODES = ClusterConfig(launcher="ray", num_workers=2, num_nodes=2, start_timeout_s=300, call_timeout_s=60)


@pytest.fixture(scope="module")
def group(cluster, tmp_path_factory):
    """One rank on each of two nodes."""
    variables = {"HF_TOKEN": "hf_verysecret", "NCCL_DEBUG": "VERSION", "TORCH_SECRET_KEY": "verysecret", "OTHER": "1"}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in variables.items():
            patched.setenv(name, value)
        group = WorkerGroup(Joined, cluster=TWO_NODES, log_dir=tmp_path_factory.mktemp("logs"))
    with group:
        yield group


def test_ranks_on_two_nodes_find_each_other(group):
    assert len(set(nodes_of(group))) == 2
    assert group.run_all("sum_of_ranks") == [1.0, 1.0]
    environments = group.run_all("environment")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    assert [[found[name] for name in names] for found in environments] == [["0", "0", "2", "1"], ["1", "0", "2", "1"]]
    assert {found["MASTER_ADDR"] for found in environments} == {ray.util.get_node_ip_address()}


def test_ranks_listen_on_one_interface_only(group):
    for pid in group.run_all("pid"):
        listening = [c.laddr.ip for c in psutil.Process(pid).net_connections() if c.status == psutil.CONN_LISTEN]
        assert set(listening) == {ray.util.get_node_ip_address()}


def test_variables_that_change_what_ranks_compute_reach_them_and_secrets_do_not(group):
    for environment in group.run_all("environment"):
        assert environment["NCCL_DEBUG"] == "VERSION"
        assert not {"HF_TOKEN", "TORCH_SECRET_KEY", "OTHER"} & environment.keys()
        assert "verysecret" not in str(environment)


@pytest.mark.filterwarnings("error:The given buffer is not writable")
def test_arguments_go_to_each_node_once_and_results_are_writable_copies(group, monkeypatch):
    stored = []
    put = ray.put
    monkeypatch.setattr(ray, "put", lambda value: stored.append(value) or put(value))
    tensor = torch.arange(100_000.0)
    results = group.run_all("double", tensor)
    assert len(stored) == 1
    for result in results:
        assert torch.equal(result, 2 * tensor)
        result.zero_()
    group.run_each("double", [(tensor,), (tensor + 1,)])
    assert len(stored) == 3


def test_arguments_that_cannot_be_pickled_are_refused_and_change_nothing(group):
    with pytest.raises(DataError, match="arguments of echo cannot be sent to the workers"):
        group.run_all("echo", lambda: None)
    assert group.run_all("echo", 3) == [3, 3]


def test_workers_leave_ctrl_c_to_the_driver(group):
    for pid in group.run_all("pid"):
        os.kill(pid, signal.SIGINT)
        os.kill(psutil.Process(pid).ppid(), signal.SIGINT)
    assert group.run_all("echo", 3) == [3, 3]


def test_what_cannot_be_placed_is_refused_at_once_with_what_there_is(group):
    started = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        WorkerGroup(Plain, cluster=ClusterConfig(launcher="ray", num_workers=3))
    assert time.monotonic() - started < 20
    text = str(caught.value)
    assert "cluster.num_workers=3 on cluster.num_nodes=1 asks Ray for CPU 3 on each of 1 nodes, but" in text
    assert text.count("CPU 1 of 2 free") == 2  # each has a rank of the group
    with pytest.raises(ConfigError, match="on each of 4 nodes"):
        WorkerGroup(Plain, cluster=ClusterConfig(launcher="ray", num_workers=4, num_nodes=4))
    with pytest.raises(ConfigError, match=r"CPU 1, GPU 1 on each of 1 nodes, but .* GPU 0 of 0 free"):
        WorkerGroup(Plain, cluster=ClusterConfig(launcher="ray", num_gpus_per_worker=1))


def test_what_another_group_holds_is_refused_within_seconds(group, monkeypatch):
    assert ray_resources._RELEASE_TIMEOUT_S < 10
    monkeypatch.setattr(ray_resources, "_RELEASE_TIMEOUT_S", 1.0)
    with pytest.raises(ConfigError, match="CPU 2 on each of 2 nodes"):
        WorkerGroup(Plain, cluster=ClusterConfig(launcher="ray", num_workers=4, num_nodes=2))


@pytest.mark.slow
def test_a_connection_that_the_program_has_made_is_used_and_left(cluster, tmp_path):
    before = ray.nodes()
    with WorkerGroup(Plain, cluster=ClusterConfig(address=cluster.address), log_dir=tmp_path) as group:
        (pid,) = group.run_all("pid")
        assert pid != os.getpid()
        group.run_all("say", "hello")
    assert not psutil.pid_exists(pid)
    assert (tmp_path / "rank_0.log").read_text() == "hello\ngoodbye\n"
    assert [path.name for path in tmp_path.iterdir()] == ["rank_0.log"]
    assert ray.is_initialized()
    assert ray.nodes() == before
    with pytest.raises(ConfigError, match=f"is not {cluster.address}, the Ray cluster that this program is connected"):
        WorkerGroup(Plain, cluster=ClusterConfig(address="127.0.0.1:1"))


@pytest.mark.slow
def test_logs_of_a_node_with_another_file_system_come_to_the_drivers_folder(cluster, tmp_path, monkeypatch):
    @contextmanager
    def unmarked(folder):
        yield folder / "there-is-no-such-file"

    monkeypatch.setattr(ray_workers, "marked", unmarked)
    two = ClusterConfig(launcher="ray", num_workers=2, num_cpus_per_worker=0.5)
    with WorkerGroup(Plain, cluster=two, log_dir=tmp_path) as group:
        assert group.blind_nodes == nodes_of(group)[:1]
        group.run_each("say", [("x" * 3_000_000 + "\nfirst",), ("second ü",)])
        group.run_all("sleep_on", 1, 1.0)
        assert (tmp_path / "rank_1.log").read_text() == "second ü\n"
    text = (tmp_path / "rank_0.log").read_text()
    assert text.endswith("x\nfirst\ngoodbye\n")
    assert "bytes are left out here" in text
    assert len(text) < 3_000_000


def learned(cluster_config: ClusterConfig, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of some training steps, and all weights and optimizer states after them."""
    torch.manual_seed(0)
    rows = BatchedDataDict(
        {
            "input_ids": torch.randint(6, 40, (8, 24)),
            "input_lengths": torch.full((8,), 24),
            "token_mask": torch.ones(8, 24),
            "sample_mask": torch.ones(8),
        }
    )
    config = PolicyConfig(model_name="embedded-untrained", optimizer={"kwargs": {"lr": 1e-2}})
    with Policy(config, load_tokenizer("embedded"), cluster=cluster_config, init_reference_model=False) as policy:
        losses = [policy.train(rows, NLLLoss()).loss for _ in range(3)]
        policy.save(folder)
    tensors = {}
    for file in sorted(folder.rglob("*.safetensors")):
        tensors |= {f"{file.parent.name}/{name}": tensor for name, tensor in load_file(file).items()}
    return losses, tensors


@pytest.mark.slow
def test_two_nodes_train_bit_identical_to_two_local_ranks(cluster, tmp_path):
    losses, tensors = learned(TWO_NODES, tmp_path / "nodes")
    local_losses, local_tensors = learned(ClusterConfig(num_workers=2), tmp_path / "local")
    assert losses[0] > losses[-1]
    assert losses == local_losses
    assert tensors.keys() == local_tensors.keys()
    assert all(torch.equal(tensor, local_tensors[name]) for name, tensor in tensors.items())


@pytest.mark.slow
def test_three_nodes_with_two_ranks_each_are_one_group(cluster, group):
    group.shutdown()
    third = cluster.add_node(num_cpus=2)
    six = ClusterConfig(launcher="ray", num_workers=6, num_nodes=3, num_threads=1)
    with WorkerGroup(Joined, cluster=six) as large:
        assert large.run_all("sum_of_ranks") == [15.0] * 6
        assert large.run_all("num_threads") == [1] * 6
        nodes = nodes_of(large)
        assert [nodes[rank] == nodes[rank + 1] for rank in range(5)] == [True, False, True, False, True]
        assert [env["LOCAL_RANK"] for env in large.run_all("environment")] == ["0", "1"] * 3
    check_all_was_given_back()
    cluster.remove_node(third)
