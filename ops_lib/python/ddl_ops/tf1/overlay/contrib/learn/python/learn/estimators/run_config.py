"""tensorflow.contrib.learn's RunConfig: that of tf.estimator, with the arguments of then."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class RunConfig(tf.estimator.RunConfig):
    """Which task of the cluster this is, from TF_CONFIG, and how it saves and runs.

    A session sees the parameter servers and its own task only, also with options of its own:
    otherwise a worker that comes late would wait for a master that has ended.
    """

    def __init__(
        self,
        master: str | None = None,
        num_cores: int = 0,
        log_device_placement: bool = False,
        gpu_memory_fraction: float = 1,
        tf_random_seed: int | None = None,
        save_summary_steps: int = 100,
        save_checkpoints_secs: int | None = 0,
        save_checkpoints_steps: int | None = None,
        keep_checkpoint_max: int = 5,
        keep_checkpoint_every_n_hours: float = 10000,
        log_step_count_steps: int = 100,
        protocol: str | None = None,
        evaluation_master: str = "",
        model_dir: str | None = None,
        session_config: Any = None,
    ) -> None:
        """As in contrib.learn; without save_checkpoints_* one checkpoint every ten minutes."""
        if save_checkpoints_secs == 0:
            save_checkpoints_secs = 600 if save_checkpoints_steps is None else None
        super().__init__(
            model_dir=model_dir,
            tf_random_seed=tf_random_seed,
            save_summary_steps=save_summary_steps,
            save_checkpoints_steps=save_checkpoints_steps,
            save_checkpoints_secs=save_checkpoints_secs,
            keep_checkpoint_max=keep_checkpoint_max,
            keep_checkpoint_every_n_hours=keep_checkpoint_every_n_hours,
            log_step_count_steps=log_step_count_steps,
            protocol=protocol,
        )
        if master is not None:
            self._master = master
        if evaluation_master:
            self._evaluation_master = evaluation_master
        chosen = tf.ConfigProto(allow_soft_placement=True)
        if self._session_config is not None:  # in a cluster, with the device filters
            chosen.CopyFrom(self._session_config)
        own = session_config or tf.ConfigProto(
            log_device_placement=log_device_placement,
            inter_op_parallelism_threads=num_cores,
            intra_op_parallelism_threads=num_cores,
        )
        if own.device_filters:
            chosen.ClearField("device_filters")
        chosen.MergeFrom(own)
        if gpu_memory_fraction != 1:
            chosen.gpu_options.per_process_gpu_memory_fraction = gpu_memory_fraction
        self._session_config = chosen
