"""MLflow: curves, the config as parameters, and a table of sample trajectories.

    tracking: [{name: mlflow, uri: sqlite:///runs/mlflow.db, experiment: arithmetic}]

It uses a separate client, because MLflow's module-level functions keep a current run per thread.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from polyturn.tracking.base import RunInfo, RunTracker, Sample

BATCH = 500
"""Largest number of metrics in one request; servers refuse more than a thousand."""
MAX_PARAM = 500
"""Largest number of characters of a parameter; longer ones are cut."""


class MlflowTracker(RunTracker):
    """Logs to a run of MLflow."""

    def __init__(self, run: RunInfo, *, uri: str | None = None, experiment: str = "polyturn") -> None:
        """Create the run in MLflow, or continue it.

        Args:
            run: The run.
            uri: A server's address, or sqlite:///FILE; MLFLOW_TRACKING_URI by default.
            experiment: The experiment; created if missing.
        """
        self._client = MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(experiment)
        experiment_id = known.experiment_id if known is not None else self._client.create_experiment(experiment)
        self._id = run.kept("mlflow_id") or ""
        if not self._id:
            self._id = run.keep("mlflow_id", self._client.create_run(experiment_id, run_name=run.name).info.run_id)
            params = [Param(_key(name), str(value)[:MAX_PARAM]) for name, value in flat(run.config()).items()]
            for start in range(0, len(params), 100):
                self._client.log_batch(self._id, params=params[start : start + 100])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve."""
        now = round(1000 * time.time())
        points = [Metric(_key(name), float(v), now, step) for name, v in values.items() if math.isfinite(v)]
        for start in range(0, len(points), BATCH):
            self._client.log_batch(self._id, metrics=points[start : start + BATCH])

    def log_samples(self, step: int, split: str, rows: Sequence[Sample]) -> None:
        """Log the trajectories as a table."""
        data: dict[str, list[Any]] = {name: [row[i] for row in rows] for i, name in enumerate(Sample._fields)}
        self._client.log_table(self._id, data, f"samples/{split.replace('/', '_')}.json")

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)


def _key(name: str) -> str:
    """Return a name that MLflow accepts, because it refuses a whole batch for one other name: mean@4 -> mean_at_4."""
    return re.sub(r"[^/\w.\- ]", "_", name.replace("@", "_at_"))


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested keys as dotted ones: {"train": {"steps": 5}} -> {"train.steps": 5}."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out
