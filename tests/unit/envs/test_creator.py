"""Env factories: how they are given, pickled and called."""

from __future__ import annotations

import pickle

import pytest

from lucidrl.envs import EnvCreator, SerialEnv
from lucidrl.errors import ConfigError, EnvironmentFailure
from tests.unit.envs.toys import Walk


def test_an_env_creator_of_a_lambda_can_be_pickled():
    batch_size = (2,)
    creator = pickle.loads(pickle.dumps(EnvCreator(lambda batch_size: Walk(batch_size), {"batch_size": batch_size})))
    assert creator().batch_size == batch_size


def test_arguments_of_a_call_win_over_those_of_the_creator():
    creator = EnvCreator(Walk, {"batch_size": (2,)})
    assert creator(batch_size=(3,)).batch_size == (3,)
    assert creator().batch_size == (2,)


def test_an_env_is_no_factory():
    with pytest.raises(ConfigError, match="the env factory is a Walk; give a function"):
        SerialEnv(2, Walk())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": 0, "create_env_fn": Walk}, "num_workers=0 must be at least 1"),
        ({"num_workers": 2, "create_env_fn": [Walk]}, "create_env_fn has 1 entries for num_workers=2"),
        (
            {"num_workers": 1, "create_env_fn": Walk, "create_env_kwargs": [{}, {}]},
            "create_env_kwargs has 2 entries for num_workers=1",
        ),
    ],
)
def test_counts_must_agree(arguments, message):
    with pytest.raises(ConfigError, match=message):
        SerialEnv(**arguments)


@pytest.mark.parametrize(("result", "what"), [(None, "None"), ({"a": 1}, "a dict")])
def test_a_factory_that_returns_no_env_is_named(result, what):
    with pytest.raises(ConfigError, match=f"the factory of env 1 returned {what}; return an EnvBase"):
        SerialEnv(2, [Walk, lambda: result])


def test_a_factory_that_raises_is_named_and_made_envs_are_closed():
    made = []

    def make():
        made.append(Walk())
        return made[-1]

    with pytest.raises(EnvironmentFailure, match=r"env 1 \(never seeded\) failed in its start: ZeroDivisionError"):
        SerialEnv(2, [make, lambda: 1 / 0])
    assert [env.is_closed for env in made] == [True]
