"""`profile.steps` records steps of a run, changes nothing of its result, and is refused where it makes no sense."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from lucidrl.errors import ConfigError
from lucidrl.profiling import gate
from lucidrl.profiling.settings import FOLDER_VARIABLE, MEMORY_VARIABLE
from lucidrl.recipes.configs import GRPORunConfig, PPORunConfig
from lucidrl.recipes.profile import VARIABLES, ProfileConfig, profiling_as_configured
from lucidrl.recipes.run import check_run, launch, train
from lucidrl.utils import nsys
from lucidrl.utils.config import dump_yaml, load_config
from tests.faults.records import digests
from tests.unit.algorithms.conftest import Watcher
from tests.unit.profiling.reading import counts_of, nesting_of
from tests.unit.profiling.span_reading import spans_of
from tests.unit.report.validation import valid_timeline

ROOT = Path(__file__).parents[3]
QUIET = "tracking: {tensorboard: false, monitor: false}\ncheckpoint: {every: 0, metric: null}\nnum_threads: 1\n"
PPO = QUIET + (
    "env: {num_envs: 2}\ncollector: {frames_per_batch: 64}\nvalidation: {num_episodes: 0}\n"
    "ppo: {max_steps: 4, minibatch_frames: 32, num_epochs: 2}\n"
)
GRPO = QUIET + (
    "env: {name: arithmetic, kwargs: {max_operand: 9}}\nvalidation: {num_prompts: 0}\ncluster: {num_threads: 1}\n"
    "policy: {generation: {max_new_tokens: 4}, optimizer: {kwargs: {lr: 1.0e-3}}}\n"
    "grpo: {max_steps: 3, loss: {entropy_coefficient: 0.01}}\n"
    "collector: {prompts_per_step: 4, samples_per_prompt: 4}\n"
)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    """No profile is requested, and arming by a test does not last."""
    monkeypatch.setattr("lucidrl.recipes.run.configure_rich_logging", lambda **options: None)
    monkeypatch.setattr(gate, "is_armed", gate.is_armed)
    monkeypatch.setattr(gate, "is_enabled", gate.is_enabled)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    nsys.take_request_from_environment()
    for name in (nsys.PATTERNS_VARIABLE, nsys.RANGE_VARIABLE):
        monkeypatch.delenv(name)


def lucidrl(folder: Path, algorithm: str, settings: str, *overrides: str) -> str:
    """Run the command with these settings, in `folder`/run; what it says."""
    (folder / "settings.yaml").write_text(settings)
    command = [sys.executable, "-c", "from lucidrl.cli import main; main()", algorithm, "--config", "settings.yaml"]
    command += [*overrides, "run.root=.", "run.name=run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def traces_of(folder: Path) -> dict[str, Path]:
    """By name of the worker; those of spans with `spans` behind it."""
    found = {}
    for path in (folder / "run" / "traces").glob("*.json"):
        name = path.name.partition("_")[0]
        found[f"{name} spans" if path.name.endswith(".spans.json") else name] = path
    return found


@pytest.mark.slow
def test_a_recorded_ppo_run_shows_its_frames_and_learns_the_same(tmp_path):
    said = lucidrl(tmp_path, "ppo", PPO, "profile.steps=2:4")
    found = traces_of(tmp_path)
    assert found.keys() == {"policy-0", "policy-0 spans"}
    counts = counts_of(found["policy-0"])
    assert counts["Collector.rollout"] == 2
    assert counts["EnvBase.step_and_maybe_reset"] == 2 * 64 // 2
    assert {("collect", "Collector.rollout"), ("Collector.rollout", "Collector.policy")} <= nesting_of(
        found["policy-0"]
    )
    assert spans_of(found["policy-0 spans"]).count("collect") == 2
    assert "open traces/timeline.json.gz with ui.perfetto.dev" in said
    (tmp_path / "plain").mkdir()
    train(load_config(PPORunConfig, tmp_path / "settings.yaml"), tmp_path / "plain", Watcher())
    assert digests(tmp_path / "run") == digests(tmp_path / "plain")


@pytest.mark.slow
def test_a_recorded_grpo_run_shows_policy_and_generator_and_learns_the_same(tmp_path):
    lucidrl(tmp_path, "grpo", GRPO, "profile.steps=2:3", "policy.generation.placement=separate")
    found = traces_of(tmp_path)
    assert found.keys() == {"policy-0", "policy-0 spans", "generation-0", "generation-0 spans"}
    assert counts_of(found["policy-0"])["train"] == 1
    assert "generate" in counts_of(found["generation-0"])
    assert {"train", "refit"} <= {*spans_of(found["policy-0 spans"])}
    (tmp_path / "plain").mkdir()
    train(load_config(GRPORunConfig, tmp_path / "settings.yaml"), tmp_path / "plain", Watcher())
    assert digests(tmp_path / "run") == digests(tmp_path / "plain")


@pytest.mark.slow
def test_the_timeline_shows_ranks_generators_and_env_workers_with_arrows_of_each_step(tmp_path):
    monitor = "tracking={tensorboard: false, monitor: true, monitor_interval_s: 0.1}"
    workers = ("cluster.num_workers=2", "policy.generation.placement=separate", "env.num_workers=2")
    said = lucidrl(tmp_path, "grpo", GRPO, "profile.steps=2:4", monitor, *workers)
    content = valid_timeline(tmp_path / "run" / "traces" / "timeline.json.gz")
    events = content["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    processes = ["driver", "policy-0", "policy-1", "generation-0", "env-0", "env-1"]
    assert sorted(names.values()) == sorted([*processes, "machines"])
    assert f"events of {', '.join(processes)})" in said
    assert content["lucidrl"]["missing"] == []
    counts = Counter((names[event["pid"]], event["name"]) for event in events if event["ph"] == "X")
    for place in (("driver", "rollout"), ("policy-1", "train"), ("generation-0", "generate"), ("env-1", "environment")):
        assert counts[place] == 2, place
    assert counts["policy-1", "aten::mm"] > 0
    assert {"node.0.cpu.util", "memory of the process (MB)"} <= {e["name"] for e in events if e["ph"] == "C"}
    starts = {event["id"]: event for event in events if event.get("cat") == "step" and event["ph"] == "s"}
    ends = [event for event in events if event.get("cat") == "step" and event["ph"] == "f"]
    arrows = Counter((e["name"], names[e["pid"]]) for e in ends)
    assert {names[event["pid"]] for event in starts.values()} >= {"driver", "policy-0", "policy-1", "generation-0"}
    for arrow in (
        ("rollout to generate", "generation-0"),
        ("environment to train", "policy-0"),
        ("environment to train", "policy-1"),
        ("train to refit", "generation-0"),
    ):
        assert arrows[arrow] >= 2, arrow  # each process has one per step
    clocks = {entry["process"]: entry["clock"] for entry in content["lucidrl"]["inputs"]}
    assert clocks["driver"] is None
    assert all(clock["error_ns"] < 50e6 for process, clock in clocks.items() if process != "driver")


@pytest.mark.slow
def test_workers_that_are_not_named_do_not_record(tmp_path):
    settings = ("profile.steps=2:3", "profile.workers=policy-1,driver", "cluster.num_workers=2")
    lucidrl(tmp_path, "grpo", GRPO, *settings)
    assert traces_of(tmp_path).keys() == {"policy-1", "policy-1 spans", "driver spans"}


# Requests


def test_a_range_is_no_number_of_base_sixty_on_the_command_line():
    for text in ("3:5", "3 : 5", "'3:5'", "03:05"):
        config = load_config(PPORunConfig, overrides=[f"profile.steps={text}"])
        assert config.profile.steps == "3:5"
    again = load_config(PPORunConfig, overrides=["profile.steps=10:12"])
    assert "steps: '10:12'" in dump_yaml(again)


@pytest.mark.parametrize("patterns", ["*", "*policy*", "*policy*,driver", "policy-[01]", "*'s"])
def test_patterns_need_no_quotes_on_the_command_line(patterns):
    overrides = ["profile.steps=3:5", f"profile.workers={patterns}"]
    assert load_config(PPORunConfig, overrides=overrides).profile.workers == patterns


def test_settings_win_over_variables_and_both_are_as_before_afterwards(monkeypatch):
    monkeypatch.setenv(nsys.PATTERNS_VARIABLE, "driver")
    monkeypatch.setenv(nsys.RANGE_VARIABLE, "7:9")
    nsys.take_request_from_environment()
    before = {name: os.environ.get(name) for name in VARIABLES}
    with profiling_as_configured(ProfileConfig(steps="3:5", workers="*policy*", memory_snapshot=True)):
        request = nsys.profile_request()
        assert (request.patterns, str(request.steps)) == (("*policy*",), "3:5")
        assert os.environ[nsys.RANGE_VARIABLE] == "3:5"
        assert os.environ[MEMORY_VARIABLE] == "1"
        assert os.environ[gate.VARIABLES[0]] == "1"
    monkeypatch.setenv(MEMORY_VARIABLE, "1")
    before[MEMORY_VARIABLE] = "1"
    with profiling_as_configured(ProfileConfig(steps="3:5")):  # what is not set is left to the variables
        assert nsys.profile_request().patterns == ("driver",)
        assert os.environ[MEMORY_VARIABLE] == "1"
    with profiling_as_configured(ProfileConfig()):
        assert str(nsys.profile_request().steps) == "7:9"
        assert os.environ[gate.VARIABLES[0]] == "1"
    assert {name: os.environ.get(name) for name in VARIABLES} == before
    assert str(nsys.profile_request().steps) == "7:9"


def test_without_a_request_nothing_is_armed():
    with profiling_as_configured(ProfileConfig()):
        assert nsys.profile_request() is None
        assert gate.VARIABLES[0] not in os.environ


def test_every_worker_has_a_name():
    assert load_config(PPORunConfig).worker_names == ["policy-0", "driver"]
    overrides = ["cluster.num_workers=2", "policy.generation.placement=separate", "policy.generation.num_workers=1"]
    names = ["policy-0", "policy-1", "generation-0", "driver"]
    assert load_config(GRPORunConfig, overrides=overrides).worker_names == names
    names[3:3] = ["env-0", "env-1"]
    assert load_config(GRPORunConfig, overrides=[*overrides, "env.num_workers=2"]).worker_names == names


MISTAKES = {
    "profile.steps=0:3": "profile.steps: '0:3' begins at 0, but steps count from 1; write 1:3",
    "profile.steps=5:3": "profile.steps: '5:3' has no steps",
    "profile.steps=soon": "profile.steps: 'soon' is not a range of steps; write start:stop, such as 3:5",
    "profile.steps=7": "profile.steps: '7' is not a range of steps; write start:stop, such as 3:5",
    "profile.steps=3:": "profile.steps: '3:' is not a range of steps; write start:stop, such as 3:5",
    "profile.steps=true": "profile.steps: 'True' is not a range of steps",
    f"profile.steps=1:{'9' * 5000}": "is not a range of steps",
    "profile.memory_snapshot=true": "workers and memory_snapshot need steps; set profile.steps too",
    "profile.step=3:5": "unknown key profile.step; did you mean profile.steps?",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_makes_no_sense_is_refused_before_anything_is_made(tmp_path, mistake):
    for start in (
        lambda: launch("ppo", None, None, [mistake, f"run.root={tmp_path}"], None),
        lambda: check_run("ppo", None, None, [mistake]),
    ):
        with pytest.raises(ConfigError) as caught:
            start()
        assert MISTAKES[mistake] in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_a_range_without_quotes_in_a_file_is_refused(tmp_path):
    (tmp_path / "file.yaml").write_text("profile: {steps: 3:5}\n")
    with pytest.raises(ConfigError, match=r"profile\.steps: 185 is a number: .*quotes"):
        launch("ppo", tmp_path / "file.yaml", None, [], None)


def test_the_variables_are_refused_just_as_early(tmp_path, monkeypatch):
    monkeypatch.setattr(nsys, "NRL_NSYS_PROFILE_STEP_RANGE", "3:5")
    for start in (
        lambda: launch("grpo", None, None, [f"run.root={tmp_path}"], None),
        lambda: check_run("grpo", None, None, []),
    ):
        with pytest.raises(ConfigError, match="needs NRL_NSYS_WORKER_PATTERNS too"):
            start()
    assert not any(tmp_path.iterdir())


def test_patterns_without_a_match_are_refused_with_the_names(tmp_path):
    settings = ["profile.steps=1:2", "profile.workers=*generation*", f"run.root={tmp_path}"]
    for start in (lambda: launch("ppo", None, None, settings, None), lambda: check_run("ppo", None, None, settings)):
        with pytest.raises(ConfigError, match=r"no worker of this run matches .*one of these: policy-0, driver"):
            start()
    assert not any(tmp_path.iterdir())
    assert FOLDER_VARIABLE not in os.environ


def test_steps_after_the_last_are_reported_and_do_not_change_the_run(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("settings.yaml").write_text(PPO)
    for name, overrides in (("late", ["profile.steps=9:12"]), ("plain", [])):
        launch("ppo", Path("settings.yaml"), None, [*overrides, "run.root=.", f"run.name={name}"], None)
    said = capfd.readouterr().out
    assert said.count("no profile will be written: steps 9:12 come after the last step, 4") == 1
    (path,) = Path("late/traces").iterdir()
    missing = ["steps 9:12 are not recorded: the run ended after step 4"]
    assert valid_timeline(path)["lucidrl"]["missing"] == missing
    assert f"missing in the timeline: {missing[0]}" in said
    launch("ppo", None, None, ["profile.steps=2:4", "ppo.max_steps=5"], Path("plain"))
    assert "no profile will be written: steps 2:4 are already done" in capfd.readouterr().out
    launch("ppo", None, None, ["profile.steps=null", "ppo.max_steps=5"], Path("late"))
    assert digests(Path("late")) == digests(Path("plain"))
