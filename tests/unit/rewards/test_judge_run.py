"""Runs with an LLM judge: GRPO trains, a resumed run requests nothing again, `lucidrl check` names the problem."""

from __future__ import annotations

import json

import pytest

from tests.unit.rewards.llm_server import LLMServer, chat
from tests.unit.test_pages import undocumented

KEY = "sk-loopback-0123456789abcdef"
SMALL = [
    "data.validation_fraction=0",
    "collector.prompts_per_step=2",
    "collector.samples_per_prompt=4",
    "policy.generation.max_new_tokens=4",
    "tracking.tensorboard=false",
    "tracking.dump_samples_every=1",
]


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRADER", KEY)
    rows = [{"prompt": f"{n}+{n}=", "answer": n + n} for n in range(10, 30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def settings(base_url: str, **options: object) -> list[str]:
    kwargs = {"base_url": base_url, "model": "grader", "key_variable": "GRADER", "cache_dir": "cache", **options}
    return ["data.file=rows.jsonl", f"reward={json.dumps({'name': 'judge', 'kwargs': kwargs})}", *SMALL]


def by_length(handler):
    """Prefer completions with many different characters, and repeat the key."""
    content = handler.llm.bodies[-1]["messages"][0]["content"] if handler.command == "POST" else ""
    completion = content.partition("<response>\n")[2].partition("\n</response>")[0]
    handler.send(chat(f"{KEY} Score: {len(set(completion))}"))


def test_grpo_trains_with_an_llm_judge_and_writes_no_key(rows, lucidrl):
    with LLMServer(by_length) as server:
        code, out, err = lucidrl("grpo", *settings(server.base_url), "env.isolation=none", "grpo.max_steps=2")
    assert code == 0, out + err
    assert 0 < len(server.bodies) <= 16
    assert set(server.keys) == {f"Bearer {KEY}"}
    (metrics,) = (rows / "runs").rglob("metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    trained = [line for line in lines if "train/reward/judge" in line]
    assert len(trained) == 2
    assert trained[0]["train/reward/judge/requests"] > 0
    assert trained[0]["train/reward/judge/crash"] == 0
    assert trained[0]["train/reward"] == trained[0]["train/reward/judge"] > 0
    assert undocumented({name for line in lines for name in line}) == set()
    _check_nothing_holds_the_key(rows, out + err)


@pytest.mark.slow
def test_a_repeated_run_in_worker_processes_requests_nothing_again(rows, lucidrl):
    with LLMServer(by_length) as server:
        for number in (1, 2):
            code, out, err = lucidrl("grpo", *settings(server.base_url), "grpo.max_steps=2")
            assert code == 0, out + err
            if number == 1:
                num_requests = len(server.bodies)
    assert len(server.bodies) == num_requests > 0
    _check_nothing_holds_the_key(rows, out + err)


def _check_nothing_holds_the_key(folder, output: str) -> None:
    written = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {"config.yaml", "step_1.jsonl"} <= {name.rpartition("/")[2] for name in written}
    assert any(name.startswith("cache/") for name in written)
    assert not [name for name, content in written.items() if KEY.encode() in content]
    assert KEY not in output


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"base_url": "http://127.0.0.1:9/v1"}, "the LLM judge at http://127.0.0.1:9/v1 cannot be reached"),
        ({"key_variable": "NOT_SET"}, "the environment variable NOT_SET of reward.kwargs.key_variable is not set"),
    ],
)
def test_check_names_what_is_missing(rows, lucidrl, options, complaint):
    with LLMServer(by_length) as server:
        arguments = settings(**{"base_url": server.base_url, **options})
        code, out, err = lucidrl("check", *arguments, "env.isolation=none")
    assert code == 2
    assert complaint in " ".join((out + err).split())
