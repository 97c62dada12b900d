"""After any fault of a recorded run, the recording is on disk and the result is unchanged."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers import processes
from lucidrl.distributed.workers.group import WorkerGroup
from lucidrl.errors import WorkerError
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.generation.separate import SeparateGenerator
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from lucidrl.models.policy.policy import Policy
from lucidrl.profiling.settings import FOLDER_VARIABLE
from lucidrl.recipes.configs import PPORunConfig
from lucidrl.recipes.run import train
from lucidrl.utils import nsys
from lucidrl.utils.config import load_config
from tests.faults.processes import wait_until_gone
from tests.faults.records import digests
from tests.unit.algorithms.conftest import Watcher
from tests.unit.distributed.recorded_workers import Recorded, SlowlyWriting
from tests.unit.profiling.reading import counts_of, read_trace
from tests.unit.profiling.span_reading import spans_of
from tests.unit.report.validation import valid_timeline

ROOT = Path(__file__).parents[2]
TWO = ClusterConfig(num_workers=2, num_threads=1, start_timeout_s=300, call_timeout_s=60)
PPO = (
    "tracking: {tensorboard: false, monitor: false}\ncheckpoint: {every: 0, metric: null}\nnum_threads: 1\n"
    "env: {num_envs: 2}\ncollector: {frames_per_batch: 256}\nvalidation: {num_episodes: 0}\n"
    "ppo: {max_steps: 6, minibatch_frames: 64, num_epochs: 2}\n"
)

GRPO = (
    "tracking: {tensorboard: false, monitor: false}\ncheckpoint: {every: 0, metric: null}\nnum_threads: 1\n"
    "env: {name: arithmetic, kwargs: {max_operand: 9}}\nvalidation: {num_prompts: 0}\ncluster: {num_threads: 1}\n"
    "policy: {optimizer: {kwargs: {lr: 1.0e-3}}}\n"
    "grpo: {max_steps: 1000, loss: {entropy_coefficient: 0.01}}\n"
    "collector: {prompts_per_step: 4, samples_per_prompt: 4}\n"
)


@pytest.fixture
def traces(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "traces"))
    return tmp_path / "traces"


def spans_file(traces: Path, worker: str) -> Path:
    (path,) = traces.glob(f"{worker}_*.spans.json")
    return path


def operators_file(traces: Path, worker: str) -> Path:
    (path,) = (path for path in traces.glob(f"{worker}_*.json") if not path.name.endswith(".spans.json"))
    return path


def rows(num_rows: int = 4) -> BatchedDataDict[Any]:
    generator = torch.Generator().manual_seed(0)
    return BatchedDataDict(
        {
            "input_ids": torch.randint(3, 12, (num_rows, 6), generator=generator),
            "input_lengths": torch.full((num_rows,), 6),
            "token_mask": torch.ones(num_rows, 6),
            "sample_mask": torch.ones(num_rows),
        }
    )


# Ranks


@pytest.mark.slow
def test_a_rank_killed_while_it_records_leaves_its_spans_and_the_others_leave_everything(tmp_path, traces):
    config = PolicyConfig(model_name="embedded")
    policy = Policy(config, embedded_tokenizer(), cluster=TWO, log_dir=tmp_path / "logs", init_reference_model=False)
    policy.start_gpu_profiling()
    policy.train(rows(), NLLLoss())
    time.sleep(0.3)
    doomed = policy.group.pids[1]
    os.kill(doomed, signal.SIGKILL)
    with pytest.raises(WorkerError, match="rank 1 of 2 was killed by SIGKILL"):
        policy.train(rows(), NLLLoss())
    policy.stop_gpu_profiling()  # does nothing: no worker is left
    assert "train" in spans_of(spans_file(traces, "policy-1"))
    assert len(list(traces.glob("policy-1_*"))) == 1
    assert spans_file(traces, "policy-0").read_text().endswith("]\n")
    assert counts_of(operators_file(traces, "policy-0"))["train"] >= 1


@pytest.fixture
def group(tmp_path, traces):
    with WorkerGroup(Recorded, cluster=TWO, log_dir=tmp_path / "logs") as group:
        yield group


@pytest.mark.slow
def test_a_stuck_rank_is_killed_and_does_not_delay_the_messages_of_others(group, traces, monkeypatch, caplog):
    monkeypatch.setattr(processes, "_LAST_WRITE_S", 3.0)
    group.start_gpu_profiling()
    group.run_all("work")
    pids = group.run_all("pid")
    started = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 of 2 did not finish sleep_on"):
        group.run_all("sleep_on", 1, 60.0, timeout_s=0.5)
    assert time.monotonic() - started < 45
    assert "rank 1 did not exit within 3 s; of its traces, only *.spans.json was written" in caplog.text
    assert "aten::add" in {event.get("name") for event in read_trace(operators_file(traces, "worker-0"))["traceEvents"]}
    assert spans_of(spans_file(traces, "worker-1")) == ["work"]
    wait_until_gone(pids)


@pytest.mark.slow
def test_ctrl_c_while_ranks_work_leaves_them_time_to_write(group, traces):
    def interrupt(number, frame):
        raise KeyboardInterrupt

    group.start_gpu_profiling()
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            group.run_all("work", 1.5)
    finally:
        signal.signal(signal.SIGALRM, previous)
    for worker in ("worker-0", "worker-1"):
        assert operators_file(traces, worker).exists()
        assert spans_of(spans_file(traces, worker)) == ["work"]


@pytest.mark.slow
def test_a_shutdown_lets_a_rank_write(tmp_path, traces, monkeypatch):
    monkeypatch.setattr(processes, "_SHUTDOWN_TIMEOUT_S", 0.2)
    with WorkerGroup(SlowlyWriting, log_dir=tmp_path / "logs", own_processes=True) as group:
        group.start_gpu_profiling()
        group.run_all("work")
    assert operators_file(traces, "worker-0").exists()


class SlowToStop(Recorded):
    def stop_gpu_profiling(self) -> None:
        time.sleep(1.0)
        super().stop_gpu_profiling()


@pytest.mark.slow
def test_a_trace_that_takes_longer_than_a_call_may_does_not_end_the_run(tmp_path, traces):
    cluster = ClusterConfig(num_threads=1, start_timeout_s=300, call_timeout_s=0.5)
    with WorkerGroup(SlowToStop, cluster=cluster, log_dir=tmp_path / "logs", own_processes=True) as group:
        group.start_gpu_profiling()
        group.stop_gpu_profiling()
        group.run_all("work")
    assert operators_file(traces, "worker-0").exists()


# Memory that moves


def trained(is_recorded: bool) -> dict[str, torch.Tensor]:
    """Weights after two steps, with all of the policy put away in between."""
    worker = DTensorPolicyWorker(PolicyConfig(model_name="embedded"), embedded_tokenizer(), init_reference_model=False)
    if is_recorded:
        worker.start_gpu_profiling()
    worker.train(rows(), NLLLoss(), gbs=4)
    worker.offload_before_refit()
    worker.prepare_weights_for_ipc()
    worker.offload_after_refit()
    worker.prepare_for_training()
    worker.train(rows(), NLLLoss(), gbs=4)
    worker.shutdown()
    return {name: tensor.detach().clone() for name, tensor in worker.model.model.named_parameters()}


def test_offloading_while_recording_changes_nothing(traces):
    plain, recorded = trained(is_recorded=False), trained(is_recorded=True)
    assert all(torch.equal(recorded[name], tensor) for name, tensor in plain.items())
    assert counts_of(operators_file(traces, "policy-0"))["train"] == 2


@pytest.mark.slow
def test_a_refit_while_recording_brings_the_weights_over(tmp_path, traces):
    config = PolicyConfig(model_name="embedded", generation={"max_new_tokens": 3, "placement": "separate"})
    prompts = BatchedDataDict({"input_ids": torch.full((2, 3), 5), "input_lengths": torch.tensor([3, 3])})
    one_thread = ClusterConfig(num_threads=1)
    with (
        Policy(config, embedded_tokenizer(), init_reference_model=False) as policy,
        SeparateGenerator(policy, config, embedded_tokenizer(), cluster=one_thread, log_dir=tmp_path) as generator,
    ):
        for recorded in (policy, generator):
            recorded.start_gpu_profiling()
        policy.train(rows(), NLLLoss())
        generator.update_weights(1)
        completions = generator.generate(prompts, greedy=True)
        assert torch.equal(completions["output_ids"], policy.generate(prompts, greedy=True)["output_ids"])
        for recorded in (policy, generator):
            recorded.stop_gpu_profiling()
    assert "refit" in spans_of(spans_file(traces, "policy-0"))
    assert "generate" in counts_of(operators_file(traces, "generation-0"))


# Whole runs


def start(
    folder: Path,
    *overrides: str,
    algorithm: str = "ppo",
    settings: str = PPO,
    resume: str | None = None,
    largest_file_bytes: int | None = None,
) -> subprocess.Popen[str]:
    (folder / "settings.yaml").write_text(settings)
    command = [sys.executable, "-c", "from lucidrl.cli import main; main()", algorithm, *overrides]
    new = ["--config", "settings.yaml", "run.root=.", "run.name=run"]
    command += new if resume is None else ["--resume", resume]

    def limit() -> None:
        if largest_file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file_bytes, largest_file_bytes))

    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=limit,
    )


def report_of(run: Path) -> str:
    """The page of a run, with what it lacks."""
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "Recorded spans of traces/timeline.json.gz" in page
    return page


def wait_for_step(folder: Path, process: subprocess.Popen[str], step: int) -> None:
    metrics = folder / "run" / "metrics.jsonl"
    until = time.monotonic() + 300
    while not (metrics.exists() and f'"step":{step},'.encode() in metrics.read_bytes()):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < until, "the run did not begin"
        time.sleep(0.01)


@pytest.mark.slow
def test_a_full_disk_costs_the_trace_and_not_the_run(tmp_path):
    with start(tmp_path, "profile.steps=2:5", largest_file_bytes=200_000) as process:
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert "have no operators" in output.replace("\n", " ")
    traces = tmp_path / "run" / "traces"
    assert [path.name.endswith(".spans.json") for path in traces.glob("*.json")] == [True]
    (missing,) = valid_timeline(traces / "timeline.json.gz")["lucidrl"]["missing"]
    assert "is missing, with the operators of policy-0" in missing
    assert missing in report_of(tmp_path / "run")
    (tmp_path / "plain").mkdir()
    train(load_config(PPORunConfig, tmp_path / "settings.yaml"), tmp_path / "plain", Watcher())
    assert digests(tmp_path / "run") == digests(tmp_path / "plain")


@pytest.mark.slow
def test_ctrl_c_in_the_range_keeps_the_recording(tmp_path):
    with start(tmp_path, "profile.steps=2:900", "ppo.max_steps=1000") as process:
        wait_for_step(tmp_path, process, 4)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    traces = tmp_path / "run" / "traces"
    assert counts_of(operators_file(traces, "policy-0"))["train"] >= 2
    assert spans_file(traces, "policy-0").read_text().endswith("]\n")
    content = valid_timeline(traces / "timeline.json.gz")
    assert sum(event["name"] == "train" for event in content["traceEvents"]) >= 2
    (missing,) = content["lucidrl"]["missing"]
    assert re.fullmatch(r"steps \d+:900 are not recorded completely: the run ended after step \d+", missing)


@pytest.mark.slow
def test_the_timeline_of_a_run_with_a_killed_rank_names_what_is_missing(tmp_path):
    overrides = ["cluster.num_workers=2", "profile.steps=2:30", "policy.generation.max_new_tokens=4"]
    with start(tmp_path, *overrides, algorithm="grpo", settings=GRPO) as process:
        wait_for_step(tmp_path, process, 3)
        time.sleep(0.3)  # spans are written within 0.1 s
        children = psutil.Process(process.pid).children(recursive=True)
        ranks = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
        ranks[1].kill()
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 2, output
    content = valid_timeline(tmp_path / "run" / "traces" / "timeline.json.gz")
    names = {e["pid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "process_name"}
    assert set(names.values()) == {"driver", "policy-0", "policy-1"}
    assert {names[event["pid"]] for event in content["traceEvents"] if event["name"] == "train"} == set(names.values())
    early, operators, steps = content["lucidrl"]["missing"]
    assert early.startswith(f"the spans of policy-1 (process {ranks[1].pid}) may end too early: the process was killed")
    assert "is missing, with the operators of policy-1" in operators
    assert "30 are not recorded completely" in steps
    assert "missing in the timeline: the spans of policy-1" in " ".join(output.split())
    page = report_of(tmp_path / "run")
    assert all(sentence in page for sentence in (early, operators, steps))
    assert "was killed by SIGKILL" in page  # what ended the run


@pytest.mark.slow
def test_a_resumed_run_merges_both_recordings(tmp_path):
    with start(tmp_path, "profile.steps=2:4", "ppo.max_steps=2") as process:
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    path = tmp_path / "run" / "traces" / "timeline.json.gz"
    (missing,) = valid_timeline(path)["lucidrl"]["missing"]
    assert missing == "steps 3:4 are not recorded completely: the run ended after step 2"
    assert missing in report_of(tmp_path / "run")
    with start(tmp_path, "ppo.max_steps=4", resume="run") as process:
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    content = valid_timeline(path)
    assert sum(event["name"] == "train" for event in content["traceEvents"]) == 2
    assert len({event["pid"] for event in content["traceEvents"] if event["name"] == "train"}) == 2
    assert content["lucidrl"]["missing"] == []
    assert "not recorded completely" not in report_of(tmp_path / "run")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_loop_that_raises_keeps_the_recording(tmp_path, traces, monkeypatch, error):
    class Ending(Watcher):
        def on_step(self, step, metrics):
            if step == 3:
                raise error

    monkeypatch.setattr(nsys, "NRL_NSYS_WORKER_PATTERNS", "*")
    monkeypatch.setattr(nsys, "NRL_NSYS_PROFILE_STEP_RANGE", "2:9")
    (tmp_path / "settings.yaml").write_text(PPO)
    (tmp_path / "run").mkdir()
    with pytest.raises(error):
        train(load_config(PPORunConfig, tmp_path / "settings.yaml"), tmp_path / "run", Ending())
    assert counts_of(operators_file(traces, "policy-0"))["train"] == 2
    assert not torch.autograd.profiler._is_profiler_enabled
