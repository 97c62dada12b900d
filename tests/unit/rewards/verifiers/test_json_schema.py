import json
import socket

import pytest

from lucidrl.errors import DataError
from tests.unit.rewards.verifiers.scoring import outcome, score

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"age": 3}', 1),
        ('{"age": "3"}', 0),
        ("[]", 0),
        ('Here:\n```json\n{"age": 3}\n```\nand\n```\n[]\n```', 1),
        ('Here: {"age": 3}', "parse failure"),
        ('```json\n{"age": 3}', "parse failure"),
        ('{"age": NaN}', "parse failure"),
        ('{"age": ' + "1" * 5000 + "}", "parse failure"),
        ("[" * 100_000, "parse failure"),
        ('{"a":' * 100_000, "parse failure"),
        ("", "parse failure"),
        ('{"age": 3, "x": "\\ud800"}', 1),
        ('{"age": 3}\0', "parse failure"),
    ],
)
def test_json_is_read_and_validated(text, expected):
    assert outcome("json_schema", text, {}, json_schema=SCHEMA) == expected
    for column in (SCHEMA, json.dumps(SCHEMA)):
        assert outcome("json_schema", text, {"schema": column}, schema_column="schema") == expected


def test_the_option_says_where_the_json_is():
    assert outcome("json_schema", "{}", {}, json_schema={}, read="block") == "parse failure"
    assert outcome("json_schema", "```\n{}\n```", {}, json_schema={}, read="whole") == "parse failure"


def test_nested_json_in_a_recursive_schema_is_a_parse_failure():
    schema = {"$defs": {"n": {"items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}
    assert outcome("json_schema", "[" * 900 + "]" * 900, {}, json_schema=schema) == "parse failure"
    assert score("json_schema", "[[[]]]", {}, json_schema=schema) == 1


@pytest.mark.parametrize("schema", ["no JSON", "3", {"type": 3}, [1]])
def test_a_schema_that_is_none_is_an_error(schema):
    with pytest.raises(DataError, match="is not a JSON schema"):
        score("json_schema", "{}", {"schema": schema}, schema_column="schema")


@pytest.fixture
def short_timeouts():
    socket.setdefaulttimeout(0.5)
    yield
    socket.setdefaulttimeout(None)


@pytest.mark.usefixtures("short_timeouts")
def test_a_schema_elsewhere_is_never_fetched():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        schema = {"$ref": f"http://127.0.0.1:{server.getsockname()[1]}/schema"}
        with pytest.raises(DataError, match="has a reference that it does not define"):
            score("json_schema", "{}", {"schema": schema}, schema_column="schema")
        with pytest.raises(BlockingIOError):  # no connection waits
            server.accept()
