"""Reads `logs/driver.log`: when the driver of a run started and ended, and the error that ended it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_ENTRY = re.compile(
    r"^(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (INFO|ERROR) lucidrl\.recipes\.folder: "
    r"((?P<start>lucidrl [^\n]*)|(?P<finished>finished)|failed with (?P<error>\w+))$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Session:
    """One start of a run; a resumed run has several."""

    start: float
    """Unix seconds; the log has local times, which are read in this machine's time zone."""
    command: str
    """Version, process, host and command line, without secrets."""
    end: float | None = None
    """None while the driver runs, and if it was killed."""
    error: str | None = None
    """The exception that ended the run, with its message."""
    is_interrupted: bool = False
    """Whether the user stopped the run at once, by a second Ctrl-C."""


def read_sessions(path: Path) -> list[Session]:
    """The sessions in a driver's log, oldest first; none if the log is missing or unreadable."""
    try:
        text = path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return []
    sessions: list[Session] = []
    for entry in _ENTRY.finditer(text):
        moment = datetime.fromisoformat(entry["time"]).timestamp()
        if entry["start"]:
            sessions.append(Session(moment, entry["start"]))
        elif sessions:
            begun = sessions[-1]
            error = _message(text, entry) if entry["error"] else None
            interrupted = entry["error"] == "KeyboardInterrupt"
            sessions[-1] = Session(begun.start, begun.command, moment, error, interrupted)
    return sessions


def _message(text: str, entry: re.Match[str]) -> str:
    """The last line of the traceback below an entry that begins with the exception's name."""
    name = entry["error"]
    following = _ENTRY.search(text, entry.end())
    traceback = text[entry.end() : following.start() if following else len(text)]
    lines = re.findall(rf"^(?:[\w.]+\.)?{name}(?:: (.*))?$", traceback, re.MULTILINE)
    return f"{name}: {lines[-1]}" if lines and lines[-1] else name
