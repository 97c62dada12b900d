"""Reads the events of a trace file one by one, so that a file of any size needs little memory.

A trace is a Chrome trace in either form: an object with `traceEvents`, as torch's profiler writes it, or an array of
events, as a file of spans is. The part before any damage is readable.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from lucidrl.profiling.settings import KEY

_CHUNK_CHARS = 1 << 20
_MOST_CHARS = 1 << 24
"""Size of the largest event, or value of the header, that is read."""
_MOST_HEADER_EVENTS = 10
_decode = json.JSONDecoder(strict=False).raw_decode  # lets control characters in names pass
_SPACE = re.compile(r"\s*")
_BETWEEN_EVENTS = re.compile(r"[\s,]*")

Event = dict[str, Any]


class DamagedTrace(Exception):  # noqa: N818 - something observed
    """The rest of a trace cannot be read; the message is the reason."""


@dataclass(frozen=True)
class TraceHeader:
    """What a trace says about itself."""

    process: str
    host: str
    pid: int
    anchor_unix_ns: int
    """Start of the recording on the clock of the spans of its process."""
    anchor_ts_us: float
    """The same moment as a time stamp of the trace."""
    operators: str | None = None
    """Of a file of spans: name of the operator trace that belongs to it."""


def header_of(path: Path) -> TraceHeader:
    """Read the header of a trace.

    Raises:
        DamagedTrace: if it cannot be read, or is not the header of a trace of this library.
    """
    with _opened(path) as text:
        found = _metadata(text)
    try:
        anchor = found["anchor"]
        return TraceHeader(
            str(found["process"]),
            str(found["host"]),
            int(found["pid"]),
            int(anchor["unix_time_ns"]),
            float(anchor["ts_us"]),
            found.get("operators"),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedTrace(f"it has no readable metadata {KEY!r} with the clock of its process") from error


def events_of(path: Path) -> Iterator[Event]:
    """The events of a trace, in the order of the file.

    Raises:
        DamagedTrace: at the place from which on the file cannot be read.
    """
    with _opened(path) as text:
        if text.next_is("{"):
            for key in _keys(text):
                if key == "traceEvents":
                    break
                text.value()
            else:
                raise DamagedTrace("it has no events")
        yield from _events(text)


def _metadata(text: _Text) -> Any:
    if text.next_is("{"):
        for key in _keys(text):
            if key == KEY:
                return text.value()
            if key == "traceEvents":
                break
            text.value()
        return None
    for _, event in zip(range(_MOST_HEADER_EVENTS), _events(text), strict=False):
        if event.get("ph") == "M" and event.get("name") == KEY:
            return event.get("args")
    return None


def _keys(text: _Text) -> Iterator[Any]:
    """The keys of an object; read the value of a key before the next key."""
    text.expect("{")
    while not text.next_is("}"):
        key = text.value()
        text.expect(":")
        yield key
        if not text.next_is("}"):
            text.expect(",")


def _events(text: _Text) -> Iterator[Event]:
    text.expect("[")
    while True:
        text.skip(_BETWEEN_EVENTS)
        if text.next_is("]"):
            return
        event = text.value()
        if not isinstance(event, dict):
            raise DamagedTrace(f"it has a {type(event).__name__} in the place of an event")
        yield event


class _Text:
    """The text of a file from the current position on."""

    def __init__(self, file: TextIO):
        self._file = file
        self._text, self._at = "", 0

    def skip(self, pattern: re.Pattern[str]) -> None:
        while True:
            found = pattern.match(self._text, self._at)
            assert found is not None, "the pattern matches the empty string"
            self._at = found.end()
            if self._at < len(self._text) or not self._read_on():
                return

    def next_is(self, character: str) -> bool:
        """Whether the next character that is no space is `character`; DamagedTrace at the end of the file."""
        self.skip(_SPACE)
        if self._at == len(self._text):
            raise DamagedTrace("it ends too early")
        return self._text[self._at] == character

    def expect(self, character: str) -> None:
        if not self.next_is(character):
            found = self._text[self._at : self._at + 20]
            raise DamagedTrace(f"it has {found!r} where {character!r} should be")
        self._at += 1

    def value(self) -> Any:
        """Read the next JSON value."""
        self.skip(_SPACE)
        while True:
            try:
                value, self._at = _decode(self._text, self._at)
                return value
            except (ValueError, RecursionError) as error:
                if len(self._text) - self._at > _MOST_CHARS:
                    raise DamagedTrace("it has text that is not JSON") from error
                if not self._read_on():
                    raise DamagedTrace("it ends in the middle of an event, or has text that is not JSON") from error

    def _read_on(self) -> bool:
        # Doubling, so that a long value is not searched again for every chunk.
        chunk = self._file.read(max(_CHUNK_CHARS, len(self._text) - self._at))
        self._text, self._at = self._text[self._at :] + chunk, 0
        return bool(chunk)


@contextmanager
def _opened(path: Path) -> Iterator[_Text]:
    try:
        opener: Any = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8", errors="replace", newline="") as file:
            yield _Text(file)
    except (OSError, EOFError, zlib.error) as error:
        raise DamagedTrace(f"it cannot be read ({error})") from error
