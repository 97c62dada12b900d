"""Check Lucid RL on your GPUs, and write one Markdown report to attach to an issue.

make gpu-check
python tools/gpu_check.py --report gpu-check.md
python tools/gpu_check.py --rehearse            # the same checks on CPUs: tests this script, not your GPUs

Each check runs in its own process, so a crash or a hang of one does not end the others. The checks compare results of
the GPU with results of the CPU of the same machine. The script sends nothing over the network.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("lucidrl", "torch", "transformers", "tensordict", "ray", "vllm")
TIMEOUT_S = 900
NUM_SHOWN_LINES = 40
TOLERANCE = 2e-3
"""For losses, gradient norms and log-probabilities in float32, relative to their size or 1."""
NO_GPU = (
    "torch sees no CUDA device on this machine, so there is nothing to check. Install a CUDA build of torch, or run \
this on a machine with GPUs."
)


@dataclass(frozen=True)
class Check:
    name: str
    claim: str
    num_gpus: int
    run: Callable[[], str]
    """Raises if the claim does not hold; returns the measured values."""
    package: str = "torch"
    """A package that the check needs."""


@dataclass(frozen=True)
class Outcome:
    check: Check
    status: str
    """passed, failed or skipped."""
    details: str
    seconds: float = 0.0


def measure(options: Mapping[str, Any]) -> dict[str, Any]:
    """Train, score and generate with the embedded model; returns plain numbers, to compare between devices.

    Args:
        options: `num_workers`, `policy` (settings), `separate` (generate in another process after a refit).
    """
    from lucidrl.distributed.config import ClusterConfig
    from lucidrl.losses.nll import NLLLoss
    from lucidrl.models.generation.separate import SeparateGenerator
    from lucidrl.models.loading import load_tokenizer
    from lucidrl.models.policy import PolicyConfig
    from lucidrl.models.policy.policy import Policy

    config = PolicyConfig.model_validate(
        {"model_name": "embedded", "optimizer": {"kwargs": {"lr": 1e-3}}, **options.get("policy", {})}
    )
    tokenizer = load_tokenizer("embedded")
    rows, prompts = example_rows(tokenizer)
    cluster = ClusterConfig(num_workers=options.get("num_workers", 1))
    with Policy(config, tokenizer, init_reference_model=False, cluster=cluster) as policy:
        results = [policy.train(rows, NLLLoss()) for _ in range(3)]
        scores = policy.with_scores(rows, previous=True, reference=False)["prev_logprobs"]
        if options.get("separate"):
            with SeparateGenerator(policy, config, tokenizer) as generator:
                generator.release_memory()
                generator.update_weights(version=1)
                generator.release_memory()
                output = generator.generate(prompts, greedy=True)
        else:
            output = policy.generate(prompts, greedy=True)
        return {
            "device": policy.places[0].device,
            "losses": [result.loss for result in results],
            "grad_norms": [result.grad_norm for result in results],
            "logprobs": scores.double().flatten().tolist(),
            "tokens": output["output_ids"].tolist(),
            "generation_logprobs": output["logprobs"].double().flatten().tolist(),
        }


def example_rows(tokenizer: Any) -> tuple[Any, Any]:
    """Rows to train on, and prompts to complete."""
    import torch

    from lucidrl.distributed.batched_data_dict import BatchedDataDict

    def encoded(texts: Sequence[str]) -> dict[str, Any]:
        batch = tokenizer(list(texts), padding=True, padding_side="right", return_tensors="pt")
        return {"input_ids": batch["input_ids"], "input_lengths": batch["attention_mask"].sum(1)}

    problems = [(a, b) for a in range(10, 14) for b in range(20, 24)]
    rows = encoded([f"{a}+{b}={a + b}" for a, b in problems])
    lengths, width = rows["input_lengths"], rows["input_ids"].shape[1]
    mask = (torch.arange(width)[None] < lengths[:, None]).float()
    prompts = encoded([f"{a}+{b}=" for a, b in problems])
    return BatchedDataDict({**rows, "token_mask": mask, "sample_mask": torch.ones(len(problems))}), BatchedDataDict(
        prompts
    )


def measured(*, on_cpu: bool = False, **options: Any) -> dict[str, Any]:
    """Run `measure` in another process, with or without GPUs."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu or is_rehearsal() else {}
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        command = [sys.executable, __file__, "--measure", json.dumps(options), "--result", str(result)]
        subprocess.run(command, check=True, env={**os.environ, **hidden}, timeout=TIMEOUT_S)
        return json.loads(result.read_text())


def compare(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Raise if a number differs by more than the tolerance, or a token at all; returns the largest differences."""
    differences = {}
    for name in ("losses", "grad_norms", "logprobs", "generation_logprobs"):
        pairs = list(zip(found[name], expected[name], strict=True))
        differences[name] = max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)
    summary = f"on {found['device']}: " + ", ".join(f"{name} {value:.1e}" for name, value in differences.items())
    if max(differences.values()) > TOLERANCE:
        raise AssertionError(f"differences exceed the tolerance {TOLERANCE}: {summary}")
    if found["tokens"] != expected["tokens"]:
        raise AssertionError(f"greedy completions differ: {found['tokens']} instead of {expected['tokens']}")
    return summary


def check_numerics() -> str:
    return compare(measured(), measured(on_cpu=True))


def check_ranks() -> str:
    return compare(measured(num_workers=2), measured(on_cpu=True))


def check_tensor_parallel() -> str:
    policy = {"dtensor_cfg": {"tensor_parallel_size": 2}}
    return compare(measured(num_workers=2, policy=policy), measured(on_cpu=True))


def check_refit(kind: str) -> str:
    policy = {"generation": {"placement": "separate", "refit": kind, "verify_refit": True}}
    return compare(measured(separate=True, policy=policy), measured(on_cpu=True))


def check_vllm(num_ranks: int = 1, *, sleep: bool = False) -> str:
    """A replica of vLLM on the GPUs of the policy, with little memory for its cache."""
    arguments = {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 1 << 28, "enforce_eager": True}
    arguments["tensor_parallel_size"] = num_ranks
    generation = {"engine": "vllm", "placement": "separate", "refit": "ipc", "sleep": sleep, "vllm": arguments}
    found = measured(num_workers=num_ranks, separate=True, policy={"generation": generation})
    return compare(found, measured(on_cpu=True))


def check_offload() -> str:
    """Move optimizer and weights to the host and back; memory must shrink, and values stay bit-identical."""
    import torch

    from lucidrl.losses.nll import NLLLoss
    from lucidrl.models.loading import load_tokenizer
    from lucidrl.models.policy import PolicyConfig
    from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker

    tokenizer = load_tokenizer("embedded")
    rows, _ = example_rows(tokenizer)
    worker = DTensorPolicyWorker(PolicyConfig(model_name="embedded"), tokenizer, init_reference_model=False)
    worker.train(rows, NLLLoss())
    before = {name: tensor.detach().cpu().clone() for name, tensor in worker.return_state_dict().items()}
    held = [worker.get_gpu_info()["memory_allocated_mb"]] if torch.cuda.is_available() else [0.0]
    worker.offload_before_refit()
    worker.offload_after_refit()
    if torch.cuda.is_available():
        held.append(worker.get_gpu_info()["memory_allocated_mb"])
        assert held[1] < held[0], f"memory in MB did not fall: {held}"
    worker.prepare_for_training()
    after = worker.return_state_dict()
    assert all(torch.equal(before[name], after[name].cpu()) for name in before), "weights differ after the move"
    worker.train(rows, NLLLoss())
    worker.shutdown()
    return f"memory allocated in MB, before and after: {held}"


def check_profiling() -> str:
    """Record a step of a run; its trace must show GPU kernels."""
    with tempfile.TemporaryDirectory() as scratch:
        settings = ["grpo.max_steps=2", "profile.steps=2:3", f"run.root={scratch}", "run.name=profiled"]
        settings += ["collector.prompts_per_step=4", "validation.num_prompts=0", "tracking.tensorboard=false"]
        command = [sys.executable, "-m", "lucidrl.cli", "grpo", *settings]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
        traces = [path for path in Path(scratch, "profiled", "traces").glob("*.json") if ".spans." not in path.name]
        events = [event for path in traces for event in json.loads(path.read_text())["traceEvents"]]
    kinds = {str(event.get("cat")) for event in events}
    wanted = "cpu_op" if is_rehearsal() else "kernel"
    assert wanted in kinds, f"the trace has no event of the kind {wanted!r}, only {sorted(kinds)}"
    return f"{len(events)} events of the kinds {', '.join(sorted(kinds))}"


CHECKS = (
    Check("numerics", "training, scoring and generation on one GPU equal the CPU", 1, check_numerics),
    Check("offload", "weights and optimizer move to the host and back, bit-identical", 1, check_offload),
    Check("profiling", "a recorded step shows GPU kernels", 1, check_profiling),
    Check("refit-ipc", "a separate generator computes with weights from CUDA IPC", 1, lambda: check_refit("ipc")),
    Check("vllm", "vLLM on the policy's GPU generates with weights from CUDA IPC", 1, check_vllm, package="vllm"),
    Check(
        "vllm-sleep",
        "vLLM sleeps on the policy's GPU, and wakes for a refit and for generation",
        1,
        lambda: check_vllm(sleep=True),
        package="vllm",
    ),
    Check("ranks-nccl", "two data parallel ranks over nccl equal one", 2, check_ranks),
    Check("tensor-parallel", "two tensor parallel ranks over nccl equal one", 2, check_tensor_parallel),
    Check(
        "vllm-tensor-parallel",
        "two tensor parallel ranks of vLLM on the policy's GPUs generate with weights from CUDA IPC",
        2,
        lambda: check_vllm(2),
        package="vllm",
    ),
    Check("refit-collective", "a separate generator gets weights over nccl", 2, lambda: check_refit("collective")),
)


def run_check(check: Check, num_gpus: int) -> Outcome:
    """Run a check in its own process."""
    if num_gpus < check.num_gpus:
        return Outcome(check, "skipped", f"needs {check.num_gpus} GPUs, found {num_gpus}")
    if importlib.util.find_spec(check.package) is None:
        return Outcome(check, "skipped", f"needs the package {check.package}, which is not installed")
    start = time.monotonic()
    command = [sys.executable, __file__, "--check", check.name]
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=2 * TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        return Outcome(check, "failed", f"no result within {error.timeout:.0f} s", time.monotonic() - start)
    lines = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode == 0:
        return Outcome(check, "passed", done.stdout.strip().splitlines()[-1], time.monotonic() - start)
    return Outcome(check, "failed", "\n".join(lines[-NUM_SHOWN_LINES:]), time.monotonic() - start)


def report(outcomes: Sequence[Outcome], devices: Sequence[str]) -> str:
    """The Markdown report."""
    lines = ["# GPU check of Lucid RL", ""]
    lines += [f"- {name}: {_version(name)}" for name in PACKAGES]
    lines += [f"- Python {platform.python_version()} on {platform.platform()}"]
    lines += [f"- {device}" for device in devices]
    lines += ["", "| check | claim | result | seconds |", "| --- | --- | --- | --- |"]
    for outcome in outcomes:
        lines.append(f"| {outcome.check.name} | {outcome.check.claim} | {outcome.status} | {outcome.seconds:.0f} |")
    for outcome in outcomes:
        lines += ["", f"## {outcome.check.name}: {outcome.status}", "", "```text", outcome.details, "```"]
    return "\n".join([*lines, ""])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def is_rehearsal() -> bool:
    return os.environ.get("LUCIDRL_GPU_CHECK_REHEARSAL") == "1"


def found_devices() -> list[str]:
    """One line per GPU."""
    import torch

    if not torch.cuda.is_available():
        return []
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    memory = [f"{gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus]
    return [f"GPU {i}: {gpu.name}, {memory[i]}, CUDA {torch.version.cuda}" for i, gpu in enumerate(gpus)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, default=Path("gpu-check.md"), help="file to write")
    parser.add_argument("--only", nargs="*", help="names of checks; by default all")
    parser.add_argument("--rehearse", action="store_true", help="run the checks on CPUs")
    for internal in ("--check", "--measure", "--result"):  # the processes that this script starts
        parser.add_argument(internal, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        Path(args.result).write_text(json.dumps(measure(json.loads(args.measure))))
        return 0
    if args.check:
        print(next(check for check in CHECKS if check.name == args.check).run())
        return 0
    if args.rehearse:
        os.environ.update(LUCIDRL_GPU_CHECK_REHEARSAL="1", CUDA_VISIBLE_DEVICES="")
    devices = ["a rehearsal on CPUs: this says nothing about GPUs"] if args.rehearse else found_devices()
    if not devices:
        print(NO_GPU)
        return 0
    outcomes = []
    for check in CHECKS:
        if not args.only or check.name in args.only:
            outcomes.append(run_check(check, 2 if args.rehearse else len(devices)))
            print(f"{check.name}: {outcomes[-1].status} ({outcomes[-1].seconds:.0f} s)", flush=True)
    args.report.write_text(report(outcomes, devices), encoding="utf-8")
    print(f"attach {args.report} to an issue")
    return int(any(outcome.status == "failed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
