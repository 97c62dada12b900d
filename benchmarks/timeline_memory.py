"""Peak memory of merging one gigabyte of traces into a timeline, next to a tenth of it.

The traces are synthetic: operators as torch's profiler writes them, for eight processes, with files of spans beside
them. Each merge is a process, whose peak of resident memory the operating system reports.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import Claim, arguments, report

NUM_PROCESSES = 8
START_NS = 1_800_000_000_000_000_000
OPERATOR = """  {
    "ph": "X", "cat": "cpu_op", "name": "aten::%s", "pid": %d, "tid": %d,
    "ts": %.3f, "dur": 8.250,
    "args": {
      "External id": %d,"Record function id": 0, "Ev Idx": %d, "Fwd thread id": 0, "Sequence number": %d
    }
  },
"""
NAMES = ("mm", "add", "mul", "_softmax", "native_layer_norm", "copy_", "empty_strided", "view")


def write_traces(folder: Path, size_bytes: int) -> int:
    """Write the traces; return their total size."""
    folder.mkdir(parents=True)
    for rank in range(NUM_PROCESSES):
        pid = 1000 + rank
        anchor = {"unix_time_ns": START_NS, "ts_us": 0.0}
        described = {"process": f"policy-{rank}", "host": "node", "pid": pid, "anchor": anchor}
        with (folder / f"policy-{rank}_node_{pid}_1.json").open("w") as file:
            file.write(f'{{"schemaVersion": 1, "lucidrl": {json.dumps(described)},\n  "traceEvents": [\n')
            number = 0
            while file.tell() < size_bytes // NUM_PROCESSES:
                for _ in range(1000):
                    number += 1
                    file.write(OPERATOR % (NAMES[number % 8], pid, pid, number * 10.0, number, number, number))
            file.write('{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "end"}}\n]}\n')
        times = [{"ts": 1e5 * step, "dur": 9e4} for step in range(number // 10_000)]
        spans = [{"ph": "X", "cat": "span", "name": "train", "pid": pid, "tid": pid, **each} for each in times]
        header = {"ph": "M", "name": "lucidrl", "pid": pid, "args": described}
        end = {"ph": "M", "name": "ended", "pid": pid, "args": {}}
        (folder / f"policy-{rank}_node_{pid}_1.spans.json").write_text(json.dumps([header, *spans, end]))
    return sum(path.stat().st_size for path in folder.iterdir())


def merge(run: Path) -> None:
    """Merge the traces of a run in this process; print the peak memory and the size of the timeline."""
    from lucidrl.report.timeline import write_timeline

    started = time.perf_counter()
    timeline = write_timeline(run)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = {"peak_mb": peak_mb, "seconds": time.perf_counter() - started, "events": timeline.num_events}
    print(json.dumps({**found, "size_mb": timeline.path.stat().st_size / 1e6, "missing": list(timeline.missing)}))


def measured(size_mb: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        size_bytes = write_traces(Path(folder) / "traces", round(size_mb * 1e6))
        command = [sys.executable, __file__, "--run", folder]
        root = str(Path(__file__).parents[1])
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": root}, stdout=subprocess.PIPE, text=True, check=True
        )
        found = json.loads(done.stdout)
    assert found["missing"] == [], found["missing"]
    print(
        f"{size_bytes / 1e6:,.0f} MB of traces, {found['events']:,} events: {found['peak_mb']:.0f} MB of memory, "
        f"{found['seconds']:.1f} s, {found['size_mb']:.0f} MB"
    )
    return found


def main() -> None:
    options = arguments(__doc__, run=(Path, None, "merge this run and exit"), mb=(float, 1000.0, "megabytes of traces"))
    if options.run is not None:
        return merge(options.run)
    small, large = measured(options.mb / 10), measured(options.mb)
    claims = [
        Claim(f"peak memory of merging {options.mb:,.0f} MB of traces", 300.0, large["peak_mb"], True, "MB"),
        Claim("peak memory relative to a tenth of the traces", 1.1, large["peak_mb"] / small["peak_mb"], at_most=True),
    ]
    report(claims, options.json)
    return None


if __name__ == "__main__":
    main()
