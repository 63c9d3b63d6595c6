"""What we publish, held to the schemas that we publish for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator

from ddl_airflow.lineage.record import lineage_schema


def check_lineage_schema(record: Mapping[str, Any]) -> None:
    """Raises jsonschema's ValidationError, or SchemaError of the schema itself."""
    Draft202012Validator.check_schema(lineage_schema())
    formats = Draft202012Validator.FORMAT_CHECKER
    Draft202012Validator(lineage_schema(), format_checker=formats).validate(record)
