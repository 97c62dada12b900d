import pytest
import torch
from tensordict import TensorDict

from lucidrl.envs.base import EnvBase
from lucidrl.envs.checks import check_env_specs
from lucidrl.envs.gym import GymEnv
from lucidrl.envs.specs import Bounded, Composite, OneHot, Unbounded
from lucidrl.errors import DataError, EnvironmentFailure


class Walk(EnvBase):
    """A random walk with a drift, from 0 until it is 3 away, or for twenty steps; written on TensorDicts."""

    def __init__(self, batch_size=()):
        super().__init__(batch_size=batch_size)
        ticks = Unbounded((*batch_size, 1), torch.int64)
        place = Bounded(-9, 9, (*batch_size, 1))
        self.observation_spec = Composite({"place": place, "clock": {"ticks": ticks}}, shape=batch_size)
        self.action_spec = OneHot(2, (*batch_size, 2))
        self.generator = torch.Generator()

    def _set_seed(self, seed):
        self.generator.manual_seed(seed)

    def _reset(self, tensordict):
        return self.moment(torch.rand((*self.batch_size, 1), generator=self.generator), 0)

    def _step(self, tensordict):
        drift = torch.rand((*self.batch_size, 1), generator=self.generator)
        place = tensordict["place"] + drift + tensordict["action"].argmax(-1, keepdim=True) - 1
        result = self.moment(place, tensordict["clock", "ticks"] + 1)
        result["reward"] = -place.abs()
        result["terminated"] = place.abs() > 3
        result["truncated"] = result["clock", "ticks"] >= 20
        return result

    def moment(self, place, ticks):
        ticks = torch.zeros((*self.batch_size, 1), dtype=torch.int64) + ticks
        return TensorDict({"place": place, "clock": {"ticks": ticks}}, batch_size=self.batch_size)


@pytest.mark.parametrize("batch_size", [(), (3,), (2, 2)])
def test_a_conforming_env_passes(batch_size):
    check_env_specs(Walk(batch_size))


@pytest.mark.parametrize("num_envs", [None, 1, 3])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "MountainCar-v0", "Acrobot-v1", "Blackjack-v1"])
def test_envs_of_gymnasium_pass(env_id, num_envs):
    check_env_specs(GymEnv(env_id, num_envs=num_envs), seed=3)


class TooFar(Walk):
    def _reset(self, tensordict):
        return self.moment(torch.full((*self.batch_size, 1), 10.0), 0)


class NotANumber(Walk):
    def _step(self, tensordict):
        result = super()._step(tensordict)
        result["place"][:] = float("nan")
        return result


class UnseededStart(Walk):
    starts = 0

    def _reset(self, tensordict):
        self.starts += 1
        return self.moment(torch.full((*self.batch_size, 1), float(self.starts) / 10), 0)


class UnseededSteps(Walk):
    steps = 0

    def _step(self, tensordict):
        self.steps += 1
        result = super()._step(tensordict)
        result["reward"] += self.steps
        return result


class SameSeedAgain(Walk):
    num_seeds = 0


class StaleFlags(Walk):
    def reset(self, tensordict=None):
        root = super().reset(tensordict)
        root["truncated"][:] = True
        return root


class Contradiction(Walk):
    def step(self, tensordict):
        result = super().step(tensordict)
        result["next", "done"][:] = True
        return result


class MissingEntry(Walk):
    def step(self, tensordict):
        result = super().step(tensordict)
        del result["next", "clock", "ticks"]
        return result


class FurtherEntry(Walk):
    def reset(self, tensordict=None):
        return super().reset(tensordict).set("height", torch.zeros(self.batch_size))


class NoNext(Walk):
    def step(self, tensordict):
        return super().step(tensordict).exclude("next")


class WrongReward(Walk):
    def step(self, tensordict):
        result = super().step(tensordict)
        result["next", "reward"] = result["next", "reward"].double()
        return result


class WrongShape(Walk):
    def reset(self, tensordict=None):
        root = super().reset(tensordict)
        root["place"] = root["place"].expand(*self.batch_size, 2)
        return root


class OneMemory(Walk):
    memory = None

    def step(self, tensordict):
        result = super().step(tensordict)
        self.memory = result["next", "place"] if self.memory is None else self.memory.copy_(result["next", "place"])
        result["next"].set("place", self.memory)
        return result


class ImpossibleAction(Walk):
    def rand_action(self, tensordict=None):
        return super().rand_action(tensordict).set("action", torch.ones_like(self.action_spec.zero()))


class NoBatchSize(Walk):
    def reset(self, tensordict=None):
        root = super().reset(tensordict)
        root.batch_size = (*root.batch_size, 1)
        return root


class ResetsAll(Walk):
    def reset(self, tensordict=None):
        return super().reset()


class WrongRewardSpec(Walk):
    def __init__(self, batch_size):
        super().__init__(batch_size)
        self.reward_spec = Unbounded(self.batch_size)


class NoSpec(Walk):
    def __init__(self, batch_size):
        super().__init__(batch_size)
        del self.observation_spec


class SmallSpec(Walk):
    def __init__(self, batch_size):
        super().__init__(batch_size)
        self.action_spec = OneHot(3)


class TakenName(Walk):
    def __init__(self, batch_size):
        super().__init__(batch_size)
        self.observation_spec["done"] = Unbounded((*self.batch_size, 1))


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (TooFar, r"'place' from reset\(\) is .*10.0.*; expected Bounded\(low=-9.0, high=9.0"),
        (NotANumber, r"'place' from step\(\) is .*nan.*; expected Bounded"),
        (UnseededStart, r"'place' before step 0 of the same seed is .*0.3.*; expected .*0.1.*draw all randomness"),
        (UnseededSteps, "'reward' after step 0 of the same seed is .*draw all randomness"),
        (SameSeedAgain, r"set_seed\(0\) returned 0"),
        (StaleFlags, r"reset\(\) returned 'truncated' True; expected False"),
        (Contradiction, r"step\(\) returned 'done' \[True.* with terminated \[False"),
        (MissingEntry, r"step\(\) returned 'done', 'place'.*, but not \('clock', 'ticks'\)"),
        (FurtherEntry, r"reset\(\) returned 'height', which is not in the specs"),
        (NoNext, r"step\(\) returned no 'next'"),
        (WrongReward, r"'reward' from step\(\) is torch.float64 \[2, 1\]; expected Unbounded"),
        (WrongShape, r"'place' from reset\(\) is torch.float32 \[2, 2\]; expected Bounded.*shape=\[2, 1\]"),
        (OneMemory, "'place' of two steps shares memory"),
        (ImpossibleAction, r"'action' from rand_action\(\) is \[\[1, 1\], \[1, 1\]\]; expected OneHot"),
        (NoBatchSize, r"reset\(\) returned batch size \[2, 1\]; expected \[2\]"),
        (ResetsAll, "in rows without reset is .*; expected .*only the rows of its mask"),
        (WrongRewardSpec, r"reward_spec is Unbounded.*; it must be float32 \[2, 1\]"),
        (NoSpec, "observation_spec is None; set it to a spec in __init__"),
        (SmallSpec, r"the spec of 'action' is OneHot.*; expand it to the env's batch size \[2\]"),
        (TakenName, "observation_spec has 'done', which is a reserved name"),
    ],
)
def test_a_violation_is_named_with_the_expected_value(broken, complaint):
    with pytest.raises(DataError, match=complaint):
        check_env_specs(broken((2,)))


class WrongDtype(Walk):
    def _reset(self, tensordict):
        return super()._reset(tensordict).double()


def test_a_value_of_another_dtype_is_a_failure_of_the_env():
    with pytest.raises(EnvironmentFailure, match="place has dtype float64, but its spec says float32"):
        check_env_specs(WrongDtype())


def test_something_else_than_an_env_is_refused():
    with pytest.raises(DataError, match="None is not an EnvBase"):
        check_env_specs(None)
