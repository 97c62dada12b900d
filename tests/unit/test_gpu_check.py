"""`make gpu-check`: what it says without GPUs, and that its checks run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def gpu_check(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    report = folder / "report.md"
    command = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "--report", str(report), *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, text=True, capture_output=True, env=environment, timeout=1200), report


def test_without_gpus_it_says_so_and_succeeds(tmp_path):
    done, report = gpu_check(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "torch sees no CUDA device on this machine" in done.stdout
    assert not report.exists()


@pytest.mark.slow
@pytest.mark.parametrize("check", ["numerics", "offload", "profiling", "refit-ipc", "ranks-nccl", "refit-collective"])
def test_its_checks_pass_on_cpus(tmp_path, check):
    done, report = gpu_check(tmp_path, "--rehearse", "--only", check)
    text = report.read_text(encoding="utf-8")
    assert done.returncode == 0, text
    assert f"## {check}: passed" in text
    assert "vLLM is not part of Lucid RL yet" in text
    assert "a rehearsal on CPUs" in text


@pytest.mark.slow
def test_a_failing_check_is_reported_with_its_output(tmp_path, monkeypatch):
    monkeypatch.setenv("LUCIDRL_PROFILE_DIR", "")
    monkeypatch.setenv("NRL_NSYS_WORKER_PATTERNS", "policy-*")  # refused without a range of steps
    done, report = gpu_check(tmp_path, "--rehearse", "--only", "offload")
    assert done.returncode == 1
    text = report.read_text(encoding="utf-8")
    assert "## offload: failed" in text
    assert "NRL_NSYS" in text
