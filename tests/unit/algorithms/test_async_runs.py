"""Asynchronous GRPO with real generator processes: no token is too old, nothing is lost, and failures have names."""

from __future__ import annotations

import time
from types import SimpleNamespace

import orjson
import pytest
import torch

from lucidrl.algorithms.grpo import GRPO, check_staleness
from lucidrl.errors import CheckpointError, ConfigError, EnvironmentFailure, RefitError
from lucidrl.models.generation import separate
from lucidrl.models.generation.refit import Refit
from lucidrl.models.policy.policy import Policy
from lucidrl.recipes.configs import GRPORunConfig
from lucidrl.utils.config import load_config
from tests.faults.records import digests
from tests.tiers import slow_except
from tests.unit.algorithms import async_parts

SEPARATE = ("num_threads=1", "cluster.num_threads=1", "policy.generation.placement=separate")
PARTS = async_parts.__name__


@pytest.fixture(autouse=True)
def _threads():
    """Runs set the number of threads of this process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tokens(monkeypatch):
    """Version of the policy, and versions of the tokens, of every sample that a step trains on."""
    found = []
    prepare = GRPO.prepare

    def recorded(self, rollouts, *args, **kwargs):
        for sample in rollouts.samples:
            messages = [message for log in (*sample.earlier_logs, sample.log) for message in log]
            versions = [message["policy_versions"] for message in messages if "policy_versions" in message]
            if not sample.is_dropped:
                assert all(len(m["token_ids"]) == len(m["policy_versions"]) for m in messages if "policy_versions" in m)
                found.append((self.policy.policy_version, torch.cat(versions)))
        return prepare(self, rollouts, *args, **kwargs)

    monkeypatch.setattr(GRPO, "prepare", recorded)
    return found


def slow(monkeypatch, owner, method: str, seconds: float) -> None:
    call = getattr(owner, method)

    def slowed(*args, **kwargs):
        time.sleep(seconds)
        return call(*args, **kwargs)

    monkeypatch.setattr(owner, method, slowed)


@pytest.mark.parametrize("what", slow_except(["trainer", "generator", "refit"], "generator"))
def test_no_token_is_older_than_the_bound_whatever_is_slow(run, tokens, monkeypatch, what):
    if what == "trainer":
        slow(monkeypatch, Policy, "train", 0.3)
    elif what == "refit":
        slow(monkeypatch, Refit, "run", 0.3)
    else:
        monkeypatch.setitem(separate.ENGINES, "builtin", async_parts.SlowGenerator)
    settings = ["grpo.async.max_staleness=2", "grpo.max_steps=8", "policy.generation.max_new_tokens=12"]
    folder, last_step = run("grpo", "run", *SEPARATE, *settings, "policy.model_name=embedded-untrained")
    assert last_step == 8
    staleness = [version - versions for version, versions in tokens]
    assert min(int(of_sample.min()) for of_sample in staleness) >= 0
    assert max(int(of_sample.max()) for of_sample in staleness) <= 2
    assert max(folder.train_metric("staleness")) > 0, "nothing was asynchronous"
    if what == "generator":
        assert any(len(versions.unique()) > 1 for _, versions in tokens), "no completion went on after a refit"
    shares = [sum(folder.train_metric(f"async/staleness_{n}")[step] for n in range(3)) for step in range(8)]
    assert shares == pytest.approx([1.0] * 8)
    rows = [orjson.loads(line) for line in (folder.path / "samples/step_8.jsonl").read_bytes().splitlines()]
    assert all(row["policy_version"] - row["oldest_policy_version"] in (0, 1, 2) for row in rows)
    assert max(folder.train_metric("ratio/max")) == min(folder.train_metric("ratio/min")) == 1.0
    late = folder.train_metric("importance/mean_weight_late")
    assert len(late) == sum(staleness > 0 for staleness in folder.train_metric("staleness"))
    assert all(0 < weight <= 2 for weight in late)
    # The policy has moved since these tokens were sampled, but that is no mismatch of the generator.
    warnings = folder.path / "warnings.jsonl"
    assert not warnings.exists() or "mismatch" not in warnings.read_text()


def test_prepare_refuses_what_the_bound_does_not_allow(run, monkeypatch):
    prepare = GRPO.prepare

    def aged(self, rollouts, *args, **kwargs):
        rollouts.samples[0].log[-1]["policy_versions"] -= 1
        return prepare(self, rollouts, *args, **kwargs)

    monkeypatch.setattr(GRPO, "prepare", aged)
    with pytest.raises(RefitError, match=r"policy versions -1 to .* with max_staleness=0 trains on versions 0 to 0"):
        run("grpo", "run")


def test_the_bound_on_the_staleness_is_exact():
    def check(oldest: int, newest: int, *, most: int, is_dropped: bool = False) -> None:
        sample = SimpleNamespace(name="p#0", version_range=(oldest, newest), is_dropped=is_dropped)
        check_staleness(SimpleNamespace(policy_version=5, samples=[sample]), 5, most)

    check(3, 5, most=2)
    check(2, 5, most=2, is_dropped=True)
    for oldest, newest in ((2, 5), (5, 6)):
        with pytest.raises(RefitError, match=f"versions {oldest} to {newest}, .* trains on versions 3 to 5 only"):
            check(oldest, newest, most=2)


@pytest.mark.slow
def test_without_staleness_nothing_is_asynchronous_and_a_run_equals_one_whose_policy_generates(run, asynchronous_parts):
    plain, _ = run("grpo", "plain", *SEPARATE, "policy.generation.placement=policy", "grpo.max_steps=2")
    folder, _ = run("grpo", "run", *SEPARATE, "grpo.max_steps=2", "grpo.async.max_staleness=0")
    assert asynchronous_parts == []
    for kind in ("parameters", "optimizer", "samples"):
        assert digests(folder.path)[kind] == digests(plain.path)[kind], kind


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_its_samples_under_another_number_of_generators(run, tokens):
    settings = [*SEPARATE, "grpo.async.max_staleness=2", "grpo.max_steps=12", "data.validation_fraction=0"]
    settings += ["validation.num_prompts=0"]
    folder, last_step = run("grpo", "run", *settings, interrupt_at=5)
    assert last_step == 5
    state = orjson.loads((folder.path / "checkpoints/step_5/state.json").read_bytes())["state"]["collector"]
    saved = state["in_flight"]
    assert len(saved["groups"]) == 12
    with pytest.raises(CheckpointError, match="a synchronous run would skip these prompts"):
        run("grpo", "run", "grpo.max_steps=12", "data.validation_fraction=0", resume=True)
    folder, last_step = run("grpo", "run", *settings, "policy.generation.num_workers=2", resume=True)
    assert last_step == 12
    trained = [
        orjson.loads(line)["sample"]
        for step in range(1, 13)
        for line in (folder.path / f"samples/step_{step}.jsonl").read_bytes().splitlines()
    ]
    assert len(trained) == len(set(trained)) == 12 * 16
    # Exactly the first 48 prompts of the order, as in a synchronous run.
    plain, _ = run("grpo", "plain", "grpo.max_steps=12", "data.validation_fraction=0", "validation.num_prompts=0")
    expected = [
        orjson.loads(line)["sample"]
        for step in range(1, 13)
        for line in (plain.path / f"samples/step_{step}.jsonl").read_bytes().splitlines()
    ]
    assert sorted(trained) == sorted(expected)


@pytest.mark.slow
def test_saved_samples_are_trained_on_as_they_were(run, monkeypatch):
    """The complete groups of a checkpoint have the same tokens, log-probabilities, versions and rewards."""
    from lucidrl.collectors.in_flight import GroupsInFlight
    from lucidrl.collectors.saved_samples import saved_sample

    state_dict, taken = GroupsInFlight.state_dict, []
    take = GroupsInFlight.take

    def waiting(self):
        """Save only once all groups are complete, so that the checkpoint has some."""
        until = time.monotonic() + 30
        while self.scheduler.num_complete < len(self.scheduler.groups) and time.monotonic() < until:
            time.sleep(0.01)
        return state_dict(self)

    def noted(self):
        groups, metrics = take(self)
        taken.append([[saved_sample(sample) for sample in group] for group in groups])
        return groups, metrics

    monkeypatch.setattr(GroupsInFlight, "state_dict", waiting)
    monkeypatch.setattr(GroupsInFlight, "take", noted)
    settings = [*SEPARATE, "grpo.async.max_staleness=1", "grpo.max_steps=6"]
    folder, _ = run("grpo", "run", *settings, interrupt_at=3)
    saved = orjson.loads((folder.path / "checkpoints/step_3/state.json").read_bytes())["state"]["collector"]
    taken.clear()
    run("grpo", "run", *settings, resume=True)
    complete = saved["in_flight"]["samples"]
    assert len(complete) == 8
    assert taken[0] == complete[:4]


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["stale_samples=wait", "stale_samples=drop", "stale_samples=regenerate"])
def test_games_of_several_turns_are_played_while_the_policy_trains(run, tokens, settings):
    game = ["env.name=guessing", "env.isolation=process", "env.kwargs=null", "collector.max_turns=4"]
    game += ["collector.max_concurrent_samples=10", "grpo.max_steps=6", "validation.every=3"]
    game[2] = "env.kwargs={max_number: 20, max_turns: 4}"
    folder, last_step = run("grpo", "run", *SEPARATE, *game, "grpo.async.max_staleness=1", f"grpo.async.{settings}")
    assert last_step == 6
    assert max(int((version - versions).max()) for version, versions in tokens) <= 1
    assert folder.watcher.validated == [0, 3, 6]


@pytest.mark.slow
def test_an_environment_worker_that_exits_costs_no_sample(run, tmp_path, monkeypatch):
    monkeypatch.setenv(async_parts.MARKER, str(tmp_path / "exited"))
    env = [f"env.name={PARTS}:ExitingEnv", "env.kwargs={}", "validation.num_prompts=0"]
    folder, last_step = run("grpo", "run", *SEPARATE, *env, "grpo.async.max_staleness=1")
    assert last_step == 4
    assert sum(folder.train_metric("replaced_env_workers")) == 1
    assert folder.train_metric("dropped_samples") == [0] * 4


@pytest.mark.slow
def test_an_error_of_the_environment_ends_the_run_with_its_name(run):
    env = [f"env.name={PARTS}:BrokenEnv", "env.kwargs={}", "validation.num_prompts=0"]
    with pytest.raises(EnvironmentFailure, match=r"BrokenEnv\.step raised KeyError: 'no such reward'"):
        run("grpo", "run", *SEPARATE, *env, "grpo.async.max_staleness=1")


def settings_of(*overrides: str) -> GRPORunConfig:
    return load_config(GRPORunConfig, overrides=overrides)


def test_the_importance_correction_is_on_unless_it_is_set():
    asynchronous = ("grpo.async.max_staleness=1", "policy.generation.placement=separate")
    assert settings_of(*asynchronous).grpo.loss.importance_correction == "truncate"
    assert settings_of(*asynchronous, "grpo.variant=dapo").grpo.loss.importance_correction == "truncate"
    assert settings_of(*asynchronous, "grpo.loss.importance_correction=none").grpo.loss.importance_correction == "none"
    assert settings_of("grpo.async.max_staleness=0").grpo.loss.importance_correction == "none"


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        ((), "set policy.generation.placement=separate"),
        (("collector.refill_rounds=1",), "set refill_rounds=0"),
    ],
)
def test_settings_that_cannot_overlap_are_refused(overrides, remedy):
    separate = ("policy.generation.placement=separate",) if overrides else ()
    with pytest.raises(ConfigError, match=remedy):
        settings_of("grpo.async.max_staleness=1", *separate, *overrides)
