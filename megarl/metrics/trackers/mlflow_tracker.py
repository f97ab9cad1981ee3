"""Sends a run's metrics and configuration to MLflow: to the server of MLFLOW_TRACKING_URI, else to a file of the run.

Names: MLflow takes letters, digits and `_-./: ` and 250 characters; any other character becomes `_`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from megarl.metrics.reading.status import is_stop
from megarl.metrics.trackers.tracker import Run, Tracker, register_tracker

ADDRESS = "MLFLOW_TRACKING_URI"  # MLflow's own variable
DATABASE = "mlflow.db"
LAST_STEP = "megarl.last_step"  # a tag of the run
_ARTIFACTS = "mlflow_artifacts"
_MOST_PARAMS = 100  # of one call
_MOST_NAME, _MOST_TEXT = 250, 6000  # characters


@register_tracker("mlflow", packages=("mlflow", "sqlalchemy", "alembic"))
class MlflowTracker(Tracker):
    """A run of the experiment `trainer.project_name`; a resumed run goes on with the same one.

    Without MLFLOW_TRACKING_URI, in the run's folder: `mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db`
    """

    def __init__(self, run: Run) -> None:
        from mlflow.entities import Metric, Param, RunTag  # optional, and slow to import
        from mlflow.tracking import MlflowClient

        folder = run.run_dir.resolve()
        address = os.environ.get(ADDRESS) or f"sqlite:///{folder / DATABASE}"
        self._client = MlflowClient(address)
        self._metric = Metric
        self._tag = RunTag
        self._known_step = -1  # up to this one an earlier run has logged
        artifacts = None if os.environ.get(ADDRESS) else (folder / _ARTIFACTS).as_uri()
        id_file = run.run_dir / "mlflow_id"
        if run.resume_step is not None and id_file.exists():
            self._id = id_file.read_text()
            self._client.update_run(self._id, status="RUNNING")
            self._known_step = int(self._client.get_run(self._id).data.tags.get(LAST_STEP, -1))
        else:
            known = self._client.get_experiment_by_name(run.project)
            experiment = known.experiment_id if known else self._client.create_experiment(run.project, artifacts)
            self._id = self._client.create_run(experiment, run_name=run.experiment).info.run_id
            id_file.write_text(self._id)
            params = [Param(_name(key), str(value)[:_MOST_TEXT]) for key, value in _flat(run.config)]
            for start in range(0, len(params), _MOST_PARAMS):
                self._client.log_batch(self._id, params=params[start : start + _MOST_PARAMS])
        # Parameters never change; what a resumed run is given anew is in the file.
        self._client.log_dict(self._id, dict(run.config), "config.yaml")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._is_known(step, metrics):
            return
        now = int(time.time() * 1000)
        rows = [self._metric(_name(name), float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=rows, tags=[self._tag(LAST_STEP, str(step))])

    def close(self, error: BaseException | None = None) -> None:
        end = "FINISHED" if error is None else "KILLED" if is_stop(error) else "FAILED"
        self._client.set_terminated(self._id, end)

    def _is_known(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether the run before, from whose save this one resumes, has logged these numbers already."""
        if step > self._known_step or not metrics:
            return False
        history = self._client.get_metric_history(self._id, _name(next(iter(metrics))))
        return any(number.step == step for number in history)


def _name(text: str) -> str:
    return re.sub(r"[^\w\-./: ]", "_", text)[:_MOST_NAME]


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
