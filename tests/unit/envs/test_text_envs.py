import asyncio
from decimal import Decimal

import pytest

from lucidrl.data.config import DataConfig
from lucidrl.data.loading import dataset_of_prompts
from lucidrl.data.reading import last_number
from lucidrl.envs.text.arithmetic import ArithmeticConfig, ArithmeticEnv
from lucidrl.envs.text.guessing import GuessingConfig, GuessingEnv
from lucidrl.envs.text.interfaces import EnvRequest
from lucidrl.errors import ConfigError
from lucidrl.utils.config import validate


def score(env, completion, info, turn=1):
    request = EnvRequest("s", [{"role": "assistant", "content": completion}], info, turn)
    return asyncio.run(env.step([request]))[0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42),
        ("The answer is 42.", 42),
        ("12 + 30 = 42", 42),
        ("-7", -7),
        ("3-10=-7", -7),
        ("10-7", 7),
        ("42.0", 42),
        ("4.25!", Decimal("4.25")),
        ("it is 1,234,567", 1_234_567),
        ("1,2345", 2345),
        ("no idea", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


def test_an_endless_run_of_digits_is_wrong_and_no_crash():
    env = ArithmeticEnv(ArithmeticConfig(match="last_number"))
    assert score(env, "9" * 5000, {"answer": 42}).reward == 0.0


def test_problems_are_all_ordered_pairs_with_their_answers():
    prompts = ArithmeticEnv(ArithmeticConfig(operations=("+", "-", "*"), max_operand=3)).prompts()
    assert len(prompts) == len({prompt.prompt_id for prompt in prompts}) == 3 * 4 * 4
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    assert [by_id[problem].info["answer"] for problem in ("2+3", "2-3", "2*3")] == [5, -1, 6]
    assert by_id["2+3"].messages == ({"role": "user", "content": "2+3="},)


def test_wording_is_configurable():
    config = ArithmeticConfig(max_operand=0, template="What is {problem}? Use \\boxed{}.", system_prompt="Be brief.")
    assert ArithmeticEnv(config).prompts()[0].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 0+0? Use \\boxed{}."},
    )


def test_too_many_problems_are_sampled_reproducibly():
    def ids(seed):
        config = ArithmeticConfig(max_operand=10**6, num_problems=500, seed=seed)
        return [prompt.prompt_id for prompt in ArithmeticEnv(config).prompts()]

    assert ids(0) == ids(0) != ids(1)
    assert len(set(ids(0))) == 500


def test_held_out_pairs_are_unseen_in_either_order():
    prompts = ArithmeticEnv(ArithmeticConfig(max_operand=20)).prompts()
    dataset = dataset_of_prompts(prompts, DataConfig(validation_fraction=0.1), seed=0)
    train, validation = dataset.take(2 * len(prompts)), dataset.held_out(len(prompts))

    def pairs(prompts):
        return {frozenset(prompt.prompt_id.split("+")) for prompt in prompts}

    assert validation
    assert not pairs(train) & pairs(validation)


@pytest.mark.parametrize(
    ("match", "completion", "reward"),
    [
        ("exact", "42", 1.0),
        ("exact", " 42\n", 1.0),
        ("exact", "It is 42", 0.0),
        ("exact", "042", 0.0),
        ("last_number", "12 and 30 make 42.", 1.0),
        ("last_number", "42 is not 43", 0.0),
        ("last_number", "many", 0.0),
    ],
)
def test_arithmetic_rewards_the_right_number(match, completion, reward):
    reply = score(ArithmeticEnv(ArithmeticConfig(match=match)), completion, {"answer": 42})
    assert (reply.reward, reply.done, reply.metrics) == (reward, True, {"accuracy": reward})


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"operations": ["/"]}, "operations"),
        ({"operations": []}, "operations"),
        ({"operations": ["+", "+"]}, "twice"),
        ({"template": "add"}, "has no {problem}"),
        ({"max_operands": 5}, "did you mean max_operand"),
    ],
)
def test_a_wrong_arithmetic_config_is_refused_with_the_reason(content, complaint):
    with pytest.raises(ConfigError, match=complaint):
        validate(ArithmeticConfig, content)


def test_there_is_one_game_for_each_secret():
    prompts = GuessingEnv(GuessingConfig(max_number=5)).prompts()
    assert {prompt.prompt_id: prompt.info["secret"] for prompt in prompts} == {f"secret-{n}": n for n in range(1, 6)}


@pytest.mark.parametrize(
    ("completion", "observation"), [("5", "higher"), ("my guess: 9", "lower"), ("hm", "one number from 1 to 10")]
)
def test_a_wrong_guess_returns_a_hint(completion, observation):
    reply = score(GuessingEnv(GuessingConfig(max_number=10, max_turns=4)), completion, {"secret": 7})
    assert not reply.done
    assert observation in reply.messages[0]["content"]


@pytest.mark.parametrize(("turn", "reward"), [(1, 1.0), (2, 0.75), (4, 0.25)])
def test_each_further_turn_costs_reward(turn, reward):
    reply = score(GuessingEnv(GuessingConfig(max_turns=4)), "7", {"secret": 7}, turn)
    assert (reply.reward, reply.done, reply.metrics) == (reward, True, {"found": 1.0, "turns": turn})


@pytest.mark.parametrize("completion", ["8", "hm"])
def test_the_game_is_lost_after_the_last_turn(completion):
    reply = score(GuessingEnv(GuessingConfig(max_turns=4)), completion, {"secret": 7}, turn=4)
    assert (reply.reward, reply.done, reply.metrics["found"]) == (0.0, True, 0.0)


def test_halving_always_wins_the_default_game():
    env = GuessingEnv(GuessingConfig())
    for prompt in env.prompts():
        low, high, turn, reply = 1, 100, 0, None
        while reply is None or not reply.done:
            turn, guess = turn + 1, (low + high) // 2
            reply = score(env, str(guess), prompt.info, turn)
            if not reply.done and reply.messages[0]["content"] == "higher":
                low = guess + 1
            else:
                high = guess - 1
        assert reply.reward > 0
