"""Run folders for tests of the page, written by the parts that write those of real runs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lucidrl.recipes.environment import record_environment
from lucidrl.recipes.folder import driver_log
from lucidrl.recipes.settings import new_settings
from lucidrl.report.page import report_page
from lucidrl.report.run_data import read_run
from lucidrl.utils.logger import Logger

SCRIPT = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><!--"
RIGHT_TO_LEFT = "\u202e\u0645\u0631\u062d\u0628\u0627 123"  # an override of the direction, then "hello" in Arabic


def page_run(
    folder: Path,
    num_steps: int = 30,
    *settings: str,
    algorithm: str = "grpo",
    samples: Mapping[int, Sequence[str]] | None = None,
    error: BaseException | None = None,
    metrics: Mapping[str, float] | None = None,
) -> Path:
    """A run whose reward grows from 0 to 1.

    Args:
        settings: overrides of the settings.
        samples: completions of the samples by step; two of them are a group.
        error: what the run failed with.
        metrics: further metrics of every step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = new_settings(algorithm, overrides=[f"{algorithm}.max_steps=30", *settings])
    (folder / "config.yaml").write_text(config.to_yaml())
    with suppress(type(error) if error is not None else ()), driver_log(folder):
        record_environment(folder)
        with Logger({"log_dir": str(folder)}) as logger:
            for step in range(1, num_steps + 1):
                timings = {"step_s": 2.0, "train_s": 1.2, "generate_s": 0.5, "rollout_s": 0.6, "forward_s": 0.4}
                reward = step / num_steps
                train = {"reward": reward, "loss": 1 - reward, "tokens_per_s": 100.0 * step, **(metrics or {})}
                logger.log_metrics({"train": train, "time": timings}, step)
            logger.log_metrics({"accuracy": 0.2}, 0, prefix="validation")
            logger.log_metrics({"accuracy": 0.8}, num_steps, prefix="validation")
            for step, completions in (samples or {}).items():
                logger.log_samples(sample_columns(completions), step, "step")
            logger.log_warning("truncated", "40% of completions were truncated", 3)
        if error is not None:
            raise error
    return folder


def sample_columns(completions: Sequence[str]) -> dict[str, list[Any]]:
    """Samples with one token per character; every second one has reward 1."""
    return {
        "sample": [f"prompt {number // 2}#{number % 2}" for number in range(len(completions))],
        "group": [number // 2 for number in range(len(completions))],
        "messages": [
            [{"role": "user", "content": f"question {number // 2}"}, completion_message(text)]
            for number, text in enumerate(completions)
        ],
        "reward": [float(number % 2) for number in range(len(completions))],
        "policy_version": [0] * len(completions),
        "truncated": [False] * len(completions),
        "dropped": [False] * len(completions),
    }


def completion_message(text: str) -> dict[str, Any]:
    logprobs = [-0.01 * (index % 10) ** 2 for index in range(len(text))]
    return {
        "role": "assistant",
        "content": text,
        "tokens": list(text),
        "generation_logprobs": logprobs,
        "training_logprobs": [value - 0.3 * (index == 1) for index, value in enumerate(logprobs)],
    }


def data_of(page: str) -> dict[str, Any]:
    """The data inside a page."""
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert embedded is not None
    return json.loads(embedded[1])


def page_of(*folders: Path) -> str:
    return report_page([read_run(folder) for folder in folders]).decode()


def first_run(*folders: Path) -> dict[str, Any]:
    """What the page says about the first of its runs."""
    return data_of(page_of(*folders))["runs"][0]
