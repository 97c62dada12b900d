"""Files of spans read back, also those of processes that were killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def events_of(path: Path) -> list[dict[str, Any]]:
    """All events; the closing bracket may be missing."""
    text = path.read_text().rstrip()
    return json.loads(text if text.endswith("]") else f"{text}]")


def spans_of(path: Path) -> list[str]:
    """Names of the spans, in the order in which they ended."""
    return [event["name"] for event in events_of(path) if event["ph"] == "X"]
