"""What a timeline lacks: operator traces, processes and steps that were requested and are not there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import yaml

from lucidrl.checkpoint.config import CONFIG_NAME
from lucidrl.errors import ConfigError
from lucidrl.report.trace_reading import TraceHeader
from lucidrl.utils.nsys import StepRange
from lucidrl.utils.run_folder import METRICS_NAME

_STEP = re.compile(rb'\{"step":(\d+),')


def missing_operators(folder: Path, headers: Iterable[TraceHeader]) -> Iterator[str]:
    """Operator traces that belong to files of spans and are not there."""
    for header in headers:
        if header.operators is not None and not (folder / header.operators).exists():
            yield (
                f"{header.operators} is missing, with the operators of {header.process}: the process was killed, its "
                "disk was full, or it still records"
            )


def missing_processes(expected: Sequence[tuple[str, int, str | None]], found: set[tuple[str, int]]) -> Iterator[str]:
    """Processes that recorded, by name, process id and node, without a file in the traces folder."""
    for process, pid, node in dict.fromkeys(expected):
        if (process, pid) not in found:
            where = f"process {pid}" if node is None else f"process {pid} on node {node}"
            yield (
                f"{process} ({where}) recorded, but has no trace here; if its node does not see the run folder, copy "
                "the traces from the same path on that node"
            )


def missing_steps(run: Path, has_traces: bool) -> Iterator[str]:
    """Steps of `profile.steps` that the run has not recorded."""
    steps, last = _requested_steps(run), _last_step(run)
    if steps is None:
        if not has_traces:
            yield "no process has recorded"
        return
    if steps.start > last:
        yield f"steps {steps} are not recorded: the run ended after step {last}"
    elif steps.stop > last + 1:
        yield f"steps {last + 1}:{steps.stop} are not recorded completely: the run ended after step {last}"
    elif not has_traces:
        yield f"no process has recorded steps {steps}: the run had completed them before it was resumed"


def _requested_steps(run: Path) -> StepRange | None:
    try:
        settings = yaml.safe_load((run / CONFIG_NAME).read_text(encoding="utf-8"))
        return StepRange.parse(settings["profile"]["steps"])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, LookupError, TypeError, ConfigError):
        return None


def _last_step(run: Path) -> int:
    """The last step with metrics of training; 0 if there is none."""
    last = 0
    try:
        with (run / METRICS_NAME).open("rb") as file:
            for line in file:
                if (found := _STEP.match(line)) and b'"time/step_s"' in line:
                    last = max(last, int(found[1]))
    except OSError:
        pass
    return last
