"""Asynchronous runs that are killed train on every prompt exactly once, by a ledger outside of the run folder."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from lucidrl.utils.run_folder import is_occupied
from tests.faults.async_runs import kill, lineage, read, start, wait, workers_of

STEPS = "grpo.max_steps=25"
"""All 100 prompts, four per step."""


def check_epoch(ledger: Path) -> None:
    entries = read(ledger)
    trained = [prompt for step in lineage(entries) for prompt in step]
    assert len(trained) == 100
    assert len(set(trained)) == 100, "a prompt was repeated, so another one was skipped"
    assert max(entry["staleness"] for entry in entries) <= 2


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_skips_and_repeats_no_prompt(tmp_path):
    folder, ledger = tmp_path / "run", tmp_path / "ledger.jsonl"
    draw = random.Random(0)
    num_kills = 0
    while not read(ledger) or read(ledger)[-1]["step"] < 25:
        is_resume = num_kills > 0
        known = len(read(ledger))
        generators = f"policy.generation.num_workers={1 + num_kills % 2}"
        process = start(folder, ledger, STEPS, generators, resume=is_resume)
        try:
            if num_kills < 4:
                wait(lambda known=known: len(read(ledger)) >= known + 4, process)
                time.sleep(draw.uniform(0, 0.3))
                kill(process)
                num_kills += 1
                wait_until_free(folder)
            else:
                assert process.wait(120) == 0
        finally:
            if process.poll() is None:
                kill(process)
    assert num_kills == 4
    check_epoch(ledger)


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_and_a_resume_skips_and_repeats_no_prompt(tmp_path):
    folder, ledger = tmp_path / "run", tmp_path / "ledger.jsonl"
    two_ranks = "cluster.num_workers=2"
    process = start(folder, ledger, STEPS, two_ranks)
    try:
        wait(lambda: len(read(ledger)) >= 8, process)
        workers_of(process, "rank")[0].send_signal(signal.SIGKILL)
        assert process.wait(60) == 2
        assert " of 2 was killed by SIGKILL" in folder.with_suffix(".log").read_text()
        wait_until_free(folder)
        process = start(folder, ledger, STEPS, two_ranks, resume=True)
        assert process.wait(120) == 0, folder.with_suffix(".log").read_text()[-3000:]
    finally:
        if process.poll() is None:
            kill(process)
    check_epoch(ledger)


def wait_until_free(folder: Path) -> None:
    until = time.monotonic() + 30
    while is_occupied(folder):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["generation", "env"])
def test_a_killed_worker_is_replaced_and_its_samples_are_made_again(tmp_path, role):
    folder, ledger = tmp_path / "run", tmp_path / "ledger.jsonl"
    process = start(folder, ledger, STEPS, "policy.generation.num_workers=2")
    try:
        for number in (3, 9):
            wait(lambda number=number: len(read(ledger)) >= number, process)
            workers_of(process, role)[0].send_signal(signal.SIGKILL)
        assert process.wait(120) == 0, folder.with_suffix(".log").read_text()[-3000:]
    finally:
        if process.poll() is None:
            kill(process)
    check_epoch(ledger)
    metric = {"generation": "train/replaced_generators", "env": "train/replaced_env_workers"}[role]
    from tests.faults.records import metrics

    assert sum(line.get(metric, 0) for line in metrics(folder)) == 2
