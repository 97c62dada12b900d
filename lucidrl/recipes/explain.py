"""What `--explain` prints: every setting, its value and its source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from lucidrl.recipes.base_config import BaseRunConfig
from lucidrl.utils.logger.redact import redacted

DEFAULT = "default"
_WIDEST = 60  # longer settings do not move the column of sources


def explained(config: BaseRunConfig) -> list[tuple[str, str, str]]:
    """Return (key, value, source) of every setting, in the order of the config; secrets are removed."""
    return [
        (key, _as_text(value), str(config.origins.of(key) or DEFAULT))
        for key, value in _leaves(redacted(config.model_dump(mode="json")))
    ]


def explanation(config: BaseRunConfig) -> Text:
    """Return a line `key=value  # source` per setting; settings with their default are dim."""
    rows = [(f"{key}={value}", source) for key, value, source in explained(config)]
    width = max(len(setting) for setting, _ in rows if len(setting) <= _WIDEST)
    lines = [
        Text(f"{setting:<{width}}  # {source}", style="dim" if source == DEFAULT else "") for setting, source in rows
    ]
    return Text("\n").join(lines)


def _leaves(content: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _as_text(value: Any) -> str:
    """As it would be written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
