"""tensorflow.contrib.learn's learn_runner: does what this task of the cluster has to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorflow.contrib.learn.python.learn.experiment import Experiment

_SCHEDULES = {
    "chief": "train_and_evaluate",
    "master": "train_and_evaluate",
    "worker": "train",
    "ps": "run_std_server",
}


def run(
    experiment_fn: Callable[..., Experiment],
    output_dir: str | None = None,
    schedule: str | None = None,
    run_config: Any = None,
    hparams: Any = None,
) -> Any:
    """Makes the experiment and runs a schedule of it, by default that of this task.

    Args:
        experiment_fn: called with output_dir; or, if run_config is given, with that and hparams by
            their names.
        output_dir: where the Estimator keeps its checkpoints.
        schedule: name of a method of the Experiment.
        run_config: with model_dir set.
        hparams: handed on.
    """
    if (output_dir is None) == (run_config is None):
        raise ValueError("give either output_dir or run_config")
    if run_config is None:
        experiment = experiment_fn(output_dir)
    else:
        if not run_config.model_dir:
            raise ValueError("run_config has no model_dir")
        experiment = experiment_fn(run_config=run_config, hparams=hparams)
    if not isinstance(experiment, Experiment):
        raise TypeError(f"experiment_fn gave {experiment!r}, and no Experiment")
    return getattr(experiment, schedule or _schedule(experiment.estimator.config))()


def _schedule(config: Any) -> str:
    if not config.cluster_spec:
        return "train_and_evaluate"
    if config.task_type not in _SCHEDULES:
        raise ValueError(f"no schedule for a task of type {config.task_type!r}: give one")
    return _SCHEDULES[config.task_type]
