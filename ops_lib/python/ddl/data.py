"""Training data of a run, also while it still comes; see ddl_ops.data."""

from __future__ import annotations

from ddl_ops.data import StagingFailed, files

__all__ = ["StagingFailed", "files"]
