"""Chat templates: check them in a limited process when a tokenizer is loaded, and render them with clear errors."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, TemplateSyntaxError

from lucidrl.data import template_probe
from lucidrl.data.interfaces import KEYS_OF_TOKENS
from lucidrl.data.template import BROKEN
from lucidrl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE_TIMEOUT_S = 120
"""Wall-clock timeout of the probe process, which also has a CPU time limit; generous for busy machines."""


def check_chat_template(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Refuse a chat template that, for a few short messages, takes too long, needs too much memory or writes too much.

    A separate process renders the template once. A template that misbehaves only for other messages is not found.

    Raises:
        ConfigError: the template exceeds a limit; the message names the file that holds the template.
    """
    if not tokenizer.chat_template:
        return
    template = tokenizer.get_chat_template()
    special_tokens = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    if excess := _excess(template, tuple(sorted(special_tokens.items()))):
        raise ConfigError(
            f"the chat template in {template_file(folder)} {excess} for three short messages; fix the template, "
            "or remove it: the contents of messages are then joined without a template"
        )


def apply_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
    """Render messages with the tokenizer's chat template, as text or tokenized.

    Raises:
        DataError: if the template refuses the messages, or fails.
    """
    plain = [{key: item for key, item in message.items() if key not in KEYS_OF_TOKENS} for message in messages]
    try:
        return tokenizer.apply_chat_template(plain, **{"add_generation_prompt": True, **options})
    except (TemplateSyntaxError, *BROKEN) as error:
        where = template_file(Path(tokenizer.name_or_path)) if tokenizer.name_or_path else "the tokenizer"
        raise DataError(
            f"the chat template in {where} fails: {type(error).__name__}: {error}; fix the template"
        ) from error
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in plain)
        raise DataError(
            f"the tokenizer's chat template refuses messages of the roles {roles}: {error}; use roles that "
            "the template supports"
        ) from error


def template_file(folder: Path) -> Path:
    """The file that holds the chat template of a tokenizer's folder."""
    separate = folder / "chat_template.jinja"
    return separate if separate.is_file() else folder / "tokenizer_config.json"


@lru_cache(maxsize=16)
def _excess(template: str, special_tokens: tuple[tuple[str, str], ...]) -> str | None:
    """Describe the limit that the template exceeds; None if it exceeds none."""
    command = [sys.executable, "-P", template_probe.__file__]
    content = json.dumps({"template": template, "special_tokens": dict(special_tokens)}).encode()
    try:
        exit_code = subprocess.run(command, input=content, capture_output=True, timeout=PROBE_TIMEOUT_S).returncode
    except subprocess.TimeoutExpired:
        exit_code = -signal.SIGXCPU
    return {
        0: None,
        template_probe.TOO_LONG: f"writes more than {template_probe.LONGEST_TEXT:,} characters",
        template_probe.OUT_OF_MEMORY: f"needs more than {template_probe.MEMORY_LIMIT_MB} MB",
        -signal.SIGXCPU: f"does not end within {template_probe.CPU_LIMIT_S} s of CPU time",
        -signal.SIGKILL: f"does not end within {template_probe.CPU_LIMIT_S} s of CPU time",
    }.get(exit_code, f"makes the process that renders it exit with code {exit_code}")
