"""A replica of vLLM with two tensor parallel ranks: what one rank would compute, refitted and replaced as a whole."""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any

import psutil
import pytest
import torch

from lucidrl.distributed.config import ClusterConfig
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.generation import separate
from lucidrl.models.generation.separate import SeparateGenerator
from lucidrl.models.generation.vllm import VllmEngine
from lucidrl.models.policy.policy import Policy
from tests.unit.models.policy import faulty_generators as faulty
from tests.unit.models.policy.test_mismatch_guard import NAMES, GuardedSteps
from tests.vllm.faulty_vllm import FAULTS, FaultyVllm
from tests.vllm.vllm_cases import (
    QUESTIONS,
    ROUNDING,
    batch_of,
    check_greedy_choices,
    completions_of,
    config_of,
    needs_vllm,
    prompts_of,
    scores,
)

pytestmark = needs_vllm
TOKENIZER = embedded_tokenizer()
PROMPTS = prompts_of(TOKENIZER, (*QUESTIONS, "12+3=" * 80))
TEMPERATURE = 0.7
SAMPLING = {"max_new_tokens": 8, "temperature": TEMPERATURE, "top_p": 0.8}
NO_TRAINING = {"init_optimizer": False, "init_reference_model": False}
EXIT_TIMEOUT_S = 10.0


@pytest.fixture(scope="module")
def parts():
    """A policy, and one replica with two ranks."""
    config = config_of(**SAMPLING, vllm={"tensor_parallel_size": 2})
    cluster = ClusterConfig(num_threads=2, start_timeout_s=180, call_timeout_s=60)
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patched, Policy(config, TOKENIZER, **NO_TRAINING) as policy:
        patched.setitem(separate.ENGINES, "vllm", FaultyVllm)
        with SeparateGenerator(policy, config, TOKENIZER, cluster=cluster) as generator:
            yield policy, generator, config


@pytest.fixture
def policy(parts):
    return parts[0]


@pytest.fixture
def generator(parts):
    return parts[1]


def greedy(generator: Any) -> list[tuple[list[int], list[float]]]:
    return completions_of(generator.generate(batch_of(PROMPTS), greedy=True))


def processes_of(generator: SeparateGenerator) -> list[psutil.Process]:
    """The processes of the replica: its own and those of its ranks."""
    replica = psutil.Process(generator.pool.workers[0].process.pids[0])
    return [replica, *(process for process in replica.children(recursive=True) if "VLLM" in process.name())]


def check_ranks(generator: SeparateGenerator, policy: Policy) -> None:
    """Both ranks use the weights of the policy."""
    ranks = generator.pool.workers[0].run("report_weights")
    assert [rank.checksum for rank in ranks] == policy.group.run_all("export.sent_checksums") * 2
    assert {rank.version for rank in ranks} == {generator.policy_version}


def test_greedy_choices_are_those_of_the_builtin_engine_after_every_prefix(generator):
    output = generator.generate(batch_of(PROMPTS), greedy=True)
    assert check_greedy_choices(PROMPTS, output, "embedded", TOKENIZER, TEMPERATURE) > 2 * len(PROMPTS)
    assert [process.name() for process in processes_of(generator)[1:]] == ["VLLM::Worker_TP0", "VLLM::Worker_TP1"]


def test_logprobs_are_those_of_the_full_distribution_at_the_temperature(generator, policy):
    output = generator.generate(batch_of(PROMPTS, samples=8))
    assert (output["logprobs"] - scores(policy, output)).abs().max() < ROUNDING


def test_ranks_share_the_threads_and_listen_on_the_loopback_address_only(generator):
    assert generator.pool.workers[0].run("num_threads_of_ranks") == [1, 1]
    _, *ranks = processes_of(generator)
    listening = [c.laddr.ip for rank in ranks for c in rank.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert listening
    assert set(listening) == {"127.0.0.1"}


def test_ranks_leave_ctrl_c_to_the_driver(generator):
    before = greedy(generator)
    for rank in processes_of(generator)[1:]:
        rank.send_signal(signal.SIGINT)
    assert greedy(generator) == before


@pytest.mark.parametrize("refit", ["ipc", "collective"])
def test_after_a_refit_greedy_output_is_that_of_one_rank_with_the_saved_weights(parts, refit, tmp_path, monkeypatch):
    policy, generator, config = parts
    monkeypatch.setattr(generator._refit, "_config", config.generation.model_copy(update={"refit": refit}))
    before = greedy(generator)
    for _ in range(2):
        policy.group.run_all("_add_noise_to_weights")
        generator.update_weights(generator.policy_version + 1)
    check_ranks(generator, policy)
    policy.group.run_all("save_checkpoint", str(tmp_path))
    fresh = VllmEngine(config_of(str(tmp_path), **SAMPLING), TOKENIZER, 0, None)
    expected, found = greedy(fresh), greedy(generator)
    fresh.shutdown()
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, logprobs), (_, expected_logprobs) in zip(found, expected, strict=True):
        assert logprobs == pytest.approx(expected_logprobs, abs=ROUNDING)
    assert found != before


def test_each_fault_on_one_rank_only_is_found_and_named(parts, tmp_path, caplog):
    policy, generator, config = parts
    caplog.set_level(logging.WARNING)
    policy.group.run_all("save_checkpoint", str(tmp_path))
    steps = GuardedSteps(policy, generator, config, str(tmp_path), caplog)
    steps.version = generator.policy_version
    for fault in FAULTS:
        steps.restore_weights()
        rank = 0 if fault == faulty.TEMPERATURE else 1  # rank 0 alone has logits
        assert steps.step() == [], f"false alarm before {fault}"
        found = steps.step(fault, only_rank=rank)
        assert found, f"{fault} was not found"
        assert all(f": {NAMES[fault]} (" in message for message in found), (fault, found)
        if fault in (faulty.SKIPPED, faulty.PERMUTED, faulty.NOT_SENT):
            assert "rank 1 of generator 0 after the refit" in found[0]
    assert steps.step() == []


def test_shared_memory_has_no_name_that_a_kill_would_leave_behind(generator):
    maps = [part.path for process in processes_of(generator) for part in process.memory_maps()]
    mapped = {path for path in maps if path.startswith("/dev/shm/")}
    # a queue to the ranks, one from each rank, and one between them
    assert len([path for path in mapped if path.startswith("/dev/shm/psm_")]) == 4
    assert [path for path in mapped if path.startswith("/dev/shm/vllm_dist")]
    assert not [path for path in mapped if os.path.exists(path)]


def test_a_killed_replica_restarts_with_both_ranks_and_leaves_no_process(generator, policy):
    undisturbed, restarts = greedy(generator), generator.num_restarts
    lost = processes_of(generator)
    lost[2].suspend()  # a rank that hangs ends too
    lost[0].kill()
    assert not psutil.wait_procs(lost, EXIT_TIMEOUT_S)[1]
    for (tokens, logprobs), (before, logprobs_before) in zip(greedy(generator), undisturbed, strict=True):
        assert tokens == before
        assert logprobs == pytest.approx(logprobs_before, abs=ROUNDING)
    assert generator.num_restarts == restarts + 1
    assert len(processes_of(generator)) == 3
    check_ranks(generator, policy)


def test_a_killed_rank_ends_its_replica(generator):
    """This test leaves a lost replica behind: keep it the last one."""
    lost = processes_of(generator)
    lost[2].kill()
    started = time.monotonic()
    generator.pool.each(lambda worker: worker.run("generate", batch_of(PROMPTS), True))
    assert time.monotonic() - started < EXIT_TIMEOUT_S
    assert "exited with code 71" in str(generator.pool.workers[0].loss)
    assert not psutil.wait_procs(lost, EXIT_TIMEOUT_S)[1]
