"""Generators that die or hang are replaced, and nothing else changes; the policy goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.config import ClusterConfig
from lucidrl.errors import DataError, LostWorkerError, RefitError, WorkerError
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.generation import separate
from lucidrl.models.generation.separate import SeparateGenerator
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.policy import Policy
from lucidrl.recipes.configs import GRPORunConfig
from lucidrl.recipes.run import train
from lucidrl.utils.config import load_config
from tests.faults.mortal_generators import FOLDER_VARIABLE, MortalGenerator, plan_death, was_met
from tests.faults.processes import is_running, own_children, wait_until_gone
from tests.faults.records import digests
from tests.unit.recipes.test_two_workers import SMALL, Unwatched, numbers

ONE_THREAD = ClusterConfig(num_threads=1)
HASTY = ClusterConfig(num_threads=1, start_timeout_s=300, call_timeout_s=40)
NO_TRAINING = {"init_optimizer": False, "init_reference_model": False}


def config_of(**generation: Any) -> PolicyConfig:
    generation = {"placement": "separate", "num_workers": 2, "max_new_tokens": 8, "refit_bucket_mb": 1, **generation}
    return PolicyConfig(model_name="embedded", generation=generation)


def rows() -> BatchedDataDict[Any]:
    """Three samples of each of eight prompts, which bring their own draws."""
    prompts = torch.arange(6, 38).view(8, 4).repeat_interleave(3, dim=0)
    columns = {"input_ids": prompts, "input_lengths": torch.full((24,), 4), "draw_keys": torch.arange(24)}
    return BatchedDataDict(columns)


def checksums(generator: SeparateGenerator) -> list[str]:
    return [worker.run("receiver.checksum") for worker in generator.pool.workers]


def pids(generator: SeparateGenerator) -> list[int]:
    return [worker.run("pid") for worker in generator.pool.workers]


def are_equal(completions: BatchedDataDict[Any], others: BatchedDataDict[Any]) -> bool:
    return completions.keys() == others.keys() and all(
        torch.equal(completions[name], others[name]) for name in completions
    )


@contextmanager
def interrupted_when_stopped(method: str, *numbers: int) -> Iterator[None]:
    """Generators stop in the method, and Ctrl-C comes when all have: it is raised at once, and none is left."""
    before, times = own_children(), []
    for number in numbers:
        plan_death(method, number, signal.SIGSTOP)

    def interrupt() -> None:
        until = time.monotonic() + 60
        while not all(was_met(method, number) for number in numbers) and time.monotonic() < until:
            time.sleep(0.02)
        times.append(time.monotonic())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        yield
    assert time.monotonic() - times[0] < 45
    assert all(was_met(method, number) for number in numbers)
    assert own_children() <= before


@pytest.fixture(scope="module", autouse=True)
def mortal(tmp_path_factory):
    """Generators that tests can kill at a call."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("deaths")))
        patched.setitem(separate.ENGINES, "builtin", MortalGenerator)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def policy():
    with Policy(config_of(), embedded_tokenizer(), **NO_TRAINING) as policy:
        yield policy


@pytest.fixture(scope="module")
def generator(policy, tmp_path_factory):
    """Two processes, which the policy's weights reach through shared memory."""
    logs = tmp_path_factory.mktemp("logs")
    with SeparateGenerator(policy, config_of(), embedded_tokenizer(), cluster=ONE_THREAD, log_dir=logs) as generator:
        yield generator
    assert {path.name for path in (logs / "generation").iterdir()} == {"rank_0.log", "rank_1.log"}


@pytest.mark.slow
def test_two_generators_generate_like_the_policy_itself_also_for_rows_without_seeds(generator, policy):
    data = rows()
    del data["draw_keys"]
    shuffled = data.select_indices(torch.randperm(24, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(generator.generate(shuffled)["output_ids"], policy.generate(shuffled)["output_ids"])


def test_the_prompts_of_a_killed_generator_are_completed_by_others(generator, policy, caplog):
    policy.group.run_all("_add_noise_to_weights")
    generator.update_weights(1)
    undisturbed, weights, restarts = generator.generate(rows()), checksums(generator), generator.num_restarts
    plan_death("generate", 1)
    assert are_equal(generator.generate(rows()), undisturbed)
    assert generator.num_restarts == restarts + 1
    assert checksums(generator) == weights
    assert set(undisturbed["policy_versions"].tolist()) == {1}
    assert "generator 1 of 2 was killed by SIGKILL, perhaps out of memory, in generate" in caplog.text
    assert "all generators were killed" not in caplog.text


@pytest.mark.slow
def test_a_generator_killed_in_a_refit_gets_the_weights_again(generator, policy):
    policy.group.run_all("_add_noise_to_weights")
    plan_death("take_weights", 0)
    restarts = generator.num_restarts
    generator.update_weights(2)
    assert generator.num_restarts == restarts + 1
    assert checksums(generator) == [policy.group._worker.export.checksum()] * 2
    assert set(generator.generate(rows())["policy_versions"].tolist()) == {2}


@pytest.mark.slow
def test_a_restart_without_the_weights_of_its_version_is_an_error(generator, policy, monkeypatch):
    monkeypatch.setattr(policy, "is_ahead", True)
    os.kill(pids(generator)[0], signal.SIGKILL)
    for _ in range(2):  # the second call raises it too
        with pytest.raises(RefitError, match="generator 0 lacks version 2 of the weights, and the policy no"):
            generator.generate(rows())
    generator.update_weights(3)
    assert set(generator.generate(rows())["policy_versions"].tolist()) == {3}


@pytest.mark.slow
def test_with_no_restarts_the_first_loss_stops_with_its_cause(generator, monkeypatch):
    monkeypatch.setattr(generator.pool, "max_restarts", 0)
    plan_death("generate", 0)
    message = r"max_restarts=0 allows no more restarts in a row; fix the cause: generator 0 of 2 was killed by"
    with pytest.raises(WorkerError, match=message) as error:
        generator.generate(rows())
    assert isinstance(error.value.__cause__, LostWorkerError)


@pytest.mark.slow
def test_an_error_that_a_generator_raises_is_raised_without_a_restart(generator):
    generator.generate(rows())  # replaces what the test before has lost
    restarts, processes = generator.num_restarts, pids(generator)
    too_long = BatchedDataDict({"input_ids": torch.full((2, 600), 6), "input_lengths": torch.full((2,), 600)})
    with pytest.raises(DataError, match="prompt of row 0 has 600 tokens"):
        generator.generate(too_long)
    assert generator.num_restarts == restarts
    wait_until_gone(processes)


@pytest.mark.slow
def test_an_interruption_ends_generators_that_start(policy):
    with interrupted_when_stopped("start", 0, 1):
        SeparateGenerator(policy, config_of(), embedded_tokenizer(), cluster=HASTY)


@pytest.mark.slow
@pytest.mark.parametrize(("refit", "method"), [("ipc", "take_weights"), ("collective", "receive_weights")])
def test_an_interruption_ends_generators_that_hang_in_a_refit(refit, method):
    config = config_of(refit=refit)
    two_ranks = ClusterConfig(num_workers=2, num_threads=1)
    with (
        Policy(config, embedded_tokenizer(), cluster=two_ranks, **NO_TRAINING) as policy,
        SeparateGenerator(policy, config, embedded_tokenizer(), cluster=HASTY) as generator,
    ):
        processes = pids(generator)
        with interrupted_when_stopped(method, 0):
            generator.update_weights(1)
        wait_until_gone(processes)


@pytest.mark.slow
def test_a_policy_that_dies_while_generators_are_busy_is_reported_at_once():
    two_ranks = ClusterConfig(num_workers=2, num_threads=1)
    with (
        Policy(config_of(num_workers=1), embedded_tokenizer(), cluster=two_ranks, **NO_TRAINING) as policy,
        SeparateGenerator(policy, config_of(num_workers=1), embedded_tokenizer(), cluster=HASTY) as generator,
    ):
        processes = pids(generator)
        plan_death("generate", 0, signal.SIGSTOP)  # the reply would not come before the timeout
        victim = policy.group.pids[1]
        threading.Timer(1, os.kill, (victim, signal.SIGKILL)).start()
        started = time.monotonic()
        with pytest.raises(WorkerError, match=r"rank 1 of 2 was killed by SIGKILL.* in the wait for its next call"):
            generator.generate(rows())
        assert time.monotonic() - started < 1 + 45
        wait_until_gone(processes)


# Over a process group


@pytest.mark.slow
def test_a_policy_of_two_ranks_survives_a_generator_that_dies_or_hangs_in_a_broadcast():
    config = config_of(refit="collective", verify_refit=True)
    two_ranks = ClusterConfig(num_workers=2, num_threads=1, call_timeout_s=60)
    hasty = ClusterConfig(num_threads=1, call_timeout_s=8)
    with (
        Policy(config, embedded_tokenizer(), cluster=two_ranks, **NO_TRAINING) as policy,
        SeparateGenerator(policy, config, embedded_tokenizer(), cluster=hasty) as generator,
    ):
        versions = []
        for version, fate in enumerate((None, signal.SIGKILL, signal.SIGSTOP), start=1):
            policy.group.run_all("_add_noise_to_weights")
            processes = pids(generator)
            if fate is not None:
                plan_death("receive_weights", 1, fate)
            started = time.monotonic()
            generator.update_weights(version)
            assert time.monotonic() - started < 120
            assert generator.num_restarts == version - 1
            assert pids(generator)[0] == processes[0]
            versions.append(checksums(generator))
        assert [len(set(of_all)) for of_all in versions] == [1, 1, 1]
        assert len({of_first for of_first, _ in versions}) == 3
        completions, expected = generator.generate(rows(), greedy=True), policy.generate(rows(), greedy=True)
        assert torch.equal(completions["output_ids"], expected["output_ids"])


@pytest.mark.slow
def test_a_generator_that_dies_before_it_joins_the_policy_is_not_waited_for():
    config = config_of(refit="collective", num_workers=1)
    hasty = ClusterConfig(num_threads=1, call_timeout_s=8)
    with (
        Policy(config, embedded_tokenizer(), **NO_TRAINING) as policy,
        SeparateGenerator(policy, config, embedded_tokenizer(), cluster=hasty) as generator,
    ):
        plan_death("join_collective", 0)
        started = time.monotonic()
        generator.update_weights(1)
        assert time.monotonic() - started < 60  # and not at the timeout of the rendezvous
        assert generator.num_restarts == 1


@pytest.mark.slow
def test_a_generator_that_hangs_is_killed_at_the_timeout_and_its_prompts_are_completed(policy, caplog):
    hasty = ClusterConfig(num_threads=1, call_timeout_s=8)
    with SeparateGenerator(policy, config_of(), embedded_tokenizer(), cluster=hasty) as generator:
        undisturbed, stuck = generator.generate(rows()), pids(generator)[0]
        plan_death("generate", 0, signal.SIGSTOP)
        started = time.monotonic()
        assert are_equal(generator.generate(rows()), undisturbed)
        assert time.monotonic() - started < 120
        assert generator.num_restarts == 1
        assert not is_running(stuck)
    assert "generator 0 of 2 did not finish generate within 8 s" in caplog.text


# A whole run


@pytest.mark.slow
def test_a_run_that_lost_generators_is_the_run_that_did_not(tmp_path):
    def run(name: str, *overrides: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        settings = ["num_threads=1", "cluster.num_threads=1", "grpo.max_steps=3", "tracking.dump_samples_every=1"]
        settings += ["policy.optimizer.kwargs.momentum=0.9"]
        settings += ["policy.generation.placement=separate", "policy.generation.num_workers=2"]
        train(load_config(GRPORunConfig, SMALL, overrides=[*settings, *overrides]), folder, Unwatched())
        return folder

    undisturbed = digests(run("undisturbed"))
    plan_death("take_weights", 0)
    plan_death("generate", 1)
    folder = run("disturbed")
    records = numbers(folder)
    disturbed = digests(folder)
    assert sum(v for record in records for k, v in record.items() if k.endswith("/replaced_generators")) == 2
    del undisturbed["metrics"], disturbed["metrics"]  # which count it
    assert disturbed == undisturbed
