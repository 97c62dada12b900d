"""RewardEnv: the sum of functions and verifiers, their metrics, and the outcomes that are no scores."""

from __future__ import annotations

import asyncio
import time

import psutil
import pytest

from lucidrl.data.datasets import Prompt
from lucidrl.envs.text.config import EnvConfig
from lucidrl.envs.text.interfaces import SampleFailure
from lucidrl.envs.text.runner import EnvRunner
from lucidrl.envs.text.workers import start_env
from lucidrl.errors import ConfigError, EnvironmentFailure
from lucidrl.rewards.env import RewardEnv
from lucidrl.rewards.interfaces import SampleTime
from lucidrl.rewards.verifiers import VERIFIERS
from tests.unit.rewards.obedient_rewards import ENTRIES, exact, requests

POOLED = {"name": "pooled", "num_workers": 1, "timeout_s": 0.3}
EXACT = "tests.unit.rewards.obedient_rewards:exact"
ENV = "tests.unit.rewards.obedient_rewards:ObedientEnv"


@pytest.fixture(autouse=True)
def verifiers(monkeypatch):
    for name, entry in ENTRIES.items():
        monkeypatch.setitem(VERIFIERS, name, entry)


def step(env: RewardEnv, *completions: str, **row):
    return asyncio.run(env.step(requests(*completions, **row)))


def test_the_reward_is_the_weighted_sum_and_each_part_is_a_metric():
    def short(completion):
        return None if completion == "none" else 1.0 / len(completion)

    env = RewardEnv([{"name": EXACT, "weight": 2}, "inline"], [short])
    right, other = step(env, "42", "none", answer="42")
    assert right.reward == 2 * 1.0 + 2 + 0.5
    assert right.metrics == {
        "reward/exact": 1.0,
        "reward/exact/not_applicable": 0.0,
        "reward/inline": 2.0,
        "reward/inline/timeout": 0.0,
        "reward/inline/crash": 0.0,
        "reward/inline/parse_failure": 0.0,
        "reward/short": 0.5,
        "reward/short/not_applicable": 0.0,
    }
    assert right.components == {"exact": (1.0, 2), "inline": (2.0, 1), "short": (0.5, 1)}
    assert other.reward == 4
    assert "short" not in other.components
    assert other.metrics["reward/short/not_applicable"] == 1.0
    assert "reward/short" not in other.metrics


def test_equal_names_are_numbered():
    (reply,) = step(RewardEnv(["inline", "inline"], [lambda completion: 1, lambda completion: 2]), "ab")
    assert [name for name in reply.metrics if name.count("/") == 1] == [
        "reward/inline",
        "reward/inline_2",
        "reward/lambda",
        "reward/lambda_2",
    ]


def test_a_sample_to_which_nothing_applies_is_refused():
    (failed,) = step(RewardEnv([], [lambda completion: None]), "ab")
    assert isinstance(failed, SampleFailure)
    assert "no reward applies to the sample, because lambda returned None" in str(failed)


@pytest.mark.parametrize(
    ("completion", "outcome"), [("parse", "parse_failure"), ("raise x", "crash"), ("nan", "crash"), ("text", "crash")]
)
def test_outcomes_of_a_verifier_have_their_own_reward_and_are_counted(completion, outcome):
    env = RewardEnv({"name": "inline", f"on_{outcome}": -0.5})
    failed, scored = step(env, completion, "ab")
    assert (failed.reward, scored.reward) == (-0.5, 2.0)
    counted = {name for name, value in failed.metrics.items() if value == 1}
    assert counted == {f"reward/inline/{outcome}"}


def test_a_run_can_stop_at_an_outcome():
    with pytest.raises(EnvironmentFailure, match=r"crash of verifier inline \(ValueError: x\) for sample p1#0; fix"):
        step(RewardEnv({"name": "inline", "on_crash": "fail"}), "ab", "raise x")


def test_a_run_can_drop_samples_with_an_outcome_and_still_counts_them():
    env = RewardEnv([{"name": "inline", "on_parse_failure": "drop"}, EXACT])
    with EnvRunner(env, 10, 2, "fail") as runner:
        kept, dropped = runner.step(requests("ab", "parse", answer="ab"))
        assert (kept.reward, kept.is_dropped, dropped.is_dropped) == (3.0, False, True)
        assert runner.counts == {"dropped": 1}
    assert dropped.metrics["reward/inline/parse_failure"] == 1.0
    assert not [name for name in dropped.metrics if name.count("/") == 1]


@pytest.mark.slow
def test_verifiers_in_a_pool_work_while_functions_run():
    def slow(completion):
        time.sleep(0.5)
        return 0.0

    env = RewardEnv({**POOLED, "timeout_s": 5.0}, [slow])
    try:
        step(env, "warm")
        start = time.monotonic()
        (reply,) = step(env, "sleep 0.5")
        assert time.monotonic() - start < 0.9
        assert reply.reward == len("sleep 0.5")
    finally:
        env.close()


def test_a_pooled_verifier_times_out_and_close_ends_its_processes():
    before = set(psutil.Process().children())
    env = RewardEnv({**POOLED, "on_timeout": -1})
    late, crashed, scored = step(env, "native", "exit", "ab")
    assert (late.reward, crashed.reward, scored.reward) == (-1.0, 0.0, 2.0)
    assert (late.metrics["reward/pooled/timeout"], crashed.metrics["reward/pooled/crash"]) == (1.0, 1.0)
    env.close()
    env.close()
    started = set(psutil.Process().children()) - before
    assert not [child for child in started if "spawn_main" in " ".join(child.cmdline())]


def test_columns_are_checked_with_a_prompt_before_any_completion():
    env = RewardEnv([EXACT, "inline"])
    env.check_prompt(Prompt("p", (), {"answer": 4}))
    with pytest.raises(ConfigError, match="reward exact has the parameter answer, but the columns are solution"):
        env.check_prompt(Prompt("p", (), {"solution": 4}))


@pytest.mark.parametrize("name", ["inline", pytest.param("pooled", marks=pytest.mark.slow)])
def test_a_row_that_a_verifier_cannot_use_is_refused_before_any_completion(name):
    env = RewardEnv(name)
    env.check_prompt(Prompt("p", (), {"answer": 4}))
    with pytest.raises(ConfigError, match=f"^verifier {name} cannot use the row of prompt 'p': column 'unusable' is"):
        env.check_prompt(Prompt("p", (), {"unusable": 4}))
    env.close()


@pytest.mark.parametrize(
    ("rewards", "complaint"),
    [
        ([], "there is no reward; set reward=..."),
        ("poled", "did you mean pooled"),
        ({"name": "inline", "kwargs": {"problem": "refuse"}}, "^reward.kwargs.problem=refuse is not valid; remove it$"),
        ({"name": "inline", "weight": float("nan")}, "reward.0.weight"),
    ],
)
def test_wrong_rewards_are_refused(rewards, complaint):
    with pytest.raises(ConfigError, match=complaint):
        RewardEnv(rewards)


def test_a_failed_sample_is_named_with_its_function():
    with EnvRunner(RewardEnv(EXACT), 10, 1, "fail") as runner:
        with pytest.raises(EnvironmentFailure) as stopped:
            runner.step(requests("a", "raise", "b", answer="a"))
        assert str(stopped.value) == (
            "reward exact raised ValueError: no idea (sample p1#0, turn 1); fix it, or set env.on_error=drop"
        )
    with EnvRunner(RewardEnv(EXACT), 10, 1, "drop") as runner:
        assert [reply and reply.reward for reply in runner.step(requests("a", "raise", "b", answer="a"))] == [
            1,
            None,
            0,
        ]


def test_a_failed_batch_is_retried_sample_by_sample_if_samples_may_be_dropped():
    def picky(completions):
        return [1.0] * (len(completions) - completions.count("bad"))

    with EnvRunner(RewardEnv([], [picky]), 10, 1, "drop") as runner:
        assert [reply and reply.reward for reply in runner.step(requests("a", "bad", "b"))] == [1, None, 1]


@pytest.mark.slow
def test_functions_of_a_worker_process_are_killed_at_the_timeout_and_the_sample_is_named():
    config = EnvConfig(name=ENV, kwargs={"rewards": [EXACT, POOLED]})
    with EnvRunner(start_env(config), 1.0, 2, "drop", seconds_per_sample=[SampleTime(0.1)]) as runner:
        scored = runner.step(requests("a", "hang", "exit", "b", answer="a"))
        assert [reply and reply.reward for reply in scored] == [2.0, None, None, 1.0]
        assert runner.num_restarts >= 2
        assert set(runner.counts) == {"timeout", "exited"}


@pytest.mark.slow
def test_the_processes_of_verifiers_end_with_a_killed_environment_worker():
    config = EnvConfig(name=ENV, kwargs={"rewards": {**POOLED, "timeout_s": 30}})
    workers = start_env(config)
    try:
        (pid,) = workers._pool.workers[0].process.pids
        below = psutil.Process(pid).children(recursive=True)
        assert len(below) >= 2
        psutil.Process(pid).kill()
        _, alive = psutil.wait_procs(below, timeout=5)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    finally:
        workers.shutdown()


def test_exact_is_what_the_other_tests_believe():
    assert exact("4", "4") is True
