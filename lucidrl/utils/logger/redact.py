"""Hyperparameters without secrets: what a tracker shows to a whole team must not hold anybody's password."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

REDACTED = "<redacted>"

_MIN_SECRET_CHARS = 8  # shorter values of variables ("1", "yes") would be found in harmless text
_MAX_DEPTH = 100  # no configuration is deeper, and what records it may recurse

_CAMEL_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_SECRET_NAME = re.compile(
    r"secret|passw(or)?d|passphrase|credential|(api|access|private|ssh)_?keys?\d*(_|$)"
    r"|(^|_)(o?auth2?|authorization|bearer)(_|$)|(^|_)(api|access|refresh|hf|github|wandb)_?tokens$"
)
# A token is a secret unless it is one of a vocabulary (`eos_token`) or one that is counted (`loss_per_token`).
_TOKEN_NAME = re.compile(r"(?:^|_)([^_]*?)_?token_?\d*$")
_HARMLESS_TOKEN_NAME = re.compile(
    "pad|eos|bos|unk|unknown|mask|stop|cls|sep|sos|eot|eom|bot|boi|eoi|start|begin|end|special|image|video|audio|think|"
    "thinking|newline|prefix|suffix|middle|first|last|next|prev|new|num|max|min|per|every|each"
)
_URL_CREDENTIALS = re.compile(r"(?<=://)[^\s/?#]+(?=@)")
_ASSIGNMENT = re.compile(r"""(?<![\w.-])([\w.-]++)=("[^"]*"|'[^']*'|[^\s&,;]+)""")


def redacted(params: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of `params` in dicts and lists, with "<redacted>" in place of secrets.

    Replaced are: all that is under a key which names a secret (`hfToken`, `OPENAI_API_KEY`), unless it is None, "" or
    a bool, so that one still sees what is unset; and in any text the values of environment variables with such names,
    the credentials of URLs, and the right side of assignments such as `wandb.api_key=...`. Dataclasses and pydantic
    models are opened like mappings. Other objects are passed on as they are.
    """
    return _copy(dict(params), _environment_secrets(), ancestors=())


def is_secret_name(name: str) -> bool:
    """Whether a key or variable of this name is taken to hold a secret."""
    words = re.sub(r"[\W_]+", "_", _CAMEL_CASE.sub("_", name)).lower().strip("_")
    token = _TOKEN_NAME.search(words)
    return bool(_SECRET_NAME.search(words)) or (token is not None and not _HARMLESS_TOKEN_NAME.fullmatch(token[1]))


def _environment_secrets() -> re.Pattern[str] | None:
    """What finds the value of any environment variable with a secret name."""
    values = {value.strip() for name, value in os.environ.items() if is_secret_name(name)}
    longest_first = sorted((value for value in values if len(value) >= _MIN_SECRET_CHARS), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _copy(value: Any, secrets: re.Pattern[str] | None, ancestors: tuple[int, ...]) -> Any:
    if isinstance(value, str):
        return _clean_text(value, secrets)
    content = _opened(value)
    if content is None:
        return value
    if id(value) in ancestors:
        return "<contains itself>"
    if len(ancestors) == _MAX_DEPTH:
        return "<too deep>"
    ancestors = (*ancestors, id(value))
    if not isinstance(content, Mapping):
        return [_copy(item, secrets, ancestors) for item in content]
    copy = {}
    for key, item in content.items():
        shown_key = _clean_text(key, secrets) if isinstance(key, str) else key
        copy[shown_key] = _hidden(item) if is_secret_name(str(key)) else _copy(item, secrets, ancestors)
    return copy


def _opened(value: Any) -> Mapping[Any, Any] | Sequence[Any] | Set[Any] | None:
    """The content of a container; None of what is none."""
    if isinstance(value, Mapping | Set):
        return value
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview | range):
        return value
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(value) if hasattr(value, "model_dump") else None  # a pydantic model iterates over its fields


def _hidden(value: Any) -> Any:
    """`value` of a secret key: hidden as a whole, since names inside of it may be telling too."""
    is_unset = value is None or isinstance(value, bool) or (isinstance(value, str) and not value)
    return value if is_unset else REDACTED


def _clean_text(text: str, secrets: re.Pattern[str] | None) -> str:
    if secrets is not None:
        text = secrets.sub(REDACTED, text)
    text = _URL_CREDENTIALS.sub(REDACTED, text)
    return _ASSIGNMENT.sub(lambda found: f"{found[1]}={REDACTED}" if is_secret_name(found[1]) else found[0], text)
