"""Word problems: what is asked, what SFT learns from them, and how completions are rewarded."""

from __future__ import annotations

import asyncio
import re

import pytest

from lucidrl.data.config import DataConfig
from lucidrl.data.datasets import example_of
from lucidrl.data.loading import dataset_of_prompts
from lucidrl.envs.text.interfaces import EnvRequest
from lucidrl.envs.text.registry import make_env
from lucidrl.envs.text.word_problems import STORIES
from lucidrl.errors import ConfigError


def score(completion, *, result=42, **settings):
    request = EnvRequest("s", [{"role": "assistant", "content": completion}], {"result": result}, turn=1)
    return asyncio.run(make_env("word_problems", settings).step([request]))[0]


def numbers_of(prompt):
    return sorted(int(number) for number in re.findall(r"\d+", prompt.messages[-1]["content"]))


@pytest.fixture(scope="module")
def prompts():
    return make_env("word_problems", {"num_problems": 1500, "max_number": 40}).prompts()


def test_the_same_seed_gives_the_same_problems():
    first, again, other = (
        make_env("word_problems", {"num_problems": 50, "seed": seed}).prompts() for seed in (3, 3, 4)
    )
    assert first == again != other


def test_every_story_is_asked(prompts):
    openings = [re.sub(r"\\{\w+\\}", r"[\\w ]+", re.escape(story.text)) for story in STORIES]
    texts = [prompt.messages[-1]["content"] for prompt in prompts]
    assert all(any(re.fullmatch(opening, text) for text in texts) for opening in openings)


def test_the_worked_solution_calculates_with_the_numbers_of_the_problem(prompts):
    for prompt in prompts:
        *lines, boxed = prompt.info["answer"].split("\n")
        operands, value = [], None
        for line in lines:
            calculation, result = line.split(" = ")
            left, _, right = calculation.split()
            assert value is None or int(left) == value, "a step continues from the previous result"
            operands += [int(left), int(right)] if value is None else [int(right)]
            value = int(result)
            assert eval(calculation) == value
            assert 2 <= value <= 40
        assert sorted(operands) == numbers_of(prompt)
        assert boxed == rf"\boxed{{{value}}}"
        assert (prompt.info["result"], prompt.info["operations"]) == (value, len(lines))


def test_the_worked_solution_is_learned_and_gets_the_full_reward(prompts):
    learned = example_of(prompts[0]).messages[-1]
    assert learned["role"] == "assistant"
    assert score(learned["content"], result=prompts[0].info["result"]).reward == 1.0


def test_held_out_calculations_are_unseen_in_any_story(prompts):
    dataset = dataset_of_prompts(prompts, DataConfig(validation_fraction=0.1), seed=0)

    def calculations(prompts):
        found = set()
        for prompt in prompts:
            steps = re.findall(r"(\d+) (.) (\d+) =", prompt.info["answer"])
            found.add(tuple((o, frozenset((a, b))) if o in "+*" else (a, o, b) for a, o, b in steps))
        return found

    train, validation = dataset.take(len(prompts)), dataset.held_out(len(prompts))
    assert len(calculations(validation)) > 30
    assert not calculations(train) & calculations(validation)


def test_one_operation_is_enough_if_asked():
    prompts = make_env("word_problems", {"num_problems": 100, "max_operations": 1, "system_prompt": None}).prompts()
    assert {prompt.info["operations"] for prompt in prompts} == {1}
    assert all([message["role"] for message in prompt.messages] == ["user"] for prompt in prompts)


@pytest.mark.parametrize(
    ("completion", "reward", "boxed", "answer"),
    [
        (r"40 + 2 = 42, so \boxed{42}", 1.0, 1.0, "42"),
        (r"\boxed{42.0 \text{ apples}}", 1.0, 1.0, "42"),
        (r"\boxed{41} no, \boxed{42}", 1.0, 1.0, "42"),
        (r"\boxed{42} no, \boxed{41}", 0.1, 1.0, "41"),
        (r"\boxed{40 + 1}", 0.1, 1.0, "1"),
        ("It is 42.", 0.0, 0.0, None),
        (r"\boxed{many}", 0.0, 0.0, None),
        (r"\boxed{42", 0.0, 0.0, None),
        ("", 0.0, 0.0, None),
    ],
)
def test_the_number_in_the_last_box_decides(completion, reward, boxed, answer):
    reply = score(completion)
    assert (reply.reward, reply.done, reply.answer) == (reward, True, answer)
    assert reply.metrics == {"accuracy": float(reward == 1.0), "boxed": boxed}


def test_the_reward_of_the_format_can_be_turned_off():
    assert score(r"\boxed{41}", format_reward=0).reward == 0.0


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"max_operations": 3}, "max_operations"),
        ({"max_number": 5}, "max_number=5"),
        ({"format_reward": 1.0}, "format_reward=1.0"),
        ({"num_problem": 5}, "did you mean env.kwargs.num_problems"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_rule(settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make_env("word_problems", settings)
