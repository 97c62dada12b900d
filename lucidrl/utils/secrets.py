"""Secrets in settings: find those that are given in plain, and write files that only their owner can read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lucidrl.utils.logger.folders import whole_file
from lucidrl.utils.logger.redact import is_secret_name, redacted_text

# `${oc.env:NAME}` or `${other.key}`, without a default that is a plain value; with the user name of a URL before it.
_REFERENCE = re.compile(r"""((?<=://)[^\s/?#:@]+:)?\$\{[^{},]*(,\s*(null|''|"")?\s*)?\}""")


def secret_like_keys(settings: Mapping[str, Any]) -> list[str]:
    """Dotted keys whose value looks like a secret in plain text.

    That is a value below the name of a secret (`env.kwargs.api_key`), or a text with credentials in it, by the rules
    of `redacted`. References such as `${oc.env:NAME}` are not plain, so pass the settings unresolved; None, "" and
    booleans are not secrets.
    """
    return list(_plain_secrets(settings, path=(), is_secret=False))


def write_private_text(path: Path, text: str) -> None:
    """Write a file with mode 0600; it appears complete or not at all, and replaces what was there."""
    with whole_file(path, mode=0o600) as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def _plain_secrets(value: Any, path: tuple[str, ...], is_secret: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _plain_secrets(item, (*path, str(key)), is_secret or is_secret_name(str(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _plain_secrets(item, (*path, str(index)), is_secret)
    elif not (value is None or isinstance(value, bool)):
        text = _REFERENCE.sub("", str(value))
        if text and (is_secret or redacted_text(text) != text):
            yield ".".join(path)
