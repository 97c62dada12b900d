"""Files that are not JSONL are refused at once, with their kind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lucidrl.data.datasets import load_examples, load_prompts
from lucidrl.data.jsonl import LONGEST_LINE_BYTES, read_json_lines
from lucidrl.errors import DataError


def load(path: Path) -> None:
    for line in read_json_lines(path, "prompt"):
        assert line.record


@pytest.mark.parametrize("read", [load_prompts, lambda path: load_examples(path, 0.1)], ids=["prompts", "examples"])
def test_a_parquet_file_is_named_with_its_conversion(tmp_path, read):
    path = tmp_path / "data.parquet"
    path.write_bytes(b"PAR1\x15\x04\x15\xff\xfe\n\x00PAR1")
    with pytest.raises(DataError, match=r"data\.parquet must be JSONL, .* is a Parquet file; convert it with pandas"):
        read(path)


@pytest.mark.parametrize(
    ("start", "kind"), [(b"\x1f\x8b\x08", "gzip"), (b"PK\x03\x04", "a ZIP archive"), (b"ARROW1", "an Arrow file")]
)
def test_files_of_other_kinds_are_named(tmp_path, start, kind):
    path = tmp_path / "data.jsonl"
    path.write_bytes(start + b"\x00\xff")
    with pytest.raises(DataError, match=f"must be JSONL, .* but is .*{kind}"):
        load(path)


def test_a_line_of_50_mb_is_refused_at_once_with_its_number_and_the_limit(tmp_path):
    path = tmp_path / "data.jsonl"
    with path.open("wb") as file:
        file.write(b'{"prompt": "a"}\n{"prompt": "')
        file.write(b"x" * 50_000_000)
        file.write(b'"}\n')
    start = time.process_time()
    with pytest.raises(DataError, match=rf"data\.jsonl:2: the line is longer than {LONGEST_LINE_BYTES} bytes; write"):
        load_prompts(path)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('{"prompt": "1+1=", "answer": "2", "answer": "3"}', "answer"),
        ('{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "content"),
        ('{"prompt": "a", "pr\\u006fmpt": "b"}', "prompt"),
    ],
)
def test_a_key_that_occurs_twice_is_refused(tmp_path, line, key):
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
    with pytest.raises(DataError, match=rf"data\.jsonl:3: has the key '{key}' twice in one object"):
        load(path)


def test_equal_keys_of_different_objects_are_accepted_and_blank_lines_skipped(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"a": {"b": 1}, "c": [{"b": 2}, {"b": 3}]}\r\n \n{"n": 123456789012345678}')
    assert [(line.number, line.content[:4], line.record) for line in read_json_lines(path, "prompt")] == [
        (1, b'{"a"', {"a": {"b": 1}, "c": [{"b": 2}, {"b": 3}]}),
        (3, b'{"n"', {"n": 123456789012345678}),
    ]


def test_deep_nesting_is_refused(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(DataError, match=r"data\.jsonl:1: (is nested too deeply|not valid JSON)"):
        load(path)
