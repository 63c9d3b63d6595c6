"""What the steps share that start processes in the ranks' Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from airflow.sdk.exceptions import TaskDeferred

from ddl_airflow.core.job import JobSpec
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.parameters import parameter_environment
from ddl_airflow.hooks.store import secret_of
from ddl_airflow.operators.base import StepOperator, rank_python, ranks_user
from ddl_airflow.operators.launch import RunningJob


class JobOperator(StepOperator):
    """A step that starts processes, and ends them when Airflow ends it. Not for use by itself.

    Args:
        python: the processes' Python; empty for the site's.
        tf1: whether the scripts are for TensorFlow 1: then `import tensorflow` gives them that API.
        parameters: values that a run may change, by name; ``PARAM_<NAME>`` in the environment.
        secrets: of each secret parameter the id of the Airflow connection whose password is its
            value; ``PARAM_<NAME>`` in the environment, and nowhere else.
    """

    def __init__(
        self,
        *,
        python: str = "",
        tf1: bool = False,
        parameters: Mapping[str, Any] | None = None,
        secrets: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.python = python
        self.tf1 = tf1
        self.parameters = dict(parameters or {})
        self.secrets = dict(secrets or {})
        self._job: RunningJob | None = None

    def with_layout(
        self, context: Any, work: Callable[[RunLayout, Any], dict[str, Any]]
    ) -> dict[str, Any]:
        """As ``StepOperator``, with the run's folder open to its ranks meanwhile."""

        def opened(layout: RunLayout, context: Any) -> dict[str, Any]:
            layout.open_to_ranks()
            try:
                done = work(layout, context)
            except TaskDeferred:  # its job goes on
                raise
            except BaseException:
                layout.close_to_ranks()
                raise
            layout.close_to_ranks()
            return done

        return super().with_layout(context, opened)

    def environment(self, layout: RunLayout, *, trained: bool = True) -> dict[str, str]:
        """What the manifest's own commands find in their environment, once it has ``trained``.

        Raises:
            ConnectionInvalid: there is no connection for a secret parameter, or no password in it.
        """
        return {
            **layout.rank_environment(self.dag_id, trained=trained),
            # Source: ddl_ops.tf1
            **({"DDL_TF1": "1"} if self.tf1 else {}),
            **parameter_environment(self.parameters),
            **parameter_environment({name: secret_of(i) for name, i in self.secrets.items()}),
        }

    def run_once(
        self, layout: RunLayout, name: str, command: str, log_dir: Path, env: Mapping[str, str]
    ) -> None:
        """Runs one process in the run's copy of the code, and waits for its end.

        Args:
            layout: the run's.
            name: of the job, within the run; with the number of the try.
            command: as in a manifest.
            log_dir: where its output goes.
            env: what it gets besides what every rank inherits from the worker.

        Raises:
            JobFailed: it failed.
            JobLost: it was cancelled.
        """
        job = JobSpec(
            job_id=f"{layout.training_id}/{name}",
            command=command,
            nodes=1,
            slots=1,
            python=rank_python(self.python),
            folder=layout.code,
            record_dir=layout.state / name,
            log_dir=log_dir,
            env=dict(env),
            user=ranks_user(),
        )
        # Not at the top: a DAG that is parsed starts nothing.
        from ddl_airflow.launchers.local import OnceLauncher

        self._job = RunningJob(OnceLauncher(), self.log)
        self._job.run(job)

    def on_kill(self) -> None:
        """Ends every process. Airflow calls it when the task is failed, cleared or timed out."""
        if self._job is not None:
            self._job.cancel()
