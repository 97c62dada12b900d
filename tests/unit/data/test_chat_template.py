"""Hostile chat templates raise a clear error within bounded time and memory."""

from __future__ import annotations

import resource

import pytest

from lucidrl.data.chat_template import apply_template, check_chat_template
from lucidrl.errors import ConfigError, DataError
from tests.tiers import slow_except

GREETING = [{"role": "user", "content": "Hello"}]
EXCESSIVE = {
    "endless": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        r"does not end within 2 s of CPU time",
    ),
    "huge_string": ("{{ 'x' * 10 ** 10 }}", r"needs more than 512 MB"),
    "doubled_string": (
        "{% set all = namespace(text='x') %}{% for i in range(99) %}{% set all.text = all.text ~ all.text %}"
        "{% endfor %}{{ all.text }}",
        r"needs more than 512 MB",
    ),
    "long_output": ("{% for i in range(99999) %}{{ 'x' * 100 }}{% endfor %}", r"writes more than 1,000,000 characters"),
}
BROKEN = {
    "huge_range": ("{% for i in range(10 ** 12) %}x{% endfor %}", "OverflowError: Range too big"),
    "include": ("{% include 'other' %}", "TypeError: no loader"),
    "syntax": ("{% for message in %}", "TemplateSyntaxError"),
    "recursion": ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError"),
    "sum": ("{{ messages + 1 }}", "TypeError"),
}


@pytest.mark.parametrize("name", slow_except(EXCESSIVE, "huge_string", "long_output"))
def test_a_template_that_takes_too_much_is_refused_and_its_file_named(chat_tokenizer, tmp_path, name):
    template, excess = EXCESSIVE[name]
    chat_tokenizer.chat_template = template
    file = tmp_path / "chat_template.jinja"
    file.write_text(template)
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match=rf"the chat template in {file} {excess} .*; fix the template"):
        check_chat_template(chat_tokenizer, tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 100_000


@pytest.mark.parametrize(("template", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_template_that_fails_is_a_data_error_that_names_its_file(chat_tokenizer, template, reason):
    chat_tokenizer.chat_template = template
    chat_tokenizer.name_or_path = "some/folder"
    with pytest.raises(DataError, match=rf"chat template in some/folder/tokenizer_config\.json fails: {reason}"):
        apply_template(chat_tokenizer, GREETING, tokenize=False)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('only user messages') }}",
        "{% for message in messages %}{% generation %}{{ message['content'] }}{% endgeneration %}{% endfor %}",
        "{{ strftime_now('%Y') }}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}",
        "{{ bos_token }}{{ messages | tojson(indent=1) }}{{ messages[0].tool_calls[0].name }}",
    ],
)
def test_ordinary_templates_are_accepted(chat_tokenizer, tmp_path, template):
    chat_tokenizer.chat_template = template
    check_chat_template(chat_tokenizer, tmp_path)


def test_a_tokenizer_without_template_has_nothing_to_check(plain_tokenizer, tmp_path):
    check_chat_template(plain_tokenizer, tmp_path)
