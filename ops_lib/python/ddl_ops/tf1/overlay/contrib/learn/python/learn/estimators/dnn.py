"""tensorflow.contrib.learn's deep networks: those of tf.estimator, with the arguments of then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ddl_ops.tf1 import gone

# The mean over the batch, as then; the Estimators of today take the sum.
_LOSS = {"loss_reduction": tf.losses.Reduction.SUM_OVER_BATCH_SIZE}


class _Fit:
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        input_fn: Callable[..., Any] | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        monitors: Sequence[Any] | None = None,
        max_steps: int | None = None,
    ) -> Any:
        """Trains, and returns the Estimator. ``x``, ``y`` and ``batch_size`` are gone."""
        _refuse("give an input_fn", x=x, y=y, batch_size=batch_size)
        return self.train(input_fn, hooks=monitors, steps=steps, max_steps=max_steps)


class DNNClassifier(_Fit, tf.estimator.DNNClassifier):
    """See tf.estimator.DNNClassifier."""

    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Sequence[Any],
        model_dir: str | None = None,
        n_classes: int = 2,
        weight_column_name: str | None = None,
        optimizer: Any = None,
        activation_fn: Callable[..., Any] = tf.nn.relu,
        dropout: float | None = None,
        gradient_clip_norm: float | None = None,
        enable_centered_bias: bool = False,
        config: Any = None,
        feature_engineering_fn: Callable[..., Any] | None = None,
        embedding_lr_multipliers: Any = None,
        input_layer_min_slice_size: int | None = None,
        label_keys: Sequence[Any] | None = None,
    ) -> None:
        """As in contrib.learn."""
        _refuse(
            "write a model_fn for tf.estimator.Estimator",
            gradient_clip_norm=gradient_clip_norm,
            enable_centered_bias=enable_centered_bias,
            feature_engineering_fn=feature_engineering_fn,
            embedding_lr_multipliers=embedding_lr_multipliers,
            input_layer_min_slice_size=input_layer_min_slice_size,
        )
        super().__init__(
            hidden_units,
            feature_columns,
            model_dir,
            n_classes,
            weight_column_name,
            label_keys,
            optimizer or "Adagrad",
            activation_fn,
            dropout,
            config=config,
            **_LOSS,
        )


class DNNRegressor(_Fit, tf.estimator.DNNRegressor):
    """See tf.estimator.DNNRegressor."""

    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Sequence[Any],
        model_dir: str | None = None,
        weight_column_name: str | None = None,
        optimizer: Any = None,
        activation_fn: Callable[..., Any] = tf.nn.relu,
        dropout: float | None = None,
        gradient_clip_norm: float | None = None,
        enable_centered_bias: bool = False,
        config: Any = None,
        feature_engineering_fn: Callable[..., Any] | None = None,
        label_dimension: int = 1,
        embedding_lr_multipliers: Any = None,
        input_layer_min_slice_size: int | None = None,
    ) -> None:
        """As in contrib.learn."""
        _refuse(
            "write a model_fn for tf.estimator.Estimator",
            gradient_clip_norm=gradient_clip_norm,
            enable_centered_bias=enable_centered_bias,
            feature_engineering_fn=feature_engineering_fn,
            embedding_lr_multipliers=embedding_lr_multipliers,
            input_layer_min_slice_size=input_layer_min_slice_size,
        )
        super().__init__(
            hidden_units,
            feature_columns,
            model_dir,
            label_dimension,
            weight_column_name,
            optimizer or "Adagrad",
            activation_fn,
            dropout,
            config=config,
            **_LOSS,
        )


def _refuse(instead: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None and value is not False:
            raise gone.LeftTensorFlow(f"{name} of tensorflow.contrib.learn is gone: {instead}.")
