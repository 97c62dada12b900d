"""Terminal output: log lines and samples of the model's text."""

from __future__ import annotations

import logging
import math
import statistics
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lucidrl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.panel import Panel

log = logging.getLogger(__name__)

_rich_logging_configured = False

_MAX_TEXT_CHARS = 800
_MAX_MESSAGES = 20
_MAX_BINS = 10
_MAX_BAR_CHARS = 40
_ROLE_STYLES = {
    "system": "bold magenta",
    "user": "bold cyan",
    "assistant": "bold green",
    "environment": "bold yellow",
    "tool": "bold yellow",
}
# Categories of characters that a terminal does not show: control, format (zero width and writing direction), lone
# surrogate, line and paragraph separator.
_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def configure_rich_logging(level: str = "INFO", show_time: bool = True, show_path: bool = True) -> None:
    """Show log records of this process in the terminal with rich; later calls do nothing. A closed terminal is ignored.

    Args:
        level: lowest level shown, such as "DEBUG" or "WARNING".
        show_time: whether each line has its time.
        show_path: whether each line has its source file and line.
    """
    global _rich_logging_configured
    levels = logging.getLevelNamesMapping()
    if level.upper() not in levels:
        raise ConfigError(f"log level {level!r} is not known; use one of {', '.join(levels)}")
    if _rich_logging_configured:
        return
    from rich.console import Console
    from rich.logging import RichHandler

    class LogConsole(Console):
        def on_broken_pipe(self) -> None:
            """Continue; rich would exit the program."""

    root = logging.getLogger()
    # A plain handler on the terminal would print every record twice; keep handlers on files.
    for handler in [handler for handler in root.handlers if type(handler) is logging.StreamHandler]:
        root.removeHandler(handler)
    rich_handler = RichHandler(levels[level.upper()], LogConsole(stderr=True), show_time=show_time, show_path=show_path)
    rich_handler.setFormatter(logging.Formatter("%(message)s", datefmt="[%X]"))
    root.addHandler(rich_handler)
    root.setLevel(levels[level.upper()])
    _rich_logging_configured = True


def print_message_log_samples(
    message_logs: Sequence[Sequence[Mapping[str, Any]]], rewards: Sequence[float], num_samples: int = 5, step: int = 0
) -> None:
    """Print some samples, including the best and the worst, and the distribution of all rewards.

    Prints text literally, including markup and escape codes, and shortens long text. A closed terminal is ignored.

    Args:
        message_logs: samples, each a list of messages with `role` and `content`.
        rewards: one reward per sample.
        num_samples: number of samples to print.
        step: step for the headings.
    """
    from rich.console import Console

    numbers = _numbers(rewards)
    if len(message_logs) != len(numbers):
        raise DataError(f"{len(message_logs)} message logs came with {len(numbers)} rewards; pass one per sample")
    console = Console(markup=False, highlight=False, emoji=False)
    shown = _spread_by_reward(numbers, num_samples)
    # Captured and written here: rich would exit the program at a closed terminal.
    with console.capture() as capture:
        console.print(f"Step {step}: {_statistics(numbers)}")
        for line in _histogram(numbers, console.width):
            console.print(line, no_wrap=True)
        for index in shown:
            title = f"{_rank(index, shown, numbers)}, reward {numbers[index]:.4g}, step {step}"
            console.print(_panel(message_logs[index], title))
    try:
        # Question marks replace what the terminal cannot encode. To sys.stdout, which a progress bar redirects, and not
        # to `console.file`.
        sys.stdout.write(capture.get().encode(console.encoding, "replace").decode(console.encoding))
        sys.stdout.flush()
    except (OSError, ValueError) as error:  # ValueError: it is closed
        log.warning("the samples of step %d cannot be printed: %r", step, error)


def _numbers(rewards: Any) -> list[float]:
    values = rewards.tolist() if hasattr(rewards, "tolist") else rewards
    try:
        return [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise DataError(f"rewards must be one number per sample: {error}") from error


def _spread_by_reward(rewards: Sequence[float], num_samples: int) -> list[int]:
    """Indices of samples from best to worst, evenly spread over the ranking; NaN ranks last."""
    ranked = sorted(
        range(len(rewards)), key=lambda i: -math.inf if math.isnan(rewards[i]) else rewards[i], reverse=True
    )
    count = min(num_samples, len(ranked))
    if count <= 1:
        return ranked[: max(count, 0)]
    return [ranked[k * (len(ranked) - 1) // (count - 1)] for k in range(count)]


def _rank(index: int, shown: Sequence[int], rewards: Sequence[float]) -> str:
    """Name of a printed sample; the first is the best of all, the last the worst."""
    if len(set(rewards)) > 1:
        if index == shown[0]:
            return f"best sample {index}"
        if index == shown[-1]:
            return f"worst sample {index}"
    return f"sample {index}"


def _statistics(rewards: Sequence[float]) -> str:
    finite = [reward for reward in rewards if math.isfinite(reward)]
    text = f"{len(rewards)} samples"
    if finite:
        # Exact sums, which do not overflow.
        text += f", reward mean {statistics.mean(finite):.4g}, std {statistics.pstdev(finite):.4g}"
        text += f", min {min(finite):.4g}, max {max(finite):.4g}"
    if len(finite) < len(rewards):
        text += f", {len(rewards) - len(finite)} not finite"
    return text


def _histogram(rewards: Sequence[float], width: int) -> list[str]:
    """One line per bin of equal width: its start, a bar and the count; no lines for equal rewards."""
    # Half of each reward: differences cannot overflow.
    halves = [reward / 2 for reward in rewards if math.isfinite(reward)]
    lowest, span = min(halves, default=0.0), max(halves, default=0.0) - min(halves, default=0.0)
    if span == 0:
        return []
    counts = [0] * min(_MAX_BINS, len(set(halves)))
    for half in halves:
        counts[min(int((half - lowest) / span * len(counts)), len(counts) - 1)] += 1
    starts = [f"{2 * (lowest + span * (k / len(counts))):.4g}" for k in range(len(counts))]
    label_chars = max(map(len, starts))
    bar_chars = max(1, min(_MAX_BAR_CHARS, width - label_chars - len(str(max(counts))) - len("from   ")))
    return [
        f"from {start:<{label_chars}} {_bar(count / max(counts) * bar_chars)} {count}"
        for start, count in zip(starts, counts, strict=True)
    ]


def _bar(chars: float) -> str:
    """A bar in eighths of a character, visible unless empty."""
    eighths = math.ceil(chars * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _panel(messages: Sequence[Mapping[str, Any]], title: str) -> Panel:
    from rich.panel import Panel
    from rich.text import Text

    body = Text()
    left_out = len(messages) - _MAX_MESSAGES
    for index, message in enumerate(messages):
        if left_out <= 0 or not 0 <= index - _MAX_MESSAGES // 2 < left_out:
            role = message.get("role", "unknown")
            body.append(f"{_printable(role)}: ", style=_ROLE_STYLES.get(str(role), "bold"))
            body.append(_printable(_readable(message.get("content", ""))) + "\n")
        elif index == _MAX_MESSAGES // 2:
            body.append(f"… {left_out} messages …\n", style="dim")
    body.rstrip()
    return Panel(body, title=Text(title), title_align="left")


def _readable(content: Any) -> str:
    """The text of a message; for a list of parts, the texts, and the types of other parts."""
    if content is None:
        return ""
    if not isinstance(content, list | tuple):
        return str(content)
    return "\n".join(
        str(part.get("text", f"<{part.get('type', 'unknown part')}>")) if isinstance(part, Mapping) else str(part)
        for part in content
    )


def _printable(value: Any) -> str:
    text = str(value)
    if len(text) > _MAX_TEXT_CHARS:
        half = _MAX_TEXT_CHARS // 2
        text = f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"
    return visible(text, kept="\n\t")


def visible(text: str, kept: str = "") -> str:
    """The text with characters that a terminal does not show, or obeys, in a visible form.

    Args:
        kept: characters that stay as they are.
    """

    def shown(char: str) -> str:
        if char in kept or unicodedata.category(char) not in _INVISIBLE:
            return char
        return chr(0x2400 + ord(char)) if char < " " else f"\\u{ord(char):04x}"

    return text if text.isascii() and text.isprintable() else "".join(map(shown, text))
