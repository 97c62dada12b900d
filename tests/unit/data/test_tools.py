"""Tools in prompts: by the chat template's own format, or by the plain format; in training examples as in rollouts."""

from __future__ import annotations

import json

import pytest
import torch

from lucidrl.data.messages import render_next_turn, render_prompt, rewrites_history, supervised_example, with_tokens
from lucidrl.data.tools import has_tool_format, instructions, with_tools
from lucidrl.errors import ConfigError
from tests.unit.data.conftest import CHATML, make_tokenizer

SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": 'Evaluate "it"\n{{ braces }} {% tag %}.',
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
QUESTION = [{"role": "user", "content": "1+2="}]
CALL = {"function": {"name": "calculator", "arguments": {"expression": "1+2"}}}
CALL_TEXT = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+2"}}</tool_call>'
NATIVE = "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}" + CHATML
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
STRIPS_REASONING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def text_of(tokenizer, ids):
    return "".join(tokenizer.convert_ids_to_tokens(list(ids)))


def prompt_text(tokenizer, messages):
    return text_of(tokenizer, render_prompt(tokenizer, messages))


def logged(tokenizer, completion):
    """A log of the question and a completion."""
    log = with_tokens(QUESTION, render_prompt(tokenizer, QUESTION))
    ids = tokenizer.encode(completion, add_special_tokens=False)
    return [*log, {"role": "assistant", "content": completion, "token_ids": torch.tensor(ids)}]


def test_a_template_with_tools_gets_them_in_its_own_format():
    tokenizer = make_tokenizer(NATIVE)
    assert has_tool_format(tokenizer, [SCHEMA])
    text = prompt_text(with_tools(tokenizer, [SCHEMA]), QUESTION)
    assert text == f"TOOLS {json.dumps([SCHEMA])}\n" + prompt_text(tokenizer, QUESTION)


def test_a_template_without_tools_gets_them_in_the_system_message(chat_tokenizer):
    about = instructions([SCHEMA])
    assert json.dumps(SCHEMA["function"]) in about
    chatting = with_tools(chat_tokenizer, [SCHEMA])
    start = f"<|im_start|>system\n{about}<|im_end|>\n<|im_start|>user\n1+2="
    assert prompt_text(chatting, QUESTION).startswith(start)
    both = prompt_text(chatting, [{"role": "system", "content": "Add."}, *QUESTION])
    assert both.startswith(f"<|im_start|>system\nAdd.\n\n{about}<|im_end|>\n<|im_start|>user\n1+2=")


def test_a_template_that_refuses_system_messages_gets_them_in_the_first_user_message():
    chatting = with_tools(make_tokenizer(NO_SYSTEM), [SCHEMA])
    assert prompt_text(chatting, QUESTION).startswith(f"<|im_start|>user\n{instructions([SCHEMA])}\n\n1+2=")


def test_a_tokenizer_without_template_gets_them_before_the_prompt(plain_tokenizer):
    chatting = with_tools(plain_tokenizer, [SCHEMA])
    assert prompt_text(chatting, QUESTION) == f"{instructions([SCHEMA])}\n\n1+2="


def test_the_original_tokenizer_stays_as_it_is(chat_tokenizer):
    before = chat_tokenizer.chat_template
    with_tools(chat_tokenizer, [SCHEMA])
    assert chat_tokenizer.chat_template == before
    assert with_tools(chat_tokenizer, []) is chat_tokenizer


def test_results_follow_the_sampled_call_as_one_user_message(chat_tokenizer):
    chatting = with_tools(chat_tokenizer, [SCHEMA])
    results = [{"role": "tool", "name": "calculator", "content": content} for content in ("3", "4")]
    ids = render_next_turn(chatting, logged(chatting, f"{CALL_TEXT}<|im_end|>"), results)
    assert text_of(chatting, ids) == (
        "\n<|im_start|>user\n<tool_result>3</tool_result>\n<tool_result>4</tool_result><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_an_example_has_the_tokens_of_a_rollout_with_the_same_text(chat_tokenizer):
    chatting = with_tools(chat_tokenizer, [SCHEMA])
    result = {"role": "tool", "name": "calculator", "content": "3"}
    example = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        result,
        {"role": "assistant", "content": "It is 3."},
    ]
    learned = supervised_example(chatting, example)
    log = logged(chatting, f"{CALL_TEXT}<|im_end|>")
    log += with_tokens([result], render_next_turn(chatting, log, [result]))
    log += with_tokens(example[-1:], chatting.encode("It is 3.<|im_end|>", add_special_tokens=False))
    assert [m["token_ids"].tolist() for m in learned] == [m["token_ids"].tolist() for m in log]


@pytest.mark.parametrize("template", [CHATML, NATIVE])
def test_a_template_that_keeps_the_history_does_not_rewrite_it(template):
    tokenizer = with_tools(make_tokenizer(template), [SCHEMA])
    log = logged(tokenizer, f"<think>hm</think> {CALL_TEXT}")
    assert not rewrites_history(tokenizer, log, [{"role": "tool", "content": "3"}])


def test_a_template_that_removes_reasoning_rewrites_the_history():
    tokenizer = make_tokenizer(STRIPS_REASONING)
    hint = [{"role": "user", "content": "higher"}]
    assert rewrites_history(tokenizer, logged(tokenizer, "<think>hm</think>3"), hint)
    assert not rewrites_history(tokenizer, logged(tokenizer, " 3 \n"), hint)


def test_without_a_template_nothing_is_rewritten(plain_tokenizer):
    assert not rewrites_history(plain_tokenizer, logged(plain_tokenizer, "3"), [{"role": "user", "content": "x"}])


IGNORES_SYSTEM = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATES = (
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}{% set ns = namespace(user=true) %}"
    "{% for m in messages if m.role in ('user', 'assistant') %}{% if (m.role == 'user') != ns.user %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.user = not ns.user %}{% endfor %}" + CHATML
)


def test_a_template_that_ignores_system_messages_gets_the_tools_in_the_first_user_message():
    chatting = with_tools(make_tokenizer(IGNORES_SYSTEM), [SCHEMA])
    assert prompt_text(chatting, QUESTION).startswith(f"<|im_start|>user\n{instructions([SCHEMA])}\n\n1+2=")


def test_a_template_that_refuses_a_second_call_gets_the_plain_format():
    tokenizer = make_tokenizer(ALTERNATES)
    assert has_tool_format(tokenizer, [SCHEMA])
    chatting = with_tools(tokenizer, [SCHEMA])
    turns = [{"role": "assistant", "content": CALL_TEXT}, {"role": "tool", "content": "3"}] * 2
    text = prompt_text(chatting, [*QUESTION, *turns])
    assert "TOOLS" not in text
    assert text.count("<tool_result>3</tool_result>") == 2


def test_a_template_that_shows_tools_nowhere_is_refused():
    with pytest.raises(ConfigError, match="no description of the tools"):
        with_tools(make_tokenizer("{% for m in messages[1:] %}{{ m.role }}{% endfor %}"), [SCHEMA])
