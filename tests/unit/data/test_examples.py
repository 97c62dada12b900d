"""Supervised examples: read from a file and split reproducibly, or made of prompts with known answers."""

from __future__ import annotations

import pytest

from lucidrl.data.datasets import Prompt, example_of, load_examples
from lucidrl.errors import DataError

GREETING = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}'


@pytest.fixture
def write(tmp_path):
    def write_lines(*lines: str):
        path = tmp_path / "examples.jsonl"
        path.write_text("\n".join(lines))
        return path

    return write_lines


def test_both_forms_of_a_line_are_read(write):
    train, held_out = load_examples(write(GREETING, "", '{"prompt": "1+1=", "completion": "2"}'), 0.0)
    assert train == [
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
        [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}],
    ]
    assert held_out == []


def test_the_split_depends_only_on_the_example(write):
    lines = [f'{{"prompt": "{n}", "completion": "{n}"}}' for n in range(300)]
    train, held_out = load_examples(write(*lines), 0.2)
    assert len(train) + len(held_out) == 300
    assert 30 < len(held_out) < 90
    again_train, again_held_out = load_examples(write(*reversed(lines)), 0.2)
    assert again_held_out == held_out[::-1]
    assert again_train == train[::-1]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        '{"prompt": "1"}',
        '{"prompt": 1, "completion": "2"}',
        '{"messages": []}',
        '{"messages": "hi"}',
        '{"messages": [{"role": "user", "content": "hi"}]}',
        '{"messages": [{"role": "assistant"}]}',
    ],
)
def test_a_malformed_line_is_named(write, line):
    with pytest.raises(DataError, match=r"examples\.jsonl:2: "):
        load_examples(write(GREETING, line), 0.0)


def test_a_file_without_examples_is_refused(write, tmp_path):
    with pytest.raises(DataError, match="has no examples to train on"):
        load_examples(write("", "  "), 0.0)
    with pytest.raises(DataError, match="does not exist"):
        load_examples(tmp_path / "absent.jsonl", 0.0)


def test_a_prompt_is_completed_by_the_answer_of_its_info():
    prompt = Prompt("p", ({"role": "user", "content": "1+1="},), {"answer": 2})
    assert example_of(prompt) == [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    with pytest.raises(DataError, match="'q' has no answer"):
        example_of(Prompt("q", prompt.messages))
