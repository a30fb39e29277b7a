"""Record a run with MLflow: at MLFLOW_TRACKING_URI, else in `mlflow.db` in the run's folder."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.report.run_record import ended_well
from launcher.report.text import flat
from launcher.report.trackers.tracker import Metrics, TrackedRun, Tracker

if TYPE_CHECKING:
    from mlflow import MlflowClient

RUN_TAG = "launcher.run"  # the run's folder: by it a resumed run is found
_LONGEST_PARAM = 500  # characters
_MOST_PARAMS = 100  # a call
# Variables that only MLflow's own `start_run` reads, as it reads those of the experiment.
_WITHOUT_EFFECT = ("MLFLOW_RUN_ID", "MLFLOW_RUN_CONTEXT", "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING")

_log = logging.getLogger(__name__)


class MlflowTracker(Tracker):
    """One MLflow run, in the experiment of MLFLOW_EXPERIMENT_NAME or _ID, else in "launcher".

    MLflow takes seconds to import and to make a database: that begins with the first call, which
    is not on the thread of the training.

    Args:
        run: the run to record.
    """

    needs = ("mlflow", "sqlalchemy", "alembic")

    def __init__(self, run: TrackedRun) -> None:
        self._tracked, self._earlier = run, run.earlier
        self._begun: tuple[MlflowClient, str] | None = None
        self._newest = self._alerts = 0
        self._tables: list[dict[str, str]] = []

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Record a table as MLflow's own file of one."""
        client, run = self._open()
        file = f"{name}.json"
        content = {"columns": [*columns], "data": [[*row] for row in rows]}
        client.log_text(run, json.dumps(content, default=str), file)
        self._tables.append({"path": file, "type": "table"})
        client.set_tag(run, "mlflow.loggedArtifacts", json.dumps(self._tables))

    def log(self, step: int, metrics: Metrics) -> None:
        """Record the known metrics of a step; a step that is done again is left out."""
        from mlflow.entities import Metric

        client, run = self._open()
        earlier, self._earlier = self._earlier, ()
        for record in earlier:
            self.log(record["step"], record)
        if step <= self._newest:  # what is logged cannot be taken back
            return
        self._newest, now = step, int(time.time() * 1000)
        found = {"step": step, **metrics}.items()
        client.log_batch(run, [Metric(k, float(v), now, step) for k, v in found if v is not None])

    def image(self, name: str, path: Path) -> None:
        """Record a PNG file."""
        self._log_file(path, name.rpartition("/")[0])

    def artifact(self, name: str, path: Path) -> None:
        """Record a copy of a file or a folder."""
        self._log_file(path, name if path.is_dir() else "")

    def alert(self, title: str, text: str) -> None:
        """Record an alert as a tag."""
        client, run = self._open()
        self._alerts += 1
        client.set_tag(run, f"alert.{self._alerts}", f"{title}: {text}"[:_LONGEST_PARAM])

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Record the summary and end the run."""
        client, run = self._open()
        if summary:
            client.log_text(run, json.dumps(summary, indent=2, default=str), "summary.json")
            client.set_tag(run, "exit_reason", str(summary.get("exit_reason"))[:_LONGEST_PARAM])
        is_done = ended_well(summary.get("exit_reason", "done"))
        client.set_terminated(run, "FINISHED" if is_done else "FAILED")

    def _log_file(self, path: Path, folder: str) -> None:
        client, run = self._open()
        log = client.log_artifacts if path.is_dir() else client.log_artifact
        log(run, str(path), folder or None)

    def _open(self) -> tuple[MlflowClient, str]:
        """Return the client and MLflow's id of the run, which is begun or continued."""
        if self._begun is None:
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it reports its use
            logging.getLogger("mlflow").setLevel(logging.ERROR)
            from mlflow import MlflowClient

            tracked, own = self._tracked, "MLFLOW_TRACKING_URI" not in os.environ
            place = f"sqlite:///{tracked.folder.absolute() / 'mlflow.db'}" if own else None
            client = MlflowClient(tracking_uri=place)
            if ours := [name for name in _WITHOUT_EFFECT if name in os.environ]:
                _log.warning(f"mlflow: without effect, as the folder is the run: {', '.join(ours)}")
            name, number = os.environ.get("MLFLOW_EXPERIMENT_NAME"), None
            if name is None:
                name, number = "launcher", os.environ.get("MLFLOW_EXPERIMENT_ID")
            if number is None and (experiment := client.get_experiment_by_name(name)):
                number = experiment.experiment_id
            files = (tracked.folder.absolute() / "mlflow").as_uri() if own else None
            number = number or client.create_experiment(name, artifact_location=files)
            self._begun = client, self._run(client, number)
        return self._begun

    def _run(self, client: MlflowClient, experiment: str) -> str:
        from mlflow.entities import Param

        folder = str(self._tracked.folder.absolute())
        quoted = folder.replace("'", "\\'")
        found = client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{quoted}'")
        if found:
            run: str = found[0].info.run_id
            client.update_run(run, "RUNNING")
            self._newest = int(found[0].data.metrics.get("step", 0))
            return run
        made = client.create_run(experiment, run_name=self._tracked.id, tags={RUN_TAG: folder})
        params = [Param(k, str(v)[:_LONGEST_PARAM]) for k, v in flat(self._tracked.config).items()]
        for at in range(0, len(params), _MOST_PARAMS):
            client.log_batch(made.info.run_id, params=params[at : at + _MOST_PARAMS])
        return str(made.info.run_id)
