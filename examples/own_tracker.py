"""A tracker of your own: two methods, and the logger feeds it like all others.

python examples/own_tracker.py
"""

from collections.abc import Mapping
from typing import Any

from lucidrl.utils.logger import Logger, LoggerInterface


class PrintingTracker(LoggerInterface):
    """Prints its records: names are full, values are numbers or lists of numbers, secrets are redacted.

    It may be slow and may raise: the logger calls it in a separate thread, and the run only loses records.
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
        logger.log_hyperparams({"lr": 1e-4, "scorer": {"api_key": "sk-123"}})
        for step in range(1, 4):
            logger.log_metrics({"reward": step / 4, "tokens": {"mean": 8.5}}, step, prefix="train")


if __name__ == "__main__":
    main()
