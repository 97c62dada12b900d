"""Record what a recipe learned, and write the curves and tables of docs/recipes.md from the records.

    python tools/recipe_curves.py record NAME MODEL RUN [RUN ...]
    python tools/recipe_curves.py families NAME EVAL_FOLDER
    python tools/recipe_curves.py draw

`record` evaluates MODEL and the newest checkpoint of each run on held-out prompts of the last run, and writes
docs/recipes/NAME.json. `families` records the result of `lucidrl eval ... --by name`. `draw` writes
docs/images/recipe-NAME.svg for each record with runs, and the tables of all records into the page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from lucidrl.recipes.evaluate import EvalResult

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "recipes.md"
RECORDS = ROOT / "docs" / "recipes"
IMAGES = ROOT / "docs" / "images"
SAMPLES = 4
"""Samples per prompt, in addition to a greedy completion."""
NUM_PROMPTS = 400
"""Most held-out prompts that are evaluated."""
BACKGROUND, TEXT, TRAINING, HELD_OUT = "#f4f8f8", "#10282d", "#90a4ae", "#00796b"


def record(name: str, model: str, runs: Sequence[Path], samples: int = SAMPLES) -> Path:
    """Evaluate the models of a recipe and write its record; return the file.

    Args:
        samples: samples per prompt, in addition to a greedy completion; 0 evaluates greedily only.
    """
    curves = [run_record(run) for run in runs]
    names = ["before", *(f"after {run['algorithm'].upper()}" for run in curves)]
    evaluations = [_evaluated(model, runs, count) for count in (1, samples) if count]
    of_models = list(zip(*evaluations, strict=True))
    models = [
        _model_record(title, results, of_models[max(0, number - 1)])
        for number, (title, results) in enumerate(zip(names, of_models, strict=True))
    ]
    return _written({"recipe": name, "runs": curves, "models": models})


def _evaluated(model: str, runs: Sequence[Path], samples: int) -> list[EvalResult]:
    """Evaluate the model and each run, with the prompts and the sampling of the last run."""
    from lucidrl.recipes.evaluate import evaluate

    settings = [f"validation.num_prompts={NUM_PROMPTS}"]
    last = evaluate(runs[-1], settings=settings, samples=samples).result
    others = [evaluate(runs[-1], source, settings=settings, samples=samples) for source in (model, *runs[:-1])]
    return [*(report.results[1] for report in others), last]


def _model_record(title: str, results: Sequence[EvalResult], before: Sequence[EvalResult]) -> dict[str, Any]:
    """The estimates of a model and its gains over the one before it; `results` are the greedy and the sampled one."""
    from lucidrl.algorithms.estimates import compare

    estimates, gains = {}, {}
    for result, first in zip(results, before, strict=True):
        k = result.samples_per_prompt
        names = ["accuracy"] if k == 1 else [f"avg_at_{k}", f"pass_at_{k}"]
        estimates |= {_title(name): asdict(result.estimates[name]) for name in names}
        if result is not first:
            gains[_title(names[0])] = compare(names[0], first.values[names[0]], result.values[names[0]]).to_json()
    metrics = results[0].metrics
    return {
        "name": title,
        "num_prompts": results[0].num_prompts,
        "estimates": estimates,
        "gains": gains,
        "readable": metrics.get("answered", metrics.get("boxed")),
        "answer_tokens": metrics["answer_tokens"],
    }


def record_families(name: str, folder: Path) -> Path:
    """Write a record of an evaluation that was split by the name of the family; return the file."""
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    k = result["samples_per_prompt"]
    families = {
        family: {_title(key): estimates[key] for key in (f"avg_at_{k}", f"pass_at_{k}")}
        for family, estimates in sorted(result["by"].items(), key=lambda item: -item[1][f"pass_at_{k}"]["value"])
    }
    return _written({"recipe": name, "runs": [], "families": families})


def run_record(run: Path) -> dict[str, Any]:
    """The curves and the duration of a run, from the files in its folder."""
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    by_step = {
        key: {} for key in ("train/reward", "train/loss", "time/step_s", "validation/accuracy", "validation/reward")
    }
    for line in lines:
        for key, values in by_step.items():
            if key in line:
                values[line["step"]] = line[key]  # a resumed run repeats steps; the later line counts
    held_out = "accuracy" if by_step["validation/accuracy"] else "reward"
    algorithm = next(name for name in ("grpo", "sft") if name in config)
    return {
        "algorithm": algorithm,
        "steps": max(by_step["time/step_s"]),
        "training_s": sum(by_step["time/step_s"].values()),
        "curve": "reward" if algorithm == "grpo" else "loss",
        "training": list(by_step["train/reward" if algorithm == "grpo" else "train/loss"].items()),
        "held_out": held_out,
        "validation": list(by_step[f"validation/{held_out}"].items()),
    }


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw the curves of a record, one panel per run."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "recipe", "font.family": "sans-serif"})
    from matplotlib import pyplot

    runs = content["runs"]
    figure, panels = pyplot.subplots(
        1,
        len(runs),
        figsize=(7.5 if len(runs) > 1 else 6, 2.8),
        facecolor=BACKGROUND,
        squeeze=False,
        layout="constrained",
    )
    for panel, run in zip(panels[0], runs, strict=True):
        panel.set_facecolor(BACKGROUND)
        steps, values = zip(*run["training"], strict=True)
        panel.plot(steps, values, color=TRAINING, linewidth=1, label=f"training {run['curve']}")
        if run["validation"]:
            steps, values = zip(*run["validation"], strict=True)
            panel.plot(
                steps, values, "o-", color=HELD_OUT, linewidth=2, markersize=4, label=f"held-out {run['held_out']}"
            )
        panel.set_ylim(bottom=0)
        panel.set_xlabel(f"step of lucidrl {run['algorithm']}", color=TEXT)
        panel.tick_params(colors=TEXT)
        panel.legend(frameon=False, labelcolor=TEXT, fontsize=9)
        for side, spine in panel.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(TEXT)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Title": f"Curves of the recipe {content['recipe']}"})
    pyplot.close(figure)


def table(content: dict[str, Any]) -> str:
    """The results of a record in Markdown."""
    if "families" in content:
        rows = [[f"`{name}`", *map(_interval, found.values())] for name, found in content["families"].items()]
        return _markdown(["family", *next(iter(content["families"].values()))], rows)
    durations = ", then ".join(
        f"{run['steps']} steps of {run['algorithm']} in {run['training_s'] / 60:.1f} minutes" for run in content["runs"]
    )
    first, *_, last = content["models"]
    columns = ["model", *first["estimates"], "readable", *(f"gain in {name}" for name in last["gains"])]
    rows = []
    for model in content["models"]:
        gains = [_interval(gain["difference"], "+") for gain in model["gains"].values()] or [""] * len(last["gains"])
        readable = "" if model["readable"] is None else f"{model['readable']:.0%}"
        rows.append([model["name"], *map(_interval, model["estimates"].values()), readable, *gains])
    return f"{durations}; {first['num_prompts']} held-out prompts.\n\n{_markdown(columns, rows)}"


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _title(name: str) -> str:
    return "greedy accuracy" if name == "accuracy" else name.replace("_at_", "@")


def page_with_tables(text: str, records: list[dict[str, Any]]) -> str:
    """The page with the table of each record between `<!-- NAME -->` and `<!-- end -->`."""
    for content in records:
        start, end = f"<!-- {content['recipe']} -->\n\n", "\n<!-- end -->"
        before, found, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise SystemExit(f"{PAGE.name} has no place for the table of {content['recipe']}; write {start}{end}")
        text = f"{before}{start}{table(content)}\n{end}{after}"
    return text


def records() -> list[dict[str, Any]]:
    """All records, by name."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDS.glob("*.json"))]


def _interval(estimate: dict[str, float], sign: str = "") -> str:
    return f"{estimate['value']:{sign}.3f} [{estimate['low']:{sign}.3f}, {estimate['high']:{sign}.3f}]"


def _written(content: dict[str, Any]) -> Path:
    RECORDS.mkdir(exist_ok=True)
    path = RECORDS / f"{content['recipe']}.json"
    path.write_text(json.dumps(_rounded(content), indent=1) + "\n", encoding="utf-8")
    return path


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(element) for key, element in value.items()}
    return [_rounded(element) for element in value] if isinstance(value, list | tuple) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record")
    one.add_argument("name")
    one.add_argument("model")
    one.add_argument("runs", nargs="+", type=Path)
    one.add_argument("--samples", type=int, default=SAMPLES, help="per prompt; 0 evaluates greedily only")
    families = commands.add_parser("families")
    families.add_argument("name")
    families.add_argument("folder", type=Path)
    commands.add_parser("draw")
    options = parser.parse_args()
    if options.command == "record":
        print(record(options.name, options.model, options.runs, options.samples))
        return
    if options.command == "families":
        print(record_families(options.name, options.folder))
        return
    found = records()
    for content in found:
        if content["runs"]:
            draw(content, IMAGES / f"recipe-{content['recipe']}.svg")
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
