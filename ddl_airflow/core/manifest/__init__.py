"""The manifest: one YAML file that says what to train, where the data is, where the model goes."""

from __future__ import annotations

from ddl_airflow.core.manifest.folder import (
    KEYS_FORGOTTEN,
    REDACTED,
    is_passed_over,
    label,
    manifests_in,
    may_be_read,
    may_have_dag_id,
    read_manifest,
    shared_dag_id,
    state_of,
    yaml_files,
)
from ddl_airflow.core.manifest.load import (
    load_manifest,
    load_manifest_text,
    looks_like_manifest,
    redacted_text,
    without_keys,
)
from ddl_airflow.core.manifest.model import Manifest
from ddl_airflow.core.manifest.sections.notifications import Notification
from ddl_airflow.core.manifest.sections.outcome import Metric
from ddl_airflow.core.manifest.sections.places import Connection, Credentials, Location, Reference
from ddl_airflow.core.manifest.sections.schedule import Schedule

__all__ = [
    "KEYS_FORGOTTEN",
    "REDACTED",
    "Connection",
    "Credentials",
    "Location",
    "Manifest",
    "Metric",
    "Notification",
    "Reference",
    "Schedule",
    "is_passed_over",
    "label",
    "load_manifest",
    "load_manifest_text",
    "looks_like_manifest",
    "manifests_in",
    "may_be_read",
    "may_have_dag_id",
    "read_manifest",
    "redacted_text",
    "shared_dag_id",
    "state_of",
    "without_keys",
    "yaml_files",
]
