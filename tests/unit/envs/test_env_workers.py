"""An environment in worker processes scores as it does in the driver; what blocks or exits is killed and named."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest

from lucidrl.distributed.config import ClusterConfig
from lucidrl.envs.text import workers
from lucidrl.envs.text.config import EnvConfig
from lucidrl.envs.text.runner import EnvRunner
from lucidrl.envs.text.workers import EnvWorkerPool, start_env
from lucidrl.errors import ConfigError, EnvironmentFailure, WorkerError
from lucidrl.profiling.settings import FOLDER_VARIABLE
from tests.faults.processes import own_children, wait_until_gone
from tests.unit.envs.scorers import read_prompts, request, requests
from tests.unit.profiling.span_reading import spans_of

SCORER, COUNTING = "tests.unit.envs.scorers:Scorer", "tests.unit.envs.scorers:Counting"


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(workers, "_GRACE_S", 1.0)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Two workers; tests may harm them."""
    config = EnvConfig(name=SCORER, num_workers=2, timeout_s=0.5)
    pool = EnvWorkerPool(config, ClusterConfig(num_threads=1), log_dir=tmp_path_factory.mktemp("logs"))
    yield pool
    pool.shutdown()


def make_runner(pool, on_error="fail", max_concurrency=4, **settings) -> EnvRunner:
    return EnvRunner(pool, 0.5, max_concurrency, on_error, **settings)


def rewards(replies) -> list[float | None]:
    return [None if reply is None else reply.reward for reply in replies]


def test_calls_are_spread_over_the_workers_and_replies_come_in_order(pool):
    replies = make_runner(pool).step(requests(*("x" * length for length in range(20))))
    assert rewards(replies) == list(range(20))
    pids = {reply.metrics["pid"] for reply in replies}
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_workers_record_in_a_folder_that_was_set_after_their_start(pool, tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "traces"))
    runner = make_runner(pool)
    runner.step(requests("before", "before"))
    pool.start_gpu_profiling()
    runner.step(requests("a", "b", "c", "d"))
    pool.stop_gpu_profiling()
    runner.step(requests("after", "after"))
    files = {path.name.partition("_")[0]: path for path in (tmp_path / "traces").glob("*.spans.json")}
    assert files.keys() == {"env-0", "env-1"}
    assert [spans_of(path) for path in files.values()] == [["environment"]] * 2
    assert len((tmp_path / "traces" / "clocks.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("completion", "complaint"),
    [
        ("raise", "raised KeyError: 'no such reward'"),
        ("exit", "raised SystemExit: 3"),
        ("unpicklable", r"raised tests\.unit\.envs\.scorers\.UnpicklableError: wheel and axle"),
        ("hang", r"exceeded its timeout of 0\.5 s"),
        ("unsendable", "returned a reply that cannot be sent to the driver"),
    ],
)
def test_a_failed_sample_costs_no_worker(pool, completion, complaint):
    before = pool.num_restarts
    with pytest.raises(
        EnvironmentFailure, match=rf"scorers:Scorer\.step {complaint}.* \(sample s1, turn 1\)"
    ) as caught:
        make_runner(pool).step(requests("fine", completion))
    assert ("in _do" in str(caught.value.__cause__)) == ("raised" in complaint)
    dropping = make_runner(pool, "drop", max_concurrency=2)
    assert rewards(dropping.step(requests("a", "bb", completion, "dddd"))) == [1, 2, None, 4]
    assert pool.num_restarts == before


def test_a_sample_that_blocks_the_interpreter_is_killed_and_named(pool):
    before = pool.num_restarts
    with pytest.raises(EnvironmentFailure) as caught:
        make_runner(pool).step(requests("a", "bb", "block", "dddd"))
    text = str(caught.value)
    assert "scorers:Scorer.step exceeded its timeout of 0.5 s and blocked its worker (sample s2, turn 1)" in text
    assert "did not finish score within 1.5 s. If it needs longer, raise env.timeout_s" in text
    assert "scorers.py" in text  # where it was
    assert "Last lines of environment worker" in text
    assert rewards(make_runner(pool).step(requests("a", "bb"))) == [1, 2]
    assert pool.num_restarts == before + 2  # of the batch, and of the sample alone


def test_a_sample_that_ends_its_worker_with_status_0_is_named_or_dropped(pool):
    complaint = r"Scorer\.step ended its worker \(sample s2, turn 1\).*environment worker . of 2 exited with code 0"
    with pytest.raises(EnvironmentFailure, match=complaint):
        make_runner(pool).step(requests("a", "bb", "leave", "dddd"))
    dropping = make_runner(pool, "drop")
    assert rewards(dropping.step(requests("a", "leave", "ccc", "dddd"))) == [1, None, 3, 4]
    assert dropping.counts == Counter(exited=1)


def test_calls_of_a_worker_that_was_killed_are_sent_again(pool, tmp_path):
    make_runner(pool).step(requests("a", "bb"))  # with all workers that earlier tests ended
    before = pool.num_restarts
    completion = f"once {tmp_path / 'mark'}"
    assert rewards(make_runner(pool).step(requests("a", completion, "ccc", "dddd"))) == [1, len(completion), 3, 4]
    assert pool.num_restarts == before + 1


def test_output_is_in_the_logs_folder_of_the_run(pool):
    make_runner(pool).step(requests("a", "bb"))
    paths = [pool._pool.workers[number]._process._workers.labels[0].log_path for number in (0, 1)]
    assert [path.name for path in paths] == ["env_0.log", "env_1.log"]
    assert all("the scorer is here" in path.read_text() for path in paths)


def test_too_many_losses_in_a_row_stop_the_run_and_name_the_samples(pool, monkeypatch):
    monkeypatch.setattr(pool._pool, "max_restarts", 0)
    complaint = r"step lost its worker \(samples s0, s2\): environment worker 0 failed, .*max_restarts=0 allows no more"
    with pytest.raises(EnvironmentFailure, match=complaint):
        make_runner(pool, "drop").step(requests("leave", "bb", "ccc", "dddd"))


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    pool = start_env(EnvConfig(name=COUNTING, timeout_s=0.5), log_dir=tmp_path_factory.mktemp("counting"), seed=7)
    yield pool
    pool.shutdown()


def test_state_and_random_draws_survive_a_restart_and_a_resume(counting):
    runner = make_runner(counting, max_concurrency=1)
    runner.step(requests("a", "b"))
    saved = runner.state_dict()
    assert saved["env"] == {"count": 2}
    expected = runner.step(requests("a", "b", "c"))
    assert rewards(expected) == [5, 5, 5]

    runner.load_state_dict(saved)
    os.kill(counting._pool.workers[0]._process._workers._processes[0].pid, signal.SIGKILL)
    assert runner.step(requests("a", "b", "c")) == expected
    assert counting.num_restarts == 1


@pytest.mark.slow
def test_a_failed_watch_ends_the_wait_and_the_workers():
    def fail():
        raise WorkerError("a rank exited")

    children = own_children()
    pool = start_env(EnvConfig(name=SCORER))
    workers = own_children() - children
    runner = EnvRunner(pool, 60, 1, "drop", fail)
    with runner, pytest.raises(WorkerError, match="a rank exited"):
        runner.step([request("hang")])
    wait_until_gone(workers)


@pytest.mark.parametrize(
    ("start", "complaint"),
    [
        ("raise", r"cannot be made with kwargs .*: KeyError: 'no such reward'"),
        ("exit", r"cannot be made with kwargs .*: SystemExit: 3"),
        ("leave", r"cannot be made: environment worker 0 of 1 exited with code 0 in the start"),
        pytest.param(
            "block",
            r"cannot be made: .* did not finish the start within 3 s.*raise cluster\.start_timeout_s",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_constructor_that_fails_exits_or_blocks_is_refused(start, complaint):
    config = EnvConfig(name=SCORER, kwargs={"start": start})
    with pytest.raises(ConfigError, match=rf"scorers:Scorer {complaint}"):
        read_prompts(config, ClusterConfig(start_timeout_s=3 if start == "block" else 60))


def test_prompts_come_from_a_worker():
    prompts = read_prompts(EnvConfig(name=SCORER), ClusterConfig())
    assert sorted(int(prompt.prompt_id) for prompt in prompts) == list(range(20))


@pytest.mark.parametrize("start", [start_env, read_prompts])
def test_an_environment_with_state_has_one_worker(start):
    with pytest.raises(ConfigError, match=r"env\.num_workers=2 needs an environment without state"):
        start(EnvConfig(name=COUNTING, num_workers=2), ClusterConfig(num_threads=1))


def test_prompts_that_end_their_worker_are_refused():
    config = EnvConfig(name="tests.unit.envs.scorers:Silent")
    with pytest.raises(ConfigError, match=r"Silent\.prompts ended its worker: .* exited with code 0 in prompts"):
        read_prompts(config, ClusterConfig(num_threads=1))
