"""A timeline shows all processes of a run on one clock, and says what it lacks."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

from lucidrl.errors import ConfigError
from lucidrl.profiling import clock
from lucidrl.profiling.recording import Recording
from lucidrl.profiling.settings import FOLDER_VARIABLE
from lucidrl.profiling.spans import recorder
from lucidrl.profiling.spans import span as recorded_span
from lucidrl.report.timeline import write_timeline
from tests.unit.report.traces import START_NS, span, write_clock, write_operators, write_spans
from tests.unit.report.validation import valid_timeline

ROOT = Path(__file__).parents[3]


@pytest.fixture
def traces(tmp_path):
    return tmp_path / "traces"


def merged(run: Path) -> dict:
    """The valid content of the timeline of a run, with the processes of its events."""
    content = valid_timeline(write_timeline(run).path)
    content["processes"] = {e["pid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "process_name"}
    return content


def slices(content: dict) -> list[tuple[str, str, float, float]]:
    """Process, name, start and end in milliseconds of all slices."""
    events = [event for event in content["traceEvents"] if event["ph"] == "X"]
    return sorted(
        (content["processes"][e["pid"]], e["name"], e["ts"] / 1000, (e["ts"] + e["dur"]) / 1000) for e in events
    )


def arrows(content: dict) -> Counter[tuple[str, str]]:
    """Process and kind of arrow, at both ends."""
    flows = [event for event in content["traceEvents"] if event.get("cat") == "step"]
    starts, ends = ({e["id"]: content["processes"][e["pid"]] for e in flows if e["ph"] == phase} for phase in "sf")
    names = {event["id"]: event["name"] for event in flows}
    return Counter((starts[number], names[number], ends[number]) for number in names)


# One process


def test_spans_and_operators_of_a_process_are_shown_once(tmp_path, traces, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(traces))

    def write_checkpoint() -> None:
        with recorded_span("save"):
            torch.zeros(1)

    record = Recording("policy-0")
    record.start()
    for _ in range(3):
        with recorded_span("train"), recorded_span("forward"):
            torch.ones(3) + 1
        recorder.count("batches waiting", 2)
    writer = threading.Thread(target=write_checkpoint, name="checkpoint-writer")
    writer.start()
    writer.join()
    record.stop()
    content = merged(tmp_path)
    counts = Counter(name for _, name, *_ in slices(content))
    assert (counts["train"], counts["forward"], counts["save"], counts["aten::add"]) == (3, 3, 1, 3)
    named = {e["tid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name"}
    of_span = {e["name"]: named[e["tid"]] for e in content["traceEvents"] if e["ph"] == "X"}
    assert of_span["save"] == "checkpoint-writer"
    assert of_span["train"] == of_span["aten::add"] == "main thread"
    counters = {e["name"] for e in content["traceEvents"] if e["ph"] == "C"}
    assert counters == {"memory of the process (MB)", "CPU of the process (%)", "batches waiting"}
    assert content["lucidrl"]["missing"] == []


def test_operators_stay_in_their_spans_when_the_system_clock_has_changed(tmp_path, traces, monkeypatch):
    """The clock of spans goes on as before; torch's profiler uses the changed clock."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(traces))
    monkeypatch.setattr(clock, "_anchor_ns", clock._anchor_ns + 5_000_000_000)
    record = Recording("policy-0")
    record.start()
    started_ns = clock.now_ns()
    with recorded_span("train"):
        torch.ones(3) + 1
    record.stop()
    content = merged(tmp_path)
    (train,) = (event for event in content["traceEvents"] if event["name"] == "train")
    assert abs(content["lucidrl"]["start_unix_ns"] + train["ts"] * 1000 - started_ns) < 1e9


def test_a_span_that_the_operator_trace_lacks_comes_from_the_file_of_spans(tmp_path, traces):
    write_operators(traces, "policy-0", 7, span("train", 10, 20, 7, cat="user_annotation"))
    write_spans(traces, "policy-0", 7, *(span("train", begin, begin + 10, 7) for begin in (0, 10, 20)))
    assert [found[1:] for found in slices(merged(tmp_path))] == [("train", 0, 10), ("train", 10, 20), ("train", 20, 30)]


def test_a_span_that_began_before_the_recording_is_cut(tmp_path, traces):
    write_spans(traces, "driver", 7, span("save", -50, 20, 7))
    assert slices(merged(tmp_path)) == [("driver", "save", 0, 20)]


def test_events_of_the_profiler_about_itself_are_left_out_and_gpus_have_tracks(tmp_path, traces):
    labels = {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "ts": 0, "args": {"labels": "GPU 0"}}
    window = {**span("PyTorch Profiler (0)", 0, 100, 7), "pid": "Spans", "tid": "PyTorch Profiler"}
    kernel = span("gemm", 5, 6, 0, tid=7, cat="kernel")
    write_operators(traces, "policy-0", 7, labels, window, kernel, span("aten::mm", 4, 5, 7, cat="cpu_op"))
    assert slices(merged(tmp_path)) == [("policy-0", "aten::mm", 4, 5), ("policy-0 GPU 0", "gemm", 5, 6)]


# Several processes


def test_processes_with_the_same_id_on_two_nodes_have_separate_tracks(tmp_path, traces):
    for rank, host in enumerate(("node-a", "node-b")):
        write_spans(traces, f"policy-{rank}", 7, span("train", 10, 20 + rank, 7), host=host)
    timeline = write_timeline(tmp_path)
    assert list(timeline.processes) == ["policy-0", "policy-1"]
    assert slices(merged(tmp_path)) == [("policy-0", "train", 10, 20), ("policy-1", "train", 10, 21)]


def test_clocks_are_corrected_by_their_measured_offset(tmp_path, traces):
    write_spans(traces, "driver", 1, span("train", 10, 20, 1))
    write_spans(traces, "policy-1", 2, span("train", 12, 18, 2), host="node-b", late_s=5.0)
    assert slices(merged(tmp_path))[1] == ("policy-1", "train", 5012, 5018)
    write_clock(traces, "policy-1", 2, offset_s=5.0)
    content = merged(tmp_path)
    assert slices(content) == [("driver", "train", 10, 20), ("policy-1", "train", 12, 18)]
    clocks = {entry["process"]: entry["clock"] for entry in content["lucidrl"]["inputs"]}
    assert clocks == {"driver": None, "policy-1": {"offset_ns": 5_000_000_000, "error_ns": 400_000}}
    labels = [event["args"]["labels"] for event in content["traceEvents"] if event["name"] == "process_labels"]
    assert labels[1] == "process 2 on node-b, clock +5000.000 ± 0.400 ms"


def test_processes_of_one_machine_have_one_clock_unless_the_measurement_contradicts(tmp_path, traces):
    write_spans(traces, "driver", 1, span("train", 10, 20, 1))
    write_spans(traces, "policy-1", 2, span("train", 12, 18, 2))
    write_clock(traces, "policy-1", 2, offset_s=0.0003, node=None)
    assert slices(merged(tmp_path))[1] == ("policy-1", "train", 12, 18)


def test_ids_of_arrows_from_several_files_do_not_meet(tmp_path, traces):
    for pid in (1, 2):
        operator = span("aten::add", 1, 2, pid, cat="cpu_op")
        flow = {"cat": "fwdbwd", "name": "fwdbwd", "id": 3, "pid": pid, "tid": pid, "ts": 1500}
        write_operators(traces, f"policy-{pid}", pid, operator, {"ph": "s", **flow}, {"ph": "f", "bp": "e", **flow})
    assert len({event["id"] for event in merged(tmp_path)["traceEvents"] if event["ph"] == "s"}) == 2


def test_arrows_lead_from_the_prompts_over_rollouts_and_update_to_the_refit(tmp_path, traces):
    def steps(pid: int, *stages: tuple[str, float, float]) -> list[dict]:
        return [span(name, begin + late, end + late, pid) for late in (0, 100) for name, begin, end in stages]

    around = [("rollout", 0, 30), ("generate", 1, 20), ("environment", 20, 29), ("train", 40, 60), ("refit", 60, 80)]
    write_spans(traces, "driver", 1, *steps(1, *around))
    for rank in range(2):
        write_spans(traces, f"policy-{rank}", 10 + rank, *steps(10 + rank, ("train", 41 + rank, 59), ("refit", 61, 70)))
    write_spans(traces, "generation-0", 20, *steps(20, ("generate", 2, 19), ("refit", 65, 79)))
    write_spans(traces, "env-0", 30, *steps(30, ("environment", 21, 28)))
    assert arrows(merged(tmp_path)) == {
        ("driver", "rollout to generate", "generation-0"): 2,
        ("generation-0", "generate to environment", "env-0"): 2,
        ("env-0", "environment to train", "policy-0"): 2,
        ("env-0", "environment to train", "policy-1"): 2,
        ("policy-0", "train to refit", "policy-0"): 2,
        ("policy-1", "train to refit", "policy-1"): 2,
        ("policy-0", "train to refit", "generation-0"): 2,
    }


def test_the_steps_of_a_single_process_have_arrows_too(tmp_path, traces):
    stages = [span("collect", 0, 10, 7), span("train", 10, 20, 7), span("collect", 20, 30, 7), span("train", 30, 40, 7)]
    write_spans(traces, "policy-0", 7, *stages)
    assert arrows(merged(tmp_path)) == {("policy-0", "collect to train", "policy-0"): 2}


def test_readings_of_the_monitor_are_counters(tmp_path, traces):
    """The monitor writes several readings at once, and begins again after a resume."""
    write_spans(traces, "driver", 1, span("train", 0, 60_000, 1))
    start_s = START_NS / 1e9

    def lines(began_s: float, readings: dict[float, float]) -> str:
        written = began_s + max(readings)
        records = [
            {"time": written, "machine/elapsed_s": elapsed, "machine/node.0.cpu.util": value}
            for elapsed, value in readings.items()
        ]
        return "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)

    metrics = lines(start_s - 90, {0: 5.0, 10: 6.0}) + '{"step":1,"time":1.0,"train/loss":2.0}\n{"torn'
    metrics += "\n" + lines(start_s - 10, {0: 10.0, 20: 20.0, 40: 40.0, 400: 99.0})
    (tmp_path / "metrics.jsonl").write_text(metrics)
    events = [event for event in merged(tmp_path)["traceEvents"] if event["name"] == "node.0.cpu.util"]
    found = {round(event["ts"] / 1e6, 3): event["args"]["value"] for event in events}
    assert found == pytest.approx({0: 10.0, 10: 20.0, 30: 40.0})


# What is missing


@pytest.mark.parametrize("content", ["", "[", "no trace", '{"traceEvents": []}', '[{"ph": "M", "name": "lucidrl"}]'])
def test_a_file_without_a_header_is_named_and_the_rest_is_merged(tmp_path, traces, content):
    write_spans(traces, "driver", 1, span("train", 10, 20, 1))
    (traces / "policy-0_node-a_7_1.json").write_text(content)
    content = merged(tmp_path)
    assert slices(content) == [("driver", "train", 10, 20)]
    (missing,) = content["lucidrl"]["missing"]
    assert missing.startswith("policy-0_node-a_7_1.json is not in the timeline: it ")


def test_names_and_numbers_that_are_unusual_in_json_pass(tmp_path, traces):
    odd = {**span("half \ud800 <b>&", 1, 2, 7), "args": {"number": 1 << 70, "text": "\u202e\x07"}}
    write_operators(traces, "policy-0", 7, odd, {"ph": "X"}, {"ph": "X", "name": 3, "pid": 7, "tid": 7, "ts": "soon"})
    content = merged(tmp_path)
    (event,) = (event for event in content["traceEvents"] if event["ph"] == "X")
    assert (event["name"], event["args"]) == (odd["name"], odd["args"])
    assert content["lucidrl"]["missing"] == []


def test_a_damaged_file_is_named_and_its_beginning_is_merged(tmp_path, traces):
    path = write_operators(traces, "policy-0", 7, *(span(f"aten::{n}", n, n + 1, 7, cat="cpu_op") for n in range(50)))
    path.write_text(path.read_text()[: path.read_text().index("aten::30")])
    write_spans(traces, "policy-0", 7, span("train", 0, 50, 7))
    content = merged(tmp_path)
    assert len(slices(content)) == 31
    (missing,) = content["lucidrl"]["missing"]
    assert missing.startswith("policy-0_node-a_7_1.json is damaged after 30 events: it ends in the middle")


def test_what_a_killed_process_did_not_write_is_named(tmp_path, traces):
    write_spans(traces, "policy-1", 7, span("train", 10, 20, 7), is_killed=True, operators="policy-1_node-a_7_1.json")
    timeline = write_timeline(tmp_path)
    early, operators = timeline.missing
    assert early.startswith("the spans of policy-1 (process 7) may end too early")
    assert operators.startswith("policy-1_node-a_7_1.json is missing, with the operators of policy-1")
    assert slices(merged(tmp_path)) == [("policy-1", "train", 10, 20)]


def test_a_process_without_files_and_a_damaged_clock_are_named(tmp_path, traces):
    write_spans(traces, "policy-0", 7, span("train", 10, 20, 7))
    for rank in range(2):
        write_clock(traces, f"policy-{rank}", 7, offset_s=0.0)
    with (traces / "clocks.jsonl").open("a") as file:
        file.write('{"process": "gener')
    damaged, absent = write_timeline(tmp_path).missing
    assert damaged == "clocks.jsonl is damaged in line 3: the clock of one process is unknown"
    assert absent.startswith("policy-1 (process 7 on node node-b) recorded, but has no trace here")


STEPS = {
    "9:12": "steps 9:12 are not recorded: the run ended after step 4",
    "4:8": "steps 5:8 are not recorded completely: the run ended after step 4",
    "1:3": "no process has recorded steps 1:3: the run had completed them before it was resumed",
}


@pytest.mark.parametrize("steps", STEPS)
def test_steps_that_are_not_recorded_are_named(tmp_path, traces, steps):
    traces.mkdir()
    (tmp_path / "config.yaml").write_text(f"profile: {{steps: '{steps}'}}\n")
    lines = (f'{{"step":{step},"time":1.0,"time/step_s":0.5}}\n' for step in range(1, 5))
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert merged(tmp_path)["lucidrl"]["missing"] == [STEPS[steps]]
    write_spans(traces, "driver", 1, span("train", 10, 20, 1))
    assert write_timeline(tmp_path).missing == ([] if steps == "1:3" else [STEPS[steps]])


# The file


def test_the_timeline_replaces_an_older_one_and_is_no_input(tmp_path, traces):
    write_spans(traces, "driver", 1, span("train", 10, 20, 1))
    first = write_timeline(tmp_path).path.read_bytes()
    assert write_timeline(tmp_path).path.read_bytes() == first
    assert [path.name for path in traces.iterdir() if "timeline" in path.name] == ["timeline.json.gz"]


def test_a_full_disk_is_one_sentence_and_leaves_the_older_timeline(tmp_path, traces):
    write_spans(traces, "driver", 1, span("train", 10, 20, 1))
    before = write_timeline(tmp_path).path.read_bytes()
    write_operators(traces, "policy-0", 7, *(span(f"aten::{n}", n, n + 1, 7) for n in range(9_000)))
    done = subprocess.run(
        [sys.executable, "-c", "from lucidrl.cli import main; main()", "timeline", str(tmp_path)],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin", "PYTHONDONTWRITEBYTECODE": "1"},  # no cut off bytecode
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {traces}/timeline.json.gz cannot be written (File too large); free space")
    assert (traces / "timeline.json.gz").read_bytes() == before
    assert not [path for path in traces.iterdir() if path.name.startswith(".")]


def test_the_command_prints_the_path_and_what_is_missing(tmp_path, traces, lucidrl):
    write_spans(traces, "policy-1", 7, span("train", 10, 20, 7), is_killed=True)
    code, output, _ = lucidrl("timeline", tmp_path)
    assert code == 0
    assert f"timeline: {traces}/timeline.json.gz (5 events of policy-1); open it with ui.perfetto.dev" in output
    assert "missing in the timeline: the spans of policy-1 (process 7) may end too early" in output


def test_a_folder_without_traces_is_refused(tmp_path, lucidrl):
    with pytest.raises(ConfigError, match="has no folder traces; record steps of a run"):
        write_timeline(tmp_path)
    code, _, errors = lucidrl("timeline", tmp_path / "nowhere")
    assert code == 2
    assert "has no folder traces" in errors
