"""Run all benchmarks, each in its own process, and print one table of claims, targets and measured values.

`make bench` runs this script. It writes `results.json` to its folder. It exits with code 1 only if a benchmark fails to
run; a missed target is a result.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from harness import Claim, arguments, print_table

FOLDER = Path(__file__).parent
BENCHMARKS = (
    "startup",
    "logging_cost",
    "profiling_cost",
    "observe_cost",
    "timeline_memory",
    "logprob_head",
    "train_vs_bare_loop",
    "prefix_sharing",
    "dynamic_batching",
    "ranks",
    "ray_step",
    "checkpoint_stall",
    "refit",
    "mismatch_guard",
    "group_sampling",
    "continuous_batching",
    "grpo_step_vs_trl",
    "dpo_step_vs_trl",
    "collectors",
    "large_dataset",
    "demo",
    "distillation",
    "async_overlap",
    "async_kills",
    "async_learning",
    "verifiers",
    "smollm2_grpo",
    "dpo_smollm2",
)
WITH_MODEL = (
    "train_vs_bare_loop",
    "prefix_sharing",
    "ranks",
    "ray_step",
    "checkpoint_stall",
    "refit",
    "mismatch_guard",
    "group_sampling",
    "continuous_batching",
    "grpo_step_vs_trl",
    "dpo_step_vs_trl",
    "smollm2_grpo",
    "dpo_smollm2",
)
RECORDED_VERSIONS = ("torch", "transformers", "trl", "torchrl", "tensordict", "gymnasium", "stable-baselines3")


def run(name: str, model: str, threads: int) -> list[Claim] | None:
    """Run a benchmark and return its claims; None if it failed."""
    print(f"\n== {name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "claims.json"
        command = [sys.executable, str(FOLDER / f"{name}.py"), "--json", str(result), "--threads", str(threads)]
        if name in WITH_MODEL:
            command += ["--model", model]
        quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
        exit_code = subprocess.run(command, env={**os.environ, **quiet, "OMP_NUM_THREADS": str(threads)}).returncode
        if exit_code:
            return None
        return [Claim(**{k: v for k, v in entry.items() if k != "is_met"}) for entry in json.loads(result.read_text())]


def main() -> None:
    options = arguments(
        __doc__,
        smollm2=(str, ".cache/smollm2", "folder of SmolLM2-135M-Instruct"),
        only=(str, ",".join(BENCHMARKS), "benchmarks to run, separated by commas"),
    )
    results = {name: run(name, options.smollm2, options.threads) for name in options.only.split(",")}
    print("\n== all")
    rows = [claim.row() for claims in results.values() for claim in claims or ()]
    failed = [name for name, claims in results.items() if claims is None]
    print_table([*rows, *((name, "", "", "failed to run") for name in failed)])
    record = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": options.threads,
        "versions": {package: version(package) for package in RECORDED_VERSIONS},
        "claims": [dict(zip(("claim", "target", "measured", "result"), row, strict=True)) for row in rows],
    }
    (options.json or FOLDER / "results.json").write_text(json.dumps(record, indent=2) + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
