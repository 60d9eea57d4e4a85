"""MLflow: a run in the experiment PROJECT, of a server (MLFLOW_TRACKING_URI) or of the database FOLDER/mlflow.db."""

import os
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from petal.errors import ConfigError
from petal.track.tracker import Tracker

KEY = "petal.key"
BATCHES = 32            # written at once: each writing takes tens of milliseconds


class MLflow(Tracker):
    """Numbers as metrics, settings as parameters. `mlflow ui --backend-store-uri sqlite:///FOLDER/mlflow.db` shows them."""

    package: ClassVar[str] = "mlflow"

    @property
    def client(self) -> Any:
        """Who speaks to the store."""
        if not hasattr(self, "_client"):
            uri = os.environ.get("MLFLOW_TRACKING_URI")
            if not uri:
                self.folder.mkdir(parents=True, exist_ok=True)
                uri = f"sqlite:///{self.folder.resolve() / 'mlflow.db'}"
            try:
                self._client = self.needed("mlflow.tracking").MlflowClient(tracking_uri=uri)
            except Exception as error:
                raise ConfigError(f"MLflow cannot begin: {error}") from error
        return self._client

    def _found(self) -> Any:
        """The run of this key, or None."""
        experiment = self.client.get_experiment_by_name(self.project)
        if experiment is None or self.key is None:
            return None
        runs = self.client.search_runs([experiment.experiment_id], filter_string=f"tags.`{KEY}` = '{self.key}'")
        return runs[0] if runs else None

    def written(self) -> int:
        """The step after the last one in the store."""
        run = self._found()
        steps = [m.step for m in self.client.get_metric_history(run.info.run_id, "n")] if run is not None else []
        return max(steps) + 1 if steps else 0

    def ended(self) -> bool:
        """True if the run is finished."""
        run = self._found()
        return run is not None and run.info.status == "FINISHED"

    def begin(self) -> None:
        """Begin a run, or go on with it."""
        self.waiting: list[Any] = []
        self.run, self.status = self._found(), "KILLED"
        if self.run is not None:
            self.client.update_run(self.run.info.run_id, status="RUNNING")
            return
        experiment = self.client.get_experiment_by_name(self.project)
        number = self.client.create_experiment(self.project) if experiment is None else experiment.experiment_id
        tags = {} if self.key is None else {KEY: self.key}
        self.run = self.client.create_run(number, run_name=self.name, tags=tags)
        for name, value in self.settings.items():
            self.client.log_param(self.run.info.run_id, name, str(value)[:500])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics of one step, which may wait for others."""
        metric, now = self.needed("mlflow.entities").Metric, round(1000 * time.time())
        self.waiting.append([metric(name, value, now, step) for name, value in values.items()])
        if len(self.waiting) == BATCHES:
            self._flush()

    def write_end(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics of the whole; the run is finished."""
        self.write(step, values)
        self.status = "FINISHED"

    def end(self) -> None:
        """Write what waits, and say how it ended."""
        self._flush()
        self.client.set_terminated(self.run.info.run_id, status=self.status)

    def _flush(self) -> None:
        if self.waiting:
            self.client.log_batch(self.run.info.run_id, metrics=[m for batch in self.waiting for m in batch])
            self.waiting = []
