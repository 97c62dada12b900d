"""Copies the run to a local database of Trackio."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

from lucidrl.utils.imports import require_package
from lucidrl.utils.logger.config import TrackioConfig, validated
from lucidrl.utils.logger.folders import path_inside
from lucidrl.utils.logger.interface import Tracker
from lucidrl.utils.logger.values import PlainMetrics, finite_histogram, jsonable

_choosing_folder = threading.Lock()


class TrackioLogger(Tracker):
    """Writes scalars, histograms (of lists), the nested configuration and figures to Trackio's database.

    `TRACKIO_DIR=<log_dir> trackio show` displays the run. The logger writes directly to the database, because
    `trackio.init` prints, monitors the machine, starts threads, and sends data to a Space that the environment names.

    Args:
        cfg: see `TrackioConfig`.
        log_dir: folder of the database and the images; by default Trackio's choice.
    """

    def __init__(self, cfg: TrackioConfig, log_dir: Optional[str] = None) -> None:  # noqa: UP045
        require_package("trackio", "tracking by trackio")
        from trackio.sqlite_storage import TRACKIO_DIR

        cfg = validated(TrackioConfig, cfg)
        super().__init__()
        self._folder = Path(log_dir).absolute() if log_dir else TRACKIO_DIR
        self._project = cfg.get("project", "lucidrl")
        self._id = cfg.get("id") or uuid.uuid4().hex
        self._name = cfg.get("name") or (self._folder.parent.name if log_dir else self._id)

    def _write_metrics(self, metrics: PlainMetrics, step: int, step_metric: str | None) -> None:
        from trackio import Histogram
        from trackio.utils import RESERVED_KEYS

        record: dict[str, Any] = {}
        for name, value in metrics.items():
            key = f"__{name}" if name in RESERVED_KEYS else name  # as Trackio renames them
            if not isinstance(value, list):
                record[key] = value
            elif histogram := finite_histogram(value):
                counts, edges = histogram
                record[key] = {"_type": Histogram.TYPE, "bins": edges.tolist(), "values": counts.tolist()}
        self._write(record, step)

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        self._write({}, step=0, config=jsonable(params))

    def _write_png(self, png: bytes, step: int, name: str) -> None:
        from trackio import Image
        from trackio.utils import canonical_project_name

        media = self._folder / "media"
        file_name = f"{canonical_project_name(self._project)}/{self._name}/{step}/{uuid.uuid4()}.png"
        path = path_inside(media, file_name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png)
        self._write({name: {"_type": Image.TYPE, "file_path": file_name, "caption": None}}, step)

    def _write(self, record: dict[str, Any], step: int, config: dict[str, Any] | None = None) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        with _stored_in(self._folder):
            SQLiteStorage.bulk_log(self._project, self._name, [record], steps=[step], config=config, run_id=self._id)


@contextmanager
def _stored_in(folder: Path) -> Iterator[None]:
    """Let Trackio store in `folder` during the block; Trackio has one folder per process, set at import."""
    from trackio import sqlite_storage

    with _choosing_folder:
        usual = sqlite_storage.TRACKIO_DIR
        sqlite_storage.TRACKIO_DIR = folder
        try:
            yield
        finally:
            sqlite_storage.TRACKIO_DIR = usual
