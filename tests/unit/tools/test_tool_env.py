"""ToolEnv: calls run in processes that can be killed, errors go to the model, the final completion is scored."""

from __future__ import annotations

import asyncio
import json
import logging

import psutil
import pytest

from lucidrl.data.datasets import Prompt
from lucidrl.envs.text.interfaces import EnvRequest, SampleFailure
from lucidrl.errors import ConfigError, EnvironmentFailure
from lucidrl.tools.config import ToolConfig
from lucidrl.tools.env import ToolEnv
from lucidrl.tools.functions import describe, load_tools

MODULE = "tests.unit.tools.functions_for_tools"


def repeat(text: str, times: int = 2) -> str:
    """Repeat a text.

    Args:
        text: what to repeat
        times: how often
    """
    return text * times


def broken(code: int) -> dict:
    """Fail.

    Args:
        code: any number
    """
    raise RuntimeError(f"code {code}")


def long_result() -> str:
    """Return 10 MB."""
    return "a" * 10_000_000


def request(completion: str, turn: int = 1, **info) -> EnvRequest:
    log = [{"role": "user", "content": "q"}, {"role": "assistant", "content": completion}]
    return EnvRequest("p#0", log, {"answer": "391", **info}, turn)


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def step(env: ToolEnv, *completions: str, turn: int = 1):
    return asyncio.run(env.step([request(completion, turn) for completion in completions]))


@pytest.fixture(scope="module")
def env():
    hang = ToolConfig(name=f"{MODULE}:hang", timeout_s=0.5)
    tools = ["calculator", repeat, broken, long_result, f"{MODULE}:leave", hang]
    with_tools = ToolEnv(tools, rewards="numeric", max_turns=3)
    yield with_tools
    with_tools.close()


def contents(reply) -> list[str]:
    return [message["content"] for message in reply.messages]


def test_calls_of_one_completion_are_all_answered_in_their_order(env):
    (reply,) = step(env, call("calculator", expression="17*23") + call("repeat", text="ab") + call("nope"))
    assert contents(reply)[:2] == ["391", "abab"]
    assert contents(reply)[2].startswith("error: there is no tool 'nope'; the tools are calculator, repeat")
    assert [message["role"] for message in reply.messages] == ["tool"] * 3
    assert [message["name"] for message in reply.messages] == ["calculator", "repeat", "unknown"]
    assert (reply.reward, reply.done) == (0.0, False)


def test_a_completion_without_calls_is_scored_and_ends_the_sample(env):
    right, wrong = step(env, "It is 391.", "It is 390.")
    assert (right.reward, right.done, wrong.reward, wrong.done) == (1.0, True, 0.0, True)
    assert right.metrics["tools/calls"] == right.metrics["tools/no_turn_left"] == 0.0


def test_calls_of_the_last_turn_are_scored_instead_of_executed(env):
    (reply,) = step(env, call("calculator", expression="17*23"), turn=3)
    assert (reply.reward, reply.done, reply.metrics["tools/no_turn_left"]) == (0.0, True, 1.0)


@pytest.mark.parametrize(
    ("completion", "content", "metric"),
    [
        (call("repeat", words="ab"), "error: repeat got wrong arguments: ", "bad_calls"),
        (call("repeat", text="ab", times="many"), "error: repeat got wrong arguments: times: ", "bad_calls"),
        ("<tool_call>{nonsense", "error: the tool call is not valid JSON", "bad_calls"),
        (call("broken", code=7), "error: broken failed: RuntimeError: code 7", "tool_errors"),
        (call("leave"), "error: leave failed: its process exited with code 3", "tool_errors"),
        (call("hang"), "error: hang exceeded its timeout of 0.5 s", "timeouts"),
    ],
)
def test_a_call_that_fails_is_an_error_for_the_model_and_counted(env, completion, content, metric):
    (reply,) = step(env, completion)
    assert contents(reply)[0].startswith(content)
    assert not reply.done
    counts = {name: reply.metrics[f"tools/{name}"] for name in ("bad_calls", "tool_errors", "timeouts")}
    assert counts == {name: float(name == metric) for name in counts}


def test_a_long_result_is_cut_and_says_so(env):
    (reply,) = step(env, call("long_result"))
    (content,) = contents(reply)
    assert content == "a" * 2000 + " ... (cut: 10,000,000 characters, 2,000 shown)"


def test_arguments_are_converted_as_the_hints_say(env):
    (reply,) = step(env, call("repeat", text="ab", times="3"))
    assert contents(reply) == ["ababab"]


def test_counts_and_calls_of_all_turns_reach_the_final_reward():
    seen = []

    def reward(completion, tool_calls, answer):
        seen.append(tool_calls)
        return float(len(tool_calls))

    env = ToolEnv(["calculator"], functions=[reward])
    (first,) = step(env, call("calculator", expression="1+1") + call("nope"))
    (final,) = asyncio.run(env.step([request("done", 2, **first.info)]))
    env.close()
    assert (final.reward, final.metrics["tools/calls"], final.metrics["tools/bad_calls"]) == (2.0, 2.0, 1.0)
    assert [(one["tool"], one["result"][:6], one["failure"]) for one in seen[0]] == [
        ("calculator", "2", ""),
        ("nope", "error:", "bad_call"),
    ]


def test_every_turn_with_calls_gets_its_reward(tmp_path, monkeypatch):
    module = "def used(tool_calls): return 0.25 * sum(not call['failure'] for call in tool_calls)\n"
    (tmp_path / "turn_rewards.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    env = ToolEnv(["calculator"], rewards="numeric", use={"turn_reward": "turn_rewards:used"})
    (first,) = step(env, call("calculator", expression="1+1") * 2)
    (second,) = asyncio.run(env.step([request(call("calculator", expression="2"), 2, **first.info)]))
    (final,) = asyncio.run(env.step([request("391", 3, **second.info)]))
    env.close()
    assert (first.reward, second.reward, final.reward) == (0.5, 0.25, 1.0)
    assert final.metrics["tools/turn_reward"] == 0.75


@pytest.mark.parametrize(
    ("use", "completion"),
    [
        ({"on_bad_call": "{}"}, call("nope")),
        ({"on_tool_error": "{}"}, call("broken", code=7)),
    ],
)
@pytest.mark.slow
def test_the_settings_say_what_becomes_of_a_failed_call(use, completion):
    replies = {}
    for chosen in ("end", "drop", "fail"):
        key = next(iter(use))
        env = ToolEnv(["calculator", broken], rewards="numeric", use={key: chosen})
        if chosen == "fail":
            with pytest.raises(EnvironmentFailure, match=rf"sample p#0, turn 1.*tool_use\.{key}=message"):
                step(env, completion)
        else:
            (replies[chosen],) = step(env, completion)
        (right,) = step(env, "391")
        assert right.reward == 1.0
        env.close()
    assert (replies["end"].done, replies["end"].reward, replies["end"].is_dropped) == (True, 0.0, False)
    assert (replies["drop"].done, replies["drop"].is_dropped) == (True, True)


def test_more_calls_than_a_turn_may_have_are_not_executed():
    env = ToolEnv([repeat], rewards="numeric", use={"max_calls_per_turn": 2})
    (reply,) = step(env, call("repeat", text="a") * 3)
    env.close()
    assert contents(reply)[:2] == ["aa", "aa"]
    assert contents(reply)[2] == "error: call 3 was not executed, because a turn may have 2 calls"


def test_the_first_failure_of_a_tool_is_logged_and_later_ones_are_not(caplog):
    env = ToolEnv([broken], rewards="numeric")
    with caplog.at_level(logging.WARNING):
        step(env, call("broken", code=1), call("broken", code=2))
        step(env, call("broken", code=3))
    env.close()
    (record,) = [record for record in caplog.records if record.name == "lucidrl.tools.env"]
    assert "broken failed: RuntimeError: code 1 (sample p#0, turn 1)" in record.getMessage()


def test_nothing_is_left_running_after_close():
    before = set(psutil.Process().children(recursive=True))
    env = ToolEnv(["calculator", ToolConfig(name=f"{MODULE}:hang", timeout_s=60)], rewards="numeric")
    started = set(psutil.Process().children(recursive=True)) - before
    assert started
    env.close()
    env.close()
    trackers = {one for one in started if one.is_running() and "resource_tracker" in " ".join(one.cmdline())}
    _, alive = psutil.wait_procs(started - trackers, timeout=30)
    assert not alive


def test_the_schema_comes_from_signature_and_docstring():
    function = describe(repeat)["function"]
    assert function["name"] == "repeat"
    assert function["description"] == "Repeat a text."
    assert function["parameters"]["properties"]["times"] == {"type": "integer", "description": "how often"}
    assert function["parameters"]["required"] == ["text"]


@pytest.mark.parametrize(
    ("tool", "problem"),
    [
        (ToolConfig(name="calculater"), "did you mean calculator"),
        (ToolConfig(name="quux"), "use calculator, python, or your function"),
        (ToolConfig(name="no.such.module:f"), "there is no module"),
        (ToolConfig(name=f"{MODULE}:nothing"), "has no function nothing; it defines hang, leave, undescribed"),
        (ToolConfig(name=f"{MODULE}:undescribed"), "cannot be described to the model.*type hint"),
        (3, "tools has 3; pass functions"),
    ],
)
def test_a_tool_that_cannot_be_used_is_refused_with_the_remedy(tool, problem):
    with pytest.raises(ConfigError, match=problem):
        load_tools([tool])


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two tools have the name calculator"):
        load_tools([ToolConfig(name="calculator")] * 2)


def test_a_prompt_is_checked_against_the_rewards(env):
    env.check_prompt(Prompt("p", ({"role": "user", "content": "q"},), {"answer": "3"}))
    with pytest.raises(ConfigError, match="cannot use the row"):
        env.check_prompt(Prompt("p", ({"role": "user", "content": "q"},), {"solution": "3"}))


def test_a_failure_of_the_reward_is_the_failure_of_the_sample():
    def raises(completion):
        raise KeyError("x")

    env = ToolEnv(["calculator"], functions=[raises])
    (found,) = step(env, "391")
    env.close()
    assert isinstance(found, SampleFailure)


def test_text_that_tokenizers_refuse_does_not_reach_the_model(env):
    surrogate = '<tool_call>{"name": "\\ud800", "arguments": %s}</tool_call>'
    for reply in step(env, surrogate % "5", surrogate % "{}", call("repeat", text="\ud800")):
        for message in reply.messages:
            (message["name"] + message["content"]).encode()


@pytest.mark.slow
def test_a_tool_that_raises_a_timeout_error_counts_as_a_timeout():
    env = ToolEnv([ToolConfig(name="python", timeout_s=2)], rewards="numeric")
    (reply,) = step(env, call("python", code="while True: pass"))
    env.close()
    assert (reply.metrics["tools/timeouts"], reply.metrics["tools/tool_errors"]) == (1.0, 0.0)


def test_functions_that_do_not_return_their_result_are_refused():
    async def later(x: int) -> int:
        """Wait.

        Args:
            x: x
        """
        return x

    def parts(x: int):
        """Yield.

        Args:
            x: x
        """
        yield x

    def by_position(x: int, /) -> int:
        """Return.

        Args:
            x: x
        """
        return x

    for function, problem in ((later, "a coroutine"), (parts, "a generator"), (by_position, "remove the /")):
        with pytest.raises(ConfigError, match=problem):
            load_tools([function])
