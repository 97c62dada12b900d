"""Plain functions as rewards: their parameters, their results, and what is refused."""

from __future__ import annotations

import asyncio
import functools

import numpy as np
import pytest
import torch

from lucidrl.envs.text.interfaces import EnvRequest, SampleFailure
from lucidrl.errors import ConfigError, EnvironmentFailure
from lucidrl.rewards import reward_function
from lucidrl.rewards.functions import RewardFunction, import_reward
from tests.unit.rewards.obedient_rewards import request, requests


def scores(function, batch, **kwargs):
    return asyncio.run(RewardFunction(function, kwargs=kwargs).score(batch))


def failure(function, *completions: str) -> str:
    """The complaint, the same for all samples."""
    found = scores(function, requests(*(completions or ("4",)), answer="4"))
    assert all(isinstance(score, SampleFailure) for score in found), found
    assert len(set(map(str, found))) == 1
    return str(found[0])


def test_columns_fill_parameters_by_name():
    def exact(completion, answer, level=0, **row):
        assert row == {"topic": "sums"}
        return float(completion == answer) + level

    batch = [request("4", answer="4", level=2, topic="sums"), request("5", answer="4", topic="sums")]
    assert scores(exact, batch) == [3.0, 0.0]


def test_prompt_messages_and_tokens_are_there_beside_the_columns():
    def describe(prompt, messages, completion_tokens):
        assert prompt == "2+2="
        assert messages == [{"role": "user", "content": "2+2="}]
        return completion_tokens

    assert scores(describe, requests("4")) == [3.0]


def test_kwargs_fill_parameters_and_win_over_columns():
    assert scores(lambda completion, scale: scale, requests("4", scale=1), scale=5) == [5.0]


def test_async_functions_of_a_batch_overlap():
    running = most = 0

    async def slow(completion):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return len(completion)

    assert scores(slow, requests("a", "bb", "ccc")) == [1.0, 2.0, 3.0]
    assert most == 3


def test_a_sync_function_lets_others_go_on_between_samples():
    order = []

    def sync(completion):
        order.append(completion)
        return 0.0

    async def other():
        await asyncio.sleep(0)
        order.append("other")

    async def both():
        await asyncio.gather(RewardFunction(sync).score(requests("a", "b", "c")), other())

    asyncio.run(both())
    assert order.index("other") < order.index("c")


def test_a_decorated_function_gets_the_whole_batch():
    @reward_function(per="batch")
    async def longest(completion, answer):
        assert answer == ["4", "4"]
        most = max(map(len, completion))
        return [float(len(text) == most) for text in completion]

    assert scores(longest, requests("a", "bb", answer="4")) == [0.0, 1.0]


def test_the_signature_of_trl_is_known_by_its_first_parameter():
    def reward(completions, answer, **kwargs):
        assert kwargs["prompts"] == ["2+2=", "2+2="]
        assert kwargs["completion_ids"] == [[7, 8, 9]] * 2
        assert kwargs["level"] == [1, 1]
        return np.array([float(text == right) for text, right in zip(completions, answer, strict=True)])

    assert scores(reward, requests("4", "5", answer="4", level=1)) == [1.0, 0.0]


def test_chat_prompts_give_the_signature_of_trl_lists_of_messages():
    log = [{"role": "system", "content": "Be brief."}, *request("4").message_log]

    def reward(prompts, completions):
        assert [message["role"] for message in prompts[0]] == ["system", "user"]
        return [len(completion[0]["content"]) for completion in completions]

    assert scores(reward, [EnvRequest("p#0", log, {}, 1)]) == [1.0]
    as_chat = reward_function(per="batch", chat=True)(lambda completions: [completions[0][0]["content"] == "4"])
    assert scores(as_chat, requests("4")) == [1.0]


@pytest.mark.parametrize(
    ("value", "score"), [(True, 1.0), (None, None), (np.float32(0.5), 0.5), (torch.tensor(2.0), 2.0), (np.True_, 1.0)]
)
def test_numbers_of_any_kind_and_none_are_scores(value, score):
    assert scores(lambda completion: value, requests("4")) == [score]
    assert scores(lambda completions: [value], requests("4")) == [score]


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (float("nan"), "reward bad returned nan instead of a finite number or None"),
        (10**400, "reward bad returned inf instead of"),
        ("1.0", "reward bad returned a str instead of a number or None"),
        ([1.0], "reward bad returned a list instead of a number or None"),
    ],
)
def test_other_results_are_refused_by_name(value, complaint):
    def bad(completion):
        return value

    assert complaint in failure(bad)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ([1.0], "returned 1 rewards for 2 completions"),
        (1.0, "returned a float for 2 completions"),
        ("ab", "a str for 2"),
    ],
)
def test_a_wrong_count_is_refused(value, complaint):
    def bad(completions):
        return value

    assert complaint in failure(bad, "4", "5")


@pytest.mark.parametrize("error", [ValueError("no idea"), SystemExit(3), KeyboardInterrupt()])
def test_a_function_that_raises_fails_only_its_sample_and_keeps_its_traceback(error):
    def picky(completion):
        if completion == "b":
            raise error
        return 1.0

    good, bad = scores(picky, requests("a", "b"))
    assert good == 1.0
    assert f"reward picky raised {type(error).__name__}" in str(bad)
    assert "in picky" in bad.trace
    assert not bad.is_of_call


def test_a_failure_of_the_environment_passes_through():
    def stop(completion):
        raise EnvironmentFailure("the grader is offline")

    with pytest.raises(EnvironmentFailure, match="the grader is offline"):
        scores(stop, requests("4"))


def test_a_parameter_without_a_column_is_refused_with_the_columns():
    def exact(completion, solution):
        return 1.0

    with pytest.raises(ConfigError, match=r"exact has the parameter solution, but the columns are answer, level \(and"):
        RewardFunction(exact).check({"answer": 1, "level": 2})
    RewardFunction(exact).check({"solution": 1})
    RewardFunction(functools.partial(exact, solution=2), "exact").check({})
    assert "the parameter solution" in failure(exact)


def test_functions_are_imported_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards_of_a_user.py").write_text(
        "LIMIT = 3\n"
        "def exact(completion): return 1.0\n"
        "class Long:\n"
        "    def __init__(self, least): self.least = least\n"
        "    def __call__(self, completion): return len(completion) >= self.least\n"
    )
    module = "rewards_of_a_user"
    assert asyncio.run(import_reward(f"{module}:exact", {}).score(requests("4"))) == [1.0]
    assert asyncio.run(import_reward(f"{module}:Long", {"least": 2}).score(requests("4", "44"))) == [0.0, 1.0]
    for path, kwargs, complaint in [
        (f"{module}:exat", {}, "has no exat; it defines exact, Long"),
        (f"{module}:LIMIT", {}, "has a int, not a function, called LIMIT"),
        (f"{module}:exact", {"scale": 2}, "unknown key reward.kwargs.scale"),
        (f"{module}:Long", {"last": 2}, "did you mean reward.kwargs.least"),
        ("nowhere_to_be_found:exact", {}, "there is no module nowhere_to_be_found"),
    ]:
        with pytest.raises(ConfigError, match=complaint):
            import_reward(path, kwargs)


def test_the_decorator_refuses_another_unit():
    with pytest.raises(ConfigError, match="per='batch'"):
        reward_function(per="group")
