"""Generators on the nodes of a Ray cluster: their placement, and the refit that reaches them."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import ray
import torch

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers import ray_resources
from lucidrl.errors import ConfigError
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.generation import separate
from lucidrl.models.generation.separate import SeparateGenerator
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.policy import Policy
from lucidrl.recipes.configs import GRPORunConfig
from lucidrl.recipes.preflight import preflight
from lucidrl.utils.config import load_config
from tests.faults.mortal_generators import FOLDER_VARIABLE, MortalGenerator, plan_death
from tests.ray.nodes import check_all_was_given_back

pytestmark = pytest.mark.slow

ONE = ClusterConfig(launcher="ray", num_threads=1, start_timeout_s=300, call_timeout_s=60)
NO_TRAINING = {"init_optimizer": False, "init_reference_model": False}


def config_of(**generation: Any) -> PolicyConfig:
    return PolicyConfig(model_name="embedded", generation={"placement": "separate", "max_new_tokens": 4, **generation})


def rows() -> BatchedDataDict[Any]:
    return BatchedDataDict({"input_ids": torch.arange(6, 22).view(4, 4), "input_lengths": torch.full((4,), 4)})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["num_workers=4"], r"worker \d of policy.generation.num_workers=4 asks Ray for CPU 1 on one node, but "),
        (["nodes=policy", "num_workers=2"], r"num_workers=2 asks Ray for CPU 1 on one node of [0-9a-f]{8}, but "),
        (["nodes=other", "num_workers=3"], r"num_workers=3 asks .* on one node other than [0-9a-f]{8}, but "),
    ],
)
def test_generators_without_room_beside_the_policy_are_refused_before_anything_is_loaded(
    cluster, tmp_path, monkeypatch, settings, message
):
    monkeypatch.setattr(ray_resources, "_RELEASE_TIMEOUT_S", 1.0)
    overrides = [f"policy.generation.{setting}" for setting in ("placement=separate", *settings)]
    overrides += [f"cluster.address={cluster.address}", f"run.root={tmp_path}"]
    with pytest.raises(ConfigError, match=message):
        preflight(load_config(GRPORunConfig, overrides=overrides))
    check_all_was_given_back()


@pytest.fixture(scope="module")
def policy(cluster, tmp_path_factory):
    with Policy(
        config_of(), embedded_tokenizer(), cluster=ONE, log_dir=tmp_path_factory.mktemp("policy"), **NO_TRAINING
    ) as policy:
        yield policy


@pytest.fixture(scope="module", autouse=True)
def mortal(tmp_path_factory):
    """Generators that tests can kill at a call."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("deaths")))
        patched.setitem(separate.ENGINES, "builtin", MortalGenerator)
        yield


def listening_at(pid: int) -> set[str]:
    sockets = psutil.Process(pid).net_connections()
    return {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}


def test_generators_on_other_nodes_are_sent_the_weights_also_when_they_are_replaced(policy, tmp_path):
    (place,) = policy.group.run_all("report_place")
    config = config_of(nodes="other", verify_refit=True)
    with SeparateGenerator(policy, config, embedded_tokenizer(), cluster=ONE, log_dir=tmp_path) as generator:
        (worker,) = generator.pool.workers
        assert generator._states[0].places[0].node != place.node
        assert not generator._refit.shares_memory(worker)
        for version in (1, 2):
            policy.group.run_all("_add_noise_to_weights")
            generator.update_weights(version)
        assert listening_at(worker.run("pid")) == {ray.util.get_node_ip_address()}
        completions, expected = generator.generate(rows(), greedy=True), policy.generate(rows(), greedy=True)
        assert torch.equal(completions["output_ids"], expected["output_ids"])
        plan_death("generate", 0)
        again = generator.generate(rows(), greedy=True)
        assert torch.equal(again["output_ids"], expected["output_ids"])
        assert set(again["policy_versions"].tolist()) == {2}
        assert generator.num_restarts == 1
        assert generator._states[0].places[0].node != place.node


def test_generators_beside_the_policy_find_the_weights_in_its_memory(policy, tmp_path):
    (place,) = policy.group.run_all("report_place")
    with SeparateGenerator(
        policy, config_of(nodes="policy"), embedded_tokenizer(), cluster=ONE, log_dir=tmp_path
    ) as generator:
        (worker,) = generator.pool.workers
        assert generator._states[0].places[0].node == place.node
        assert generator._refit.shares_memory(worker)
        policy.group.run_all("_add_noise_to_weights")
        generator.update_weights(1)
        completions, expected = generator.generate(rows(), greedy=True), policy.generate(rows(), greedy=True)
        assert torch.equal(completions["output_ids"], expected["output_ids"])
    assert (tmp_path / "generation" / "rank_0.log").exists()
