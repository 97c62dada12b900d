"""`make gpu-check`: what it says without GPUs, and that its checks run."""

from __future__ import annotations

import importlib
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


@pytest.mark.slow
def test_without_gpus_it_says_so_and_succeeds(tmp_path):
    done, report = gpu_check(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "torch sees no CUDA device on this machine" in done.stdout
    assert not report.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", ["numerics", "offload", "profiling", "refit-ipc", "ranks-nccl", "tensor-parallel", "refit-collective"]
)
def test_its_checks_pass_on_cpus(tmp_path, check):
    done, report = gpu_check(tmp_path, "--rehearse", "--only", check)
    text = report.read_text(encoding="utf-8")
    assert done.returncode == 0, text
    assert f"## {check}: passed" in text
    assert "a rehearsal on CPUs" in text


def test_a_failing_check_is_reported_with_its_output(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    module = importlib.import_module("gpu_check")
    unknown = module.Check("no-such-check", "nothing", 1, lambda: "")
    outcome = module.run_check(unknown, num_gpus=1)
    assert outcome.status == "failed"
    assert "StopIteration" in outcome.details
    assert "## no-such-check: failed" in module.report([outcome], ["GPU 0"])


def test_a_check_that_needs_more_gpus_is_skipped(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    module = importlib.import_module("gpu_check")
    outcome = module.run_check(module.Check("two", "nothing", 2, lambda: ""), num_gpus=1)
    assert (outcome.status, outcome.details) == ("skipped", "needs 2 GPUs, found 1")


def test_a_check_that_needs_a_missing_package_is_skipped(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    module = importlib.import_module("gpu_check")
    outcome = module.run_check(module.Check("one", "nothing", 1, lambda: "", package="no_such_package"), num_gpus=1)
    assert (outcome.status, outcome.details) == ("skipped", "needs the package no_such_package, which is not installed")
