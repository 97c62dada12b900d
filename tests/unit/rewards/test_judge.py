"""The LLM judge: every behaviour of its endpoint gives a documented outcome in time; the key stays secret."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

from lucidrl.data.datasets import Prompt
from lucidrl.envs.text.interfaces import EnvReply
from lucidrl.envs.text.runner import EnvRunner
from lucidrl.errors import ConfigError, EnvironmentFailure
from lucidrl.rewards.config import rewards_of, seconds_per_sample
from lucidrl.rewards.env import RewardEnv
from lucidrl.rewards.interfaces import ParseFailure, SampleTime
from lucidrl.rewards.judge.config import JudgeConfig
from lucidrl.rewards.judge.reply import score_of
from tests.unit.rewards.llm_server import LLMServer, chat, drips, hangs, in_turn, says, sends, sends_raw
from tests.unit.rewards.obedient_rewards import requests

KEY = "sk-loopback-0123456789abcdef"
OUTCOMES = {"on_timeout": -1, "on_crash": -2, "on_parse_failure": -3}
REWARDS = {"timeout": -1.0, "crash": -2.0, "parse_failure": -3.0}
PROMPT = Prompt("p", ({"role": "user", "content": "2+2="},), {"answer": 4})


@pytest.fixture(autouse=True)
def no_surprises(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("http_proxy", "https_proxy", "all_proxy"):  # must not be used
        monkeypatch.setenv(name, "http://127.0.0.1:9")


def reward(base_url: str, timeout_s: float = 60, **kwargs) -> dict:
    """Settings of a reward that retries quickly; `on_*` settings may be among the `kwargs`."""
    outcomes = {name: kwargs.pop(name, value) for name, value in OUTCOMES.items()}
    options = {"base_url": base_url, "model": "grader", "backoff_s": 0.01, "cache": False, **kwargs}
    return {"name": "judge", "timeout_s": timeout_s, "kwargs": options, **outcomes}


def scored(settings: dict, *completions: str, **row) -> list[EnvReply]:
    env = RewardEnv(settings)
    try:
        return asyncio.run(env.step(requests(*completions, **row)))
    finally:
        env.close()


def metric(reply: EnvReply, name: str) -> float:
    return reply.metrics[f"reward/judge/{name}"]


def failures(reply: EnvReply) -> set[str]:
    kinds = ("timeout", "crash", "parse_failure", "rate_limited", "http_error", "connection_error", "bad_response")
    return {kind for kind in kinds if metric(reply, kind)}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_the_reply_is_the_reward_and_the_request_holds_rubric_and_sampling():
    with LLMServer(says("Right.\nScore: 7")) as server:
        (reply,) = scored(reward(server.base_url + "/", extra_body={"seed": 5, "max_tokens": None}), "four", answer=4)
    assert reply.reward == pytest.approx(0.7)
    assert (metric(reply, "requests"), metric(reply, "retries"), failures(reply)) == (1, 0, set())
    assert metric(reply, "request_s") > 0
    (body,) = server.bodies
    assert {key: body[key] for key in ("model", "temperature", "seed")} == {
        "model": "grader",
        "temperature": 0,
        "seed": 5,
    }
    assert "max_tokens" not in body
    (message,) = body["messages"]
    assert "<task>\n2+2=\n</task>\n<reference_answer>\n4\n</reference_answer>\n<response>\nfour\n" in message["content"]
    assert "from 0 (worst) to 10 (best)" in message["content"]
    assert server.keys == [None]


def test_own_templates_see_columns_prompt_and_completion():
    templates = {"rubric": "{{ prompt }}|{{ completion }}|{{ topic }}|{{ max_score }}", "system": "Grade {{ topic }}."}
    with LLMServer(says('{"reason": "", "score": 1}')) as server:
        settings = reward(server.base_url, max_score=1, completion_after="</think>", **templates)
        scored(settings, "hm</think>four", topic="sums")
    assert server.bodies[0]["messages"] == [
        {"role": "system", "content": "Grade sums."},
        {"role": "user", "content": "2+2=|four|sums|1"},
    ]


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 7", 0.7),
        ("**Score:** 7/10", 0.7),
        ("Score: **7.5**.", 0.75),
        ("Final score (0 to 10): 10", 1.0),
        ('```json\n{"score": 2.5, "reason": "Score it"}\n```', 0.25),
        ("score = 0", 0.0),
        ("First I thought Score: 3. No.\nScore: 4\nA good score: yes", 0.4),
        ("Score: .5", 0.05),
        ("Score: 7 out of 10", 0.7),
        ("Score: 7\n- 3 errors", 0.7),
    ],
)
def test_scores_are_read_in_documented_forms(reply, score):
    assert score_of(reply, JudgeConfig(base_url="http://h", model="m")) == pytest.approx(score)


@pytest.mark.parametrize(
    "reply",
    [
        "7",
        "Score: good",
        "Score: 11",
        "Score: -1",
        "Score: 7-8",
        "Score: 7 or 8",
        "Score: **8** to **9**",
        "Score: 7.5/10 and 8/10",
        "Score: 70%",
        "Score: 7,5",
        "Score: 7/100",
        "Score: 1e1",
    ],
)
def test_a_reply_without_one_score_in_range_is_a_parse_failure(reply):
    with pytest.raises(ParseFailure):
        score_of(reply, JudgeConfig(base_url="http://h", model="m"))


def test_scores_may_keep_their_range():
    config = JudgeConfig(base_url="http://h", model="m", min_score=-1, max_score=1, rescale=False)
    assert score_of("Score: -0.5", config) == -0.5


@pytest.mark.parametrize(
    ("behaviour", "kinds"),
    [
        (says("Nice work!"), {"parse_failure"}),
        (sends(chat(None, finish_reason="length")), {"parse_failure"}),
        (sends(chat("Score: 1", finish_reason="length")), {"parse_failure"}),
        (sends(b'{"choices": ['), {"crash", "bad_response"}),
        (sends(b"[" * 100_000), {"crash", "bad_response"}),
        (sends(b'{"choices": []}'), {"crash", "bad_response"}),
        (sends(b"{}", Content_Length="9999999999"), {"crash", "bad_response"}),
        (sends_raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n"), {"crash", "bad_response"}),
        (sends_raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffff\r\n"), {"crash", "bad_response"}),
        (sends_raw(b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (5 << 20)), {"crash", "bad_response"}),
        (sends_raw(b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 20)), {"crash", "bad_response"}),
        (sends_raw(b"SSH-2.0-nonsense\r\n\r\n"), {"crash", "bad_response"}),
        (sends(b"no such model", 404), {"crash", "http_error"}),
        (sends(b"", 302, Location="http://127.0.0.1:9/v1"), {"crash", "bad_response"}),
    ],
)
def test_a_wrong_response_is_a_counted_outcome_without_a_retry(behaviour, kinds):
    with LLMServer(behaviour) as server:
        (reply,) = scored(reward(server.base_url), "four")
    assert failures(reply) == kinds
    assert reply.reward == min(REWARDS.get(kind, 0) for kind in kinds)
    assert len(server.bodies) == metric(reply, "requests") == 1


def test_chunks_and_responses_without_length_are_read():
    content = chat("Score: 10")
    chunked = b"".join(b"%x;ext\r\n%s\r\n" % (len(part), part) for part in (content[:5], content[5:])) + b"0\r\n\r\n"
    both = [
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked,
        b"HTTP/1.0 200 OK\r\n\r\n" + content,
    ]
    with LLMServer(in_turn(map(sends_raw, both))) as server:
        assert [reply.reward for reply in scored(reward(server.base_url), "a", "b")] == [1, 1]


@pytest.mark.parametrize("behaviour", [hangs, drips])
def test_a_slow_or_dripping_server_times_out(behaviour):
    start = time.monotonic()
    with LLMServer(behaviour) as server:
        (reply,) = scored(reward(server.base_url, timeout_s=0.5, request_timeout_s=0.2), "four")
    assert time.monotonic() - start < 20, "the server would go on for a minute or forever"
    assert (failures(reply), reply.reward) == ({"timeout"}, -1)
    assert 1 <= metric(reply, "requests") <= 3


def test_a_server_that_is_down_is_a_connection_error_after_retries():
    (reply,) = scored(reward(f"http://127.0.0.1:{free_port()}", max_retries=2), "four")
    assert (failures(reply), reply.reward) == ({"crash", "connection_error"}, -2)
    assert (metric(reply, "requests"), metric(reply, "retries")) == (3, 2)


@pytest.mark.parametrize(
    "failure",
    [sends(b"busy", 500), sends(b"", 503), sends_raw(b""), sends_raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{")],
)
def test_a_flapping_server_is_retried_until_it_replies(failure):
    with LLMServer(in_turn([failure, failure, says("Score: 5")])) as server:
        (reply,) = scored(reward(server.base_url), "four")
    assert (reply.reward, failures(reply)) == (0.5, set())
    assert (metric(reply, "requests"), metric(reply, "retries")) == (3, 2)


def test_retries_are_bounded_and_the_last_error_is_reported():
    with LLMServer(sends(b"busy\x1b[31m", 500)) as server:
        (reply,) = scored(reward(server.base_url, max_retries=1), "four")
        assert failures(reply) == {"crash", "http_error"}
        with pytest.raises(EnvironmentFailure) as stopped:
            scored(reward(server.base_url, max_retries=1, on_crash="fail"), "four")
    assert str(stopped.value).startswith(
        "crash of verifier judge (HTTP 500: busy [31m after 2 requests) for sample p0#0; fix the reason, or set "
    )
    assert len(server.bodies) == 4


def test_a_rate_limit_is_respected():
    limited = sends(b"slow down", 429, Retry_After="1")
    with LLMServer(in_turn([limited, says("Score: 5")])) as server:
        start = time.monotonic()
        (reply,) = scored(reward(server.base_url), "four")
    assert time.monotonic() - start >= 1
    assert (reply.reward, metric(reply, "retries"), failures(reply)) == (0.5, 1, set())


@pytest.mark.parametrize(
    "wait", ["3600", format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)], ids=["seconds", "date"]
)
def test_a_rate_limit_beyond_the_timeout_is_reported_at_once(wait):
    with LLMServer(sends(b"", 429, Retry_After=wait)) as server:
        (reply,) = scored(reward(server.base_url), "four")
    assert (failures(reply), metric(reply, "requests")) == ({"crash", "rate_limited"}, 1)


def test_at_most_max_concurrency_requests_are_in_progress():
    three = threading.Barrier(3)

    def together(handler):
        three.wait(60)
        handler.send(chat("Score: 1"))

    with LLMServer(together) as server:
        replies = scored(reward(server.base_url, max_concurrency=3), *(str(number) for number in range(9)))
    assert [reply.reward for reply in replies] == [0.1] * 9
    assert server.most_at_once == 3


def test_a_step_in_which_all_requests_time_out_does_not_stop_the_run():
    with LLMServer(hangs) as server:
        settings = reward(server.base_url, timeout_s=0.3, max_retries=0, max_concurrency=2)
        times = [SampleTime(0.35, of.num_at_once) for of in seconds_per_sample(rewards_of(settings))]
        with EnvRunner(RewardEnv(settings), 0.3, 8, "fail", seconds_per_sample=times) as runner:
            replies = runner.step(requests(*"abcdefgh"))
    assert [reply and failures(reply) for reply in replies] == [{"timeout"}] * 8


def test_a_reward_function_that_blocks_does_not_delay_requests():
    arrived = threading.Event()

    def behave(handler):
        arrived.set()
        handler.send(chat("Score: 1"))

    with LLMServer(behave) as server:
        env = RewardEnv(reward(server.base_url), [lambda completion: float(arrived.wait(60))])
        (reply,) = asyncio.run(env.step(requests("a")))
        env.close()
    assert reply.reward == 1.1


def test_a_cancelled_step_and_a_shutdown_end_requests():
    disconnected = threading.Semaphore(0)

    def behave(handler):
        handler.connection.recv(1)  # returns when the client closes the connection
        disconnected.release()

    async def step_shortly(env: RewardEnv, server: LLMServer) -> None:
        step = asyncio.create_task(env.step(requests("a")))
        while not server.bodies:
            await asyncio.sleep(0.01)
        step.cancel()

    with LLMServer(behave) as server:
        env = RewardEnv(reward(server.base_url))
        asyncio.run(step_shortly(env, server))
        assert disconnected.acquire(timeout=30)
        server.bodies.clear()
        scorer = env._parts[0].scorer
        scorer._submit(scorer._score_batch(requests("b")))
        while not server.bodies:
            time.sleep(0.01)
        env.close()
        assert disconnected.acquire(timeout=30)
        with pytest.raises(EnvironmentFailure, match="was shut down"):
            asyncio.run(env.step(requests("c")))


def test_failures_are_dropped_or_stop_the_run_by_default():
    (config,) = rewards_of({"name": "judge", "kwargs": {"base_url": "http://h", "model": "m"}})
    assert (config.on_timeout, config.on_crash, config.on_parse_failure) == ("drop", "fail", "drop")
    assert rewards_of({"name": "judge", "on_crash": 0})[0].on_crash == 0
    assert seconds_per_sample([config]) == [SampleTime(121, num_at_once=8)]


def test_the_first_parse_failure_is_logged_and_all_are_counted(caplog):
    with LLMServer(says("I like it")) as server:
        replies = scored(reward(server.base_url), "a", "b")
    assert [metric(reply, "parse_failure") for reply in replies] == [1, 1]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("parse failure of the LLM judge (the reply 'I like it' has no line like `Score: 10`)")


@pytest.mark.parametrize(
    ("limit", "shown"),
    [({"max_tokens": 9}, "max_tokens=9"), ({"extra_body": {"max_completion_tokens": 7}}, "max_completion_tokens=7")],
)
def test_a_cut_reply_says_its_limit_and_is_not_cached(caplog, tmp_path, limit, shown):
    with LLMServer(sends(chat("Score: 1", finish_reason="length"))) as server:
        settings = reward(server.base_url, cache=True, cache_dir=str(tmp_path / "replies"), **limit)
        scored(settings, "a")
        scored(settings, "a")
    assert len(server.bodies) == 2
    assert f"the reply was cut at {shown}; raise reward.kwargs.max_tokens" in caplog.text


def test_the_key_is_sent_and_shown_nowhere(monkeypatch, caplog, tmp_path):
    """The server repeats the key wherever it can."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("GRADER", f" {KEY}\n")
    replies = [
        sends(f"wrong key {KEY[:8]}... {KEY}".encode(), 401),
        sends(f"key {KEY}".encode(), 400),
        sends(b"", 302, Location=f"http://127.0.0.1:9/{KEY}"),
        sends(f'{{"{KEY}": '.encode()),
        says(f"no number, {KEY}"),
        says(f"{KEY} Score: 5"),
    ]
    shown = []
    with LLMServer(in_turn(replies)) as server:
        for _ in replies:
            settings = reward(
                server.base_url, key_variable="GRADER", cache=True, on_crash="fail", on_parse_failure="fail"
            )
            try:
                shown.append(str(scored(settings, "four")))
            except EnvironmentFailure as stopped:
                shown += [str(stopped), repr(stopped.__cause__), repr(stopped.__context__)]
        server.behaviour = replies[0]
        with pytest.raises(ConfigError) as refused:
            RewardEnv(settings).check_prompt(PROMPT)
    assert set(server.keys) == {f"Bearer {KEY}"}
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(files) == 1
    texts = [*shown, str(refused.value), *(path.read_text() for path in files), caplog.text]
    assert all(KEY not in text for text in texts)
    assert not any(KEY[:8] in text for text in texts)
    assert "the server refuses the key in variable GRADER" in str(refused.value)


def test_a_redirect_to_another_host_gets_no_request():
    with LLMServer(says("Score: 10")) as other, LLMServer(sends(b"", 307, Location=other.base_url)) as server:
        (reply,) = scored(reward(server.base_url), "four")
    assert failures(reply) == {"crash", "bad_response"}
    assert other.bodies == other.keys == []


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")
    folder = tmp_path_factory.mktemp("tls")
    key, file = folder / "key.pem", folder / "certificate.pem"
    options = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", file]
    subprocess.run(["openssl", "req", *options.split(), *names], check=True, capture_output=True)
    return key, file


def test_certificates_are_verified(certificate, monkeypatch):
    key, file = certificate
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(file, key)
    with LLMServer(says("Score: 10"), tls) as server:
        (refused,) = scored(reward(server.base_url), "four")
        assert (failures(refused), metric(refused, "requests")) == ({"crash", "connection_error"}, 1)
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
        assert scored(reward(server.base_url), "four")[0].reward == 1


def test_a_check_says_that_the_endpoint_cannot_be_reached():
    env = RewardEnv(reward(f"http://127.0.0.1:{free_port()}/v1"))
    with pytest.raises(
        ConfigError, match=r"^the LLM judge at http://127\S+ cannot be reached: connection error: .*; start"
    ):
        env.check_prompt(PROMPT)
    env.close()


@pytest.mark.parametrize("status", [200, 404])
def test_a_check_accepts_an_endpoint_that_replies(status):
    with LLMServer(sends(b"{}", status)) as server:
        env = RewardEnv(reward(server.base_url))
        env.check_prompt(PROMPT)
        env.close()
    assert server.bodies == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"modle": "m"}, "unknown key reward.kwargs.modle; did you mean reward.kwargs.model?"),
        ({"api_key": KEY}, "unknown key reward.kwargs.api_key; did you mean reward.kwargs.key_variable?"),
        ({"base_url": "localhost:8000"}, "reward.kwargs.base_url: 'localhost:8000' is not the address of an endpoint"),
        ({"base_url": "http://h:99999/"}, "reward.kwargs.base_url: 'http://h:99999/' is not the address"),
        ({"base_url": "http://a..b/v1"}, "reward.kwargs.base_url: 'http://a..b/v1' is not the address of an endpoint"),
        ({"base_url": f"http://{'a' * 64}.org/v1"}, "is not the address of an endpoint; write it like http://"),
        ({"base_url": "http://h/v1\r\nX: y"}, "is not the address of an endpoint"),
        ({"base_url": f"https://me:{KEY}@host/v1"}, "reward.kwargs.base_url: the address must have no user, query"),
        ({"key_variable": KEY}, "reward.kwargs.key_variable: the value is not the name of a variable"),
        (
            {"key_variable": "UNSET_VARIABLE"},
            "the environment variable UNSET_VARIABLE of reward.kwargs.key_variable is not",
        ),
        ({"rubric": "{% if %}"}, "reward.kwargs.rubric: line 1 is not valid jinja"),
        ({"min_score": 5, "max_score": 5}, "reward.kwargs.min_score=5 is not below max_score=5; lower"),
        ({"extra_body": {"seed": float("nan")}}, "reward.kwargs.extra_body: the value cannot be sent as JSON"),
        ({"extra_body": {"stream": True}}, "reward.kwargs.extra_body: stream cannot be set here"),
        (
            {"cache": True, "cache_dir": "/proc/nowhere"},
            "the cache of the LLM judge cannot be written to /proc/nowhere",
        ),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(change, complaint):
    with pytest.raises(ConfigError) as refused:
        RewardEnv(reward(**{"base_url": "http://127.0.0.1:9", **change}))
    assert complaint in str(refused.value)
    assert KEY not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_wrong_settings_of_the_reward_are_refused():
    with pytest.raises(ConfigError, match="the LLM judge runs no processes, so num_workers and memory_limit_mb"):
        rewards_of({"name": "judge", "num_workers": 2})
    with pytest.raises(ConfigError, match=r"unknown verifier 'jugde'; did you mean judge\?"):
        RewardEnv("jugde")


@pytest.mark.parametrize(
    ("rubric", "complaint"),
    [
        ("{{ solution }}", "the LLM judge cannot use the row of prompt 'p': reward.kwargs.rubric fails: 'solution' is"),
        ("{{ answer.x.y }}", "cannot use the row of prompt 'p': reward.kwargs.rubric fails"),
        ("{{ ''.__class__.__mro__ }}", "reward.kwargs.rubric fails"),
    ],
)
def test_a_rubric_that_does_not_fit_the_row_is_refused_before_any_request(rubric, complaint):
    env = RewardEnv(reward("http://127.0.0.1:9", rubric=rubric))
    with pytest.raises(ConfigError) as refused:
        env.check_prompt(PROMPT)
    assert complaint in str(refused.value)
    (reply,) = asyncio.run(env.step(requests("a")))
    assert reply.reward == -2
    env.close()


def test_a_key_over_plain_http_is_warned_about(monkeypatch, caplog):
    monkeypatch.setenv("GRADER", KEY)
    RewardEnv(reward("http://judge.invalid/v1", key_variable="GRADER")).close()
    assert re.search(r"the key of GRADER is sent to judge\.invalid without encryption", caplog.text)
