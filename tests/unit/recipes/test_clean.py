"""Disk space of runs: what is shown, what is freed, and what must stay."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from lucidrl.checkpoint.manager import CheckpointManager
from lucidrl.errors import CheckpointError, ConfigError
from lucidrl.recipes.clean import Free, clean, find_runs
from lucidrl.recipes.settings import new_settings
from lucidrl.utils.run_folder import occupied

KIB = 1024


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("runs")


def make_run(folder: Path, rewards: dict[int, float], max_steps: int = 40, **policy: str) -> Path:
    """A run folder with checkpoints of 1 KiB of weights and 2 KiB of optimizer."""
    folder.mkdir(parents=True)
    settings = yaml.safe_load(new_settings("grpo", overrides=[f"grpo.max_steps={max_steps}"]).to_yaml())
    settings["policy"] |= policy
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    for step, reward in rewards.items():
        with CheckpointManager(folder / "checkpoints", keep_last=9).saving(step, metrics={"reward": reward}) as saved:
            for name, size in (("policy/model.safetensors", KIB), ("optimizer/optimizer.safetensors", 2 * KIB)):
                (saved / name).parent.mkdir()
                (saved / name).write_bytes(os.urandom(size))
    for name, size in (("traces/a.json", 3), ("samples/step_1.jsonl", 4), ("logs/driver.log", 5), ("metrics.jsonl", 6)):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x" * size * KIB)
    (folder / "warnings.jsonl").touch()
    return folder


def cleaned(*paths: Path, agree: bool = True, **free: bool) -> str:
    console = Console(file=io.StringIO(), width=200)
    clean(paths, Free(**free), confirm=lambda question: agree, console=console)
    return console.file.getvalue()


def files_below(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def steps_of(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_the_table_shows_what_runs_take_and_nothing_is_freed_without_consent(root):
    make_run(root / "grpo/exp_001", {10: 0.9, 20: 0.1, 30: 0.5})
    make_run(root / "grpo/exp_002", {40: 0.1})
    before = files_below(root)
    shown = cleaned(root, agree=False)
    [first, second, both] = [line for line in shown.splitlines() if "exp_00" in line or "2 runs" in line][:3]
    for part in ("6.0 KiB", "3.0 KiB", "4.0 KiB", "11.0 KiB", "step 30"):
        assert part in first, first
    assert "finished at step 40" in second
    assert both.startswith("2 runs")
    assert "checkpoints/step_20" in shown
    assert "freed" not in shown
    assert files_below(root) == before


def test_checkpoints_that_are_neither_newest_nor_best_are_freed(root):
    run = make_run(root / "grpo/exp_001", {10: 0.9, 20: 0.1, 30: 0.5, 40: 0.2})
    others = {path: content for path, content in files_below(run).items() if "checkpoints" not in path.parts}
    assert "freed" in cleaned(root)
    assert steps_of(run) == ["step_10", "step_40"]
    assert {path: content for path, content in files_below(run).items() if "checkpoints" not in path.parts} == others
    manager = CheckpointManager(run / "checkpoints", metric="reward")
    assert (manager.latest().step, manager.best().step) == (40, 10)
    assert "nothing to free" in cleaned(root)


def test_the_optimizer_of_finished_runs_is_freed_when_asked(root):
    finished = make_run(root / "finished", {20: 0.9, 40: 0.5})
    going_on = make_run(root / "going_on", {10: 0.9, 20: 0.5})
    weights = (finished / "checkpoints/step_40/policy/model.safetensors").read_bytes()
    cleaned(root, optimizer=True)
    manager = CheckpointManager(finished / "checkpoints", metric="reward")
    assert manager.latest().weights_only, "still a valid checkpoint, whose record says what it lacks"
    assert (manager.best().step, manager.best().metrics) == (20, {"reward": 0.9})
    assert (manager.latest().path / "policy/model.safetensors").read_bytes() == weights
    assert not list(finished.glob("checkpoints/*/optimizer"))
    with pytest.raises(CheckpointError, match="has no optimizer"):
        manager.to_resume()
    assert CheckpointManager(going_on / "checkpoints").to_resume().step == 20


def test_whole_runs_are_removed_by_name_and_own_files_stay(root):
    gone, kept = make_run(root / "grpo/exp_001", {10: 0.9}), make_run(root / "grpo/exp_002", {10: 0.9})
    noted = make_run(root / "grpo/exp_003", {10: 0.9})
    (noted / "notes.txt").write_text("mine")
    before = files_below(kept)
    shown = cleaned(gone, noted, runs=True)
    assert not gone.exists()
    assert files_below(noted) == {noted / "notes.txt": b"mine"}
    assert "exp_003 stays: it still has notes.txt" in shown
    assert files_below(kept) == before
    with pytest.raises(ConfigError, match="runs/grpo is not a run folder; run `lucidrl clean runs/grpo`"):
        cleaned(root / "grpo", runs=True)
    assert files_below(kept) == before


def test_a_run_that_is_running_stays_as_it_is(root):
    run = make_run(root / "exp_001", {10: 0.9, 20: 0.1, 40: 0.5})
    with occupied(run):
        before = files_below(run)
        for free in ({}, {"optimizer": True}, {"runs": True}):
            shown = cleaned(run, **free)
            assert "running" in shown
            assert "freed" not in shown
        assert files_below(run) == before


def test_a_run_that_starts_before_the_answer_stays_as_it_is(root):
    run = make_run(root / "exp_001", {10: 0.9, 20: 0.1, 40: 0.5})
    lock = occupied(run)
    console = Console(file=io.StringIO(), width=200)
    clean([run], Free(), confirm=lambda question: lock.__enter__() is None, console=console)
    assert "exp_001 stays: runs/exp_001 is in use by process" in console.file.getvalue()
    assert len(steps_of(run)) == 3
    lock.__exit__(None, None, None)


def test_older_checkpoints_stay_if_the_newest_is_damaged(root):
    run = make_run(root / "exp_001", {10: 0.9, 20: 0.1, 40: 0.5})
    (run / "checkpoints/step_40/policy/model.safetensors").write_bytes(b"damage")
    assert "exp_001 stays: the newest checkpoint is damaged" in cleaned(run)
    assert len(steps_of(run)) == 3


def test_the_checkpoint_that_another_run_starts_from_stays(root):
    first = make_run(root / "first", {10: 0.9, 20: 0.1, 40: 0.5})
    make_run(root / "second", {}, model_name=str(first / "checkpoints/step_20/policy"))
    assert "runs/second starts from step_20" in cleaned(root)
    assert len(steps_of(first)) == 3


def test_links_are_not_followed(root, tmp_path):
    elsewhere = make_run(tmp_path / "elsewhere/exp_001", {10: 0.9, 20: 0.1, 40: 0.5})
    before = files_below(elsewhere)
    run = make_run(root / "exp_001", {})
    (run / "checkpoints").symlink_to(elsewhere / "checkpoints")
    (root / "linked").symlink_to(elsewhere)
    assert [found.folder for found in find_runs([root])] == [run]
    assert "nothing to free" in cleaned(root, optimizer=True)
    with pytest.raises(ConfigError, match="is a link, and links are not followed"):
        cleaned(root / "linked")
    cleaned(run, runs=True)
    assert not run.exists()
    assert files_below(elsewhere) == before


@pytest.mark.parametrize("content", ["model: x\n", "run: {}\n", "- 1\n", "a: [\n", "grpo: 3\nrun: {}\n"])
def test_a_folder_with_another_config_is_no_run(root, content):
    (root / "site/checkpoints/step_1").mkdir(parents=True)
    (root / "site/config.yaml").write_text(content)
    with pytest.raises(ConfigError, match="runs holds no run; give a run folder"):
        cleaned(root)
    with pytest.raises(ConfigError, match="runs/site holds no run"):
        cleaned(root / "site", runs=True)
    assert (root / "site/config.yaml").exists()


def test_a_path_that_does_not_exist_is_named(root):
    with pytest.raises(ConfigError, match="runs is not a folder; give a run folder"):
        cleaned(root)


def test_the_command_asks_only_a_terminal(lucidrl, root):
    run = make_run(root / "exp_001", {10: 0.9, 20: 0.1, 40: 0.5})
    code, output, errors = lucidrl("clean", stdin="y\n")
    assert (code, errors) == (0, "")
    assert "nothing is freed: standard input is not a terminal" in output
    assert len(steps_of(run)) == 3
    code, output, _ = lucidrl("clean", "runs", "--yes")
    assert code == 0
    assert "freed 3." in output
    assert len(steps_of(run)) == 2
