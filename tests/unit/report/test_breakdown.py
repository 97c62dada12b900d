"""The breakdown of a run: what is read back from its metrics, and which problem it names first."""

from __future__ import annotations

import json
import re

import pytest

from lucidrl.report.breakdown import Breakdown, Segment, write_breakdown
from tests.unit.test_pages import DOCS, blocks

PHASES = {"generation": 1.0, "reward": 0.2, "forward": 0.5, "backward": 0.7, "training": 0.1, "other": 0.1}


def record(step: int, phases: dict[str, float], **busy: float) -> dict[str, float]:
    whole_s = sum(phases.values())
    processes = {"driver": whole_s, **{name.replace("_", "-"): seconds for name, seconds in busy.items()}}
    return {
        "step": step,
        "time/whole_step_s": whole_s,
        "observe/overhead_pct": 0.5,
        **{f"time/exclusive/{name}_s": seconds for name, seconds in phases.items()},
        **{f"time/busy/{name}_s": seconds for name, seconds in processes.items()},
    }


def first_opportunity(phases: dict[str, float], **busy: float):
    found = Breakdown.of_records([record(step, phases, **busy) for step in (1, 2, 3)]).opportunities()
    assert len(found) <= 3
    assert [each.saved_s for each in found] == sorted((each.saved_s for each in found), reverse=True)
    return found[0]


def test_phases_and_idle_times_sum_to_the_step():
    lines = [record(1, PHASES), record(2, {**PHASES, "validation": 2.0})]
    found = Breakdown.of_records(lines)
    for index, whole_s in enumerate(found.whole_s):
        assert sum(values[index] for values in found.phases.values()) == pytest.approx(whole_s)
        assert sum(segment.seconds for segment in found.critical_path(index)) == pytest.approx(whole_s)
    assert found.phases["validation"] == [0.0, 2.0]
    assert list(found.seconds())[:2] in (["validation", "generation"], ["generation", "validation"])
    assert list(found.seconds())[-1] == "other"


def test_a_process_is_busy_communicates_or_is_idle():
    line = record(1, PHASES, policy_0=1.0, policy_1=1.5) | {"time/communication/policy-0_s": 0.6}
    found = Breakdown.of_records([line])
    assert found.idle()["policy-0"] == pytest.approx([2.6 - 1.0 - 0.6])
    assert found.idle()["policy-1"] == pytest.approx([2.6 - 1.5])
    assert found.busy_share()["driver"] == 1.0


def test_the_critical_path_leads_over_the_process_that_the_driver_waited_for():
    found = Breakdown.of_records(
        [record(1, PHASES, policy_0=1.0, policy_1=1.5, generation_0=1.0, env_0=0.1, env_1=0.2)]
    )
    path = found.critical_path(0)
    assert Segment("generation", "generation-0", 1.0) in path
    assert Segment("reward", "env-1", 0.2) in path
    assert Segment("backward", "policy-1", 0.7) in path
    assert Segment("other", "driver", 0.1) in path
    assert found.waited_for["forward"] == ["policy-1"]
    assert found.most_waited_for("reward") == "env-1"
    assert found.most_waited_for("other") == "driver"


def test_a_slow_environment_is_named_first_with_its_seconds():
    first = first_opportunity({**PHASES, "reward": 3.0}, policy_0=1.2, policy_1=1.2, env_0=3.0)
    assert first.name == "environment"
    assert first.saved_s == 3.0
    assert first.text == (
        "environment: 3.0 s of 5.4 s per step; the ranks wait for it. Run it on more workers (env.num_workers=2) to "
        "save up to 3.0 s per step"
    )


def test_a_slow_rank_is_named_first_with_the_seconds_that_others_wait():
    first = first_opportunity({**PHASES, "forward": 2.5}, policy_0=1.3, policy_1=3.3, policy_2=1.3)
    assert first.name == "policy-1"
    assert first.saved_s == pytest.approx(2.0)
    assert "policy-1: busy 3.3 s per step, its peers 1.3 s" in first.text


def test_a_slow_refit_is_named_first():
    first = first_opportunity({**PHASES, "refit": 1.0}, policy_0=1.3, generation_0=1.0)
    assert (first.name, first.saved_s) == ("refit", 1.0)
    assert "policy.generation.placement=policy" in first.text


def test_remedies_fit_the_run():
    assert "policy.generation.num_workers" in first_opportunity({"generation": 3.0}, generation_0=3.0).text
    assert "cluster.num_workers" in first_opportunity({"generation": 3.0}, policy_0=3.0).text
    assert "ppo.num_epochs" in first_opportunity({"collect": 0.5, "forward": 3.0}).text
    assert "profile.steps" in first_opportunity({"curriculum": 3.0}).text


def test_the_first_step_warms_up_and_small_shares_are_no_opportunity():
    lines = [
        record(1, {"refit": 50.0, "forward": 50.0}),
        *(record(n, {"refit": 0.009, "forward": 1.0}) for n in (2, 3)),
    ]
    (found,) = Breakdown.of_records(lines).opportunities()
    assert (found.name, found.saved_s) == ("training", 0.5)


def test_the_last_attempt_of_a_repeated_step_counts(tmp_path):
    attempts = [(1, 1.0), (2, 2.0), (3, 3.0), (2, 5.0)]
    lines = [
        line
        for step, seconds in attempts
        for line in ({"step": step, "train/reward": 0.5}, record(step, {"other": seconds}))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = Breakdown.read(tmp_path)
    assert (found.steps, found.whole_s) == ([1, 2], [1.0, 5.0])
    assert Breakdown.read(tmp_path, first_step=2).steps == [2]


def test_the_file_is_made_from_the_metrics_and_a_cut_line_is_left_out(tmp_path):
    lines = [{"step": 1, "train/reward": 0.5}, record(1, PHASES, policy_0=1.0), {"machine/elapsed_s": 3.0}]
    text = "".join(json.dumps(line) + "\n" for line in lines) + json.dumps(record(2, PHASES))[:-9]
    (tmp_path / "metrics.jsonl").write_text(text)
    write_breakdown(tmp_path)
    content = json.loads((tmp_path / "breakdown.json").read_text())
    assert content["schema"] == 1
    assert content["steps"] == [1]
    assert content["step_s"] == [2.6]
    assert {name: values[0] for name, values in content["phases"].items()} == PHASES
    assert content["processes"]["policy-0"] == {"busy_s": [1.0], "communication_s": [0.0], "idle_s": [1.6]}
    assert content["waited_for"]["forward"] == ["policy-0"]
    assert content["overhead_pct"] == [0.5]
    assert content["opportunities"][0].keys() == {"name", "seconds_per_step", "text"}
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_the_program_of_the_page_reads_the_file(tmp_path, monkeypatch, capsys):
    [program] = [code for code in blocks(DOCS / "profiling.md", "python") if "breakdown.json" in code]
    folder = tmp_path / "runs/grpo/exp_001"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(json.dumps(record(1, {"generation": 3.0, "other": 1.0})))
    write_breakdown(folder)
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "profiling.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out == "generation 0.75\nother 0.25\n"


def test_the_page_documents_every_key_of_the_file():
    documented = re.findall(r"^\| `(\w+)` \|", (DOCS / "profiling.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(Breakdown.of_records([record(1, PHASES)]).to_json()) <= set(documented)


def test_a_run_without_steps_has_no_file_and_a_failure_only_warns(tmp_path, caplog):
    write_breakdown(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record(1, PHASES)))
    (tmp_path / "breakdown.json").mkdir()
    write_breakdown(tmp_path)
    assert "breakdown.json cannot be written" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["breakdown.json", "metrics.jsonl"]
