"""TransformedEnv, and what a user's own transform can rely on."""

import pickle

import numpy as np
import pytest
import torch

from lucidrl.envs.arrays import Frame
from lucidrl.envs.checks import check_env_specs
from lucidrl.envs.gym import GymEnv
from lucidrl.envs.serial import SerialEnv
from lucidrl.envs.specs import Bounded, Composite
from lucidrl.envs.transforms import (
    ActionMask,
    CatFrames,
    CatTensors,
    Compose,
    DoubleToFloat,
    FrameSkip,
    GrayScale,
    InitTracker,
    NoopReset,
    ObservationNorm,
    Resize,
    RewardClipping,
    RewardScaling,
    RewardSum,
    StepCounter,
    TimeLimit,
    ToTensorImage,
    Transform,
    TransformedEnv,
    VecNorm,
)
from lucidrl.errors import CheckpointError, ConfigError, EnvironmentFailure
from tests.unit.envs.toys import Countdown
from tests.unit.envs.transforms.toys import SEED, Weather, rollouts


class Halved(Transform):
    """A user's transform: doubles the action, halves the observation."""

    def __init__(self):
        super().__init__(in_keys=["observation"], in_keys_inv=["action"])

    def forward(self, value):
        return value / 2

    def inverse(self, value):
        return value * 2

    def transform_spec(self, spec):
        return Bounded(spec.low / 2, spec.high / 2, spec.shape, spec.dtype)

    def transform_action_spec(self, spec):
        return Bounded(spec.low / 2, spec.high / 2, spec.shape, spec.dtype)


def trained(norm):
    """What a VecNorm for evaluation is: one that saw something, and stays."""
    env = TransformedEnv(Weather(), norm)
    env.rollout(5)
    return norm.frozen_copy()


MAKERS = {
    "StepCounter": lambda: StepCounter(max_steps=4),
    "RewardSum": RewardSum,
    "InitTracker": InitTracker,
    "TimeLimit": lambda: TimeLimit(2),
    "ObservationNorm": lambda: ObservationNorm(1.0, 2.0, ["observation", "wide"]),
    "VecNorm": lambda: trained(VecNorm(["observation", "hour", "reward"])),
    "RewardScaling": lambda: RewardScaling(1.0, -2.0),
    "RewardClipping": lambda: RewardClipping(-1, 1),
    "DoubleToFloat": DoubleToFloat,
    "ToTensorImage": ToTensorImage,
    "GrayScale": lambda: Compose(ToTensorImage(), GrayScale()),
    "Resize": lambda: Compose(ToTensorImage(), Resize(5, 3, "bicubic")),
    "CatFrames": lambda: CatFrames(3, -1, ["observation"]),
    "CatFrames of images": lambda: CatFrames(2, -3, ["pixels"], padding="constant"),
    "CatTensors": lambda: CatTensors(["hour", "observation", ("sky", "cloud")]),
    "ActionMask": ActionMask,
    "all that learning from pixels needs": lambda: Compose(
        ToTensorImage(), GrayScale(), Resize(4), CatFrames(4, -3), RewardSum(), StepCounter(), InitTracker()
    ),
}
SINGLE_MAKERS = {"FrameSkip": lambda: FrameSkip(2), "NoopReset": lambda: NoopReset(4)}


@pytest.mark.parametrize("name", [*MAKERS, *SINGLE_MAKERS])
def test_every_transform_of_a_single_env_keeps_to_its_specs(name):
    check_env_specs(TransformedEnv(Weather(), (MAKERS | SINGLE_MAKERS)[name]()))


@pytest.mark.parametrize("batch_size", [(3,), (2, 2)])
@pytest.mark.parametrize("name", MAKERS)
def test_every_transform_of_a_batch_keeps_to_its_specs(name, batch_size):
    check_env_specs(TransformedEnv(Weather(batch_size), MAKERS[name]()))


@pytest.mark.parametrize("name", [*(name for name in MAKERS if name != "ActionMask"), *SINGLE_MAKERS])
def test_transforms_of_envs_that_make_a_batch_keep_to_their_specs(name):
    check_env_specs(SerialEnv(3, lambda: TransformedEnv(Weather(), (MAKERS | SINGLE_MAKERS)[name]())))


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_environments_of_gymnasium_can_be_transformed(env_id):
    transforms = Compose(ObservationNorm(0.5, 2.0), CatFrames(2, -1, ["observation"]), RewardSum(), StepCounter(9))
    for env in (GymEnv(env_id), GymEnv(env_id, num_envs=2)):
        check_env_specs(TransformedEnv(env, transforms.clone()))


def test_a_users_env_of_tensordicts_can_be_transformed():
    check_env_specs(TransformedEnv(Countdown((3,)), Compose(StepCounter(5), RewardSum())))


@pytest.mark.parametrize("name", MAKERS | SINGLE_MAKERS)
def test_transforms_can_be_sent_to_another_process(name):
    sent = pickle.loads(pickle.dumps((MAKERS | SINGLE_MAKERS)[name]()))
    check_env_specs(TransformedEnv(Weather(), sent))


def test_a_users_transform_changes_observations_actions_and_specs():
    env, plain = TransformedEnv(GymEnv("Pendulum-v1"), Halved()), GymEnv("Pendulum-v1")
    check_env_specs(env)
    assert env.action_spec == Bounded(-1, 1, (1,))
    assert env.observation_spec["observation"].high.tolist() == [0.5, 0.5, 4.0]
    halves = []
    for each, action in ((env, 0.4), (plain, 0.8)):
        each.set_seed(SEED)
        halves.append(each.rollout(20, lambda root, action=action: torch.tensor([action])))
    torch.testing.assert_close(halves[0]["observation"], halves[1]["observation"] / 2)
    torch.testing.assert_close(halves[0]["next", "observation"], halves[1]["next", "observation"] / 2)
    torch.testing.assert_close(halves[0]["next", "reward"], halves[1]["next", "reward"])


def test_the_first_transform_is_next_to_the_env():
    class Noted(Transform):
        def __init__(self, name, notes):
            super().__init__(in_keys=["observation"], in_keys_inv=["action"])
            self.name, self.notes = name, notes

        def forward(self, value):
            self.notes.append(f"{self.name} forward")
            return value

        def inverse(self, value):
            self.notes.append(f"{self.name} inverse")
            return value

    notes: list[str] = []
    env = TransformedEnv(Weather(), Compose(Noted("a", notes), Compose(Noted("b", notes), Noted("c", notes))))
    root = env.reset()
    assert notes == ["a forward", "b forward", "c forward"]
    notes.clear()
    env.rand_step(root)
    assert notes == ["c inverse", "b inverse", "a inverse", "a forward", "b forward", "c forward"]


def test_the_env_writes_straight_into_the_frame_unless_an_entry_is_changed():
    written: list[Frame] = []

    class Watched(Weather):
        def _step_into(self, actions, out):
            written.append(out)
            super()._step_into(actions, out)

    env = TransformedEnv(Watched(), Compose(StepCounter(), ToTensorImage(), RewardScaling(0, 2)))
    frames = [env.new_frame(), env.new_frame()]
    env.reset_into(env.new_frame())
    for frame in (*frames, *frames):
        env.step_into(env.new_actions(), frame)
    first, second, third, fourth = written
    assert (third, fourth) == (first, second), "a frame that comes again costs nothing"
    for key in ("observation", "wide", "action_mask"):
        assert first.observation[key] is frames[0].observation[key]
    assert first.done is frames[0].done
    assert "step_count" not in first.observation
    assert first.observation["pixels"] is second.observation["pixels"], "changed entries pass through one array"
    assert first.reward is second.reward


def test_rows_that_go_on_are_not_transformed_again_by_the_reset_of_others():
    transforms = Compose(RewardScaling(0, 2), ObservationNorm(1.0, 3.0), CatFrames(2, -1, ["observation"]))
    steps, _ = rollouts(transforms, (4,))
    goes_on = ~steps["next", "done"][:, :-1, 0]
    assert goes_on.any()
    assert not goes_on.all()
    torch.testing.assert_close(
        steps["observation"][:, 1:][goes_on], steps["next", "observation"][:, :-1][goes_on], rtol=0, atol=0
    )


def test_a_batch_that_steps_and_resets_together_equals_single_steps():
    transforms = Compose(
        DoubleToFloat(),
        VecNorm(["observation", "reward"]),
        StepCounter(),
        CatFrames(2, -1, "observation"),
        RewardSum(),
    )
    fused, apart = (TransformedEnv(Weather((4,)), transforms.clone()) for _ in range(2))
    for env in (fused, apart):
        env.set_seed(SEED)
    frames = [env.new_frame() for env in (fused, fused, apart, apart)]
    fused.reset_into(frames[1])
    apart.reset_into(frames[3])
    actions = fused.new_actions()
    for _ in range(60):
        fused.step_and_reset_into(actions, *frames[:2])
        super(TransformedEnv, apart)._step_and_reset_into(actions, *frames[2:])
        for got, expected in ((frames[0], frames[2]), (frames[1], frames[3])):
            np.testing.assert_equal(got.observation | got.flags(), expected.observation | expected.flags())
        np.testing.assert_array_equal(frames[0].reward, frames[2].reward)


def test_a_nested_env_is_the_same_as_one_with_all_transforms():
    def stepped(env):
        env.set_seed(SEED)
        return env.rollout(30, break_when_any_done=False)

    one = TransformedEnv(Weather((2,)), Compose(ToTensorImage(), StepCounter(3), RewardSum()))
    nested = TransformedEnv(TransformedEnv(Weather((2,)), ToTensorImage()), Compose(StepCounter(3), RewardSum()))
    appended = TransformedEnv(Weather((2,)), ToTensorImage())
    appended.rollout(3)
    appended.append_transform(Compose(StepCounter(3), RewardSum()))
    expected = stepped(one)
    for env in (nested, appended):
        assert env.observation_spec == one.observation_spec
        assert (stepped(env) == expected).all()
    assert [type(transform) for transform in appended.transform] == [ToTensorImage, StepCounter, RewardSum]
    assert isinstance(appended.base_env, Weather)


def test_closing_and_seeding_reach_the_env():
    env = TransformedEnv(GymEnv("CartPole-v1", num_envs=3), Compose(StepCounter(), RewardSum()))
    assert env.set_seed(5) == 8
    assert env.base_env.seed == 5
    env.close()
    env.close()
    assert env.base_env.is_closed


def test_a_transform_belongs_to_one_env():
    counter = StepCounter(3)
    TransformedEnv(Weather(), counter)
    with pytest.raises(ConfigError, match=r"StepCounter already belongs to an env.*clone"):
        TransformedEnv(Weather(), counter)
    other = TransformedEnv(Weather((2,)), counter.clone())
    assert other.transform.max_steps == 3
    check_env_specs(other)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: ObservationNorm(0, 1, ["obs"]), "reads 'obs', but the env has .*'observation'"),
        (lambda: Compose(StepCounter(), StepCounter()), "writes 'step_count', which the env already has"),
        (Compose, "Compose is empty"),
        (lambda: "StepCounter", "is not a transform"),
        (lambda: Transform(["observation"], ["a", "b"]), "reads 1 entries, but out_keys has 2"),
        (lambda: Transform(["reward"], ["gain"]), "a reward keeps its key"),
        (lambda: DoubleToFloat(in_keys_inv=["torque"]), "changes the action 'torque', but the env has 'action'"),
    ],
)
def test_keys_that_do_not_fit_are_refused(make, complaint):
    with pytest.raises(ConfigError, match=complaint):
        TransformedEnv(Weather(), make())


def test_a_transform_whose_values_do_not_fit_its_spec_raises_at_reset():
    class Wider(Transform):
        def forward(self, value):
            return np.concatenate([value, value], -1)

    with pytest.raises(EnvironmentFailure, match=r"observation has shape \[6\], but its spec says \[3\]"):
        TransformedEnv(Weather(), Wider(["observation"])).reset()


def test_an_entry_can_be_written_under_another_name():
    steps, plain = rollouts(ObservationNorm(1.0, 2.0, ["observation"], [("normal", "observation")]), (3,))
    torch.testing.assert_close(steps["observation"], plain["observation"])
    torch.testing.assert_close(steps["next", "normal", "observation"], plain["next", "observation"] * 2 + 1)


def test_the_state_of_a_compose_is_that_of_its_transforms():
    learned = Compose(StepCounter(), VecNorm())
    TransformedEnv(Weather((2,)), learned).rollout(3)
    state = learned.state_dict()
    assert state.keys() == {"1.observation.weight", "1.observation.mean", "1.observation.squares"}
    other = Compose(StepCounter(), VecNorm())
    TransformedEnv(Weather((2,)), other)
    other.load_state_dict(state)
    np.testing.assert_equal(other.state_dict(), state)
    with pytest.raises(CheckpointError, match="there are 1 transforms"):
        Compose(VecNorm()).load_state_dict(state)
    with pytest.raises(CheckpointError, match="StepCounter learns nothing"):
        Compose(RewardSum(), StepCounter()).load_state_dict(state)


def test_specs_of_the_env_below_stay_as_they_are():
    base = Weather()
    before = base.observation_spec.clone()
    TransformedEnv(base, Compose(StepCounter(), CatTensors(["wide", ("sky", "cloud")])))
    assert base.observation_spec == before
    assert isinstance(base.observation_spec, Composite)
