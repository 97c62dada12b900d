"""Row sources beside JSON: CSV, Parquet, saved datasets, folders, patterns and Python rows."""

from __future__ import annotations

import sys

import pytest

from lucidrl.data.config import DataConfig
from lucidrl.data.csv_rows import CsvFile
from lucidrl.data.json_rows import LONGEST_ROW_BYTES
from lucidrl.data.sources import PythonRows, open_source, with_pinned_names
from lucidrl.errors import DataError
from tests.hub import COMMIT, served_hub, use_hub

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = [{"question": f"{n}+1=", "answer": n + 1, "chat": [{"role": "user", "content": str(n)}]} for n in range(2000)]


def rows_of(source):
    return [source.row(index) for index in range(len(source))]


def test_records_of_a_csv_file_are_read_at_use(tmp_path):
    path = tmp_path / "data.csv"
    path.write_bytes('\ufeffquestion,answer\r\n"1, ""one""\nor two",2\r\n\r\nü\u2028x,\n5+5=,10'.encode())
    source = open_source(str(path))
    expected = [
        {"question": '1, "one"\nor two', "answer": "2"},
        {"question": "ü\u2028x", "answer": ""},
        {"question": "5+5=", "answer": "10"},
    ]
    assert rows_of(source) == expected
    assert source.row(1) == expected[1]
    assert (source.row_id(2), source.place(2)) == ("data:3", f"{path}, row 3")


def test_a_tsv_file_is_split_at_tabs(tmp_path):
    path = tmp_path / "data.tsv"
    path.write_text("a\tb\n1,2\t3\n")
    assert rows_of(open_source(str(path))) == [{"a": "1,2", "b": "3"}]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a,b\n1,2\n3\n", r"data\.csv, row 2: has 1 fields, but the header has 2 \(a, b\)"),
        (b"a,b,a\n1,2,3\n", r"header: has the column 'a' 2 times"),
        (b"a,,b\n1,2,3\n", "header: has a column without a name"),
        (b'a,b\n1,2\n"3,4\n', r"row 2: is not valid CSV \(unexpected end of data\)"),
        (b'a,b\n1,"2"x\n', "row 1: is not valid CSV"),
        (b"a,b\n1,\xff\n", "line 2 is not valid UTF-8"),
        (b"a,b\n", "has no rows"),
        (b"a,b\n1," + b"x" * LONGEST_ROW_BYTES, r"line 2 is longer than \d+ bytes"),
        (b'a,b\n1,"' + (b"x" * 999 + b"\n") * (LONGEST_ROW_BYTES // 999), r"row 1: is not valid CSV \(field larger"),
    ],
)
def test_a_bad_csv_file_is_named_with_the_row(tmp_path, content, said):
    path = tmp_path / "data.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=said):
        rows_of(open_source(str(path)))


def test_the_field_limit_of_other_csv_readers_does_not_change(tmp_path):
    import csv

    before = csv.field_size_limit()
    (tmp_path / "data.csv").write_text(f"a\n{'x' * 200_000}\n")
    assert len(CsvFile(tmp_path / "data.csv").row(0)["a"]) == 200_000
    assert csv.field_size_limit() == before


@pytest.mark.parametrize("row_group_size", [300, 10_000])
def test_a_parquet_file_has_random_access_and_leaves_no_file(tmp_path, monkeypatch, row_group_size):
    (tmp_path / "copies").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "copies"))
    path = tmp_path / "data.parquet"
    parquet.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=row_group_size)
    source = open_source(str(path))
    assert len(source) == 2000
    for index in (1999, 0, 511, 512, 700):
        assert source.row(index) == ROWS[index]
    assert (source.row_id(9), source.place(9)) == ("data:10", f"{path}, row 10")
    assert list((tmp_path / "copies").iterdir()) == []


def test_folders_saved_by_datasets_are_read_without_a_copy(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(tmp_path / "one", num_shards=3)
    datasets.DatasetDict({"train": dataset, "test": dataset.select([0])}).save_to_disk(tmp_path / "several")
    datasets.DatasetDict({"test": dataset.select([0])}).save_to_disk(tmp_path / "without")
    for name in ("one", "several"):
        source = open_source(str(tmp_path / name))
        assert (len(source), source.row(1500)) == (2000, ROWS[1500])
    assert len(open_source(str(tmp_path / "several/test"))) == 1
    with pytest.raises(DataError, match=r"without has the splits test but not train; name one of them, as .*SPLIT"):
        open_source(str(tmp_path / "without"))


def test_a_damaged_parquet_or_arrow_file_is_one_sentence(tmp_path):
    (tmp_path / "data.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(DataError, match=r"data\.parquet is not a valid Parquet file"):
        open_source(str(tmp_path / "data.parquet"))
    (tmp_path / "data.arrow").write_bytes(b"\xff\xff\xff\xff and nothing more")
    with pytest.raises(DataError, match=r"data\.arrow is not a valid Arrow file"):
        open_source(str(tmp_path / "data.arrow"))


def test_a_huge_row_and_columns_of_one_name_are_refused(tmp_path):
    rows = [{"a": "fine"}, {"a": "x" * (LONGEST_ROW_BYTES + 1)}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    source = open_source(str(tmp_path / "data.parquet"))
    assert source.row(0) == rows[0]
    with pytest.raises(DataError, match=r"data\.parquet, row 2: has \d+ bytes"):
        source.row(1)
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(DataError, match=r"twice\.parquet has the column 'a' 2 times"):
        open_source(str(tmp_path / "twice.parquet"))


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    parquet.write_table(pa.Table.from_pylist(ROWS[:1]), tmp_path / "data.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r'data\.parquet needs pyarrow to be read; .* pip install "lucidrl\[data\]"'):
        open_source(str(tmp_path / "data.parquet"))


@pytest.fixture
def shards(tmp_path):
    (tmp_path / "data").mkdir()
    for number in range(2):
        parquet.write_table(pa.Table.from_pylist(ROWS[number : number + 1]), tmp_path / f"data/train-{number}.parquet")
    parquet.write_table(pa.Table.from_pylist(ROWS[5:6]), tmp_path / "data/test-0.parquet")
    return tmp_path


def test_a_folder_or_pattern_joins_its_files(shards):
    for name in ("", "data", "data/train-*.parquet"):
        source = open_source(str(shards / name))
        assert rows_of(source) == ROWS[:2]
        assert source.row_id(1) == "2/train-1:1"
        assert source.place(1).endswith("train-1.parquet, row 1")
    assert rows_of(open_source(str(shards / "data/test*"))) == ROWS[5:6]
    with pytest.raises(DataError, match=r"none-\* has no data files"):
        open_source(str(shards / "none-*"))


def test_a_dataset_of_the_hub_is_downloaded_and_pinned(shards, monkeypatch, tmp_path):
    with served_hub() as hub:
        hub.add("datasets/me/sums", {f"data/{path.name}": path.read_bytes() for path in (shards / "data").iterdir()})
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        assert rows_of(open_source("hub:me/sums@v1")) == ROWS[:2]
        assert rows_of(open_source("hub:me/sums/data")) == ROWS[:2]
        assert rows_of(open_source("hub:me/sums@v1/data/test-*")) == ROWS[5:6]
        several = DataConfig(file=["hub:me/sums", "own.jsonl"], validation_file="hub:me/sums/data/test-*")
        names = with_pinned_names(several)
    assert [entry.file for entry in names.files] == [f"hub:me/sums@{COMMIT}", "own.jsonl"]
    assert names.validation_file == f"hub:me/sums@{COMMIT}/data/test-*"
    assert rows_of(open_source(names.files[0].file)) == ROWS[:2]  # the hub is closed


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent.jsonl", "does not exist; give the path of a file"),
        ("notes.txt", r"unknown extension \.txt; the known extensions are \.jsonl"),
        ("empty.jsonl", "has no rows, because it is empty"),
        ("blank.jsonl", "has no rows"),
        ("none.json", "has no rows"),
        ("folder", "has no data files"),
    ],
)
def test_what_has_no_rows_is_refused(tmp_path, name, said):
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n  \n")
    (tmp_path / "none.json").write_text("[]")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=said):
        open_source(str(tmp_path / name))


def test_rows_of_a_program_are_any_sequence_of_mappings():
    datasets = pytest.importorskip("datasets")
    source = PythonRows(datasets.Dataset.from_list(ROWS[:3]))
    assert rows_of(source) == ROWS[:3]
    assert (source.place(1), source.row_id(1)) == ("rows[1]", "rows:2")
    with pytest.raises(DataError, match=r"rows\[0\]: is a str; give one mapping of columns per row"):
        PythonRows(["text"]).row(0)
