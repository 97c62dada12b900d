"""What a person reads: whole on a narrow terminal, literal, and with commands that can be copied."""

from __future__ import annotations

import builtins
import io
import json
import re
import shlex
import sys
import types
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from lucidrl.algorithms.config import GRPOConfig, PPOConfig
from lucidrl.recipes.configs import GRPORunConfig, PPORunConfig
from lucidrl.recipes.display import RunDisplay
from lucidrl.recipes.run import arithmetic_table

STEP = {"reward": 0.5, "tokens_per_s": 12345.6, "time/step_s": 2.0, "time/train_s": 1.5}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / ("long [/bold] :smile: é " + "x" * 60)
    path.mkdir(parents=True)
    return path


def grpo_of(max_steps: int) -> GRPORunConfig:
    return GRPORunConfig(grpo=GRPOConfig(max_steps=max_steps))


def shown(folder: Path, steps, max_steps: int, validations=(), width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    ask = ["lucidrl", "generate", str(folder), "12+30="]
    with RunDisplay(grpo_of(max_steps), folder, console) as display:
        for step, metrics in validations:
            display.on_validation(step, metrics)
        for step in steps:
            display.on_step(step, STEP)
    display.summary(max([*steps, 0]) or max_steps, [ask])
    return console.file.getvalue()


def test_lines_of_a_pipe_tell_step_reward_speed_and_time_left(folder):
    assert "step 1/2  reward 0.500  12,346 tok/s  left 2 s\n" in shown(folder, [1, 2], 2)


def test_the_time_left_of_a_resumed_run_counts_its_own_steps(folder):
    assert "step 105/110  reward 0.500  12,346 tok/s  left 10 s\n" in shown(folder, range(101, 106), 110)


def whole_step(step: int, phases: dict[str, float], **busy: float) -> str:
    """A line of metrics.jsonl."""
    exclusive = {f"time/exclusive/{name}_s": seconds for name, seconds in phases.items()}
    processes = {f"time/busy/{name}_s": seconds for name, seconds in busy.items()}
    return json.dumps({"step": step, "time/whole_step_s": sum(phases.values()), **exclusive, **processes}) + "\n"


def test_the_rows_of_the_summary_add_up_to_the_whole_run(folder, monkeypatch):
    clock = iter([110.0, 135.0, 140.0])  # loaded, trained, shut down
    monkeypatch.setattr("lucidrl.recipes.display.time.perf_counter", lambda: next(clock))
    spans = iter([{"validate": 1.0}, {"validate": 4.0}])
    monkeypatch.setattr("lucidrl.recipes.display._seconds_of_spans", lambda: next(spans))
    phases = {"forward": 1.5, "generation": 0.5, "other": 0.25, "validation": 1.0}
    before_resume = whole_step(4, {"forward": 99.0}, driver=99.0)
    lines = [before_resume, *(whole_step(step, phases, driver=3.25) for step in (5, 6))]
    (folder / "metrics.jsonl").write_text("".join(lines))
    console = Console(file=io.StringIO(), width=80)
    with RunDisplay(grpo_of(6), folder, console, started=100.0) as display:
        display.on_loaded()
        for step in (5, 6):
            display.on_step(step, STEP)
        display.on_trained()
    display.summary(6)
    table, _, savings = console.file.getvalue().partition("time of 2 steps")[2].partition("largest savings:\n")
    rows = {line[: line.index(".")].rstrip("0123456789 "): float(line.split()[-2]) for line in table.splitlines()[1:]}
    assert list(rows)[2:7] == ["steps", "  forward", "  validation", "  generation", "  other"]
    assert rows["  forward"] == 3.0
    assert sum(seconds for name, seconds in rows.items() if name.startswith(" ")) == rows["steps"] == 6.5
    assert rows["loading"] == 10.0
    assert rows["first validation"] == 1.0
    assert rows["shutdown"] == 5.0
    whole = rows.pop("total")
    assert sum(seconds for name, seconds in rows.items() if not name.startswith(" ")) == whole == 40.0
    assert savings.splitlines()[0].startswith("  forward, backward and optimizer: 1.5 s of 3.2 s per step. ")


def test_the_table_names_the_process_of_each_phase_if_there_are_several(folder):
    phases = {"forward": 1.5, "reward": 0.5}
    workers = {"policy-0": 1.5, "policy-1": 1.0, **{f"env-{number}": 0.25 for number in range(20)}}
    (folder / "metrics.jsonl").write_text(whole_step(1, phases, driver=0.5, **workers))
    text = shown(folder, [1], 1)
    assert re.search(r"^  forward +1\.5 +\d+% +policy-0 *$", text, flags=re.MULTILINE)
    assert re.search(r"^  reward +0\.5 +\d+% +env-0 *$", text, flags=re.MULTILINE)
    assert "busy: driver 25%, policy-0 75%, policy-1 50%, env-0 12%" in text
    assert "and 11 more\n" in text


def test_a_run_whose_metrics_are_lost_still_has_a_summary(folder):
    text = shown(folder, [1], 1)
    assert "time of 1 step" in text
    assert "largest savings" not in text


@pytest.mark.parametrize("width", [60, 80, 130])
def test_elapsed_and_remaining_time_are_never_cut(folder, width):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, legacy_windows=False)
    with RunDisplay(grpo_of(500), folder, console) as display:
        display.on_step(123, {**STEP, "accuracy": 0.25})
    line = Text.from_ansi(console.file.getvalue()).plain.splitlines()[-1]
    assert "step 123/500" in line
    assert re.search(r" 0:00:0\d left (\d:\d\d:\d\d|-:--:--)", line), line
    assert len(line.rstrip()) <= width
    if width >= 80:
        assert "reward 0.500  accuracy 0.250  12,346 tok/s" in line


def test_traces_are_pointed_out_where_there_are_some(folder):
    assert "open traces/timeline.json.gz" not in shown(folder, [1], 1)
    (folder / "traces").mkdir()
    assert "open traces/timeline.json.gz" not in shown(folder, [1], 1)
    (folder / "traces" / "timeline.json.gz").touch()
    assert "open traces/timeline.json.gz" in shown(folder, [1], 1)


def test_folder_names_are_literal_and_commands_can_be_copied(folder):
    text = shown(folder, [1], 1)
    assert f"run folder: {folder}\n" in text
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("  lucidrl")]
    assert ["lucidrl", "generate", str(folder), "12+30="] in commands
    assert ["lucidrl", "grpo", "--resume", str(folder), "grpo.max_steps=2"] in commands


def test_a_stopped_run_says_so_and_resumes_with_its_own_settings(folder):
    text = shown(folder, [1, 2], 5)
    assert "stopped after step 2 of 5; the step is saved" in text
    assert [line for line in text.splitlines() if line.endswith("--resume " + shlex.quote(str(folder)))]


def test_a_run_that_was_finished_before_has_nothing_to_do(folder):
    assert "nothing to do: the run already completed and saved step 5 of 5" in shown(folder, [], 5)


def test_held_out_results_are_compared_with_the_steps_they_belong_to(folder):
    text = shown(folder, [1], 1, [(0, {"accuracy": 0.25, "other": 3.0}), (1, {"accuracy": 0.5, "other": 4.0})])
    assert "step 0: held-out accuracy 0.250\n" in text
    assert "held-out accuracy: 0.250 at step 0, 0.500 at step 1\n" in text


def test_nothing_of_the_arithmetic_is_cut_at_80_columns():
    console = Console(file=io.StringIO(), width=80)
    console.print(arithmetic_table(GRPORunConfig()))
    text = console.file.getvalue()
    assert "policy.sequence_packing.train_mb_tokens" in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_control_run_shows_its_episodes_and_suggests_only_what_it_can_do(folder):
    console = Console(file=io.StringIO(), width=80)
    step = {"episode_reward": 21.25, "frames_per_s": 12345.6, "time/step_s": 2.0}
    with RunDisplay(PPORunConfig(ppo=PPOConfig(max_steps=1)), folder, console) as display:
        display.on_validation(0, {"reward": 9.4, "length": 9.4})
        display.on_step(1, step)
        display.on_validation(1, {"reward": 500.0, "length": 500.0})
    display.summary(1)
    text = console.file.getvalue()
    assert "step 1/1  episode reward 21.2  12,346 frames/s  left 0 s\n" in text
    assert "greedy reward: 9.400 at step 0, 500.000 at step 1\n" in text
    assert "lucidrl generate" not in text
    assert "held-out" not in text


@pytest.fixture
def notebook(monkeypatch):
    """The outputs of a notebook's cell: texts that changed in place, by their number."""
    shown: list[list[str]] = []

    class ZMQInteractiveShell:
        pass

    class Handle:
        def __init__(self, number):
            self._number = number

        def update(self, data, raw):
            shown[self._number].append(data["text/plain"])

    def display(data, raw, display_id):
        shown.append([data["text/plain"]])
        return Handle(len(shown) - 1)

    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    monkeypatch.setenv("FORCE_COLOR", "1")
    return shown


def test_a_notebook_has_one_progress_line_that_changes(folder, notebook, capsys, monkeypatch):
    monkeypatch.setattr("lucidrl.recipes.display.SECONDS_BETWEEN_UPDATES", 0)
    with RunDisplay(grpo_of(300), folder) as display:
        for step in range(1, 301):
            display.on_step(step, STEP)
    [line] = notebook
    assert len(line) == 300
    assert line[-1].startswith("step 300/300  reward 0.500")
    display.announce("saved step 300")
    assert capsys.readouterr().out == "saved step 300\n"


def test_the_line_of_a_notebook_changes_only_now_and_then_and_at_the_end(folder, notebook):
    with RunDisplay(grpo_of(300), folder) as display:
        for step in range(1, 301):
            display.on_step(step, STEP)
    assert len(notebook[0]) < 100
    assert notebook[0][-1].startswith("step 300/300")


def test_a_quiet_display_shows_nothing(folder, notebook, capsys):
    with RunDisplay(grpo_of(3), folder, Console(quiet=True)) as display:
        display.on_validation(0, {"reward": 0.5})
        display.on_samples(0, [[{"role": "user", "content": "hello"}]], [0.5])
        display.on_step(1, STEP)
    display.summary(1)
    assert (notebook, capsys.readouterr().out) == ([], "")


def test_a_run_with_objects_of_a_program_is_resumed_by_that_program(folder):
    config = GRPORunConfig(grpo=GRPOConfig(max_steps=2), python_inputs={"dataset": "3 rows"})
    console = Console(file=io.StringIO(), width=80)
    RunDisplay(config, folder, console).summary(1)
    assert f"  GRPOTrainer(...).train(resume={str(folder)!r})" in console.file.getvalue().splitlines()
    assert "--resume" not in console.file.getvalue()
