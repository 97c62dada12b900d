"""Find and redact secrets in settings: trackers show hyperparameters to a whole team."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import pairwise
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

REDACTED = "<redacted>"

_MIN_SECRET_CHARS = 8  # shorter values ("1", "yes") occur in ordinary text
_MAX_DEPTH = 100  # deeper than any configuration; back ends may recurse

# Names of secrets, in lower case with "_" between words.
_CAMEL_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_SECRET_NAME = re.compile(
    r"secret|passw(or)?d|passphrase|passcode|credential|pwd\d*(_|$)|(^|_)(pw|pat)\d*$"
    r"|(^|_)(o?auth2?|authorization|bearer)(_|$)|(^|_)(api|access|refresh|hf|github|wandb)_?tokens$"
    r"|(api|access|private|ssh)_?keys?\d*(_|$)"
    # Any other key is a secret only with one of these words: most keys sort, join or name something.
    r"|(^|_)(account|admin|aes|anthropic|aws|azure|client|cohere|comet|decryption|deepseek|deploy|encryption|gcp|gemini"
    r"|github|gitlab|google|gpg|groq|hf|hmac|huggingface|jwt|license|master|mistral|neptune|ngc|nvidia|openai|openrouter"
    r"|root|rsa|s3|service|session|shared|signing|slack|ssl|stripe|subscription|tls|wandb|webhook)_?keys?\d*$"
)
_WORKING_DIRECTORIES = ("PWD", "OLDPWD")  # set by every shell
# A token is a secret unless it is of a vocabulary (`eos_token`) or counted (`loss_per_token`).
_TOKEN_NAME = re.compile(r"(?:^|_)([^_]*?)_?token_?\d*$")
_HARMLESS_TOKEN_NAME = re.compile(
    "pad|eos|bos|unk|unknown|mask|stop|cls|sep|sos|eot|eom|bot|boi|eoi|start|begin|end|special|image|video|audio|think|"
    "thinking|newline|prefix|suffix|middle|first|last|next|prev|new|num|max|min|per|every|each"
)

# Secrets in a text.
_URL_CREDENTIALS = re.compile(r"(?<=://)[^\s/?#]+(?=@)")
# "Basic" is also an ordinary word, so only before text like base64.
_HTTP_CREDENTIALS = re.compile(r"""\b((?i:bearer)\s+|(?i:basic)\s+(?=\S*(?:[0-9=]|[a-z][A-Z])))[^\s,;"']+""")
_NAME_OF_VALUE = re.compile(
    r"""(?<![\w.-])(?:([\w.-]++)(?:["']?(?:=|\s+=\s+)|["']\s*:\s*|:[ \t]+)"""  # name=X, "name": X, name: X
    r"""|(--?[\w.-]++)\s++(?!-))"""  # --name X
)
_VALUE = re.compile(
    r"""b?"(?:[^"\\]++|\\.)*+"|b?'(?:[^'\\]++|\\.)*+'"""
    r"""|(?:["']|[^\s&,;([{]*[([{]).*"""  # an open quotation or bracket: all the rest
    r"""|[^\s&,;]*[^\s&,;)\]}"']""",
    re.DOTALL,
)
# `${oc.env:NAME}` or `${other.key}`, without a default that is a plain value; with the user name of a URL before it.
_REFERENCE = re.compile(r"""((?<=://)[^\s/?#:@]+:)?\$\{[^{},]*(,\s*(null|''|"")?\s*)?\}""")
_UNSET = ("''", '""', "None", "null", "True", "true", "False", "false")


def redacted(params: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of `params` in dicts and lists, with "<redacted>" in place of secrets.

    Redacts values with the name of a secret (`hfToken`, `OPENAI_API_KEY`) as a key, in a (name, value) pair, as a
    command-line option or inside a string, unless they are None, "" or a bool. Redacts also the values of environment
    variables with such names, and credentials in URLs and HTTP headers. Opens dataclasses, named tuples and pydantic
    models like mappings, keeps arrays of numbers, and converts other objects to text.
    """
    return _copy(dict(params), _environment_secrets(), ancestors=())


def redacted_text(text: str) -> str:
    """A text with "<redacted>" in place of secrets, line by line, by the rules of `redacted`."""
    secrets = _environment_secrets()
    if secrets is not None:  # some, such as private keys, have several lines
        text = secrets.sub(REDACTED, text)
    return "\n".join(_clean_text(line, None) for line in text.split("\n"))


def secret_like_keys(settings: Mapping[str, Any]) -> list[str]:
    """Dotted keys whose value looks like a secret in plain text, by the rules of `redacted`.

    References such as `${oc.env:NAME}` are not plain text, so pass the settings unresolved.
    """
    return list(_plain_secrets(settings, path=(), is_secret=False))


def is_secret_name(name: str) -> bool:
    """Whether a key or variable of this name counts as a secret."""
    if name in _WORKING_DIRECTORIES:
        return False
    words = re.sub(r"[\W_]+", "_", _CAMEL_CASE.sub("_", name)).lower().strip("_")
    token = _TOKEN_NAME.search(words)
    return bool(_SECRET_NAME.search(words)) or (token is not None and not _HARMLESS_TOKEN_NAME.fullmatch(token[1]))


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


def _environment_secrets() -> re.Pattern[str] | None:
    """Pattern that matches values of environment variables with names of secrets, also escaped or URL-quoted values."""
    found = set()
    for value in (value.strip() for name, value in os.environ.items() if is_secret_name(name)):
        as_bytes = value.encode("utf-8", "surrogateescape")
        found |= {value, repr(value)[1:-1], repr(as_bytes)[2:-1], json.dumps(value)[1:-1], quote(as_bytes, safe="")}
        found.add(str(PurePath(value)))
    longest_first = sorted((text for text in found if len(text) >= _MIN_SECRET_CHARS), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _copy(value: Any, secrets: re.Pattern[str] | None, ancestors: tuple[int, ...]) -> Any:
    if value is None or isinstance(value, bool | int | float) or _is_array_of_numbers(value):
        return value
    content = _opened(value)
    if content is None:
        return _clean_text(_text(value), secrets)
    if id(value) in ancestors:
        return "<contains itself>"
    if len(ancestors) == _MAX_DEPTH:
        return "<too deep>"
    ancestors = (*ancestors, id(value))
    if not isinstance(content, Mapping):
        names = _names_of_items(content)
        return [
            _hidden(item) if name is not None and is_secret_name(name) else _copy(item, secrets, ancestors)
            for name, item in zip(names, content, strict=False)
        ]
    copy = {}
    for key, item in content.items():
        shown_key = key if key is None or isinstance(key, bool | int | float) else _clean_text(_text(key), secrets)
        copy[shown_key] = _hidden(item) if is_secret_name(_text(key)) else _copy(item, secrets, ancestors)
    return copy


def _is_array_of_numbers(value: Any) -> bool:
    """Whether this is a tensor, or an array that cannot hold text."""
    kind = type(value)  # its attributes: some objects claim to have every attribute
    if hasattr(kind, "__array_interface__"):
        return value.dtype.kind in "biufcmM"
    return hasattr(kind, "detach") and hasattr(kind, "tolist")


def _opened(value: Any) -> Mapping[Any, Any] | Sequence[Any] | None:
    """The content of a container; None for anything else."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    if isinstance(value, Set):
        return list(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview | range):
        return value
    if isinstance(value, type):
        return None
    if hasattr(type(value), "__array_interface__") and value.ndim:
        return value.tolist()
    if dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value))
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return dict(value) if hasattr(type(value), "model_dump") else None  # a pydantic model iterates over its fields


def _names_of_items(items: Sequence[Any]) -> list[str | None]:
    """The name of each item, if the item before it is a name: the first of a pair, or a command-line option."""
    names: list[str | None] = [None]
    for name, item in pairwise(items):
        is_name = isinstance(name, str) and re.fullmatch(r"[\w.-]+", name)
        is_option = is_name and name.startswith("-") and not (isinstance(item, str) and item.startswith("-"))
        names.append(name if is_option or (is_name and len(items) == 2) else None)
    return names


def _hidden(value: Any) -> Any:
    """The value of a secret name, redacted as a whole, because inner names may reveal something too."""
    is_unset = value is None or isinstance(value, bool) or (isinstance(value, str) and not value)
    return value if is_unset else REDACTED


def _text(value: Any) -> str:
    """`value` as plain text."""
    try:
        return str.__str__(value) if isinstance(value, str) else str(value)
    except Exception:  # a strange object must not prevent the recording
        return f"<{type(value).__name__}>"


def _clean_text(text: str, secrets: re.Pattern[str] | None) -> str:
    if secrets is not None:
        text = secrets.sub(REDACTED, text)
    text = _URL_CREDENTIALS.sub(REDACTED, text)
    text = _HTTP_CREDENTIALS.sub(rf"\1{REDACTED}", text)
    return _without_named_values(text)


def _without_named_values(text: str) -> str:
    """`text` with the values of secret names redacted."""
    pieces, end = [], 0
    for name in _NAME_OF_VALUE.finditer(text):
        if name.start() < end or not is_secret_name(name[1] or name[2]):
            continue
        value = _VALUE.match(text, name.end())
        if value and value[0] not in _UNSET:
            pieces += [text[end : name.end()], REDACTED]
            end = value.end()
    return "".join([*pieces, text[end:]])
