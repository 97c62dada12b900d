"""Asynchronous GRPO on two nodes: a generator that is lost with its agent or without it costs no prompt."""

from __future__ import annotations

import signal

import psutil
import pytest

from tests.faults.async_runs import kill, of_role, read, start, wait
from tests.faults.records import metrics
from tests.faults.test_async_kills import STEPS, check_epoch
from tests.ray.nodes import agent_of, check_all_was_given_back, rank_processes, raylet_of

pytestmark = pytest.mark.slow


def test_a_generator_on_another_node_is_lost_twice_and_every_prompt_is_trained_on_once(cluster, tmp_path):
    folder, ledger = tmp_path / "run", tmp_path / "ledger.jsonl"
    nodes = (f"cluster.address={cluster.address}", "policy.generation.nodes=other")
    process = start(folder, ledger, STEPS, *nodes)

    def generator() -> int:
        [found] = of_role("generation", rank_processes())
        return found.pid

    try:
        wait(lambda: len(read(ledger)) >= 3, process)
        [rank] = of_role("rank", rank_processes())
        assert raylet_of(rank.pid) != raylet_of(generator())
        psutil.Process(generator()).send_signal(signal.SIGKILL)
        wait(lambda: len(read(ledger)) >= 9, process)
        psutil.Process(agent_of(generator())).send_signal(signal.SIGKILL)
        assert process.wait(240) == 0, folder.with_suffix(".log").read_text()[-3000:]
    finally:
        if process.poll() is None:
            kill(process)
    check_epoch(ledger)
    assert max(entry["staleness"] for entry in read(ledger)) > 0, "nothing was asynchronous"
    assert sum(line.get("train/replaced_generators", 0) for line in metrics(folder)) == 2
    check_all_was_given_back()
