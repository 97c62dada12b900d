"""Rows of a batch become JSON lines, for any type of column, and fast."""

import datetime
import enum
import json
import logging
import warnings

import numpy as np
import pytest
import torch

from lucidrl.utils.logger import jsonl as rows_module
from lucidrl.utils.logger.jsonl import row_lines, write_rows
from lucidrl.utils.logger.values import WarnOnce

NAN, INF = float("nan"), float("inf")


def rows(batch):
    return [json.loads(line) for line in row_lines(batch, WarnOnce())]


def column(value):
    return [row["x"] for row in rows({"x": value})]


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32]
)
def test_tensors_of_every_dtype_keep_their_values(dtype):
    tensor = torch.tensor([[0, 1, 2.5], [3, 4, 5]]).to(dtype)
    assert column(tensor) == tensor.tolist()
    assert column(tensor[:, 0]) == tensor[:, 0].tolist()


def test_float32_is_bit_identical_after_a_round_trip():
    tensor = torch.randn(4, 1000) * torch.logspace(-30, 30, 1000)
    assert torch.equal(torch.tensor(column(tensor)), tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_numbers_that_are_not_finite_are_null(dtype):
    assert column(torch.tensor([[NAN, 1], [INF, -INF]], dtype=dtype)) == [[None, 1], [None, None]]
    assert column(torch.tensor([NAN, 1], dtype=dtype)) == [None, 1]
    assert column([NAN, [INF, 1.0]]) == [None, [None, 1.0]]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(3, 2).T,
        torch.arange(12).reshape(2, 6)[:, ::2],
        torch.arange(2).expand(3, 2),
        torch.zeros(2, 0),
        torch.zeros(0, 3),
        torch.ones(2, 3, 4, requires_grad=True),
        torch.ones(2, 3, dtype=torch.complex64).conj().real,
        np.arange(6).reshape(3, 2)[::-1].T,
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.ones((2, 2), dtype=np.longdouble),
        np.ones((2, 2), dtype=np.float16),
    ],
)
def test_any_layout_in_memory_is_read_right(tensor):
    assert column(tensor) == tensor.tolist()


def test_ragged_rows_and_tensors_inside_of_rows_are_written_whole():
    ragged = [torch.tensor([1, 2]), torch.tensor([]), torch.tensor(3), np.arange(6).reshape(2, 3)[:, 1]]
    messages = [[{"role": "user", "token_ids": torch.tensor([1, 2], dtype=torch.bfloat16)}], [], (), None]
    assert rows({"x": ragged, "messages": messages}) == [
        {"x": [1, 2], "messages": [{"role": "user", "token_ids": [1, 2]}], "idx": 0},
        {"x": [], "messages": [], "idx": 1},
        {"x": 3, "messages": [], "idx": 2},
        {"x": [1, 4], "messages": None, "idx": 3},
    ]


@pytest.mark.parametrize("lengths", [[2, 0, 99, -1], torch.tensor([2, 0, 99, -1]), np.array([2, 0, 99, -1])])
def test_token_columns_are_cut_to_lengths_of_any_kind(lengths):
    batch = {
        "input_ids": torch.ones(4, 3),
        "input_lengths": lengths,
        "hidden": torch.ones(4, 3, 2),
        "other": torch.ones(4, 2),
    }
    assert [len(row["input_ids"]) for row in rows(batch)] == [2, 0, 3, 0]
    assert [len(row["hidden"]) for row in rows(batch)] == [2, 0, 3, 0]
    assert [len(row["other"]) for row in rows(batch)] == [2, 2, 2, 2]


@pytest.mark.parametrize("lengths", [["a", None, NAN], torch.ones(3, 1)])
def test_lengths_that_are_no_numbers_cut_nothing(lengths):
    assert [row["input_ids"] for row in rows({"input_ids": torch.ones(3, 2), "input_lengths": lengths})] == [[1, 1]] * 3


class Color(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    "odd", ["lone \ud800", 2**70, {1: 2}, 1 + 2j, b"bytes", {3}, datetime.date(2020, 1, 1), Color.RED, np.array(["a"])]
)
def test_what_json_does_not_know_costs_no_row_nor_its_other_fields(odd):
    first, second = rows({"odd": [odd, 1], "ids": torch.tensor([[1, 2], [3, 4]])})
    assert first["ids"] == [1, 2]
    assert first["odd"] not in (None, "")
    assert second == {"odd": 1, "ids": [3, 4], "idx": 1}


def test_columns_without_rows_are_left_out_and_named(caplog):
    with caplog.at_level(logging.WARNING):
        assert rows({"a": [1, 2], "b": torch.tensor(1.0), "c": {"d": 1}, "e": "text", "f": torch.ones(3)}) == [
            {"a": 1, "idx": 0},
            {"a": 2, "idx": 1},
        ]
    assert {record.args[0] for record in caplog.records} == {"b", "c", "e", "f"}


def test_the_number_of_rows_is_what_most_columns_have():
    assert rows({"odd": [1, 2, 3], "a": [1, 2], "b": torch.tensor([3, 4])}) == [
        {"a": 1, "b": 3, "idx": 0},
        {"a": 2, "b": 4, "idx": 1},
    ]


@pytest.mark.parametrize("deciding", ["input_ids", "input_lengths"])
def test_where_opinions_are_even_the_tokens_decide(deciding):
    assert rows({"odd": [1, 2, 3], deciding: [5]}) == [{deciding: 5, "idx": 0}]
    assert [row["input_ids"] for row in rows({"input_lengths": [1, 2, 3], "input_ids": [5]})] == [5]
    assert len(rows({"first": [1, 2], "second": [1, 2, 3]})) == 2


class Unprintable:
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]),
        lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8),
        lambda: torch.ones(2, device="meta"),
        lambda: ValueError("it cannot be copied"),
    ],
    ids=["sparse", "nested", "quantized", "meta", "error"],
)
def test_a_column_that_cannot_be_read_is_left_out_and_named(make, caplog):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that some kinds may change or go
        batch = {"odd": make(), "a": torch.tensor([[1, 2], [3, 4]])}
    assert rows(batch) == [{"a": [1, 2], "idx": 0}, {"a": [3, 4], "idx": 1}]
    (record,) = caplog.records
    assert record.getMessage().startswith("column odd is not logged: ")


def deep():
    value = []
    for _ in range(400):
        value = [value]
    return value


def circular():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize("make", [Unprintable, lambda: torch.eye(2).to_sparse(), deep, circular])
def test_a_field_that_cannot_be_written_is_an_error_text_in_its_place(make, caplog):
    first, second, third = rows({"odd": [make(), 1, make()], "a": [1, "lone \ud800", 3]})
    assert first["odd"].startswith("<cannot be logged: ")
    assert (first["a"], second, third["a"]) == (1, {"odd": 1, "a": "lone ?", "idx": 1}, 3)
    (record,) = caplog.records
    assert record.getMessage().startswith("column odd has a field that cannot be logged: ")


def test_a_file_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "samples" / "step_1.jsonl"
    write_rows({"a": [1, 2]}, path, WarnOnce())
    written = path.read_bytes()
    assert written == b'{"a":1,"idx":0}\n{"a":2,"idx":1}\n'

    def broken_lines(batch, warn_once):
        yield b"half"
        raise OSError("disk full")

    monkeypatch.setattr(rows_module, "row_lines", broken_lines)
    with pytest.raises(OSError, match="disk full"):
        write_rows({"a": [3]}, path, WarnOnce())
    assert path.read_bytes() == written
    assert [entry.name for entry in path.parent.iterdir()] == ["step_1.jsonl"]


def test_a_file_name_may_have_the_maximum_length_and_the_usual_mode(tmp_path):
    path = tmp_path / ("x" * 255)
    write_rows({"a": [1]}, path, WarnOnce())
    (tmp_path / "ordinary").touch()
    assert path.stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_concurrent_writers_of_one_file_do_not_conflict(tmp_path, monkeypatch):
    path = tmp_path / "step_1.jsonl"
    real_lines = row_lines

    def lines_with_another_writer_between(batch, warn_once):
        yield from real_lines(batch, warn_once)
        if batch == {"a": [1]}:
            write_rows({"a": [2]}, path, warn_once)
            assert path.read_bytes() == b'{"a":2,"idx":0}\n'

    monkeypatch.setattr(rows_module, "row_lines", lines_with_another_writer_between)
    write_rows({"a": [1]}, path, WarnOnce())
    assert path.read_bytes() == b'{"a":1,"idx":0}\n'
    assert list(tmp_path.iterdir()) == [path]
