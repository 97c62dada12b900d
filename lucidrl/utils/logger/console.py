"""What a person sees in the terminal: log lines and samples of the model's text."""

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
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

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
# Categories of characters that a terminal acts on instead of showing them: control, format (zero width and writing
# direction), lone surrogate, line and paragraph separator.
_ACTED_ON = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def configure_rich_logging(level: str = "INFO", show_time: bool = True, show_path: bool = True) -> None:
    """Show log records of this process in the terminal with rich; the first call decides, later ones do nothing.

    A terminal that is gone is no error.

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
    from rich.logging import RichHandler

    root = logging.getLogger()
    # A plain handler on the terminal would print every record a second time; handlers on files are left alone.
    for handler in [handler for handler in root.handlers if type(handler) is logging.StreamHandler]:
        root.removeHandler(handler)
    rich_handler = RichHandler(levels[level.upper()], _log_console(), show_time=show_time, show_path=show_path)
    rich_handler.setFormatter(logging.Formatter("%(message)s", datefmt="[%X]"))
    root.addHandler(rich_handler)
    root.setLevel(levels[level.upper()])
    _rich_logging_configured = True


def _log_console() -> Console:
    from rich.console import Console

    class LogConsole(Console):
        def on_broken_pipe(self) -> None:
            """Go on; rich would end the program, but a run matters more than who reads of it."""

    return LogConsole(stderr=True)


def print_message_log_samples(
    message_logs: Sequence[Sequence[Mapping[str, Any]]], rewards: Sequence[float], num_samples: int = 5, step: int = 0
) -> None:
    """Print some conversations, the best and the worst among them, and the distribution of all rewards.

    Text is printed literally, whatever markup or escape codes it holds, and shortened where it is long. A terminal
    that cannot be written to is no error.

    Args:
        message_logs: conversations, each a list of messages with `role` and `content`.
        rewards: one reward for each of them.
        num_samples: how many to print.
        step: step shown in the headings.
    """
    from rich.console import Console

    numbers = _numbers(rewards)
    if len(message_logs) != len(numbers):
        raise DataError(f"{len(message_logs)} message logs came with {len(numbers)} rewards; give one reward for each")
    console = Console(markup=False, highlight=False, emoji=False)
    shown = _spread_by_reward(numbers, num_samples)
    # Written in one piece and by ourselves: rich would end the program when nobody reads its output any more.
    with console.capture() as capture:
        console.print(f"Step {step}: {_statistics(numbers)}")
        for line in _histogram(numbers, console.width):
            console.print(line, no_wrap=True)
        for index in shown:
            title = f"{_rank(index, shown, numbers)}, reward {numbers[index]:.4g}, step {step}"
            console.print(_conversation(message_logs[index], title))
    try:
        # A terminal of another encoding gets question marks in place of what it does not know. Not to `console.file`,
        # which would write across a progress bar: that one watches sys.stdout.
        sys.stdout.write(capture.get().encode(console.encoding, "replace").decode(console.encoding))
        sys.stdout.flush()
    except (OSError, ValueError) as error:  # also one that is closed
        log.warning("the samples of step %d cannot be printed: %r", step, error)


def _numbers(rewards: Any) -> list[float]:
    values = rewards.tolist() if hasattr(rewards, "tolist") else rewards
    try:
        return [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise DataError(f"rewards must be one number for each sample: {error}") from error


def _spread_by_reward(rewards: Sequence[float], num_samples: int) -> list[int]:
    """Indices of samples from best to worst, evenly spread over the ranks; NaN ranks below everything."""
    ranked = sorted(
        range(len(rewards)), key=lambda i: -math.inf if math.isnan(rewards[i]) else rewards[i], reverse=True
    )
    count = min(num_samples, len(ranked))
    if count <= 1:
        return ranked[: max(count, 0)]
    return [ranked[k * (len(ranked) - 1) // (count - 1)] for k in range(count)]


def _rank(index: int, shown: Sequence[int], rewards: Sequence[float]) -> str:
    """Name of a sample that is shown; the first is the best of all and, of several, the last the worst."""
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
    """A line for each of a few bins of equal size: where it starts, a bar and the count; none for equal rewards."""
    # Halved, so that the distance of two rewards is always a float.
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
    """A bar in eighths of a character; what is not empty is visible."""
    eighths = math.ceil(chars * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _conversation(messages: Sequence[Mapping[str, Any]], title: str) -> Panel:
    from rich.panel import Panel
    from rich.text import Text

    body = Text()
    left_out = len(messages) - _MAX_MESSAGES
    for index, message in enumerate(messages):
        if left_out <= 0 or not 0 <= index - _MAX_MESSAGES // 2 < left_out:
            _append_message(body, message)
        elif index == _MAX_MESSAGES // 2:
            body.append(f"… {left_out} messages …\n", style="dim")
    body.rstrip()
    return Panel(body, title=Text(title), title_align="left")


def _append_message(body: Text, message: Mapping[str, Any]) -> None:
    role = message.get("role", "unknown")
    body.append(f"{_harmless(role)}: ", style=_ROLE_STYLES.get(str(role), "bold"))
    body.append(_harmless(_readable(message.get("content", ""))) + "\n")


def _readable(content: Any) -> str:
    """The text of a message; of a list of parts, as chat formats have it, their texts and the kinds of the others."""
    if content is None:
        return ""
    if not isinstance(content, list | tuple):
        return str(content)
    return "\n".join(
        str(part.get("text", f"<{part.get('type', 'unknown part')}>")) if isinstance(part, Mapping) else str(part)
        for part in content
    )


def _harmless(value: Any) -> str:
    text = str(value)
    if len(text) > _MAX_TEXT_CHARS:
        half = _MAX_TEXT_CHARS // 2
        text = f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"
    return text if text.isascii() and text.isprintable() else "".join(map(_visible, text))


def _visible(char: str) -> str:
    if char in "\n\t" or unicodedata.category(char) not in _ACTED_ON:
        return char
    return chr(0x2400 + ord(char)) if char < " " else f"\\u{ord(char):04x}"
