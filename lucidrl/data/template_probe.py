"""Script that renders a chat template in a separate process with limits. It imports little, to start quickly.

A template is code that the author of the model wrote. jinja's sandbox protects files and Python objects; the limits
protect against endless loops and huge strings.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_LIMIT_S = 2
MEMORY_LIMIT_MB = 512
LONGEST_TEXT = 1_000_000
"""Most characters that a template may write for messages of a few words."""
TOO_LONG, OUT_OF_MEMORY = 3, 4
"""Exit codes."""
USER, ASSISTANT = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}
MESSAGE_LISTS = ([USER], [{"role": "system", "content": "Be brief"}, USER], [USER, ASSISTANT, USER])


class Generation(Extension):
    """The jinja tag `generation` of transformers, which marks assistant text without changing it."""

    tags = {"generation"}  # noqa: RUF012 - as jinja declares it

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """A jinja environment that reads chat templates as transformers does."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False)
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def render(template: str, special_tokens: dict[str, str]) -> None:
    """Render test messages as transformers does; errors of the template are ignored: its real use reports them."""
    compiled = environment().from_string(template)
    for messages in MESSAGE_LISTS:
        length = 0
        try:
            for text in compiled.generate(messages=messages, add_generation_prompt=True, **special_tokens):
                length += len(text)
                if length > LONGEST_TEXT:
                    sys.exit(TOO_LONG)
        except MemoryError:
            raise
        except Exception:
            continue


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def main() -> None:
    cpu_limit_s = math.ceil(time.process_time()) + CPU_LIMIT_S  # imports do not count
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_limit_s, cpu_limit_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_MB << 20, MEMORY_LIMIT_MB << 20))
    content = json.loads(sys.stdin.buffer.read())
    try:
        render(content["template"], content["special_tokens"])
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)
    except (jinja2.TemplateError, RecursionError, ValueError, TypeError):
        return


if __name__ == "__main__":
    main()
