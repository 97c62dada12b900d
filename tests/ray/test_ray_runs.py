"""Whole runs on simulated nodes: equal to local ranks, and bit-identical after a fault and a resume."""

from __future__ import annotations

import pytest

from lucidrl.recipes.configs import GRPORunConfig
from lucidrl.recipes.run import train
from lucidrl.utils.config import load_config
from tests.faults import injection
from tests.faults.records import digests
from tests.faults.test_resume_after_kill import OF_ALGORITHM, SETTINGS
from tests.faults.test_resume_after_kill import Unwatched as OnTheSameLayout
from tests.ray.nodes import check_all_was_given_back
from tests.unit.recipes.test_two_workers import SMALL, Unwatched, numbers

pytestmark = pytest.mark.slow


def test_a_run_on_three_nodes_is_the_run_on_three_local_ranks(cluster, tmp_path):
    def run(name: str, *overrides: str) -> list[dict[str, float]]:
        (tmp_path / name).mkdir()
        settings = ["cluster.num_workers=3", "cluster.num_threads=1", "num_threads=1", *overrides]
        train(load_config(GRPORunConfig, SMALL, overrides=settings), tmp_path / name, Unwatched())
        return numbers(tmp_path / name)

    third = cluster.add_node(num_cpus=1)
    on_nodes = run("nodes", "cluster.launcher=ray", "cluster.num_nodes=3")
    assert on_nodes == run("local")
    assert {f"rank_{rank}.log" for rank in range(3)} <= {path.name for path in (tmp_path / "nodes/logs").iterdir()}
    check_all_was_given_back()
    cluster.remove_node(third)


def test_a_run_whose_rank_was_killed_in_a_step_resumes_bit_identical(cluster, tmp_path):
    nodes = ("cluster.num_workers=2", "cluster.num_nodes=2", f"cluster.address={cluster.address}", "grpo.max_steps=4")
    settings = [*SETTINGS, *OF_ALGORITHM["grpo"], *nodes]

    def run(name: str, resume: bool) -> dict[str, str]:
        (tmp_path / name).mkdir(exist_ok=True)
        train(load_config(GRPORunConfig, overrides=settings), tmp_path / name, OnTheSameLayout(), resume)
        return digests(tmp_path / name)

    failed = injection.run_with_fault(tmp_path / "killed", settings, "train", 3, "SIGKILL of a rank")
    assert failed.returncode == 2, failed.stdout
    assert "error: rank 1 of 2 on node " in failed.stdout
    assert "was killed by SIGKILL, perhaps out of memory, in train" in failed.stdout
    assert "begins call 3 of train" in failed.stdout
    check_all_was_given_back()
    resumed = run("killed", resume=True)
    assert resumed["step"] == "4"
    assert resumed == run("uninterrupted", resume=False)
