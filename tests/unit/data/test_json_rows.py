"""Rows of JSON files: read at use, errors name file and row."""

from __future__ import annotations

import json
import time

import pytest

from lucidrl.data.json_rows import LONGEST_ROW_BYTES, JsonArray, JsonLines, open_json
from lucidrl.data.sources import open_source
from lucidrl.errors import DataError


@pytest.fixture
def write(tmp_path):
    def write_file(content, name="data.jsonl"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file


def rows_of(source):
    return [source.row(index) for index in range(len(source))]


def test_lines_are_read_in_any_order_with_their_numbers(write):
    source = JsonLines(write('\n{"a": 1}\r\n \n{"a": 2}\n{"n": 123456789012345678}'))
    assert [source.row(index) for index in (2, 0, 1)] == [{"n": 123456789012345678}, {"a": 1}, {"a": 2}]
    assert [source.row_id(index) for index in range(3)] == ["data:2", "data:4", "data:5"]
    assert source.place(1).endswith("data.jsonl:4")
    assert source.content(0) == b'{"a": 1}'


def test_lines_without_blank_ones_need_no_table_of_numbers(write):
    source = JsonLines(write('{"a": 1}\n{"a": 2}\n\n\n'))
    assert rows_of(source) == [{"a": 1}, {"a": 2}]
    assert source._numbers is None


@pytest.mark.parametrize(
    ("start", "kind"),
    [(b"\x1f\x8b\x08", "gzip"), (b"PK\x03\x04", "a ZIP archive"), (b"ARROW1", "an Arrow"), (b"PAR1", "a Parquet")],
)
@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.csv"])
def test_files_of_other_kinds_are_named(write, start, kind, name):
    with pytest.raises(DataError, match=f"must hold .* but is .*{kind}"):
        open_source(str(write(start + b"\x00\xff", name)))


def test_a_line_of_50_mb_is_refused_at_once_with_its_number_and_the_limit(tmp_path):
    path = tmp_path / "data.jsonl"
    with path.open("wb") as file:
        file.write(b'{"prompt": "a"}\n{"prompt": "')
        file.write(b"x" * 50_000_000)
        file.write(b'"}\n')
    start = time.process_time()
    with pytest.raises(DataError, match=rf"data\.jsonl:2: the line is longer than {LONGEST_ROW_BYTES} bytes; write"):
        JsonLines(path)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('{"prompt": "1+1=", "answer": "2", "answer": "3"}', "answer"),
        ('{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "content"),
        ('{"prompt": "a", "pr\\u006fmpt": "b"}', "prompt"),
    ],
)
def test_a_key_that_occurs_twice_is_refused(write, line, key):
    source = JsonLines(write(f'{{"prompt": "fine"}}\n\n{line}\n'))
    with pytest.raises(DataError, match=rf"data\.jsonl:3: has the key '{key}' twice in one object"):
        rows_of(source)


@pytest.mark.parametrize(
    ("number", "shown"), [(2**64, str(2**64)), (-(2**63) - 1, str(-(2**63) - 1)), ("9" * 300, f"{'9' * 40}...")]
)
def test_an_integer_that_would_be_rounded_is_refused(write, number, shown):
    source = JsonLines(write(f'{{"prompt": "fine"}}\n{{"prompt": "a", "info": {{"answer": [{number}]}}}}\n'))
    with pytest.raises(DataError) as refused:
        rows_of(source)
    assert f"data.jsonl:2: the integer {shown} has more than 64 bits" in str(refused.value)
    assert str(refused.value).endswith("; write it as a string")


def test_integers_of_64_bits_and_large_floats_are_kept(write):
    values = [2**64 - 1, -(2**63), 0, 1e30]
    assert rows_of(JsonLines(write(json.dumps({"a": values})))) == [{"a": values}]


def test_equal_keys_of_different_objects_are_accepted(write):
    assert rows_of(JsonLines(write('{"a": {"b": 1}, "c": [{"b": 2}, {"b": 3}]}')))


@pytest.mark.parametrize(
    ("line", "said"), [("{not json", "not valid JSON"), ("[1, 2]", "holds a list"), ("3", "holds a int")]
)
def test_a_line_that_is_no_object_is_named(write, line, said):
    with pytest.raises(DataError, match=rf"data\.jsonl:2: {said}.*write one JSON object per line"):
        rows_of(JsonLines(write(f'{{"a": 1}}\n{line}')))


def test_deep_nesting_is_refused(write):
    source = JsonLines(write('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}\n"))
    with pytest.raises(DataError, match=r"data\.jsonl:1: (is nested too deeply|not valid JSON)"):
        source.row(0)


ROWS = [{"a": 1, "b": 'quote " and \\ {[', "c": [{"d": "]"}]}, {"a": [1, [2]], "e": {}}, {"a": "ü\n"}]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_the_objects_of_an_array_are_read_at_use(write, indent, bom):
    source = open_json(write(bom + json.dumps(ROWS, indent=indent).encode(), "data.json"))
    assert isinstance(source, JsonArray)
    assert rows_of(source) == ROWS
    assert (source.row_id(1), source.place(1)[-16:]) == ("data:2", "data.json, row 2")


def test_a_json_file_may_hold_lines(write):
    assert rows_of(open_json(write('{"a": 1}\n{"a": 2}\n', "data.json"))) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('[{"a": 1}, 5]', r"row 2: holds ', 5'"),
        ('[{"a": 1}, 5, {"a": 2}]', r"row 2: holds ', 5,'"),
        ('["a"]', "row 1: holds a string"),
        ('[{"a": 1}, [1]]', "row 2: holds a list"),
        ('[{"a": 1}', "does not end where its array ends"),
        ('[{"a": 1}] [{"a": 2}]', "more than one JSON value"),
        ('[{"a": 1} {"a": 2}]', "row 2: holds an object"),
    ],
)
def test_anything_but_an_array_of_objects_is_refused(write, content, said):
    with pytest.raises(DataError, match=rf"data\.json.*({said})"):
        JsonArray(write(content, "data.json"))


def test_a_malformed_object_of_an_array_is_named(write):
    source = JsonArray(write('[{"a": 1}, {"a": }]', "data.json"))
    with pytest.raises(DataError, match=r"data\.json, row 2: not valid JSON"):
        rows_of(source)


def test_a_huge_object_of_an_array_is_refused(write):
    with pytest.raises(DataError, match=r"data\.json, row 2: has \d+ bytes"):
        JsonArray(write(json.dumps([{"a": 1}, {"a": "x" * LONGEST_ROW_BYTES}]), "data.json"))
