"""A refit brings whole versions of the policy's weights into vLLM; replicas that fail are replaced."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import psutil
import pytest

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.shared_memory import NAME_PREFIX
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.generation import separate
from lucidrl.models.generation.separate import SeparateGenerator
from lucidrl.models.generation.vllm import VllmEngine
from lucidrl.models.policy.policy import Policy
from tests.faults.mortal_generators import FOLDER_VARIABLE, MortalVllm, plan_death
from tests.faults.processes import is_running
from tests.vllm.vllm_cases import (
    QUESTIONS,
    ROUNDING,
    batch_of,
    check_greedy_choices,
    completions_of,
    config_of,
    needs_vllm,
    prompts_of,
    write_untied_model,
)

pytestmark = needs_vllm
TOKENIZER = embedded_tokenizer()
PROMPTS = prompts_of(TOKENIZER, (*QUESTIONS, "12+3=" * 80))
"""The last one fills blocks of the prefix cache."""
NO_TRAINING = {"init_optimizer": False, "init_reference_model": False}
HASTY = ClusterConfig(num_threads=1, start_timeout_s=120, call_timeout_s=25)


@pytest.fixture(scope="module", autouse=True)
def mortal(tmp_path_factory):
    """Replicas that tests can kill at a call."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("deaths")))
        patched.setitem(separate.ENGINES, "vllm", MortalVllm)
        yield


def generator_of(policy: Policy, config: Any, cluster: ClusterConfig | None = None) -> SeparateGenerator:
    return SeparateGenerator(policy, config, TOKENIZER, cluster=cluster or ClusterConfig(num_threads=1))


def add_noise(policy: Policy) -> None:
    policy.group.run_all("_add_noise_to_weights")


def greedy(generator: Any) -> list[tuple[list[int], list[float]]]:
    return completions_of(generator.generate(batch_of(PROMPTS), greedy=True))


def checksums_of(generator: SeparateGenerator) -> list[Any]:
    """Checksums of the weights in use, of each rank of each replica."""
    return [rank.checksum for worker in generator.pool.workers for rank in worker.run("report_weights")]


@pytest.fixture(scope="module", params=["tied", "untied"])
def model(request, tmp_path_factory) -> str:
    return "embedded" if request.param == "tied" else write_untied_model(tmp_path_factory.mktemp("untied"))


@pytest.mark.parametrize("refit", ["ipc", "collective"])
def test_after_a_refit_greedy_output_is_that_of_an_engine_loaded_from_the_saved_weights(model, refit, tmp_path):
    config = config_of(model, refit=refit, refit_bucket_mb=1, verify_refit=True)
    with Policy(config, TOKENIZER, **NO_TRAINING) as policy, generator_of(policy, config) as generator:
        before = greedy(generator)
        for version in (1, 2):
            add_noise(policy)
            generator.update_weights(version)
        policy.group.run_all("save_checkpoint", str(tmp_path))
        fresh = VllmEngine(config_of(str(tmp_path)), TOKENIZER, 0, None)
        expected, found = greedy(fresh), greedy(generator)
        fresh.shutdown()
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        for (_, logprobs), (_, expected_logprobs) in zip(found, expected, strict=True):
            assert logprobs == pytest.approx(expected_logprobs, abs=1e-5)
        assert found != before
        output = generator.generate(batch_of(PROMPTS), greedy=True)
        assert set(output["policy_versions"].tolist()) == {2}
        assert check_greedy_choices(PROMPTS, output, str(tmp_path), TOKENIZER)
        assert checksums_of(generator) == policy.group.run_all("export.sent_checksums")


@pytest.fixture(scope="module")
def policy():
    with Policy(config_of(), TOKENIZER, **NO_TRAINING) as policy:
        yield policy


@pytest.fixture(scope="module")
def generator(policy):
    with generator_of(policy, config_of(refit_bucket_mb=1, num_workers=2), HASTY) as generator:
        generator.generate(batch_of(PROMPTS))
        yield generator


def num_open_memories(process: psutil.Process) -> int:
    links = [os.readlink(entry) for entry in os.scandir(f"/proc/{process.pid}/fd") if os.path.islink(entry)]
    return sum(link.startswith(f"/memfd:{NAME_PREFIX}") for link in links)


def test_fifty_refits_leak_nothing(generator, policy):
    processes = [psutil.Process(), *(psutil.Process(w.process.pids[0]) for w in generator.pool.workers)]

    def refit() -> None:
        generator.update_weights(generator.policy_version + 1)

    def counts() -> list[tuple[int, int, int]]:
        return [(num_open_memories(p), p.num_fds(), p.num_threads()) for p in processes]

    for _ in range(5):
        refit()
    before, resident = counts(), [process.memory_info().rss for process in processes]
    for _ in range(50):
        refit()
    assert counts() == before
    for process, resident_bytes in zip(processes, resident, strict=True):
        assert process.memory_info().rss - resident_bytes < 30 << 20  # fifty versions have 160 MB
    assert not [name for name in os.listdir("/dev/shm") if NAME_PREFIX in name]


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_the_prompts_of_a_replica_that_fails_are_completed(generator, policy, fate, caplog):
    add_noise(policy)
    generator.update_weights(generator.policy_version + 1)
    undisturbed, restarts = greedy(generator), generator.num_restarts
    process = generator.pool.workers[1].process.pids[0]
    plan_death("generate", 1, fate)
    started = time.monotonic()
    output = generator.generate(batch_of(PROMPTS), greedy=True)
    assert time.monotonic() - started < 120
    assert generator.num_restarts == restarts + 1
    assert not is_running(process)
    for (tokens, logprobs), (before, logprobs_before) in zip(completions_of(output), undisturbed, strict=True):
        assert tokens == before
        assert logprobs == pytest.approx(logprobs_before, abs=ROUNDING)
    assert set(output["policy_versions"].tolist()) == {generator.policy_version}
    how = "was killed by SIGKILL" if fate == signal.SIGKILL else "did not finish generate within 25 s"
    assert f"generator 1 of 2 {how}" in caplog.text


def test_a_replica_whose_loader_fails_is_replaced_and_refitted(generator, policy, caplog):
    add_noise(policy)
    restarts, others = generator.num_restarts, generator.pool.workers[1].process.pids
    plan_death("load", 0)
    generator.update_weights(generator.policy_version + 1)
    assert generator.num_restarts == restarts + 1
    assert generator.pool.workers[1].process.pids == others
    assert checksums_of(generator) == policy.group.run_all("export.sent_checksums") * 2
    assert "exited with code 70" in caplog.text
    assert "a planned failure of the loader" in caplog.text


def test_rows_do_not_change_when_replicas_share_them(generator, policy):
    completions = greedy(generator)
    longer = generator.generate(batch_of(PROMPTS, samples=3), greedy=True)
    assert [tokens for tokens, _ in completions_of(longer)] == [tokens for tokens, _ in completions for _ in range(3)]
