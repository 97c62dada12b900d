"""Tools in prompts: describe them to the model, by its chat template or by a plain format.

A chat template that reads the variable `tools` writes the tools in the format that the model was trained on. For any
other model, a prelude before its template writes them in the plain format:

- the system message lists the tools (`instructions`); if the template refuses system messages, the first user message
  does;
- `tool_calls` of an assistant message become lines `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`;
- a message of the role `tool` becomes a user message `<tool_result>...</tool_result>`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateSyntaxError, meta

from lucidrl.data.template_probe import environment
from lucidrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CALL_START, CALL_END = "<tool_call>", "</tool_call>"

_NATIVE_PRELUDE = "{%%- set tools = %s +%%}"

_PLAIN_PRELUDE = """
{%%- set about = %r %%}
{%%- set opening = %r %%}
{%%- set plain = namespace(messages=[], is_described=false) %%}
{%%- for message in messages %%}
{%%- if not plain.is_described and message['role'] == opening %%}
{%%- set plain.is_described = true %%}
{%%- set parts = [about, message['content'] or ''] %%}
{%%- set parts = parts | reverse | list if opening == 'system' else parts %%}
{%%- set plain.messages = plain.messages + [{'role': opening, 'content': parts | join('\\n\\n')}] %%}
{%%- else %%}
{%%- if not plain.is_described and opening == 'system' %%}
{%%- set plain.is_described = true %%}
{%%- set plain.messages = [{'role': 'system', 'content': about}] %%}
{%%- endif %%}
{%%- if message['role'] == 'tool' %%}
{%%- set result = '<tool_result>' + message['content'] + '</tool_result>' %%}
{%%- if plain.messages[-1]['role'] == 'user' %%}
{%%- set result = plain.messages[-1]['content'] + '\\n' + result %%}
{%%- set plain.messages = plain.messages[:-1] %%}
{%%- endif %%}
{%%- set plain.messages = plain.messages + [{'role': 'user', 'content': result}] %%}
{%%- elif message['tool_calls'] %%}
{%%- set lines = namespace(all=[message['content']] if message['content'] else []) %%}
{%%- for call in message['tool_calls'] %%}
{%%- set function = call['function'] if call['function'] else call %%}
{%%- set arguments = function['arguments'] if function['arguments'] is string else function['arguments'] | tojson %%}
{%%- set text = '{"name": ' + (function['name'] | tojson) + ', "arguments": ' + arguments + '}' %%}
{%%- set lines.all = lines.all + ['<tool_call>' + text + '</tool_call>'] %%}
{%%- endfor %%}
{%%- set plain.messages = plain.messages + [{'role': 'assistant', 'content': lines.all | join('\\n')}] %%}
{%%- else %%}
{%%- set plain.messages = plain.messages + [message] %%}
{%%- endif %%}
{%%- endif %%}
{%%- endfor %%}
{%%- set messages = plain.messages +%%}
"""

_CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Hello"},
    *[
        message
        for number in (1, 2)
        for message in (
            {"role": "assistant", "content": "Hm"},
            {"role": "tool", "name": "t", "tool_call_id": f"call0{number}001", "content": "1"},
        )
    ],
]
"""As in a rollout: the calls are part of the content, because sampled text is never parsed for the template."""

_JOINED_TEMPLATE = "{{- %r }}{%%- for message in messages %%}{{- message['content'] }}{%%- endfor %%}"
"""Template of a tokenizer that has none: the joined contents, after the special tokens that the tokenizer adds."""


def instructions(schemas: Sequence[dict[str, Any]]) -> str:
    """Text of the plain format that lists the tools and explains how to call them."""
    listed = "\n".join(json.dumps(schema.get("function", schema), ensure_ascii=False) for schema in schemas)
    call = f'{CALL_START}{{"name": "TOOL", "arguments": {{"ARGUMENT": "VALUE"}}}}{CALL_END}'
    return f"You can use these tools:\n{listed}\nTo use a tool, write {call} and stop. You will get its result."


def has_tool_format(tokenizer: PreTrainedTokenizerBase, schemas: Sequence[dict[str, Any]]) -> bool:
    """Whether the tokenizer's chat template writes tools itself."""
    if not tokenizer.chat_template:
        return False
    try:
        parsed = environment().parse(tokenizer.get_chat_template(tools=list(schemas)))
    except TemplateSyntaxError:  # its real use reports it
        return False
    return "tools" in meta.find_undeclared_variables(parsed)


def with_tools(tokenizer: PreTrainedTokenizerBase, schemas: Sequence[dict[str, Any]]) -> PreTrainedTokenizerBase:
    """Return a copy of the tokenizer whose chat template describes the tools in every prompt.

    Use the copy to render messages. Save the original with the model: its template serves any tools.

    Args:
        schemas: JSON schemas of the tools, in the form of `transformers.utils.get_json_schema`.

    Raises:
        ConfigError: the template shows the tools in no format.
    """
    if not schemas:
        return tokenizer
    found, about = copy.deepcopy(tokenizer), instructions(schemas)
    candidates = []
    if has_tool_format(tokenizer, schemas):
        native = _NATIVE_PRELUDE % repr(list(schemas)) + tokenizer.get_chat_template(tools=list(schemas))
        candidates.append((native, schemas[0].get("function", schemas[0])["name"]))
    if tokenizer.chat_template:
        template = tokenizer.get_chat_template()
    else:
        template, about = _JOINED_TEMPLATE % tokenizer.decode(tokenizer.encode("")), f"{about}\n\n"
    # Some templates refuse system messages, others ignore them.
    candidates += [((_PLAIN_PRELUDE % (about, opening)).strip() + template, about) for opening in ("system", "user")]
    for found.chat_template, expected in candidates:
        if _shows(found, expected):
            return found
    raise ConfigError(
        "the chat template writes no description of the tools, neither in its own format nor in the system message or "
        "the first user message; use a model with another template"
    )


def _shows(tokenizer: PreTrainedTokenizerBase, expected: str) -> bool:
    """Whether the template writes the expected text, and accepts two turns with tool calls."""
    try:
        text = tokenizer.apply_chat_template(_CONVERSATION, tokenize=False)
    except Exception:  # a template raises anything
        return False
    return "".join(expected.split()) in "".join(str(text).split())
