"""A process that is killed at any moment of saving leaves every checkpoint that it reported.

The test runs this file in a process without threads, which forks those that are killed: importing torch for each would
take longer than saving.
"""

import os
import random
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import pytest
import torch

from lucidrl.checkpoint.manager import CheckpointManager
from lucidrl.checkpoint.tensors import TensorSpec, open_tensors
from lucidrl.checkpoint.writer import CheckpointWriter, TensorSet

NUM_KILLS = 50


@pytest.mark.slow
def test_the_newest_valid_checkpoint_is_never_older_than_the_last_that_was_reported(tmp_path):
    result = subprocess.run([sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    num_saved, num_killed_in_the_middle = map(int, result.stdout.split())
    assert num_saved > NUM_KILLS
    assert num_killed_in_the_middle > NUM_KILLS / 2


def save_forever(root: Path, report: int) -> None:
    """Save step after step, every third one twice; write a byte to `report` after each commit."""
    manager, writer = CheckpointManager(root, keep_last=2), CheckpointWriter(0, 1, None, pin_memory=False)
    newest = manager.latest()
    for step in count(newest.step + 1 if newest is not None else 1):
        tensors = {name: torch.full((300,), float(step)) for name in "abc"}
        specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
        for _ in range(2 if step % 3 == 0 else 1):
            pending = manager.begin(step, state={"step": step})
            writer.begin([TensorSet(pending.folder / "policy", "model", specs, tensors.items)], {})
            pending.commit(writer.finish())
            os.write(report, step.to_bytes(8, "big"))


def last_reported_before_death(root: Path, seconds: float) -> int:
    """Kill a saving process after a while; the last step that it reported, 0 if none."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        save_forever(root, writable)
    os.close(writable)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(readable, "rb") as reports:
        return int.from_bytes(reports.read()[-8:], "big")


def main(root: Path) -> None:
    moments, reported = random.Random(0), 0
    num_in_the_middle = 0
    for _ in range(NUM_KILLS):
        reported = max(reported, last_reported_before_death(root, moments.uniform(0.01, 0.15)))
        num_in_the_middle += any(path.name.startswith(".") for path in root.iterdir())
        newest = CheckpointManager(root, keep_last=2).latest()
        assert newest is not None or reported == 0
        if newest is not None:
            assert newest.step >= reported
            assert newest.state == {"step": newest.step}
            tensors = open_tensors(newest.path / "policy", "model")
            assert all(torch.equal(tensor, torch.full((300,), float(newest.step))) for tensor in tensors.values())
        assert not any(path.name.startswith(".") for path in root.iterdir()), "what was left is cleaned up"
    sys.stdout.write(f"{reported} {num_in_the_middle}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
