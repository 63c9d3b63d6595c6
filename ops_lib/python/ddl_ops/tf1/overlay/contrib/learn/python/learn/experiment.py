"""tensorflow.contrib.learn's Experiment: an Estimator, its data, and how long to train.

What is left out, is refused: metrics and exports of its own, and evaluation beside the training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ddl_ops.tf1 import gone

_DELAY_S = 5
_MOST_DELAY_S = 60


class Experiment:
    """Training and evaluation of one Estimator, in each task of a cluster the part that is its own.

    Attributes:
        estimator: the Estimator.
    """

    def __init__(
        self,
        estimator: Any,
        train_input_fn: Callable[..., Any],
        eval_input_fn: Callable[..., Any],
        eval_metrics: Any = None,
        train_steps: int | None = None,
        eval_steps: int | None = 100,
        train_monitors: Sequence[Any] | None = None,
        eval_hooks: Sequence[Any] | None = None,
        local_eval_frequency: int | None = None,
        eval_delay_secs: float = 120,
        continuous_eval_throttle_secs: float = 60,
        min_eval_frequency: int | None = None,
        delay_workers_by_global_step: bool = False,
        export_strategies: Any = None,
        train_steps_per_iteration: int | None = None,
        checkpoint_and_export: bool = False,
        saving_listeners: Sequence[Any] | None = None,
        check_interval_secs: float = 5,
    ) -> None:
        """As in contrib.learn.

        Evaluation comes once, after the training: what says when it should come besides
        (``local_eval_frequency``, ``min_eval_frequency``, ``eval_delay_secs``,
        ``continuous_eval_throttle_secs``, ``check_interval_secs``) has no effect.
        """
        for name, value, instead in (
            ("eval_metrics", eval_metrics, "tf.estimator.add_metrics(estimator, metric_fn)"),
            ("export_strategies", export_strategies, "estimator.export_saved_model after run()"),
            ("train_steps_per_iteration", train_steps_per_iteration, _TRAIN_AND_EVALUATE),
            ("checkpoint_and_export", checkpoint_and_export, _TRAIN_AND_EVALUATE),
        ):
            if value:
                raise gone.LeftTensorFlow(f"{name} of an Experiment is gone. Use {instead}.")
        self.estimator = estimator
        self._train_input_fn = train_input_fn
        self._eval_input_fn = eval_input_fn
        self._train_steps = train_steps
        self._eval_steps = eval_steps
        self._train_hooks = list(train_monitors or ())
        self._eval_hooks = list(eval_hooks or ())
        self._saving_listeners = saving_listeners
        self._later = not delay_workers_by_global_step
        self._server: Any = None

    def train(self, delay_secs: float | None = None) -> Any:
        """Trains until ``train_steps`` steps were done in all, by all tasks and earlier trainings.

        Args:
            delay_secs: wait so long before; by default worker n waits 5n seconds, at most 60, so
                that few begin to train weights that are still random.
        """
        config = self.estimator.config
        if _in_cluster(config):
            self._serve(config)
        if delay_secs is None:
            late = config.task_type == "worker" and _in_cluster(config) and self._later
            delay_secs = min(_MOST_DELAY_S, _DELAY_S * config.task_id) if late else 0
        time.sleep(delay_secs)
        return self.estimator.train(
            self._train_input_fn,
            hooks=self._train_hooks,
            max_steps=self._train_steps,
            saving_listeners=self._saving_listeners,
        )

    def evaluate(self, delay_secs: float = 0, name: str | None = None) -> dict[str, Any]:
        """The metrics of the newest checkpoint."""
        time.sleep(delay_secs)
        result: dict[str, Any] = self.estimator.evaluate(
            self._eval_input_fn, steps=self._eval_steps, hooks=self._eval_hooks, name=name
        )
        return result

    def train_and_evaluate(self) -> tuple[dict[str, Any], list[Any]]:
        """Trains, then evaluates. Returns the metrics, and no exports."""
        self.train(delay_secs=0)
        return self.evaluate(), []

    local_run = train_and_evaluate

    def run_std_server(self) -> None:
        """A parameter server: never returns, until the process is ended."""
        self._serve(self.estimator.config).join()

    def _serve(self, config: Any) -> Any:
        if self._server is None:
            self._server = tf.train.Server(
                config.cluster_spec,
                job_name=config.task_type,
                task_index=config.task_id,
                config=tf.ConfigProto(gpu_options=config.session_config.gpu_options),
                protocol=config.protocol,
            )
        return self._server


_TRAIN_AND_EVALUATE = "tf.estimator.train_and_evaluate"


def _in_cluster(config: Any) -> bool:
    return bool(config.cluster_spec and config.master)
