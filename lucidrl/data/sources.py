"""Row sources: files, folders and Python sequences, from which rows are read one by one when they are used."""

from __future__ import annotations

import glob
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from lucidrl.data.arrow_rows import is_saved_dataset, open_arrow, open_parquet, open_saved_dataset
from lucidrl.data.config import DataConfig
from lucidrl.data.csv_rows import CsvFile
from lucidrl.data.interfaces import Rows
from lucidrl.data.json_rows import JsonLines, open_json
from lucidrl.errors import DataError
from lucidrl.utils.hub import downloaded, is_hub_id, parse_hub_id, pinned


class RowSource(Protocol):
    """Rows with random access; a source does not keep them in memory."""

    name: str
    """File or folder, for error messages."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """The columns of a row.

        Raises:
            DataError: the row is malformed; the message names it.
        """
        ...

    def place(self, index: int) -> str:
        """File and row, for error messages."""
        ...

    def row_id(self, index: int) -> str:
        """An id that is unique in the source."""
        ...


OPENERS: dict[str, Callable[[Path], RowSource]] = {
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".json": open_json,
    ".csv": CsvFile,
    ".tsv": partial(CsvFile, delimiter="\t"),
    ".parquet": open_parquet,
    ".arrow": open_arrow,
}
"""Functions that open a file, by extension."""


class PythonRows:
    """Rows of a Python program: a list of mappings or another sequence of them, such as a `datasets.Dataset`."""

    def __init__(self, rows: Rows, name: str = "rows") -> None:
        self.name, self._rows = name, rows

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        if not isinstance(row, Mapping):
            raise DataError(f"{self.place(index)}: is a {type(row).__name__}; give one mapping of columns per row")
        return dict(row)

    def place(self, index: int) -> str:
        return f"{self.name}[{index}]"

    def row_id(self, index: int) -> str:
        return f"{self.name}:{index + 1}"


class Concatenated:
    """Several sources, one after the other."""

    def __init__(self, name: str, sources: Sequence[RowSource]) -> None:
        self.name, self._sources = name, sources
        self._ends = array("q")
        for source in sources:
            self._ends.append(len(source) + (self._ends[-1] if self._ends else 0))

    def __len__(self) -> int:
        return self._ends[-1]

    def row(self, index: int) -> dict[str, Any]:
        number, offset = self._find(index)
        return self._sources[number].row(offset)

    def place(self, index: int) -> str:
        number, offset = self._find(index)
        return self._sources[number].place(offset)

    def row_id(self, index: int) -> str:
        number, offset = self._find(index)
        return f"{number + 1}/{self._sources[number].row_id(offset)}"  # files of several folders may have the same name

    def _find(self, index: int) -> tuple[int, int]:
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number - 1] if number else 0)


def open_source(file: str) -> RowSource:
    """Open a file, a folder, a pattern of files, or a dataset of the Hugging Face hub.

    Raises:
        DataError: the file does not exist, has an unknown extension, or has no rows.
    """
    try:
        source = _opened(file)
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror or error}); check its path and permissions") from error
    if not len(source):
        raise DataError(f"{file} has no rows; write at least one row; a JSONL file has one JSON object per line")
    return source


def _opened(file: str) -> RowSource:
    if is_hub_id(file):
        return _of_hub(file)
    path = Path(file)
    if path.is_dir():
        return _of_folder(file, path)
    if path.is_file():
        return _of_kind(path)
    if glob.has_magic(file):
        return _joined(file, [Path(found) for found in sorted(glob.glob(file, recursive=True))])
    raise DataError(f"{file} does not exist; give the path of a file ({', '.join(OPENERS)}) or folder")


def _of_hub(file: str) -> RowSource:
    """Download a dataset; open the files that the path after ORG/NAME selects, or all training files."""
    folder, path = downloaded(file, "dataset"), parse_hub_id(file).path
    if (folder / path).is_dir():
        return _of_folder(file, folder / path)
    return _joined(file, sorted(found for found in folder.glob(path) if found.is_file()))


def with_pinned_names(config: DataConfig) -> DataConfig:
    """Set the revision of every `hub:` name to a commit, so that a resumed run reads the same rows."""

    def name(file: str) -> str:
        return pinned(file, "dataset") if is_hub_id(file) else file

    pins: dict[str, Any] = {}
    if isinstance(config.file, str):
        pins["file"] = name(config.file)
    elif config.file is not None:
        pins["file"] = tuple(entry.model_copy(update={"file": name(entry.file)}) for entry in config.file)
    if config.validation_file is not None:
        pins["validation_file"] = name(config.validation_file)
    return config.model_copy(update=pins)


def _of_folder(name: str, folder: Path) -> RowSource:
    return open_saved_dataset(folder) if is_saved_dataset(folder) else _joined(name, _training_files(folder))


def _training_files(folder: Path) -> list[Path]:
    """Data files below a folder; only those with a name or folder "train...", if there are any."""
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in OPENERS and path.is_file())
    data = [path for path in found if not path.name.startswith((".", "dataset_info"))]
    return [path for path in data if _names_training(path.relative_to(folder))] or data


def _names_training(path: Path) -> bool:
    return any(part.lower().startswith("train") for part in path.parts)


def _joined(name: str, files: Sequence[Path]) -> RowSource:
    if not files:
        raise DataError(f"{name} has no data files; the known extensions are {', '.join(OPENERS)}")
    return _of_kind(files[0]) if len(files) == 1 else Concatenated(name, [_of_kind(path) for path in files])


def _of_kind(path: Path) -> RowSource:
    opener = OPENERS.get(path.suffix.lower())
    if opener is None:
        raise DataError(
            f"{path} has the unknown extension {path.suffix or '(none)'}; the known extensions are {', '.join(OPENERS)}"
        )
    if path.stat().st_size == 0:
        raise DataError(f"{path} has no rows, because it is empty; a JSONL file has one JSON object per line")
    return opener(path)
