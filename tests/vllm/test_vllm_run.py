"""`lucidrl grpo` with vLLM as its generator."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import orjson

from tests.vllm.vllm_cases import needs_vllm

pytestmark = needs_vllm
ENGINE = ("policy.generation.engine=vllm", "policy.generation.placement=separate")


def lucidrl(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lucidrl.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_a_run_trains_and_logs_its_refits(tmp_path):
    done = lucidrl(
        *("grpo", "--preset", "demo", *ENGINE, f"run.root={tmp_path}", "grpo.max_steps=3", "cluster.num_threads=1"),
        *("tracking.dump_samples_every=1", "policy.generation.sleep=true"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [folder] = [path.parent for path in tmp_path.rglob("metrics.jsonl")]
    records = [orjson.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    steps = [record for record in records if "train/policy_version" in record]
    assert [record["train/policy_version"] for record in steps] == [0, 1, 2]
    assert all(record["time/refit_s"] > 0 for record in steps)
    words = " ".join(done.stdout.split())
    assert "starting 1 vllm replica; logs: " in words
    assert re.search(r"started 1 vllm replica in \d+ s", words)
    log = (folder / "logs" / "generation" / "rank_0.log").read_text()
    assert "LLM engine" in log
    assert log.count("policy.generation.sleep has no effect") == 1


def test_the_check_of_gpus_passes_on_cpus(tmp_path):
    report = tmp_path / "report.md"
    script = Path(__file__).parents[2] / "tools" / "gpu_check.py"
    command = [sys.executable, str(script), "--report", str(report), "--rehearse", "--only", "vllm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, report.read_text()
    assert "## vllm: passed" in report.read_text()


def test_an_unknown_argument_is_refused_before_anything_loads(tmp_path):
    done = lucidrl("check", *ENGINE, f"run.root={tmp_path}", "policy.generation.vllm.enable_prefix_cachin=false")
    assert done.returncode == 2
    words = " ".join((done.stdout + done.stderr).split())
    assert "unknown key policy.generation.vllm.enable_prefix_cachin" in words
    assert "did you mean policy.generation.vllm.enable_prefix_caching?" in words
