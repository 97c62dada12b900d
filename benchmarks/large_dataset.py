"""Anonymous memory of GRPO on a Parquet file of two million rows, above the same run on a small file.

The file is written twice: with row groups of 100,000 rows, and with a single row group. Each run is a process that
checks the data, trains a few steps on the embedded model, shuffled, and reports its peak of anonymous memory (RssAnon):
memory that belongs to the process alone, unlike mapped files, which the kernel may drop. Then a run that stops halfway
and is resumed must end with the weights and samples of an uninterrupted run, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from harness import Claim, arguments, print_table, report

STEPS = 4
SETTINGS = [
    "data.prompt=question",
    "env.kwargs={max_operand: 9}",
    "collector={prompts_per_step: 8, samples_per_prompt: 4}",
    "grpo.loss.entropy_coefficient=0.01",
    "policy.optimizer.kwargs.lr=1e-3",
    "policy.generation.max_new_tokens=4",
    "validation={num_prompts: 8, every: 2}",
    "checkpoint.every=0",
    "tracking={tensorboard: false, dump_samples_every: 1}",
]


def write_parquet(path: Path, num_rows: int, row_group_size: int) -> None:
    """Sums with a column of text that does not compress, about 300 bytes per row."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    draw = np.random.default_rng(0)
    left, right = draw.integers(0, 1000, num_rows), draw.integers(0, 1000, num_rows)
    noise = draw.integers(0, 256, (num_rows, 128), dtype=np.uint8)
    table = pa.table(
        {
            "question": [f"{a}+{b}=" for a, b in zip(left, right, strict=True)],
            "answer": left + right,
            "notes": [row.tobytes().hex() for row in noise],
        }
    )
    parquet.write_table(table, path, row_group_size=row_group_size)


class PeakMemory:
    """The peak of anonymous memory of this process, polled by a thread."""

    def __init__(self) -> None:
        self.peak_mb = 0.0
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_done.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._is_done.wait(0.01):
            status = Path("/proc/self/status").read_text()
            self.peak_mb = max(self.peak_mb, int(re.search(r"RssAnon:\s+(\d+)", status)[1]) / 1024)


class Silent:
    """A watcher that shows nothing."""

    def on_validation(self, step: int, metrics: object) -> None: ...

    def on_samples(self, step: int, message_logs: object, rewards: object) -> None: ...

    def on_step(self, step: int, metrics: object) -> None: ...

    def announce(self, message: str) -> None: ...


def train(file: str, folder: str, steps: str, kind: str) -> None:
    """A run in this process; prints its peak memory and the time until the data is open."""
    from lucidrl.recipes.configs import GRPORunConfig
    from lucidrl.recipes.language import GRPORun
    from lucidrl.utils.config import load_config

    config = load_config(GRPORunConfig, overrides=[*SETTINGS, f"data.file={file}", f"grpo.max_steps={steps}"])
    with PeakMemory() as memory:
        run = GRPORun(config)
        start = time.perf_counter()
        run._inputs.read()
        opened_s = time.perf_counter() - start
        if kind == "new":
            run.preflight()
        checked_s = time.perf_counter() - start
        with run.loop(Path(folder), Silent(), resume=kind == "resumed") as loop:
            loop.run()
        run.close()
    print(json.dumps({"peak_mb": memory.peak_mb, "opened_s": opened_s, "checked_s": checked_s}))


def run_process(file: Path, folder: Path, steps: int, kind: str = "new") -> dict[str, float]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, __file__, "train", str(file), str(folder), str(steps), kind]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def digest(folder: Path) -> str:
    """Of the newest weights and optimizer and of all training samples."""
    newest = max((folder / "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:]))
    samples = sorted((folder / "samples").glob("step_*.jsonl"), key=lambda path: int(path.stem[5:]))
    found = hashlib.sha256()
    for path in [*sorted(newest.rglob("*.safetensors")), *samples]:
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


def main() -> None:
    options = arguments(__doc__, rows=(int, 2_000_000, "rows of the large file"))
    rows, claims = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_parquet(folder / "small.parquet", 1000, 1000)
        small = run_process(folder / "small.parquet", folder / "small", STEPS)
        rows.append(("1,000 rows", "", "", f"{small['peak_mb']:.0f} MB", f"{small['opened_s']:.1f} s"))
        for title, size in (("row groups of 100,000", 100_000), ("a single row group", options.rows)):
            file = folder / "large.parquet"
            write_parquet(file, options.rows, size)
            whole = run_process(file, folder / f"whole {size}", STEPS)
            run_process(file, folder / f"broken {size}", STEPS // 2)
            run_process(file, folder / f"broken {size}", STEPS, "resumed")
            is_equal = digest(folder / f"whole {size}") == digest(folder / f"broken {size}")
            above = whole["peak_mb"] - small["peak_mb"]
            times = f"{whole['opened_s']:.1f} s, checked after {whole['checked_s']:.1f} s"
            cells = f"{file.stat().st_size / 2**20:.0f} MB", f"{above:+.0f} MB", f"{whole['peak_mb']:.0f} MB"
            rows.append((f"{options.rows:,} rows, {title}", *cells, times))
            claims += [
                Claim(f"anonymous memory above a small file: {title}", 300, above, at_most=True, unit="MB"),
                Claim(f"resumed run is bit-identical to an uninterrupted run: {title}", 1, float(is_equal), unit=""),
            ]
    print_table(rows, ("dataset", "on disk", "above", "peak", "opened"))
    report(claims, options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(*sys.argv[2:])
    else:
        main()
