"""A page stays small: long curves, many samples and long messages are thinned by rule."""

from __future__ import annotations

import orjson
import pytest

from lucidrl.report import sample_pages
from lucidrl.report.curves import MOST_POINTS, spread, thinned
from lucidrl.report.folder_parts import SamplesFile
from lucidrl.report.metrics_file import Series
from lucidrl.report.page_data import page_data
from lucidrl.report.run_data import read_run
from lucidrl.report.sample_pages import shown_samples
from tests.unit.report.page_runs import page_run, sample_columns


def write_samples(folder, step, completions):
    columns = sample_columns(completions)
    rows = [{name: column[row] for name, column in columns.items()} for row in range(len(completions))]
    path = folder / f"step_{step}.jsonl"
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return SamplesFile(path, "step", step)


def test_thinned_curves_keep_both_ends_and_every_peak():
    values = [0.0] * 20_000
    values[7777], values[12_345] = 9.0, -9.0
    kept = thinned(Series(list(range(20_000)), values))
    assert len(kept.steps) <= MOST_POINTS
    assert (kept.steps[0], kept.steps[-1]) == (0, 19_999)
    assert {7777: 9.0, 12_345: -9.0}.items() <= dict(zip(kept.steps, kept.values, strict=True)).items()
    assert kept.steps == sorted(set(kept.steps))


def test_short_curves_stay_whole():
    series = Series([1, 2, 3], [1.0, 2.0, 3.0])
    assert thinned(series) is series


def test_spread_numbers_have_both_ends():
    assert spread(3, 5) == {0, 1, 2}
    assert spread(101, 5) == {0, 25, 50, 75, 100}


def test_each_file_gives_the_same_share_in_whole_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_pages, "MOST_SAMPLES", 10)
    files = [write_samples(tmp_path, step, [f"answer {number}" for number in range(8)]) for step in (1, 2)]
    shown = shown_samples(files)
    assert [(sample["step"], sample["group"]) for sample in shown.samples] == [
        *[(1, 0), (1, 0), (1, 1), (1, 1)],
        *[(2, 0), (2, 0), (2, 1), (2, 1), (2, 2), (2, 2)],
    ]
    assert shown.rule == "10 of 16 samples are shown, the first groups of each file"


def test_everything_is_shown_if_it_fits(tmp_path):
    shown = shown_samples([write_samples(tmp_path, 1, ["a", "b", "c"])])
    assert len(shown.samples) == 3
    assert shown.rule is None


def test_long_messages_are_cut_and_lose_their_tokens(tmp_path):
    shown = shown_samples([write_samples(tmp_path, 1, ["x" * 9000, "short"])])
    long, short = (sample["messages"][1] for sample in shown.samples)
    assert long["content"].endswith("… (1,000 more characters)")
    assert "tokens" not in long
    assert short["tokens"] == list("short")
    assert "cut after 8,000 characters" in shown.rule


def test_long_texts_leave_room_for_every_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_pages, "MOST_CHARACTERS", 20_000)
    files = [write_samples(tmp_path, step, ["y" * 1000] * 20) for step in range(4)]
    shown = shown_samples(files)
    assert {sample["step"] for sample in shown.samples} == {0, 1, 2, 3}
    assert len(shown.samples) < 10


@pytest.mark.parametrize("num_runs", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_page_of_a_long_run_with_many_samples_stays_small(tmp_path, num_runs):
    runs = []
    for number in range(num_runs):
        folder = page_run(tmp_path / str(number), 2)
        lines = [
            orjson.dumps({"step": step, "time": 1.0 + step, **{f"train/m{name}": step * 1.37 for name in range(20)}})
            for step in range(3, 1200)
        ]
        with (folder / "metrics.jsonl").open("ab") as file:
            file.write(b"\n".join(lines) + b"\n")
        (folder / "samples").mkdir()
        for step in range(15):
            write_samples(folder / "samples", step, [f"answer {step} " * 20] * 150)
        runs.append(read_run(folder))
    data = page_data(runs)
    assert len(orjson.dumps(data)) < 10e6
    assert any("at most 1,000 points" in rule for rule in data["thinning"])
    assert any("samples are shown" in rule for rule in data["thinning"])
