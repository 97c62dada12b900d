"""What a person sees in the terminal: log lines and samples of the model's text."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lucidrl.errors import ConfigError, DataError
from lucidrl.utils.logger.values import printable

if TYPE_CHECKING:
    from rich.panel import Panel

_rich_logging_configured = False

_MAX_TEXT_CHARS = 800
# Shown instead of acted on by a terminal: control characters other than newline and tab, and those that reorder text.
_VISIBLE_CONTROLS = (
    {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
    | {0x7F: "\u2421"}
    | dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], "\ufffd")
)


def configure_rich_logging(level: str = "INFO", show_time: bool = True, show_path: bool = True) -> None:
    """Show log records of this process in the terminal with rich; the first call decides, later ones do nothing.

    Args:
        level: lowest level shown, such as "DEBUG" or "WARNING".
        show_time: whether each line has its time.
        show_path: whether each line has the file and line it comes from.
    """
    global _rich_logging_configured
    levels = logging.getLevelNamesMapping()
    if level.upper() not in levels:
        raise ConfigError(f"log level {level!r} is not known; use one of {', '.join(levels)}")
    if _rich_logging_configured:
        return
    from rich.console import Console
    from rich.logging import RichHandler

    root = logging.getLogger()
    # A plain handler on the terminal would print every record a second time; handlers on files are left alone.
    for handler in [handler for handler in root.handlers if type(handler) is logging.StreamHandler]:
        root.removeHandler(handler)
    rich_handler = RichHandler(console=Console(stderr=True), show_time=show_time, show_path=show_path)
    rich_handler.setFormatter(logging.Formatter("%(message)s", datefmt="[%X]"))
    root.addHandler(rich_handler)
    root.setLevel(levels[level.upper()])
    _rich_logging_configured = True


def print_message_log_samples(
    message_logs: Sequence[Sequence[Mapping[str, Any]]], rewards: Sequence[float], num_samples: int = 5, step: int = 0
) -> None:
    """Print some conversations, the best and the worst among them, and statistics of all rewards.

    Text is printed literally, whatever markup or escape codes it holds, and shortened where it is long.

    Args:
        message_logs: conversations, each a list of messages with `role` and `content`.
        rewards: one reward for each of them.
        num_samples: how many to print.
        step: step shown in the headings.
    """
    from rich.console import Console

    numbers = [float(reward) for reward in rewards]
    if len(message_logs) != len(numbers):
        raise DataError(f"{len(message_logs)} message logs came with {len(numbers)} rewards; give one reward for each")
    console = Console(markup=False, highlight=False, emoji=False)
    console.print(f"Step {step}: {_statistics(numbers)}")
    for index in _spread_by_reward(numbers, num_samples):
        console.print(_conversation(message_logs[index], f"step {step}, sample {index}, reward {numbers[index]:.4g}"))


def _spread_by_reward(rewards: Sequence[float], num_samples: int) -> list[int]:
    """Indices of samples from best to worst, evenly spread over the ranks; NaN ranks below everything."""
    ranked = sorted(
        range(len(rewards)), key=lambda i: -math.inf if math.isnan(rewards[i]) else rewards[i], reverse=True
    )
    count = min(num_samples, len(ranked))
    if count <= 1:
        return ranked[: max(count, 0)]
    return [ranked[k * (len(ranked) - 1) // (count - 1)] for k in range(count)]


def _statistics(rewards: Sequence[float]) -> str:
    finite = [reward for reward in rewards if math.isfinite(reward)]
    text = f"{len(rewards)} samples"
    if finite:
        mean, deviation = statistics.fmean(finite), statistics.pstdev(finite)
        text += f", reward mean {mean:.4g}, std {deviation:.4g}, min {min(finite):.4g}, max {max(finite):.4g}"
    if len(finite) < len(rewards):
        text += f", {len(rewards) - len(finite)} not finite"
    return text


def _conversation(messages: Sequence[Mapping[str, Any]], title: str) -> Panel:
    from rich.panel import Panel
    from rich.text import Text

    body = Text()
    for message in messages:
        body.append(f"{_harmless(message.get('role', 'unknown'))}: ", style="bold")
        body.append(_harmless(message.get("content", "")) + "\n")
    body.rstrip()
    return Panel(body, title=Text(title), title_align="left")


def _harmless(value: Any) -> str:
    text = printable(str(value))
    if len(text) > _MAX_TEXT_CHARS:
        half = _MAX_TEXT_CHARS // 2
        text = f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"
    return text.translate(_VISIBLE_CONTROLS)
