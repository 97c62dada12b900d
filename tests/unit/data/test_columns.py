"""From columns to prompts and examples: mapping, chat, template, filters, and errors that name row and column."""

from __future__ import annotations

import pytest

from lucidrl.data.columns import Columns
from lucidrl.data.config import DataConfig
from lucidrl.errors import DataError

CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2="}]
TALK = [*CHAT, {"role": "assistant", "content": "3"}]


def prompt(row, **settings):
    return Columns(DataConfig(**settings)).prompt(row, "data.csv, row 7", "data:7")


def example(row, **settings):
    return Columns(DataConfig(**settings)).example(row, "data.csv, row 7", "data:7")


def contents(item):
    return [(message["role"], message["content"]) for message in item.messages]


def test_prompt_and_messages_are_the_default_columns():
    found = prompt({"prompt": "1+1=", "answer": "2", "level": 3})
    assert (found.prompt_id, found.place) == ("data:7", "data.csv, row 7")
    assert (contents(found), found.info) == ([("user", "1+1=")], {"answer": "2", "level": 3})
    chat = prompt({"id": 7, "messages": CHAT, "stop_strings": ["\n"], "prompt": None})
    assert (chat.prompt_id, chat.messages, chat.stop_strings, chat.info) == ("7", tuple(CHAT), ("\n",), {})


def test_columns_are_mapped_and_the_others_reach_the_reward():
    found = prompt({"question": "1+1=", "solution": 2, "source": "me"}, prompt="question", answer="solution")
    assert contents(found) == [("user", "1+1=")]
    assert found.info == {"question": "1+1=", "solution": 2, "source": "me", "answer": 2}


def test_a_prompt_column_may_hold_chat_messages():
    chat = [{**message, "name": None} for message in CHAT]  # as Arrow stores optional keys
    assert prompt({"q": chat}, prompt="q").messages == tuple(CHAT)


def test_a_template_writes_the_user_message_and_a_system_prompt_precedes_it():
    row = {"a": 1, "b": [2, 3], "prompt": "not used"}
    found = prompt(row, template="{{ a }}+{{ b[1] }}=\n", system_prompt="Add.")
    assert contents(found) == [("system", "Add."), ("user", "1+3=\n")]


def test_a_row_keeps_its_own_system_message():
    assert contents(prompt({"messages": CHAT}, system_prompt="Other."))[0] == ("system", "Add.")


@pytest.mark.parametrize(
    ("row", "settings", "said"),
    [
        ({"question": "1"}, {}, 'has the columns question; give either "prompt" or "messages"'),
        ({"prompt": "a", "messages": CHAT}, {}, 'either "prompt" or "messages"'),
        ({"q": "1"}, {"prompt": "question"}, r"has no column 'question' \(data\.prompt\); it has q"),
        ({"prompt": "1"}, {"answer": "a"}, r"has no column 'a' \(data\.answer\); it has prompt"),
        ({"prompt": 5}, {}, r"column 'prompt' holds a int \(5\); it must hold a string or a list of chat messages"),
        ({"q": None}, {"prompt": "q"}, r"column 'q' holds nothing \(null\)"),
        ({"messages": []}, {}, "column 'messages' holds an empty list"),
        ({"messages": [{"role": "user"}]}, {}, "holds the message .* which is not valid"),
        (
            {"messages": [{"role": "user", "content": "a", "name": 3}]},
            {},
            r"name holds a int \(3\); it must hold a string",
        ),
        ({"messages": [{"role": "tool", "content": "a", "tool_call_id": 3}]}, {}, "tool_call_id holds a int"),
        ({"messages": [{"role": "assistant", "tool_calls": "add"}]}, {}, "tool_calls holds a str .* a list of objects"),
        ({"messages": [{"role": "assistant", "tool_calls": ["add"]}]}, {}, "tool_calls holds a list"),
        ({"messages": [{"role": "user", "content": "a", "token_ids": [1]}]}, {}, "the reserved key token_ids"),
        ({"messages": TALK}, {}, "the last message has the role assistant; .* lucidrl sft"),
        ({"prompt": "a", "id": None}, {}, "id None is not valid"),
        ({"prompt": "a", "stop_strings": [""]}, {}, r"stop_strings=\[''\] is not valid"),
        ({"a": 1}, {"template": "{{ b }}"}, r"data\.template fails: 'b' is undefined; the columns are a"),
        ({"a": 1}, {"template": "{{ a / 0 }}"}, r"data\.template fails: ZeroDivisionError"),
        ({"a": 1}, {"template": "{{ ().__class__ }}"}, r"data\.template fails"),
        ({"a": "x"}, {"template": "{{ a * 10**9 }}"}, r"data\.template fails: SecurityError"),
        ({"a": "x"}, {"template": "{{ 9**9**9 }}"}, r"data\.template fails: SecurityError"),
        ({"a": "x" * 999}, {"template": "{% for i in range(9999) %}{{ a }}{% endfor %}"}, "more than 1,000,000"),
    ],
)
def test_a_bad_row_is_named_with_column_and_content(row, settings, said):
    with pytest.raises(DataError, match=rf"data\.csv, row 7: .*{said}"):
        prompt(row, **settings)


@pytest.mark.parametrize(
    ("row", "settings", "expected"),
    [
        ({"messages": TALK}, {}, ["Add.", "1+2=", "3"]),
        ({"messages": [*CHAT, {**TALK[-1], "weight": 1}]}, {}, ["Add.", "1+2=", "3"]),
        ({"prompt": "1+2=", "completion": "3", "note": 1}, {}, ["1+2=", "3"]),
        ({"prompt": CHAT, "completion": TALK[-1:]}, {}, ["Add.", "1+2=", "3"]),
        ({"q": "1+2=", "a": "3"}, {"prompt": "q", "completion": "a"}, ["1+2=", "3"]),
        ({"q": "1+2", "a": "3"}, {"template": "{{ q }}=", "completion": "a"}, ["1+2=", "3"]),
        (
            {"conversations": [{"from": "human", "value": "1+2="}, {"from": "gpt", "value": "3"}]},
            {"system_prompt": "Add."},
            ["Add.", "1+2=", "3"],
        ),
        ({"instruction": "Add.", "input": "1+2", "output": "3"}, {}, ["Add.\n\n1+2", "3"]),
        ({"instruction": "Add 1+2.", "input": "", "output": "3"}, {}, ["Add 1+2.", "3"]),
        ({"instruction": "Add 1+2.", "input": None, "output": "3"}, {}, ["Add 1+2.", "3"]),
    ],
)
def test_examples_have_many_layouts(row, settings, expected):
    found = example(row, **settings)
    assert [text for _, text in contents(found)] == expected
    assert contents(found)[-1][0] == "assistant"


def test_messages_keep_the_keys_that_their_chat_template_may_read():
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "function": {"name": "add"}}],
        "name": None,
    }
    result = {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"}
    done = {"role": "assistant", "content": "It is 3.", "reasoning_content": "1+2"}
    without_null = {"role": "assistant", "content": "", "tool_calls": call["tool_calls"]}
    assert example({"messages": [*CHAT, call, result, done]}).messages == (*CHAT, without_null, result, done)
    assert prompt({"messages": [*CHAT, call, result]}).messages == (*CHAT, without_null, result)


@pytest.mark.parametrize(
    ("row", "settings", "said"),
    [
        ({}, {}, r"has the columns \(none\)"),
        ({"prompt": "1"}, {}, 'or "prompt" and "completion", but has the columns prompt; name the columns with'),
        ({"prompt": 1, "completion": "2"}, {}, "column 'prompt' holds a int"),
        ({"prompt": "1", "completion": 2}, {}, "column 'completion' holds a int"),
        ({"q": "1"}, {"prompt": "q", "completion": "a"}, r"has no column 'a' \(data\.completion\); it has q"),
        ({"messages": CHAT}, {}, 'needs "messages" that end with an assistant message'),
        ({"messages": "hi"}, {}, "that end with an assistant message"),
        ({"messages": [{"role": "assistant"}]}, {}, "holds the message"),
        ({"conversations": [{"from": "robot", "value": "a"}]}, {}, "column 'conversations' holds .* one of human"),
        ({"instruction": "a", "output": 3}, {}, "column 'output' holds a int"),
    ],
)
def test_a_bad_example_is_named(row, settings, said):
    with pytest.raises(DataError, match=rf"data\.csv, row 7: .*{said}"):
        example(row, **settings)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({}, True),
        ({"level": 3}, True),
        ({"level": 4}, False),
        ({"level": [4, 3]}, True),
        ({"level": 3, "source": "a"}, False),
        ({"empty": None}, True),
        ({"is_easy": True}, True),
        ({"is_easy": 1}, False),
        ({"one": True}, False),
    ],
)
def test_rows_are_selected_by_their_columns(where, expected):
    columns = Columns(DataConfig(where=where))
    row = {"level": 3, "source": "b", "empty": None, "is_easy": True, "one": 1}
    assert columns.is_selected(row, "row") is expected


@pytest.mark.parametrize(
    ("wanted", "equal", "different"),
    [
        (True, ["true", "True", " TRUE"], ["false", "1", "yes", ""]),
        (False, ["false", "False"], ["true", "0", ""]),
        (3, ["3", "3.0", " 3", "+3", "3e0"], ["30", "three", "", "true", "3 4"]),
        (10, ["10"], ["1_0"]),
        (0.5, ["0.5", ".50", "5e-1"], ["0.51", "nan", "1/2"]),
        (2**60 + 1, [str(2**60 + 1)], [str(2**60)]),
        (2**53, [str(2**53), f"{2**53}.0"], [str(2**53 + 1), f"{2**53 + 1}.0", "9" * 5000]),
        (None, ["", " "], ["None", "0"]),
        ("3", ["3"], ["3.0", " 3"]),
        ("true", ["true"], ["True"]),
    ],
)
def test_a_text_of_a_csv_file_is_compared_as_a_value_of_the_wanted_type(wanted, equal, different):
    columns = Columns(DataConfig(where={"cell": wanted}))
    assert [text for text in [*equal, *different] if columns.is_selected({"cell": text}, "row")] == equal


def test_a_filter_on_a_missing_column_is_refused():
    with pytest.raises(DataError, match=r"row 7: has no column 'lvl' \(data\.where\); it has level"):
        Columns(DataConfig(where={"lvl": 3})).is_selected({"level": 3}, "row 7")


def test_equal_messages_have_equal_keys():
    assert prompt({"prompt": "a", "id": 1}).key == prompt({"q": "a"}, prompt="q").key
    assert prompt({"prompt": "a"}).key != prompt({"prompt": "b"}).key
