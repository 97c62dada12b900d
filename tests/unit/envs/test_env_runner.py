"""EnvRunner with the environment in the driver: order, concurrency, timeouts, bad replies, state."""

import asyncio
import itertools
import logging
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lucidrl.envs.text import workers
from lucidrl.envs.text.interfaces import EnvReply, EnvRequest, RewardComponent
from lucidrl.envs.text.runner import EnvRunner, _even_chunks, _spread
from lucidrl.errors import CheckpointError, EnvironmentFailure, WorkerError


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(workers, "_GRACE_S", 0.5)


def make_requests(*completions):
    return [
        EnvRequest(f"s{index}", [{"role": "assistant", "content": completion}], info={}, turn=1)
        for index, completion in enumerate(completions)
    ]


class ScriptedEnv:
    """Does what the completions of a batch say; rewards any other completion with its length."""

    def __init__(self):
        self.batch_sizes = []
        self.running = 0
        self.most_running = 0

    async def step(self, batch):
        self.batch_sizes.append(len(batch))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0.01)
        self.running -= 1
        completions = [request.completion for request in batch]
        if "raise" in completions:
            raise KeyError("no such reward")
        for error in (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError):
            if error.__name__ in completions:
                raise error("its own")
        if "own timeout" in completions:
            raise TimeoutError("the server was too slow")
        if "hang" in completions:
            await asyncio.sleep(60)
        if "block" in completions:
            time.sleep(2)
        if "short" in completions:
            return []
        return [self.reply(completion) for completion in completions]

    def reply(self, completion):
        replies = {
            "nothing": None,
            "nan": EnvReply(float("nan")),
            "inf": EnvReply(float("inf")),
            "1e308": EnvReply(-1e308),
            "beyond float": EnvReply(10**400),
            "no metrics": EnvReply(1.0, metrics=None),
            "numbered metrics": EnvReply(1.0, metrics={1: 2.0}),
            "text info": EnvReply(1.0, info="42"),
            "two truths": EnvReply(1.0, done=np.array([True, False])),
            "text reward": EnvReply("1.0"),
            "tensor reward": EnvReply(torch.tensor(1.0)),
            "silent": EnvReply(0.0, done=False),
            "no list": EnvReply(0.0, done=False, messages=None),
            "half a message": EnvReply(0.0, done=False, messages=({"role": "user"},)),
            "own completion": EnvReply(0.0, done=False, messages=({"role": "assistant", "content": "x"},)),
        }
        return replies.get(completion, EnvReply(float(len(completion))))


def make_runner(env, on_error="drop", timeout_s=0.2, max_concurrency=2):
    return EnvRunner(env, timeout_s, max_concurrency, on_error)


def rewards(replies):
    return [None if reply is None else reply.reward for reply in replies]


def test_replies_come_in_the_order_of_the_requests():
    with make_runner(ScriptedEnv(), max_concurrency=3) as runner:
        assert rewards(runner.step(make_requests("a", "aa", "aaa", "aaaa", "aaaaa"))) == [1, 2, 3, 4, 5]
        assert runner.step([]) == []


def test_a_batch_is_spread_evenly_over_concurrent_calls():
    env = ScriptedEnv()
    with make_runner(env, max_concurrency=4) as runner:
        runner.step(make_requests(*"abcdefghij"))
    assert sorted(env.batch_sizes) == [2, 2, 3, 3]
    assert env.most_running == 4


@given(st.integers(0, 50), st.integers(1, 12))
def test_chunks_are_even_and_lose_nothing(num_requests, max_chunks):
    rows = list(range(num_requests))
    chunks = _even_chunks(rows, max_chunks)
    sizes = [len(chunk) for chunk in chunks]
    assert [row for chunk in chunks for row in chunk] == rows
    assert len(chunks) == min(num_requests, max_chunks)
    assert not sizes or max(sizes) - min(sizes) <= 1


@given(st.integers(0, 50))
def test_samples_are_retried_apart_from_their_neighbours(num_requests):
    spread = _spread(range(num_requests))
    assert sorted(spread) == list(range(num_requests))
    if num_requests >= 9:
        assert all(abs(a - b) > 1 for a, b in itertools.pairwise(spread))


@pytest.mark.parametrize(
    ("completion", "complaint"),
    [
        ("raise", "raised KeyError"),
        ("SystemExit", "raised SystemExit: its own"),
        ("KeyboardInterrupt", "raised KeyboardInterrupt: its own"),
        ("GeneratorExit", "raised GeneratorExit: its own"),
        ("CancelledError", r"raised asyncio\.exceptions\.CancelledError: its own"),
        ("own timeout", "raised TimeoutError: the server was too slow"),
        ("hang", r"exceeded its timeout of 0\.2 s"),
        ("short", "returned 0 replies for 1 requests"),
        ("nothing", "returned a NoneType"),
        ("nan", r"reward nan, but rewards must be finite and within ±3\.4e\+38"),
        ("1e308", r"reward -1e\+308, but rewards must be finite"),
        ("beyond float", "reward inf, but rewards must be finite"),
        ("text reward", "reward of type str"),
        ("silent", "returned done=False without messages"),
    ],
)
def test_fail_names_environment_sample_turn_and_remedy(completion, complaint):
    with (
        make_runner(ScriptedEnv(), on_error="fail") as runner,
        pytest.raises(EnvironmentFailure, match=rf"ScriptedEnv\.step .*{complaint}.*sample s1, turn 1.*on_error=drop"),
    ):
        runner.step(make_requests("fine", completion))


def test_fail_names_all_samples_of_a_call_and_chains_the_cause():
    with (
        make_runner(ScriptedEnv(), on_error="fail", max_concurrency=1) as runner,
        pytest.raises(EnvironmentFailure, match="samples s0, s1, s2, s3, s4 and 1 more") as failure,
    ):
        runner.step(make_requests("a", "b", "raise", "c", "d", "e"))
    assert "in step" in str(failure.value.__cause__)
    assert "KeyError: 'no such reward'" in str(failure.value.__cause__)


@pytest.mark.parametrize(
    ("completion", "cause"),
    [
        ("raise", "raised"),
        ("SystemExit", "raised"),
        ("hang", "timeout"),
        ("short", "bad_reply"),
        ("nothing", "bad_reply"),
        ("silent", "bad_reply"),
        ("no list", "bad_reply"),
        ("half a message", "bad_reply"),
        ("no metrics", "bad_reply"),
        ("numbered metrics", "bad_reply"),
        ("text info", "bad_reply"),
        ("two truths", "bad_reply"),
        ("own completion", "bad_reply"),
        ("nan", "bad_reward"),
        ("inf", "bad_reward"),
        ("1e308", "bad_reward"),
        ("text reward", "bad_reward"),
        ("tensor reward", "bad_reward"),
    ],
)
def test_drop_leaves_out_the_bad_sample_and_keeps_its_neighbours(completion, cause):
    with make_runner(ScriptedEnv()) as runner:
        assert rewards(runner.step(make_requests("a", completion, "aaa", "aaaa"))) == [1, None, 3, 4]
        assert runner.counts == Counter({cause: 1})


@pytest.mark.parametrize("on_error", ["fail", "drop"])
def test_a_step_that_blocks_the_driver_ends_the_run_with_the_way_out(on_error):
    with make_runner(ScriptedEnv(), on_error) as runner:
        started = time.monotonic()
        with pytest.raises(
            EnvironmentFailure,
            match=r"lost its worker \(samples s0, s1\): .*cannot be killed; set env.isolation=process",
        ):
            runner.step(make_requests("block", "a"))
        assert time.monotonic() - started < 1.5


def test_a_step_that_ignores_cancellation_cannot_beat_the_timeout():
    class Stubborn:
        async def step(self, batch):
            for _ in range(20):
                try:
                    await asyncio.sleep(0.1)
                except asyncio.CancelledError:
                    continue

    with make_runner(Stubborn(), "fail") as runner, pytest.raises(EnvironmentFailure, match="exceeded its timeout"):
        runner.step(make_requests("a"))


def test_every_call_runs_on_one_loop_so_that_clients_can_be_shared():
    loops = set()

    class Recorder:
        async def step(self, batch):
            loops.add(asyncio.get_running_loop())
            return [EnvReply(0.0) for _ in batch]

    with make_runner(Recorder()) as runner:
        for _ in range(3):
            runner.step(make_requests("a", "b", "c"))
    assert len(loops) == 1


def test_rewards_and_metrics_of_any_number_type_become_floats():
    class NumpyEnv:
        async def step(self, batch):
            numbers = [np.float32(0.5), np.int64(2), True]
            return [EnvReply(number, done=np.bool_(True), metrics={"value": number}) for number in numbers]

    with make_runner(NumpyEnv(), on_error="fail", max_concurrency=1) as runner:
        replies = runner.step(make_requests("a", "b", "c"))
    assert rewards(replies) == [reply.metrics["value"] for reply in replies] == [0.5, 2.0, 1.0]
    assert {type(value) for reply in replies for value in (reply.reward, *reply.metrics.values())} == {float}
    assert replies[0].done is True


def test_each_cause_is_logged_once(caplog):
    with caplog.at_level(logging.WARNING), make_runner(ScriptedEnv()) as runner:
        runner.step(make_requests("nan", "inf", "nothing", "a"))
        runner.step(make_requests("nan"))
    assert [record.message.split("(")[1].split(",")[0] for record in caplog.records] == ["sample s0", "sample s2"]
    assert runner.counts == Counter(bad_reward=3, bad_reply=1)


def test_close_ends_the_thread_and_may_be_called_twice():
    class ClosedEnv(ScriptedEnv):
        pass

    def is_running():
        return any(thread.name == "ClosedEnv-environment" for thread in threading.enumerate())

    runner = make_runner(ClosedEnv())
    runner.step(make_requests("a"))
    assert is_running()
    runner.close()
    runner.close()
    assert not is_running()
    with pytest.raises(RuntimeError, match="closed"):
        runner.step(make_requests("a"))


def test_a_thread_that_never_returns_does_not_keep_the_process_from_exiting(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(
        textwrap.dedent("""
        import asyncio, time
        from lucidrl.envs.text.interfaces import EnvRequest
        from lucidrl.envs.text.runner import EnvRunner
        from lucidrl.errors import EnvironmentFailure

        class Slow:
            async def step(self, batch):
                await asyncio.to_thread(time.sleep, 120)

        try:
            with EnvRunner(Slow(), timeout_s=0.2, max_concurrency=1, on_error="fail") as runner:
                runner.step([EnvRequest("s", [{"role": "assistant", "content": ""}], {}, 1)])
        except EnvironmentFailure:
            print("reported")
        """)
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "reported\n"


@pytest.mark.slow
def test_a_failed_watch_ends_the_wait():
    class Slow:
        async def step(self, batch):
            await asyncio.sleep(60)

    def fail():
        raise WorkerError("a rank exited")

    started = time.monotonic()
    runner = EnvRunner(Slow(), timeout_s=60, max_concurrency=1, on_error="drop", watch=fail)
    with runner, pytest.raises(WorkerError, match="a rank exited"):
        runner.step([EnvRequest("s", [{"role": "assistant", "content": ""}], {}, 1)])
    assert time.monotonic() - started < 45


def test_metrics_that_are_no_numbers_are_a_bad_reply():
    class Wordy:
        async def step(self, batch):
            return [EnvReply(1.0, metrics={"kind": "short"}) for _ in batch]

    request = EnvRequest("s", [{"role": "assistant", "content": ""}], {}, 1)
    with (
        EnvRunner(Wordy(), timeout_s=5, max_concurrency=1, on_error="fail") as runner,
        pytest.raises(EnvironmentFailure, match="metrics that are not numbers: kind"),
    ):
        runner.step([request])


@pytest.mark.parametrize(
    ("components", "problem"),
    [
        ({"right": RewardComponent(1.0, 0.5)}, "reward 1, but the components right add up to 0.5"),
        ({"right": RewardComponent(float("nan"))}, "add up to nan"),
        ({"right": 1.0}, "cannot be read"),
    ],
)
def test_components_that_are_not_those_of_the_reward_are_refused(components, problem):
    class Adding:
        async def step(self, batch):
            return [EnvReply(1.0, components=components) for _ in batch]

    request = EnvRequest("s", [{"role": "assistant", "content": ""}], {}, 1)
    with (
        EnvRunner(Adding(), timeout_s=5, max_concurrency=1, on_error="fail") as runner,
        pytest.raises(EnvironmentFailure, match=problem),
    ):
        runner.step([request])


@pytest.mark.parametrize("answer", [["4"], np.float64(4.0)], ids=["list", "number"])
def test_an_answer_that_is_no_string_is_a_bad_reply(answer):
    class Answering:
        async def step(self, batch):
            return [EnvReply(1.0, answer=answer) for _ in batch]

    problem = rf"Answering\.step returned an answer of type {type(answer).__name__} instead of a string \(sample s0,"
    with make_runner(Answering(), on_error="fail") as runner, pytest.raises(EnvironmentFailure, match=problem):
        runner.step(make_requests("a"))


class Counting(ScriptedEnv):
    """Counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    async def step(self, batch):
        self.calls += 1
        return await super().step(batch)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def test_the_state_of_an_environment_is_saved_and_loaded():
    with make_runner(Counting(), max_concurrency=1) as runner:
        runner.step(make_requests("a"))
        state = runner.state_dict()
    assert state == {"env": {"calls": 1}}
    env = Counting()
    with make_runner(env) as runner:
        runner.load_state_dict({"position": 3, **state})
    assert env.calls == 1


def test_an_environment_without_state_saves_none():
    with make_runner(ScriptedEnv()) as runner:
        assert runner.state_dict() == {}
        runner.load_state_dict({"position": 3})
        with pytest.raises(CheckpointError, match="has a state of the environment, but ScriptedEnv has no state"):
            runner.load_state_dict({"env": {}})


def test_an_environment_with_state_needs_it_at_a_resume():
    with make_runner(Counting()) as runner:
        with pytest.raises(CheckpointError, match="has no state of the environment, but Counting has state"):
            runner.load_state_dict({})
        with pytest.raises(CheckpointError, match=r"Counting\.load_state_dict raised KeyError: 'calls'"):
            runner.load_state_dict({"env": {}})


@pytest.mark.parametrize("state", [torch.zeros(2), {1, 2}, np.ones(2), object()])
def test_a_state_that_no_checkpoint_can_hold_is_refused(state):
    env = Counting()
    env.calls = state
    with make_runner(env) as runner, pytest.raises(EnvironmentFailure, match=r"Counting\.state_dict failed"):
        runner.state_dict()


def test_an_environment_failure_stops_the_run_even_with_drop():
    class Ending:
        async def step(self, batch):
            raise EnvironmentFailure("the server is down")

    with make_runner(Ending()) as runner, pytest.raises(EnvironmentFailure, match=r"^the server is down$"):
        runner.step(make_requests("a", "b"))
