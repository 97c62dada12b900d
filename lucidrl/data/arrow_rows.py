"""Read rows of Parquet files, Arrow files and `datasets.save_to_disk` folders through memory-mapped Arrow files."""

from __future__ import annotations

import json
import os
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lucidrl.data.json_rows import LONGEST_ROW_BYTES
from lucidrl.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_PER_BATCH = 512
"""Rows of a Parquet file that are in memory at the same time while the file is copied."""


class ArrowRows:
    """Rows of memory-mapped record batches. The index takes 8 bytes per record batch, not per row.

    Args:
        read_batch: returns the record batch with this index, without copying it.
        lengths: number of rows of each record batch.
    """

    def __init__(self, path: Path, read_batch: Callable[[int], pa.RecordBatch], lengths: list[int]) -> None:
        self.name = str(path)
        self._path, self._read_batch = path, read_batch
        self._ends = array("q")
        for length in lengths:
            self._ends.append(length + (self._ends[-1] if self._ends else 0))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, index: int) -> dict[str, Any]:
        number = bisect_right(self._ends, index)
        offset = index - (self._ends[number - 1] if number else 0)
        row = self._read_batch(number).slice(offset, 1)
        if (size := row.nbytes) > LONGEST_ROW_BYTES:
            raise DataError(f"{self.place(index)}: has {size} bytes, more than {LONGEST_ROW_BYTES}; split the row")
        found: dict[str, Any] = row.to_pylist()[0]
        return found

    def place(self, index: int) -> str:
        return f"{self.name}, row {index + 1}"

    def row_id(self, index: int) -> str:
        return f"{self._path.stem}:{index + 1}"


def open_parquet(path: Path) -> ArrowRows:
    """Open a Parquet file for random access.

    Parquet is compressed by column and cannot be read row by row, so all rows are copied to a temporary Arrow file, a
    few hundred at a time. The temporary file is unlinked while it is open, so the system frees the space when the
    process exits or is killed.

    Raises:
        DataError: the file is not a Parquet file, or the temporary folder has too little space.
    """
    pa = _pyarrow(path)
    import pyarrow.parquet as parquet

    try:
        # Memory-mapped and decoded page by page: a large row group needs little memory.
        file = parquet.ParquetFile(path, memory_map=True, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a valid Parquet file ({error}); write it again") from error
    _refuse_duplicates(path, file.schema_arrow.names)
    descriptor, name = tempfile.mkstemp(prefix="lucidrl-rows-", suffix=".arrow")
    os.close(descriptor)
    try:
        lengths: list[int] = []
        with pa.OSFile(name, "wb") as sink, pa.ipc.new_file(sink, file.schema_arrow) as writer:
            for batch in file.iter_batches(_ROWS_PER_BATCH, use_threads=False):
                writer.write_batch(batch)
                lengths.append(batch.num_rows)
        reader = pa.ipc.open_file(pa.memory_map(name))
    except pa.ArrowException as error:
        raise DataError(f"{path} is not a valid Parquet file ({error}); write it again") from error
    except OSError as error:
        folder = tempfile.gettempdir()
        raise DataError(
            f"the rows of {path} cannot be copied to {folder} ({error}); free some space there, or set the environment "
            "variable TMPDIR to a folder with more"
        ) from error
    finally:
        os.unlink(name)
    pa.default_memory_pool().release_unused()
    return ArrowRows(path, reader.get_batch, lengths)


def open_arrow(path: Path, *files: Path) -> ArrowRows:
    """Open Arrow files, in the stream or the file format, without copying them.

    Args:
        path: the dataset; names it in errors.
        files: the files of the dataset, in order; by default `path` itself.
    """
    pa = _pyarrow(path)
    batches: list[Any] = []
    for file in files or (path,):
        try:
            mapped = pa.memory_map(str(file))
            is_file = mapped.read(6) == b"ARROW1"
            mapped.seek(0)
            if is_file:
                reader = pa.ipc.open_file(mapped)
                batches += [reader.get_batch(number) for number in range(reader.num_record_batches)]
            else:
                batches += pa.ipc.open_stream(mapped)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file} is not a valid Arrow file ({error}); write it again") from error
    if batches:
        _refuse_duplicates(path, batches[0].schema.names)
    return ArrowRows(path, batches.__getitem__, [batch.num_rows for batch in batches])


def is_saved_dataset(folder: Path) -> bool:
    """Whether `datasets.save_to_disk` wrote the folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def open_saved_dataset(folder: Path) -> ArrowRows:
    """Open a folder that `datasets.save_to_disk` wrote: a dataset, or a dictionary of splits with a split `train`."""
    if (folder / "dataset_dict.json").is_file():
        splits = _json(folder / "dataset_dict.json").get("splits", [])
        if "train" not in splits:
            raise DataError(
                f"{folder} has the splits {', '.join(splits)} but not train; name one of them, as {folder}/SPLIT"
            )
        folder = folder / "train"
    names = [entry["filename"] for entry in _json(folder / "state.json").get("_data_files", [])]
    return open_arrow(folder, *(folder / name for name in names))


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); save the dataset again") from error
    return content if isinstance(content, dict) else {}


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.ipc
    except ImportError as error:
        raise DataError(f'{path} needs pyarrow to be read; install it with pip install "lucidrl[data]"') from error
    return pa


def _refuse_duplicates(path: Path, columns: list[str]) -> None:
    if doubled := sorted({name for name in columns if columns.count(name) > 1}):
        raise DataError(f"{path} has the column {doubled[0]!r} {columns.count(doubled[0])} times; rename one of them")
