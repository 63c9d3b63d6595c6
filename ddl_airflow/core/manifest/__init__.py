"""The manifest: one YAML file that says what to train, where the data is, where the model goes."""

from __future__ import annotations

from ddl_airflow.core.manifest.convert import converted
from ddl_airflow.core.manifest.load import (
    load_manifest,
    load_manifest_text,
    looks_like_manifest,
    redacted_text,
)
from ddl_airflow.core.manifest.model import (
    Connection,
    Credentials,
    Location,
    Manifest,
    Metric,
    Reference,
)

__all__ = [
    "Connection",
    "Credentials",
    "Location",
    "Manifest",
    "Metric",
    "Reference",
    "converted",
    "load_manifest",
    "load_manifest_text",
    "looks_like_manifest",
    "redacted_text",
]
