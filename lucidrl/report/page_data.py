"""Everything that the page shows of its runs, as plain values for its JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import orjson

from lucidrl import __version__
from lucidrl.report.conclusion import comparison, conclusion
from lucidrl.report.curves import MOST_POINTS, Curves, chart_groups, curves_of, machine_curves
from lucidrl.report.phases import opportunities, step_phases
from lucidrl.report.run_data import RunData, RunState
from lucidrl.report.sample_pages import ShownSamples, shown_samples
from lucidrl.report.timeline_picture import timeline_picture
from lucidrl.utils.logger.values import flatten_dict
from lucidrl.utils.run_folder import ENVIRONMENT_NAME

_TONES = {RunState.FINISHED: "good", RunState.RUNNING: "warn", RunState.STOPPED: "warn", RunState.CRASHED: "bad"}
_RESTARTS = {
    "train/replaced_generators": "generator replicas were restarted",
    "train/replaced_env_workers": "environment workers were restarted",
    "train/skipped_optimizer_steps": "optimizer steps were skipped for NaN or infinite gradients",
}
MOST_WARNINGS = 500
_NO_SAMPLES = {
    "grpo": "No samples are recorded yet.",
    "distill": "No samples are recorded yet.",
    "dpo": "DPO runs learn written completions and record no samples.",
    "reward_model": "Runs of reward models score written completions and record no samples.",
    "sft": "SFT runs learn written examples and record samples only when they validate completions.",
    "ppo": "Runs of control policies record no samples; `lucidrl play RUN` shows episodes.",
}


def page_data(runs: Sequence[RunData]) -> dict[str, Any]:
    """Return the content of the page for one run, or for several runs to compare."""
    curves = [curves_of(run) for run in runs]
    samples = [shown_samples(run.samples, len(runs)) for run in runs]
    charts, constant = chart_groups(curves)
    names = _distinct_names(runs)
    whose = [f"{name}: " if len(runs) > 1 else "" for name in names]
    thinning = [f"{of_run}{found.rule}." for of_run, found in zip(whose, samples, strict=True) if found.rule]
    if num_thinned := sum(run.num_thinned for run in curves):
        rule = (
            f"Curves have at most {MOST_POINTS:,} points: of longer ones ({num_thinned}), the page keeps the smallest"
        )
        thinning.insert(0, f"{rule} and the largest value of each interval.")
    return {
        "version": __version__,
        "written": time.time(),
        "comparison": comparison(runs) if len(runs) > 1 else None,
        "thinning": thinning,
        "charts": charts,
        "constant": constant,
        "no_samples": _NO_SAMPLES.get(runs[0].algorithm or "", "No samples are recorded."),
        "runs": [_run(*parts) for parts in zip(runs, names, curves, samples, strict=True)],
    }


def page_title(runs: Sequence[RunData]) -> str:
    """Title of the page in the browser."""
    return f"{', '.join(_distinct_names(runs))} · Lucid RL"


def _distinct_names(runs: Sequence[RunData]) -> list[str]:
    """The names of the runs; if two have the same name, with the folders above them."""
    for depth in range(1, 5):
        names = ["/".join(run.folder.resolve().parts[-depth:]) for run in runs]
        if len(set(names)) == len(names):
            return names
    return [str(run.folder.resolve()) for run in runs]


def _run(run: RunData, name: str, curves: Curves, samples: ShownSamples) -> dict[str, Any]:
    starts, phases = environment_starts(run), step_phases(run)
    return {
        "name": name,
        "title": _title(run),
        "folder": str(run.folder),
        "state": str(run.state),
        "tone": _TONES.get(run.state, "warn"),
        "conclusion": conclusion(run),
        "facts": _facts(run),
        "notes": [*_state_notes(run), *(f"{problem}." for problem in (*run.problems, *samples.problems))],
        "axes": curves.axes,
        "series": curves.series,
        "machine": machine_curves(run),
        "phases": phases,
        "opportunities": opportunities(run),
        "timeline": timeline_picture(run, phases["names"] if phases else ()),
        "samples": samples.samples,
        "config": {key: _shown(value) for key, value in flatten_dict(run.config).items()},
        "environment": {key: _shown(value) for key, value in flatten_dict(starts[-1]).items()} if starts else {},
        "warnings": [
            {"step": warning.step, "name": warning.name, "message": warning.message}
            for warning in run.warnings[-MOST_WARNINGS:]
        ],
        "starts": [
            {"start": session.start, "command": session.command, "end": _end(run, number)}
            for number, session in enumerate(run.sessions)
        ],
        "restarts": _restarts(run, starts),
    }


def _title(run: RunData) -> str:
    algorithm = (run.algorithm or "run").upper().replace("_", " ")
    if run.algorithm == "ppo":
        return f"{algorithm}: policy and critic on {run.setting('env', 'name')}"
    rewards = run.setting("reward")
    task = run.setting("data", "file") or run.setting("env", "name")
    reward = (
        f" with {', '.join(str(part.get('name')) for part in rewards if isinstance(part, Mapping))}" if rewards else ""
    )
    return f"{algorithm}: {run.model or 'unknown model'} on {task or 'unknown data'}{reward}"


def _facts(run: RunData) -> list[tuple[str, str]]:
    total = "" if run.max_steps is None else f" of {run.max_steps:,}"
    facts = [("steps", f"{run.last_step:,}{total}")]
    if run.best is not None:
        facts.append((f"best {run.best.name}", f"{run.best.value:.4g} at step {run.best.step}"))
    if run.duration_s is not None:
        facts.append(("duration", str(timedelta(seconds=round(run.duration_s)))))
    for name, words in (
        ("train/tokens_per_s", "tokens/s"),
        ("train/frames_per_s", "frames/s"),
        ("time/step_s", "s/step"),
    ):
        values = sorted(run.series(name).values)
        if values:
            facts.append((f"median {words}", f"{values[len(values) // 2]:,.4g}"))
    overhead = run.series("observe/overhead_pct").values
    if overhead:
        facts.append(("cost of observing", f"{sum(overhead) / len(overhead):.2f} % of the time"))
    facts.append(("warnings", f"{len(run.warnings):,}"))
    facts.append(("newest checkpoint", f"step {run.checkpoints[-1].step}" if run.checkpoints else "none"))
    facts.append(("size on disk", f"{run.size_bytes / 2**20:,.1f} MiB"))
    return facts


def _state_notes(run: RunData) -> list[str]:
    if run.state is RunState.RUNNING:
        return ["The run is going on: this page shows what it had recorded when the page was written."]
    if run.state is RunState.CRASHED:
        saved = f"step {run.checkpoints[-1].step}" if run.checkpoints else "no step"
        return [f"The run crashed; its newest checkpoint has {saved}. Its files may lack the last moments before."]
    if run.state is RunState.EMPTY:
        return ["The run recorded nothing: no step was completed."]
    return []


def _end(run: RunData, number: int) -> str:
    """How a start of the run ended."""
    session = run.sessions[number]
    if session.end is None:
        is_running = number == len(run.sessions) - 1 and run.state is RunState.RUNNING
        return "running" if is_running else "driver was killed"
    return session.error or ("interrupted" if session.is_interrupted else "completed")


def environment_starts(run: RunData) -> list[dict[str, Any]]:
    """What `environment.json` says about each start of the run, oldest first; none if it cannot be read."""
    try:
        starts = orjson.loads((run.folder / ENVIRONMENT_NAME).read_bytes())["starts"]
        return [start for start in starts if isinstance(start, dict)]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def _restarts(run: RunData, starts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences about restarts within the run, and about changes between its starts."""
    found = []
    for name, words in _RESTARTS.items():
        if count := int(sum(run.series(name).values)):
            found.append(f"{count:,} {words}.")
    for before, after in pairwise(starts):
        first, second = flatten_dict(before), flatten_dict(after)
        changed = [key for key in first.keys() | second.keys() if first.get(key) != second.get(key)]
        shown = [
            f"{key}: {first.get(key)} -> {second.get(key)}"
            for key in sorted(changed)
            if key not in ("started", "command")
        ]
        if shown:
            found.append(f"The environment changed before the start at {after.get('started')}: {'; '.join(shown)}.")
    return found


def _shown(value: Any) -> str:
    """A value of settings or environment as text."""
    if value == []:
        return "none"
    return value if isinstance(value, str) else orjson.dumps(value, default=str).decode()
