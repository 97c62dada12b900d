"""Commands on models of runs, checkpoints and the hub, and the chat."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from lucidrl.checkpoint.manager import CheckpointManager
from tests.hub import COMMIT, served_hub, use_hub

SMALL = [
    "env.kwargs={operations: ['+'], max_operand: 9}",
    "collector={prompts_per_step: 4, samples_per_prompt: 4}",
    "validation.num_prompts=8",
    "grpo.max_steps=1",
    "tracking.tensorboard=false",
]


@pytest.fixture
def workplace(embedded_folder, tmp_path, monkeypatch) -> Path:
    """A working directory with the run `earlier`, which saved steps 1 and 2."""
    monkeypatch.chdir(tmp_path)
    for step in (1, 2):
        with CheckpointManager(Path("earlier/checkpoints")).saving(step, metrics={"reward": -step}) as folder:
            shutil.copytree(embedded_folder, folder / "policy")
    Path("earlier/config.yaml").write_text("grpo: {max_steps: 2}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "recorded"),
    [
        ("earlier", "earlier/checkpoints/step_2/policy"),
        ("earlier@best", "earlier/checkpoints/step_1/policy"),
        ("earlier/checkpoints/step_1", "earlier/checkpoints/step_1/policy"),
    ],
)
def test_check_shows_the_checkpoint_that_a_run_would_start_from(lucidrl, workplace, name, recorded):
    code, output, errors = lucidrl("check", f"policy.model_name={name}", *SMALL)
    assert code == 0, errors
    assert f"model_name: {recorded}\n" in output.replace(" \n", "\n").replace("  ", "")


@pytest.mark.slow
def test_a_run_starts_from_another_run_and_records_its_checkpoint(lucidrl, workplace):
    code, _, errors = lucidrl("grpo", "policy.model_name=earlier@best", "run.name=next", *SMALL)
    assert code == 0, errors
    path = workplace / "runs/next/config.yaml"
    recorded = "earlier/checkpoints/step_1/policy"
    assert yaml.safe_load(path.read_text())["policy"]["model_name"] == recorded
    code, _, errors = lucidrl("grpo", "--resume", "runs/next", "grpo.max_steps=2")
    assert code == 0, errors
    assert yaml.safe_load(path.read_text())["policy"]["model_name"] == recorded


@pytest.mark.slow
def test_a_run_starts_from_the_hub_and_records_the_commit(lucidrl, embedded_folder, workplace, monkeypatch):
    with served_hub() as hub:
        hub.add("models/org/tiny", embedded_folder)
        use_hub(monkeypatch, hub.url, workplace / "cache")
        code, _, errors = lucidrl("grpo", "policy.model_name=hub:org/tiny", "run.name=next", *SMALL)
    assert code == 0, errors
    config = yaml.safe_load((workplace / "runs/next/config.yaml").read_text())
    assert config["policy"]["model_name"] == f"hub:org/tiny@{COMMIT}"
    code, _, errors = lucidrl("grpo", "--resume", "runs/next", "grpo.max_steps=2")  # the hub is closed
    assert code == 0, errors


@pytest.mark.slow
def test_the_variables_of_the_hub_are_respected(embedded_folder, workplace):
    def generate(**variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "lucidrl.cli", "generate", "hub:org/tiny", "2+3="],
            env={**os.environ, "HF_HOME": str(workplace / "home"), **variables},
            capture_output=True,
            text=True,
            timeout=120,
        )

    with served_hub() as hub:
        hub.add("models/org/tiny", embedded_folder)
        refused = generate(HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
        assert refused.returncode == 2
        assert "HF_HUB_OFFLINE forbids the download" in refused.stderr
        assert refused.stderr.count("\n") == 1
        done = generate(HF_ENDPOINT=hub.url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().isdigit()


def test_a_chat_reads_a_pipe_until_it_ends(lucidrl, workplace):
    code, output, errors = lucidrl("generate", "earlier", "--chat", stdin="2+3=\n\n/reset\n2+3=\n")
    assert (code, errors) == (0, "")
    reply, note, again = output.splitlines()
    assert (reply, note) == (again, "(new conversation)")
    assert lucidrl("generate", "earlier", "--chat", stdin="/exit\n2+3=\n")[:2] == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["\x04", "\x03"], ids=["Ctrl-D", "Ctrl-C"])
def test_a_chat_on_a_terminal_asks_and_ends(workplace, end):
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "lucidrl.cli", "generate", "earlier", "--chat", "--max-new-tokens", "4"],
        preexec_fn=lambda: os.login_tty(terminal),
    )
    os.close(terminal)
    try:
        shown = read_until(controller, b"> ")
        assert b"/reset starts a new conversation" in shown
        os.write(controller, b"2+3=\n")
        assert re.fullmatch(rb"2\+3=\r\n\d+\r\n> ", read_until(controller, b"> "))
        assert exit_code_after(process, lambda: os.write(controller, end.encode())) == 0
    finally:
        process.kill()
        process.wait()
        os.close(controller)


def exit_code_after(process: subprocess.Popen[bytes], press: Callable[[], object]) -> int | None:
    """Press a key until the process ends: Python misses a Ctrl-C in the moment before it waits for input."""
    for _ in range(12):
        press()
        with suppress(subprocess.TimeoutExpired):
            return process.wait(10)
    return None


def read_until(descriptor: int, end: bytes) -> bytes:
    shown = b""
    while not shown.endswith(end):
        shown += os.read(descriptor, 1024)
    return shown


def test_a_file_is_completed_into_another(lucidrl, workplace):
    Path("prompts.txt").write_text("2+3=\n2+2=\n")
    code, output, errors = lucidrl("generate", "earlier", "--file", "prompts.txt", "--output", "done.jsonl")
    assert (code, output, errors) == (0, "", "")
    assert len(Path("done.jsonl").read_text().splitlines()) == 2
    code, output, _ = lucidrl("generate", "earlier", "--file", "prompts.txt", "--samples", 2)
    assert (code, len(output.splitlines())) == (0, 4)
