"""The demo: held-out accuracy before and after training, and the training time."""

from __future__ import annotations

import tempfile
from pathlib import Path

from harness import Claim, arguments, read_metrics, report, run_grpo


def main() -> None:
    options = arguments(__doc__)
    with tempfile.TemporaryDirectory() as name:
        folder = run_grpo(Path(name), ["--preset", "demo", f"num_threads={options.threads}"])
        accuracy = read_metrics(folder, "validation/accuracy")
        seconds = sum(read_metrics(folder, "time/step_s"))
    print("held-out accuracy:", ", ".join(f"{value:.3f}" for value in accuracy))
    report(
        [
            Claim("demo: held-out accuracy before", 0.50, accuracy[0], at_most=True, unit=""),
            Claim("demo: held-out accuracy after", 0.85, accuracy[-1], unit=""),
            Claim("demo: training time", 180, seconds, at_most=True, unit="s"),
        ],
        options.json,
    )


if __name__ == "__main__":
    main()
