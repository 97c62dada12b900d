"""Copies the run to MLflow, on a server or in a local database."""

from __future__ import annotations

import io
import logging
import math
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, TypeVar

from lucidrl.utils.imports import require_package
from lucidrl.utils.logger.config import MlflowConfig, validated
from lucidrl.utils.logger.interface import Tracker
from lucidrl.utils.logger.values import PlainMetrics, Scalar, flatten_dict, metric_name, printable

if TYPE_CHECKING:
    from mlflow import MlflowClient

T = TypeVar("T")

_ID_TAG = "lucidrl.run_id"
_CHANGED = "changed."

# Limits of MLflow.
_MAX_METRICS_PER_CALL = 1000
_MAX_PARAMS_PER_CALL = 100
_MAX_VALUE_CHARS = 6000
_REFUSED_CHARS = re.compile(r"[^\w./ -]")


class MlflowLogger(Tracker):
    """Sends scalars, hyperparameters (flattened) and figures to a run of MLflow.

    MLflow has no histograms: a list becomes `<name>.mean`, `<name>.min` and `<name>.max` of its finite values. MLflow
    plots against the step only. Characters that it refuses in names become "_". It cannot change a hyperparameter: if a
    resumed run has another value, the tag `changed.<name>` holds both values.

    Args:
        cfg: see `MlflowConfig`.
        log_dir: folder of the database and the artifacts, unless `cfg` names another store.
    """

    def __init__(self, cfg: MlflowConfig, log_dir: Optional[str] = None) -> None:  # noqa: UP045
        require_package("mlflow", "tracking by mlflow")
        _keep_quiet()
        from mlflow import MlflowClient

        cfg = validated(MlflowConfig, cfg)
        super().__init__()
        folder = Path(log_dir).absolute() if log_dir else None
        store, artifacts = cfg.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI"), None
        if folder and not store:
            folder.mkdir(parents=True, exist_ok=True)
            store, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
        # A separate client keeps the user's active run and tracking URI unchanged.
        self._client = MlflowClient(tracking_uri=store)
        experiment_id = _experiment_id(self._client, cfg.get("experiment_name", "lucidrl"), artifacts)
        name = cfg.get("run_name") or (folder.parent.name if folder else None)
        self.run_id = _run_id(self._client, experiment_id, cfg.get("id") or uuid.uuid4().hex, name)
        """MLflow's id of the run."""
        self._is_finished = False

    def _write_metrics(self, metrics: PlainMetrics, step: int, step_metric: str | None) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        entities = [Metric(_accepted_name(name), float(value), now_ms, step) for name, value in _scalars(metrics)]
        for batch in _batches(entities, _MAX_METRICS_PER_CALL):
            self._client.log_batch(self.run_id, metrics=batch)

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        from mlflow.entities import Param, RunTag

        recorded = self._client.get_run(self.run_id).data.params
        new_params, changes = [], []
        for key, value in flatten_dict(params).items():
            name, text = _accepted_name(key), printable(str(value))[:_MAX_VALUE_CHARS]
            if name not in recorded:
                new_params.append(Param(name, text))
            elif recorded[name] != text:
                change = f"{recorded[name]} → {text}"[:_MAX_VALUE_CHARS]
                changes.append(RunTag(_accepted_name(_CHANGED + name), change))
        for params_batch in _batches(new_params, _MAX_PARAMS_PER_CALL):
            self._client.log_batch(self.run_id, params=params_batch)
        for tags_batch in _batches(changes, _MAX_PARAMS_PER_CALL):
            self._client.log_batch(self.run_id, tags=tags_batch)

    def _write_png(self, png: bytes, step: int, name: str) -> None:
        from PIL import Image

        picture = Image.open(io.BytesIO(png))
        key = _accepted_name(name.encode("ascii", "replace").decode())  # MLflow is stricter with image names
        self._client.log_image(self.run_id, picture, key=key, step=step, synchronous=True)

    def finish(self) -> None:
        if not self._is_finished:
            self._is_finished = True
            self._client.set_terminated(self.run_id)


def _keep_quiet() -> None:
    """Turn off MLflow's telemetry and its output to the terminal; call before its import."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # It prints the URL of a run, the creation of tables, and the traceback of each database error that it raises.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    logging.getLogger("urllib3.connectionpool").addFilter(_is_no_retry)


def _is_no_retry(record: logging.LogRecord) -> bool:
    """False for the retries of a call to an MLflow server; the caller logs the final error."""
    return not (str(record.msg).startswith("Retrying (") and "/mlflow" in record.getMessage().rpartition(": ")[2])


def _experiment_id(client: MlflowClient, name: str, artifacts: str | None) -> str:
    """Id of the experiment with this name, created if needed."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return client.create_experiment(name, artifact_location=artifacts)
        except MlflowException:
            experiment = client.get_experiment_by_name(name)  # another run may have created it
            if experiment is None:
                raise
    return experiment.experiment_id


def _run_id(client: MlflowClient, experiment_id: str, own_id: str, name: str | None) -> str:
    """MLflow's id of the run with our tag; creates the run if it does not exist."""
    found = client.search_runs([experiment_id], f"tags.`{_ID_TAG}` = '{own_id}'", max_results=1)
    if found:
        client.update_run(found[0].info.run_id, status="RUNNING")
        return found[0].info.run_id
    return client.create_run(experiment_id, tags={_ID_TAG: own_id}, run_name=name).info.run_id


def _scalars(metrics: Mapping[str, Scalar | list[Scalar]]) -> Iterator[tuple[str, Scalar]]:
    for name, value in metrics.items():
        if not isinstance(value, list):
            yield name, value
        elif finite := [item for item in value if math.isfinite(item)]:
            yield f"{name}.mean", sum(finite) / len(finite)
            yield f"{name}.min", min(finite)
            yield f"{name}.max", max(finite)


def _accepted_name(name: str) -> str:
    """`name` with only the characters that MLflow accepts, and no dots or slashes at its start."""
    return _REFUSED_CHARS.sub("_", metric_name(name)).lstrip("./") or "_"


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
