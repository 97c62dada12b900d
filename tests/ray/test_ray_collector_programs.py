"""RayCollector: programs with a local cluster, and programs that join a cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import ray

from tests.faults.processes import wait_until_gone
from tests.ray.collecting import check_actors_gave_all_back

pytestmark = pytest.mark.usefixtures("ray_of_the_program")


ARMED_PROGRAM = """
    import json, os, pathlib, psutil, ray
    from lucidrl.collectors import RayCollector
    from lucidrl.envs import GymEnv

    def ranges(path):
        events = json.loads(pathlib.Path(path).read_text())["traceEvents"]
        return [event["name"] for event in events if event.get("cat") == "user_annotation"]

    os.chdir(os.environ["FOLDER"])
    def make_env():
        return GymEnv("CartPole-v1")

    with RayCollector([make_env] * 3, frames_per_batch=30, total_frames=180, sync=True) as collector:
        for shown in (True, False):
            collector.map_fn("set_profiling_enabled", list_of_args=[(shown,)] * collector.num_workers)
            path = f"{shown}_{{worker_idx}}.json"
            collector.enable_profile(workers=[0, 1], num_rollouts=2, warmup_rollouts=1, save_path=path)
            assert collector.next().numel() == collector.next().numel() == 30
        for index in (0, 1):
            assert ranges(f"True_{index}.json").count("Collector.rollout") == 1
            assert ranges(f"True_{index}.json").count("EnvBase.step_and_maybe_reset") == 10
            assert ranges(f"False_{index}.json") == []
        collector.enable_profile(workers=[2], num_rollouts=99, save_path="last_{worker_idx}.json")
        assert len(list(collector)) == 2
        assert pathlib.Path("last_2.json").exists()
        listening = {
            socket.laddr.ip
            for process in [psutil.Process(), *psutil.Process().children(recursive=True)]
            for socket in process.net_connections()
            if socket.status == psutil.CONN_LISTEN
        }
        assert listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, listening
        # A second one shares what the first one started, and keeps it when that one ends.
        other = RayCollector([make_env], frames_per_batch=30)
    assert other.next().numel() == 30
    other.shutdown()
    assert not ray.is_initialized()
    print("done")
"""


def run(code, environment, **options):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


@pytest.mark.slow
def test_a_program_without_a_ray_has_one_for_itself_whose_actors_are_armed_as_it_is(tmp_path):
    program = run(ARMED_PROGRAM, {"LUCIDRL_PROFILING": "1", "FOLDER": str(tmp_path)})
    output, errors = program.communicate(timeout=300)
    assert program.returncode == 0, errors
    assert output.strip() == "done"
    assert {path.name for path in tmp_path.iterdir()} == {
        *(f"{shown}_{index}.json" for shown in (True, False) for index in (0, 1)),
        "last_2.json",
    }


ENDLESS = """
    import os, psutil, sys
    from lucidrl.collectors import RayCollector
    from lucidrl.envs import GymEnv

    collector = RayCollector([lambda: GymEnv("CartPole-v1")] * 2, frames_per_batch=200, sync=True)
    collector.next()
    collector.enable_profile(num_rollouts=10**9, warmup_rollouts=0, save_path=os.environ["FOLDER"] + "/trace.json")
    collector.next()
    children = psutil.Process().children(recursive=True)
    # Helpers of Ray try for a minute to report their node to the stopped head.
    print(*(process.pid for process in children if "Agent" not in process.name()), flush=True)
    %s
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rest", "number"),
    [
        ("while True: collector.next()", signal.SIGKILL),
        ("while True: collector.next()", signal.SIGINT),
        ("sys.exit()", None),
    ],
)
def test_nothing_is_left_of_a_program_that_ends_without_shutdown(tmp_path, rest, number):
    program = run(ENDLESS % rest, {"FOLDER": str(tmp_path)})
    pids = [int(word) for word in program.stdout.readline().split()]
    assert len(pids) > 4
    if number is not None:
        time.sleep(0.5)
        os.killpg(program.pid, number) if number == signal.SIGINT else program.send_signal(number)
    _, errors = program.communicate(timeout=300)
    if number == signal.SIGINT:
        assert errors.count("Traceback") == 1
        assert errors.strip().endswith("KeyboardInterrupt")
    elif number is None:
        assert errors == ""
        assert program.returncode == 0
    if number != signal.SIGKILL:
        assert (tmp_path / "trace.json").exists()
    wait_until_gone(pids)


@pytest.mark.slow
def test_a_program_that_disconnects_from_ray_while_it_collects_is_an_error():
    code = """
        import ray
        from lucidrl.collectors import RayCollector
        from lucidrl.envs import GymEnv

        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        collector = RayCollector([lambda: GymEnv("CartPole-v1")] * 2, frames_per_batch=200)
        collector.next()
        ray.shutdown()
        try:
            while True:  # some batches may be here already
                collector.next()
        except Exception as error:
            print(error)
        collector.update_policy_weights_()
        collector.shutdown()
        assert not ray.is_initialized()
    """
    program = run(code, {})
    output, errors = program.communicate(timeout=300)
    assert program.returncode == 0, errors
    assert "has disconnected from Ray" in output


@pytest.mark.slow
def test_a_program_joins_the_cluster_that_the_variable_names_and_brings_its_modules(tmp_path):
    code = """
        import os, ray, sys
        sys.path.insert(0, os.environ["FOLDER"])
        from lake import Lake  # which no node has
        from lucidrl.collectors import RayCollector

        with RayCollector([Lake], frames_per_batch=20) as collector:
            assert collector.next().numel() == 20
            assert ray.get_runtime_context().gcs_address == os.environ["RAY_ADDRESS"]
            assert ray.available_resources()["CPU"] == 3
        assert not ray.is_initialized()
    """
    (tmp_path / "lake.py").write_text("from tests.unit.envs.toys import Walk\n\nclass Lake(Walk):\n    pass\n")
    address = ray.get_runtime_context().gcs_address
    program = run(code, {"FOLDER": str(tmp_path), "RAY_ADDRESS": address}, cwd="/")
    _, errors = program.communicate(timeout=300)
    assert program.returncode == 0, errors
    check_actors_gave_all_back()
