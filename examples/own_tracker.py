"""A tracker of your own: two methods, and the logger feeds it beside all others.

python examples/own_tracker.py
"""

from collections.abc import Mapping
from typing import Any

from lucidrl.utils.logger import Logger, LoggerInterface


class PrintingTracker(LoggerInterface):
    """Prints what it gets: names are full, values are plain numbers or lists of them, secrets are gone.

    It may be slow and may raise. It is called in a thread of its own, and costs the run nothing but lost records.
    """

    def log_metrics(
        self, metrics: dict[str, Any], step: int, prefix: str | None = "", step_metric: str | None = None
    ) -> None:
        shown = {name: value for name, value in metrics.items() if not name.startswith("logger/")}
        print(f"step {step}: {shown}")

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        print(f"settings: {params}")


def main(log_dir: str = "runs/own_tracker") -> None:
    with Logger({"log_dir": log_dir}, extra_backends=[PrintingTracker()]) as logger:
        logger.log_hyperparams({"lr": 1e-4, "judge": {"api_key": "sk-123"}})
        for step in range(1, 4):
            logger.log_metrics({"reward": step / 4, "tokens": {"mean": 8.5}}, step, prefix="train")


if __name__ == "__main__":
    main()
