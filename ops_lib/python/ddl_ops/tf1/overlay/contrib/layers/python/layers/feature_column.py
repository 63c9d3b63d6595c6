"""The feature columns of tensorflow.contrib.layers: those of tf.feature_column, by their old names.

bucketized_column, crossed_column and embedding_column have kept theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.feature_column import *


def real_valued_column(
    column_name: str,
    dimension: int = 1,
    default_value: Any = None,
    dtype: Any = tf.float32,
    normalizer: Callable[[Any], Any] | None = None,
) -> Any:
    """Numbers; ``[batch, dimension]``."""
    return tf.feature_column.numeric_column(
        column_name, (dimension,), default_value, dtype, normalizer
    )


def sparse_column_with_hash_bucket(
    column_name: str, hash_bucket_size: int, combiner: str = "sum", dtype: Any = tf.string
) -> Any:
    """Words or numbers of any value, by their hash."""
    _no_combiner(combiner)
    return tf.feature_column.categorical_column_with_hash_bucket(
        column_name, hash_bucket_size, dtype
    )


def sparse_column_with_keys(
    column_name: str,
    keys: Sequence[Any],
    default_value: int = -1,
    combiner: str = "sum",
    dtype: Any = tf.string,
) -> Any:
    """Words of a list."""
    _no_combiner(combiner)
    return tf.feature_column.categorical_column_with_vocabulary_list(
        column_name, keys, dtype, default_value
    )


def sparse_column_with_integerized_feature(
    column_name: str, bucket_size: int, combiner: str = "sum", dtype: Any = tf.int64
) -> Any:
    """Numbers from 0 to bucket_size - 1. ``dtype`` is that of the feature, an integer's."""
    _no_combiner(combiner)
    return tf.feature_column.categorical_column_with_identity(column_name, bucket_size)


def one_hot_column(sparse_id_column: Any) -> Any:
    """A categorical column as zeros and ones."""
    return tf.feature_column.indicator_column(sparse_id_column)


def _no_combiner(combiner: str) -> None:
    if combiner != "sum":
        raise ValueError(
            f"combiner={combiner!r}: columns no longer have one; give it to embedding_column, or "
            "to sparse_combiner of a linear Estimator."
        )
