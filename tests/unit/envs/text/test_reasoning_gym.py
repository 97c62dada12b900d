"""Tasks of reasoning-gym: exact entries, own scorers, separate prompts for validation, no code of the model runs."""

from __future__ import annotations

import ast
import asyncio
import builtins
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from lucidrl.data.config import DataConfig
from lucidrl.data.datasets import Prompt
from lucidrl.data.loading import dataset_of_prompts
from lucidrl.envs.text.config import EnvConfig
from lucidrl.envs.text.interfaces import EnvReply, EnvRequest, PromptSource, ValidationPromptSource
from lucidrl.envs.text.reasoning_gym import ReasoningGymConfig, ReasoningGymEnv, _may_be_evaluated
from lucidrl.envs.text.registry import checked_prompts, make_env
from lucidrl.envs.text.runner import EnvRunner
from lucidrl.envs.text.workers import InProcessEnv, start_env
from lucidrl.errors import ConfigError, DataError


def env_of(*datasets, **options) -> ReasoningGymEnv:
    env = make_env("reasoning_gym", {"datasets": list(datasets), "size": 20, "validation_size": 8, **options})
    assert isinstance(env, ReasoningGymEnv)
    return env


def reply_to(env: ReasoningGymEnv, prompt: Prompt, completion: str) -> EnvReply:
    request = EnvRequest("s", [{"role": "assistant", "content": completion}], prompt.info, turn=1)
    return asyncio.run(env.step([request]))[0]


def tagged(answer: object) -> str:
    return f"<think>no</think> <answer>0</answer> so <answer> {answer} </answer>"


def test_the_mixture_has_its_weights_and_settings():
    env = env_of({"name": "chain_sum", "weight": 3, "config": {"min_terms": 2, "max_terms": 2}}, "leg_counting")
    prompts = env.prompts()
    assert isinstance(env, PromptSource)
    assert Counter(prompt.prompt_id.partition("-")[0] for prompt in prompts) == {"chain_sum": 15, "leg_counting": 5}
    sums = [prompt.messages[-1]["content"] for prompt in prompts if prompt.prompt_id.startswith("chain_sum")]
    assert all(question.count("+") + question.count(" - ") == 1 for question in sums)
    assert prompts[0].messages[0]["role"] == "system"
    assert [m["role"] for m in env_of("chain_sum", system_prompt=None).prompts()[0].messages] == ["user"]


def test_right_and_wrong_answers_are_scored_by_the_dataset():
    env = env_of("chain_sum", "graph_color")
    prompt = env.prompts()[0]
    answer = ast.literal_eval(prompt.info["entry"])["answer"]
    right, wrong = reply_to(env, prompt, tagged(answer)), reply_to(env, prompt, tagged("x"))
    assert (right.reward, right.metrics) == (1.0, {"answered": 1.0, "scorer_raised": 0.0, "score_chain_sum": 1.0})
    assert wrong.reward < 1
    graph = env.prompts()[-1]
    coloring = ast.literal_eval(graph.info["entry"])["metadata"]["possible_answer"]
    assert reply_to(env, graph, tagged(str(coloring).replace("'", '"'))).reward < 1  # keys of JSON are texts
    assert reply_to(env, graph, tagged(json.dumps(coloring))).reward == 1


@pytest.mark.parametrize(
    ("answer_from", "form", "reads"),
    [
        ("answer_tag", "<answer>{}</answer>", True),
        ("answer_tag", "\\boxed{{{}}}", False),
        ("boxed", "\\boxed{{1}} \\boxed{{{}}}", True),
        ("boxed", "\\boxed{{{}", False),
        ("whole", " {}\n", True),
        ("last_number", "1 + 1 is not {}.", True),
        ("last_number", "many", False),
        ("answer_tag", "<answer>{}", False),
    ],
)
def test_where_the_answer_is(answer_from, form, reads):
    env = env_of("chain_sum", answer_from=answer_from)
    prompt = env.prompts()[0]
    reply = reply_to(env, prompt, form.format(ast.literal_eval(prompt.info["entry"])["answer"]))
    assert (reply.reward, reply.metrics["answered"]) == ((1.0, 1.0) if reads else (0.0, 0.0))


def test_training_and_validation_share_no_question():
    env = env_of("chain_sum", size=300, validation_size=100)
    assert isinstance(env, ValidationPromptSource)
    train = {prompt.messages[-1]["content"] for prompt in env.prompts()}
    validation = {prompt.messages[-1]["content"] for prompt in env.validation_prompts()}
    assert len(train) > 290
    assert len(validation) > 95
    assert not train & validation


def test_neighbouring_seeds_share_almost_no_question():
    """The datasets use seed + index, so seeds 0 and 1 as they are would share all but one entry."""
    of_seed = [
        {p.messages[-1]["content"] for p in env_of("chain_sum", seed=seed, size=200).prompts()} for seed in (0, 1)
    ]
    assert len(of_seed[0] & of_seed[1]) < 5
    assert env_of("chain_sum", seed=3).prompts() == env_of("chain_sum", seed=3).prompts()
    validation = [env_of("chain_sum", validation_seed=seed).validation_prompts() for seed in (0, 1, 0)]
    assert validation[0] == validation[2] != validation[1]


def test_few_questions_are_an_error_if_all_are_in_validation(monkeypatch):
    env = env_of("chain_sum")
    of_split = env._prompts
    monkeypatch.setattr(env, "_prompts", lambda split: of_split("train"))
    with pytest.raises(ConfigError, match="chain_sum have too few questions"):
        env.prompts()


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"datasets": ["chain_sums"]}, r"^env\.kwargs\.datasets\.0: unknown dataset 'chain_sums' .* chain_sum\?$"),
        ({"datasets": ["composite"]}, "unknown dataset 'composite'"),
        ({"datasets": [{"name": "chain_sum", "config": {"min_term": 2}}]}, r"datasets\.0\.config\.min_terms\?"),
        ({"datasets": [{"name": "chain_sum", "config": {"min_terms": 0}}]}, "not valid for chain_sum: AssertionError"),
        ({"datasets": [{"name": "chain_sum", "config": {"seed": 1}}]}, r"set env\.kwargs\.seed"),
        ({"datasets": [{"name": "chain_sum", "weight": 0}]}, "weight"),
        ({"datasets": []}, "at least 1 item"),
        ({}, r"env\.kwargs\.datasets is required"),
        ({"datasets": ["chain_sum", "gcd"], "size": 1}, "size=1 is less than one prompt"),
        ({"datasets": ["chain_sum"], "sizes": 1}, r"did you mean env\.kwargs\.size\?"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(kwargs, expected):
    with pytest.raises(ConfigError, match=expected):
        make_env("reasoning_gym", kwargs)


def test_a_missing_package_is_one_sentence(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("reasoning_gym"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r'needs reasoning-gym; pip install "lucidrl\[reasoning\]"$'):
        env_of("chain_sum")


def test_two_entries_of_one_dataset_have_different_ids():
    env = env_of("gcd", {"name": "gcd", "config": {"min_numbers": 3, "max_numbers": 3}})
    assert {prompt.prompt_id.partition("-")[0] for prompt in env.prompts()} == {"gcd_1", "gcd_2"}
    assert {prompt.info["name"] for prompt in env.validation_prompts()} == {"gcd_1", "gcd_2"}, "for lucidrl eval --by"


@pytest.mark.slow
def test_code_in_an_answer_does_not_run(tmp_path):
    mark = tmp_path / "mark"
    attacks = [
        f"__import__('pathlib').Path({str(mark)!r}).touch()",
        f"[open({str(mark)!r}, 'w')]",
        f"exec({'+'.join(f'chr({ord(c)})' for c in f'open({str(mark)!r},chr(119))')})",
        "().__class__.__base__.__subclasses__()",
    ]
    names = [
        "string_insertion",
        "spiral_matrix",
        "binary_matrix",
        "n_queens",
        "countdown",
        "puzzle24",
        "number_sorting",
    ]
    names += ["puzzle24", "polynomial_multiplication", "simple_integration", "intermediate_integration"]
    env = env_of(*names, answer_from="whole", validation_size=0)
    for prompt in env.prompts():
        for attack in attacks:
            assert reply_to(env, prompt, attack).reward < 0.1
    assert not mark.exists()


@pytest.mark.parametrize(
    "answer", ["(1 + 2)*3 - 4/5", "3*x**2 + 2*x + C", "x**(3/2)*sin(2*x)", "exp(-x) + log(x)", "x**-2"]
)
def test_arithmetic_may_be_evaluated(answer):
    assert _may_be_evaluated("countdown", answer)


@pytest.mark.parametrize(
    "answer", ["9**9**9", "9**999", "x**(9**9)", "a.b", "open(x)", "'x'", "[1]", "__name__", "x = 1", "9**(x)"]
)
def test_other_text_is_not_evaluated(answer):
    assert not _may_be_evaluated("countdown", answer)


def test_a_scorer_that_raises_is_counted(monkeypatch):
    env = env_of("chain_sum")

    def score_answer(answer, entry):
        raise KeyError("x")

    monkeypatch.setattr(env._datasets["train"][0], "score_answer", score_answer)
    reply = reply_to(env, env.prompts()[0], tagged("1"))
    assert (reply.reward, reply.metrics["scorer_raised"]) == (0.0, 1.0)


def test_an_entry_that_cannot_be_written_is_regenerated_and_checked():
    env = env_of("knights_knaves")
    prompt = env.prompts()[0]
    assert "entry" not in prompt.info
    entry = env._entry(prompt.info)
    assert reply_to(env, prompt, tagged(entry["answer"])).reward == 1
    with pytest.raises(RuntimeError, match="another question for index"):
        env._entry({**prompt.info, "fingerprint": "x"})


@pytest.mark.slow
def test_every_dataset_survives_the_way_to_another_process(tmp_path):
    """Four datasets generate other entries in another process, as they depend on the order of sets."""
    code = """
import pickle, sys
from reasoning_gym.factory import DATASETS
import reasoning_gym
from lucidrl.envs.text.registry import make_env
slow = {"composite", "knight_swap", "arc_agi"}
names = sorted(DATASETS.keys() - slow)
env = make_env("reasoning_gym", {"datasets": names, "size": 2 * len(names), "validation_size": 0})
if sys.argv[1] == "write":
    prompts = env.prompts()
    pickle.dump(prompts, open(sys.argv[2], "wb"))
else:
    wrong = []
    for prompt in pickle.load(open(sys.argv[2], "rb")):
        entry = env._entry(prompt.info)
        score = 1.0
        if isinstance(entry["answer"], str):
            score = env._datasets["train"][prompt.info["dataset"]].score_answer(entry["answer"], entry)
        if entry["question"] != prompt.messages[-1]["content"] or score < 1:
            wrong.append((prompt.prompt_id, score))
    print("wrong", wrong)
"""
    path = str(tmp_path / "prompts")
    for action, seed in (("write", "1"), ("read", "2")):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code, action, path]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert "wrong []" in result.stdout


def test_the_environment_runs_in_a_worker_process_by_default():
    config = EnvConfig(name="reasoning_gym", kwargs={"datasets": ["chain_sum"]})
    assert config.is_isolated
    assert not config.model_copy(update={"isolation": "none"}).is_isolated


@pytest.mark.slow
def test_a_worker_process_serves_both_kinds_of_prompts_and_is_killed_if_a_scorer_hangs():
    config = EnvConfig(
        name="reasoning_gym",
        kwargs={"datasets": ["coin_flip"], "size": 4, "validation_size": 2, "answer_from": "whole"},
    )
    workers = start_env(config)
    validation = workers.validation_prompts()
    prompts = checked_prompts(workers.prompts(), config, validation)
    assert validation == env_of("coin_flip", size=4, validation_size=2).validation_prompts()
    requests = [
        EnvRequest("s", [{"role": "assistant", "content": text}], prompts[0].info, 1) for text in ("1e99999999", "x")
    ]
    started = time.monotonic()
    with EnvRunner(workers, timeout_s=1.0, max_concurrency=2, on_error="drop") as runner:
        replies = runner.step(requests)
    assert replies[0] is None
    assert replies[1] is not None
    assert time.monotonic() - started < 60


class _Own:
    def __init__(self, validation):
        self._validation = validation

    def prompts(self):
        return [Prompt("a", ({"role": "user", "content": "?"},))]

    def validation_prompts(self):
        return self._validation

    async def step(self, batch):
        return [EnvReply(0.0) for _ in batch]


def test_own_validation_prompts_are_used_and_checked():
    other = Prompt("b", ({"role": "user", "content": "!"},))
    env = InProcessEnv(_Own([other]))
    config = EnvConfig(name="x:Y")
    prompts, validation = checked_prompts(env.prompts(), config, env.validation_prompts()), env.validation_prompts()
    dataset = dataset_of_prompts(prompts, DataConfig(validation_fraction=0.5), seed=0, validation=validation)
    assert [prompt.prompt_id for prompt in dataset.take(3)] == ["a", "a", "a"]
    assert dataset.held_out(5) == [other]
    assert dataset_of_prompts(prompts, seed=0, validation=[]).held_out(5) == []
    with pytest.raises(DataError, match="2 prompts with the id 'a'"):
        checked_prompts(env.prompts(), config, env.prompts())
    with pytest.raises(ConfigError, match=r"_Own\.validation_prompts returned a int"):
        InProcessEnv(_Own([1])).validation_prompts()
    with pytest.raises(ConfigError, match=r"_Own\.validation_prompts raised TypeError"):
        InProcessEnv(_Own(None)).validation_prompts()


def test_the_config_is_documented():
    assert all(field.description for field in ReasoningGymConfig.model_fields.values())
    assert Path(__file__).parents[4].joinpath("docs/environments.md").read_text().count("reasoning_gym") > 1
