"""The tracker for MLflow: a server, or the database OUTPUT_DIR/mlflow.db.

A resumed run keeps its id. MLflow cannot remove a value, so a repeated step has two values of a
metric, and MLflow shows the value with the later timestamp.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from mrl.config import LoggingConfig
from mrl.run.changes import flatten
from mrl.trackers.base import SAMPLE_COLUMNS, Run, Started

FORBIDDEN = re.compile(r"[^/\w.\- :]")
"""Characters that MLflow does not allow in a key; they are replaced by `_`."""
MAX_PARAM_CHARS = 6000
MAX_BATCH = 100
"""The largest number of parameters in one request."""


class Tracker:
    """One run of MLflow."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._client: Any = None
        self._run_id: str | None = None

    @staticmethod
    def packages(config: LoggingConfig) -> Sequence[str]:
        # mlflow-skinny does not include the packages that a database needs.
        return ("mlflow",) if _remote_uri(config) else ("mlflow", "sqlalchemy", "alembic")

    def start(self, run_id: str | None, next_step: int) -> Started:
        config, folder = self._run.config, self._run.folder.absolute()
        uri = _remote_uri(config) or f"sqlite:///{folder / 'mlflow.db'}"
        self._client = import_module("mlflow").MlflowClient(tracking_uri=uri)
        if run_id is None:
            run_id = self._create(None if _remote_uri(config) else f"file://{folder / 'mlflow'}")
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._run_id = run_id
        return Started(run_id, next_step)

    def _create(self, artifacts: str | None) -> str:
        """Create the run, and its experiment if that does not exist yet; return the id of the run.

        artifacts: where a new experiment stores its artifacts; None for the server's default.
        """
        param = import_module("mlflow.entities").Param
        client, name = self._client, self._run.config.project
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            experiment_id = client.create_experiment(name, artifact_location=artifacts)
        else:
            experiment_id = experiment.experiment_id
        run_id = client.create_run(experiment_id, run_name=self._run.name).info.run_id
        flat = list(flatten(dict(self._run.recipe)).items())
        for first in range(0, len(flat), MAX_BATCH):
            part = flat[first : first + MAX_BATCH]
            params = [param(_key(key), str(value)[:MAX_PARAM_CHARS]) for key, value in part]
            client.log_batch(run_id, params=params)
        return run_id

    def log(self, step: int, metrics: Mapping[str, float], time_s: float) -> None:
        metric = import_module("mlflow.entities").Metric
        found = [
            metric(_key(key), value, int(time_s * 1000), step) for key, value in metrics.items()
        ]
        for first in range(0, len(found), 1000):  # the most that one request may have
            self._client.log_batch(self._run_id, metrics=found[first : first + 1000])

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]], time_s: float) -> None:
        # The form that pandas.read_json(orient="split") reads, as mlflow.log_table writes it.
        data = [[step, *(row.get(key) for key in SAMPLE_COLUMNS)] for row in rows]
        table = {"columns": ["step", *SAMPLE_COLUMNS], "data": data}
        self._client.log_dict(self._run_id, table, f"samples/step_{step:06d}.json")

    def flush(self) -> None:
        """Do nothing, because every call returns only after the data has reached the service."""

    def close(self, *, failed: bool) -> None:
        if self._run_id is not None:
            self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


def _remote_uri(config: LoggingConfig) -> str | None:
    """Return the tracking URI that the user chose; None if the run folder's database is used."""
    return config.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")


def _key(key: str) -> str:
    return FORBIDDEN.sub("_", key)
