"""Fabric for Deep Learning's manifests: what they may say, and what that is in our dialect.

Each field that FfDL reads is mapped, refused with the reason, or set aside with a warning; none is
passed over. ``docs/coming-from-ffdl.md`` is the table.
"""

from ddl_airflow.core.manifest.ffdl.model import (
    FFDL_FIELDS,
    OUR_FIELDS,
    SECRET_FIELDS,
    FfdlManifest,
    is_ffdl,
)
from ddl_airflow.core.manifest.ffdl.rules import RULES
from ddl_airflow.core.manifest.ffdl.translate import Translation, translated

__all__ = [
    "FFDL_FIELDS",
    "OUR_FIELDS",
    "RULES",
    "SECRET_FIELDS",
    "FfdlManifest",
    "Translation",
    "is_ffdl",
    "translated",
]
