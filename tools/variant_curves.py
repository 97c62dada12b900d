"""Record how the variants of GRPO learn, and write the tables and curves of docs/algorithms.md.

    python tools/variant_curves.py record VARIANT RUN
    python tools/variant_curves.py draw

`record` writes docs/variants/VARIANT.json from the run's folder. `draw` writes docs/images/variants.svg from all
records, and the tables of settings and results into the page.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from recipe_curves import BACKGROUND, HELD_OUT, TEXT, TRAINING, run_record

from lucidrl.algorithms.variants import VARIANTS, Variant

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "algorithms.md"
RECORDS = ROOT / "docs" / "variants"
IMAGE = ROOT / "docs" / "images" / "variants.svg"
LAST = 20
"""Steps in the mean of the last training rewards."""


def record(variant: Variant, run: Path) -> Path:
    """Write the record of a variant from its run; return the file."""
    content = run_record(run)
    RECORDS.mkdir(exist_ok=True)
    path = RECORDS / f"{variant}.json"
    path.write_text(json.dumps(_rounded(content)) + "\n", encoding="utf-8")
    return path


def records() -> dict[Variant, dict[str, Any]]:
    """All records, in the order of the variants."""
    paths = {variant: RECORDS / f"{variant}.json" for variant in Variant}
    return {variant: json.loads(path.read_text(encoding="utf-8")) for variant, path in paths.items() if path.is_file()}


def settings_table() -> str:
    """The settings of all variants in Markdown; those of `grpo` that a variant changes are bold."""
    lines = [
        f"| setting | {' | '.join(f'`{variant}`' for variant in VARIANTS)} |",
        "| --- |" + " --- |" * len(VARIANTS),
    ]
    for key, first in VARIANTS[Variant.GRPO].items():
        cells = [_cell(values[key], is_changed=values[key] != first) for values in VARIANTS.values()]
        lines.append(f"| `grpo.{key}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(value: Any, *, is_changed: bool) -> str:
    text = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else value
    return f"**{text}**" if is_changed else text


def results_table(found: dict[Variant, dict[str, Any]]) -> str:
    """The results of all records in Markdown."""
    lines = [
        f"| variant | reward in the first {LAST} steps | in the last {LAST} steps | held-out accuracy before | after |",
        "| --- | --- | --- | --- | --- |",
    ]
    for variant, content in found.items():
        rewards = [reward for _, reward in content["training"]]
        means = [sum(part) / len(part) for part in (rewards[:LAST], rewards[-LAST:])]
        ends = [content["validation"][index][1] for index in (0, -1)]
        lines.append(f"| `{variant}` | {' | '.join(f'{value:.3f}' for value in (*means, *ends))} |")
    return "\n".join(lines)


def page_with_tables(text: str, found: dict[Variant, dict[str, Any]]) -> str:
    """The page with its tables between `<!-- settings -->` or `<!-- results -->` and `<!-- end -->`."""
    for name, table in (("settings", settings_table()), ("results", results_table(found))):
        start, end = f"<!-- {name} -->", "<!-- end -->"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        text = f"{before}{start}\n\n{table}\n\n{end}{after}"
    return text


def draw(found: dict[Variant, dict[str, Any]], path: Path) -> None:
    """Draw the curves of all variants, one panel each."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "variants", "font.family": "sans-serif"})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2, 4, figsize=(9, 4.4), facecolor=BACKGROUND, sharex=True, sharey=True, layout="constrained"
    )
    panels = list(axes.flat)
    for panel, (variant, content) in zip(panels, found.items(), strict=False):
        panel.plot(*zip(*content["training"], strict=True), color=TRAINING, linewidth=1, label="training reward")
        held_out = zip(*content["validation"], strict=True)
        panel.plot(*held_out, "o-", color=HELD_OUT, linewidth=2, markersize=4, label=f"held-out {content['held_out']}")
        panel.set_title(variant, color=TEXT, fontsize=10)
        panel.set_ylim(0, 1)
    handles, labels = panels[0].get_legend_handles_labels()
    for panel in panels:
        panel.set_facecolor(BACKGROUND)
        panel.tick_params(colors=TEXT)
        for side, spine in panel.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(TEXT)
    for panel in panels[len(found) :]:
        panel.set_axis_off()
    panels[-1].legend(handles, labels, frameon=False, labelcolor=TEXT, fontsize=9, loc="center")
    figure.supxlabel("step", color=TEXT, fontsize=10)
    figure.savefig(path, metadata={"Date": None, "Title": "Rewards of the variants on the demo"})
    pyplot.close(figure)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(element) for element in value]
    return round(value, 4) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record")
    one.add_argument("variant", type=Variant)
    one.add_argument("run", type=Path)
    commands.add_parser("draw")
    options = parser.parse_args()
    if options.command == "record":
        print(record(options.variant, options.run))
        return
    found = records()
    draw(found, IMAGE)
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
