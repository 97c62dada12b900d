"""Asynchronous GRPO: prompts that are skipped or repeated when the run is killed at random moments and resumed.

The ledger of trained prompts is a file outside of the run folder. A step that was rolled back by a resume does not
count.
"""

from __future__ import annotations

import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from harness import Claim, arguments, report

sys.path.insert(0, str(Path(__file__).parents[1]))

from lucidrl.utils.run_folder import is_occupied
from tests.faults.async_runs import kill, lineage, read, start, wait, workers_of

NUM_PROMPTS = 100
ROLES = ("driver", "driver", "generation", "env")
"""Whose process gets the signal, in turn."""


def main() -> None:
    options = arguments(
        __doc__,
        kills=(int, 20, "SIGKILLs of the driver"),
        epochs=(int, 4, "passes over the prompts"),
        seed=(int, 0, ""),
    )
    last_step = options.epochs * NUM_PROMPTS // 4
    draw, num_kills, num_worker_kills = random.Random(options.seed), 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder, ledger = Path(name) / "run", Path(name) / "ledger.jsonl"
        while not read(ledger) or read(ledger)[-1]["step"] < last_step:
            generators = f"policy.generation.num_workers={1 + num_kills % 2}"
            has_checkpoint = any((folder / "checkpoints").glob("step_*"))
            if not has_checkpoint:
                shutil.rmtree(folder, ignore_errors=True)
            process = start(folder, ledger, f"grpo.max_steps={last_step}", generators, resume=has_checkpoint)
            known = len(read(ledger))
            is_last = num_kills >= options.kills
            wait(lambda known=known: len(read(ledger)) > known, process)
            if not is_last:
                if (role := ROLES[num_kills % len(ROLES)]) != "driver" and process.poll() is None:
                    for worker in workers_of(process, role)[:1]:
                        worker.send_signal(signal.SIGKILL)
                        num_worker_kills += 1
                time.sleep(draw.uniform(0, 2.0))
                if process.poll() is None:
                    kill(process)
                    num_kills += 1
                while is_occupied(folder):
                    time.sleep(0.05)
            elif process.wait(600) != 0:
                raise SystemExit(folder.with_suffix(".log").read_text()[-3000:])
        entries = read(ledger)
    trained = [prompt for step in lineage(entries) for prompt in step]
    epochs = [trained[start : start + NUM_PROMPTS] for start in range(0, len(trained), NUM_PROMPTS)]
    counts = {prompt: trained.count(prompt) for prompt in set(trained)}
    skipped = sum(max(0, options.epochs - count) for count in counts.values())
    skipped += options.epochs * (NUM_PROMPTS - len(counts))
    repeated = sum(max(0, count - options.epochs) for count in counts.values())
    print(f"{num_kills} kills of the driver, {num_worker_kills} of workers, {len(entries)} steps for {last_step}")
    print(f"{len(epochs)} epochs; staleness at most {max(entry['staleness'] for entry in entries)}")
    report(
        [
            Claim(f"async, {num_kills} SIGKILLs: prompts skipped", 0, skipped, at_most=True, unit=""),
            Claim(f"async, {num_kills} SIGKILLs: prompts repeated", 0, repeated, at_most=True, unit=""),
        ],
        options.json,
    )


if __name__ == "__main__":
    main()
