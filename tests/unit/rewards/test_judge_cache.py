"""The cache of the LLM judge: replies survive a restart, damage and other processes; the folder stays small."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lucidrl.envs.text.interfaces import EnvReply
from lucidrl.rewards.env import RewardEnv
from lucidrl.rewards.judge.cache import ReplyCache, default_folder
from tests.unit.rewards.llm_server import LLMServer, in_turn, says
from tests.unit.rewards.obedient_rewards import requests

KEYS = [f"{number:02x}" * 32 for number in range(64)]


def scored(server: LLMServer, folder: Path, *completions: str, **kwargs) -> list[EnvReply]:
    """Score with a new RewardEnv, as after a restart."""
    options = {"base_url": server.base_url, "model": "grader", "cache_dir": str(folder), **kwargs}
    env = RewardEnv({"name": "judge", "kwargs": options, "on_parse_failure": -3})
    try:
        return asyncio.run(env.step(requests(*completions)))
    finally:
        env.close()


def metrics(replies: list[EnvReply], name: str) -> list[float]:
    return [reply.metrics[f"reward/judge/{name}"] for reply in replies]


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def server():
    with LLMServer(says("Score: 5")) as server:
        yield server


def test_a_reply_is_requested_once_and_found_after_a_restart(server, tmp_path):
    first = scored(server, tmp_path, "a", "b", "a")
    again = scored(server, tmp_path, "a", "b")
    assert {reply.reward for reply in [*first, *again]} == {0.5}
    assert (metrics(first, "requests"), metrics(first, "cache_hit")) == ([1, 1, 0], [0, 0, 1])
    assert (metrics(again, "requests"), metrics(again, "cache_hit")) == ([0, 0], [1, 1])
    assert "reward/judge/request_s" not in again[0].metrics
    assert len(server.bodies) == len(entries(tmp_path)) == 2


@pytest.mark.parametrize("change", [{"model": "other"}, {"temperature": 1}, {"rubric": "Grade {{ completion }}"}])
def test_another_model_sampling_or_rubric_is_another_entry(server, tmp_path, change):
    scored(server, tmp_path, "a")
    scored(server, tmp_path, "a", **change)
    assert len(server.bodies) == 2


def test_another_range_of_scores_does_not_use_a_reply_outside_of_it(server, tmp_path):
    rubric = "Grade {{ completion }}"
    scored(server, tmp_path, "a", rubric=rubric)
    assert scored(server, tmp_path, "a", rubric=rubric, max_score=5)[0].reward == 1
    assert scored(server, tmp_path, "a", rubric=rubric, max_score=1)[0].reward == -3
    assert len(server.bodies) == 2


def test_the_cache_can_be_off(server, tmp_path):
    replies = scored(server, tmp_path, "a", "a", cache=False)
    assert metrics(replies, "requests") == [1, 1]
    assert "reward/judge/cache_hit" not in replies[0].metrics
    assert entries(tmp_path) == []


def test_failed_replies_are_not_kept(tmp_path):
    with LLMServer(in_turn([says("nothing"), says("Score: 5")])) as server:
        assert scored(server, tmp_path, "a")[0].reward == -3
        assert scored(server, tmp_path, "a")[0].reward == 0.5


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"reply": "Score: 10", "sha256": "0"}', b'{"reply": 3}', b"\xff"]
)
def test_a_damaged_entry_is_ignored_counted_and_replaced(server, tmp_path, content):
    scored(server, tmp_path, "a")
    (path,) = entries(tmp_path)
    path.write_bytes(content)
    damaged = scored(server, tmp_path, "a")
    assert (damaged[0].reward, metrics(damaged, "cache_damaged"), metrics(damaged, "requests")) == (0.5, [1], [1])
    assert metrics(scored(server, tmp_path, "a"), "cache_hit") == [1]


def test_entries_are_for_the_user_alone(server, tmp_path):
    scored(server, tmp_path / "new", "a")
    for path in [tmp_path / "new", *(tmp_path / "new").rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_an_entry_of_another_key_is_damaged(tmp_path):
    cache = ReplyCache(tmp_path, 1 << 20)
    cache.put(KEYS[0], "Score: 1")
    (tmp_path / KEYS[1][:2]).mkdir()
    os.replace(tmp_path / KEYS[0][:2] / f"{KEYS[0]}.json", tmp_path / KEYS[1][:2] / f"{KEYS[1]}.json")
    assert cache.get(KEYS[1]).is_damaged


def test_the_size_is_bounded_and_used_entries_stay(tmp_path):
    cache = ReplyCache(tmp_path, 256 << 10)
    for number, key in enumerate(KEYS):
        cache.put(key, "x" * 8000)
        path = tmp_path / key[:2] / f"{key}.json"
        if path.exists():
            os.utime(path, (number, number))
        if number == 10:
            assert cache.get(KEYS[0]).reply  # used now, so later than all others
    assert 100 << 10 < sum(path.stat().st_size for path in entries(tmp_path)) <= (256 << 10) * 17 // 16
    assert cache.get(KEYS[0]).reply
    assert cache.get(KEYS[-1]).reply
    assert cache.get(KEYS[1]).reply is None
    ReplyCache(tmp_path, 64 << 10)
    assert sum(path.stat().st_size for path in entries(tmp_path)) <= 64 << 10


def test_writers_at_the_same_time_leave_whole_entries(tmp_path):
    caches = [ReplyCache(tmp_path, 1 << 16) for _ in range(4)]

    def work(number: int) -> int:
        cache = caches[number % 4]
        cache.put(KEYS[number % 3], f"{number}" * 3000)
        return cache.get(KEYS[number % 3]).is_damaged

    with ThreadPoolExecutor(8) as pool:
        assert not any(pool.map(work, range(200)))
    assert not [path for path in entries(tmp_path) if path.suffix == ".tmp"]


def test_a_full_disk_is_logged_once(tmp_path, monkeypatch, caplog):
    cache = ReplyCache(tmp_path, 1 << 20)

    def no_space(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    for key in KEYS[:3]:
        cache.put(key, "Score: 1")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"replies of the LLM judge cannot be cached in {tmp_path}: No space left on device; later")
    assert entries(tmp_path) == []


def test_the_default_folder_is_in_the_cache_of_the_user(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_folder() == Path("/somewhere/lucidrl/judge")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_folder() == Path.home() / ".cache/lucidrl/judge"
