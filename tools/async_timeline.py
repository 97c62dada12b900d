"""Draw what generators, environment and trainer of a recorded run did at the same time, for docs/async.md.

Record a run of `lucidrl grpo` with `profile.steps`, then

    python tools/async_timeline.py RUN_FOLDER docs/images/async-timeline.svg

Several runs are drawn one below the other.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Spans = list[tuple[float, float]]
"""Start and end in seconds."""

ROWS = {"generation": "generator", "environment": "environment", "train": "trainer", "refit": "refit"}
COLORS = {"generation": "#4c78a8", "environment": "#f58518", "train": "#54a24b", "refit": "#e45756"}


def spans_of(folder: Path) -> dict[str, Spans]:
    """Spans of generation, environment, training and refit, in the seconds since the first of them."""
    with gzip.open(folder / "traces" / "timeline.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    found: dict[str, Spans] = {row: [] for row in ROWS}
    for event in events:
        if event.get("ph") == "X" and (row := row_of(event, names.get(event["pid"], ""))) is not None:
            start = event["ts"] / 1e6
            found[row].append((start, start + event["dur"] / 1e6))
    first = min(start for spans in found.values() for start, _ in spans)
    return {row: merged((start - first, end - first) for start, end in spans) for row, spans in found.items()}


def row_of(event: dict[str, Any], process: str) -> str | None:
    if event["name"] == "generate" and process.startswith("generation"):
        return "generation"
    # Policy and driver are one process if the policy has one rank.
    if event["name"] in ("environment", "train", "refit") and process.startswith(("driver", "policy")):
        return str(event["name"])
    return None


def merged(spans: Iterable[tuple[float, float]], gap_s: float = 0.01) -> Spans:
    """Join spans that overlap or nearly touch."""
    joined: Spans = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1] + gap_s:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, then the picture to write")
    parser.add_argument("--seconds", type=float, default=12.0, help="how much of each run is drawn")
    options = parser.parse_args()
    *runs, picture = options.runs
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "lucidrl"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(runs), 1, figsize=(9, 1.7 * len(runs)), sharex=True, squeeze=False)
    for axis, run in zip(axes[:, 0], runs, strict=True):
        for height, (row, spans) in enumerate(reversed(spans_of(run).items())):
            bars = [(start, end - start) for start, end in spans if start < options.seconds]
            axis.broken_barh(bars, (height - 0.4, 0.8), color=COLORS[row])
        axis.set_yticks(range(len(ROWS)), list(reversed(ROWS.values())))
        axis.set_title(run.name, loc="left", fontsize=10)
        axis.set_xlim(0, options.seconds)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None, "Title": "Timeline of a run"})


if __name__ == "__main__":
    main()
