"""Fabric for Deep Learning's manifests: what they may say, and what that is in our dialect.

Each field that FfDL reads is mapped, refused with the reason, or set aside with a warning; none is
passed over. ``docs/coming-from-ffdl.md`` is the table.

Each task's process reads a manifest, and most are of our dialect: here is only what tells them
apart; the rest is imported for a manifest of FfDL.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SECRET_FIELDS = ("user_name", "password", "access_token")
OUR_FIELDS = {"model_definition", "training_data_reference", "training_results_reference"}
FFDL_FIELDS = {"data_stores", "framework", "learners", "gpus"}


def is_ffdl(value: Mapping[str, Any]) -> bool:
    """Returns whether the fields of a document are FfDL's, and not those of our dialect."""
    return OUR_FIELDS.isdisjoint(value) and not FFDL_FIELDS.isdisjoint(value)
