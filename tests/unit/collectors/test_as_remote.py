"""as_remote: a collector class as a Ray actor class, armed as the driver is."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from lucidrl.collectors.single import Collector
from lucidrl.utils import nsys

ENVIRONMENT = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_USAGE_STATS_ENABLED": "0"}


def run_armed(script: str) -> str:
    """Run a script with a local Ray cluster in an armed process; returns its output."""
    environment = {**os.environ, **ENVIRONMENT, "TORCHRL_PROFILING": "1"}
    code = textwrap.dedent(script)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=180)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_an_actor_has_the_ranges_of_its_driver_and_the_callers_options_are_unchanged(tmp_path):
    run_armed(f"""
        import json
        import ray
        from lucidrl.collectors import Collector
        from lucidrl.envs import GymEnv

        options = {{"num_cpus": 1, "runtime_env": {{"env_vars": {{"MINE": "kept"}}}}}}
        before = json.dumps(options)
        ray.init(address="local", num_cpus=1, include_dashboard=False)
        actor = Collector.as_remote(**options).remote(
            lambda: GymEnv("CartPole-v1"), frames_per_batch=20, total_frames=60, seed=0
        )
        assert json.dumps(options) == before
        ray.get(actor.enable_profile.remote(num_rollouts=2, warmup_rollouts=1, save_path={str(tmp_path / "t.json")!r}))
        batches = [ray.get(actor.next.remote()) for _ in range(4)]
        assert [None if batch is None else batch.numel() for batch in batches] == [20, 20, 20, None]
        ray.get(actor.shutdown.remote())
        events = json.load(open({str(tmp_path / "t.json")!r}))["traceEvents"]
        names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        assert names.count("Collector.rollout") == 1 and names.count("Collector.policy") == 20, names
        ray.shutdown()
    """)


@pytest.mark.slow
def test_the_arming_variable_is_added_to_the_callers_variables():
    output = run_armed("""
        import ray
        from lucidrl.collectors import MultiSyncCollector

        seen = []
        ray.remote = lambda *args, **options: seen.append(options) or (lambda cls: cls)
        MultiSyncCollector.as_remote(num_cpus=2, runtime_env={"env_vars": {"MINE": "kept"}, "pip": []})
        MultiSyncCollector.as_remote(runtime_env={"env_vars": {"TORCHRL_PROFILING": "0"}})
        MultiSyncCollector.as_remote()
        print(seen)
    """)
    armed = {"LUCIDRL_PROFILING": "1", "TORCHRL_PROFILING": "1"}
    assert eval(output) == [
        {"num_cpus": 2, "runtime_env": {"env_vars": {**armed, "MINE": "kept"}, "pip": []}},
        {"runtime_env": {"env_vars": {"TORCHRL_PROFILING": "0"}}},
        {"runtime_env": {"env_vars": armed}},
    ]


def test_an_actor_without_steps_to_record_is_not_run_under_nsight_systems(monkeypatch):
    ray = pytest.importorskip("ray")
    seen = []
    monkeypatch.setattr(ray, "remote", lambda *args, **options: seen.append(options) or (lambda cls: cls))
    monkeypatch.setattr("shutil.which", lambda program: f"/bin/{program}")
    monkeypatch.setattr(nsys, "NRL_NSYS_WORKER_PATTERNS", "*")
    monkeypatch.setattr(nsys, "NRL_NSYS_PROFILE_STEP_RANGE", "3:5")
    Collector.as_remote(num_cpus=1)
    assert "nsight" not in seen[0].get("runtime_env", {})
