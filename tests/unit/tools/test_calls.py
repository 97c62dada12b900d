"""Tool calls are read from completions as models write them; text that only tries to call a tool is named."""

import pytest

from lucidrl.tools.calls import BadCall, ToolCall, calls_of

CALL = '{"name": "calculator", "arguments": {"expression": "1+2"}}'
SAME = ToolCall("calculator", {"expression": "1+2"})


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>{CALL}</tool_call>",
        f"I will calculate it.\n<tool_call>\n{CALL}\n</tool_call>\n",
        f"<think>hm <tool_call>nonsense</tool_call></think><tool_call>{CALL}</tool_call>",
        f"the prompt opened it <tool_call>no</tool_call></think><tool_call>{CALL}</tool_call>",
        f"<tool_call>{CALL}",
        CALL,
        f"[{CALL}]",
        CALL.replace("arguments", "parameters"),
        '{"function": ' + CALL + "}",
        '{"name": "calculator", "arguments": "{\\"expression\\": \\"1+2\\"}"}',
    ],
)
def test_a_call_is_read_in_every_form(text):
    assert calls_of(text) == [SAME]


def test_several_calls_keep_their_order():
    second = CALL.replace("1+2", "3*4")
    found = calls_of(f"<tool_call>{CALL}</tool_call> and <tool_call>{second}</tool_call>")
    assert found == [SAME, ToolCall("calculator", {"expression": "3*4"})]


@pytest.mark.parametrize(
    "text",
    ["", "42", "The answer is 42.", '{"answer": 42}', "[1, 2]", '{"name": "Ada"}', "[]", f"<think>{CALL}</think>42"],
)
def test_an_answer_is_no_call(text):
    assert calls_of(text) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>calculator(1+2)</tool_call>", "not valid JSON"),
        ("<tool_call></tool_call>", "not valid JSON"),
        ("<tool_call>[1, 2]</tool_call>", 'must be {"name"'),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', 'must be {"name"'),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "must be an object"),
        ('<tool_call>{"name": "f", "arguments": "{"}</tool_call>', "not valid JSON"),
        (f"<tool_call>{'[' * 90_000}</tool_call>", "nested too deeply"),
        (f'<tool_call>{{"name": "f", "arguments": {{"x": {"[" * 600}{"]" * 600}}}}}</tool_call>', "nested too deeply"),
        (f"<tool_call>{'x' * 200_000}</tool_call>", "200,000 characters"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(text, problem):
    (bad,) = calls_of(text)
    assert isinstance(bad, BadCall)
    assert problem in bad.problem


def test_a_call_may_write_the_tags_of_reasoning():
    (call,) = calls_of('<tool_call>{"name": "python", "arguments": {"code": "print(\'<think>\')"}}</tool_call>')
    assert call == ToolCall("python", {"code": "print('<think>')"})
