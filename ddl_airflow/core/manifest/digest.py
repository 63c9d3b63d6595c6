"""Digests of a manifest: whether two trainings were asked for in the same words.

Version 2 covers what a manifest says, and nothing that it leaves to defaults: neither a new field
nor another default in a release of ours changes it. Version 1 covered the defaults as well. They
are written down here as they were when it ended, so that a model of that time is still known to be
of the same manifest. A change of what is covered, or how, is another version: its number goes up,
and the one before joins ``earlier_digests``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

# What version 1 had where a manifest said nothing. Never changed: new fields are not in it.
_REFERENCE = {"name": ""}
_V1_DEFAULTS: Mapping[str, Any] = {
    "model_definition": {
        "description": "",
        "execution": {"compute_configuration": {"nodes": 1}},
    },
    "training_data_reference": {**_REFERENCE, "source": {"prefix": ""}},
    "training_results_reference": {**_REFERENCE, "target": {"prefix": ""}},
    "retries": {"attempts": 3, "delay": 30.0, "backoff": "exponential"},
    "steps": {
        step: {} for step in ("stage_data", "train", "transform", "evaluate", "upload_results")
    },
    "launcher": {"kind": "local"},
    "distribution": "mpi",
    "metrics": [],
    "transform": {"checkpoint": "latest", "inputs": {}, "outputs": {}},
    "approval": {"required": False},
    "parameters": {},
    "code": "./",
}
_V1_EVALUATION = {"not_worse_than_production": False}
_V1_PARAMETER = {"description": "", "choices": []}


def digest(said: Mapping[str, Any]) -> str:
    """The digest of today's version, ``sha256:v2:…``.

    Args:
        said: what a manifest says, as ``Manifest.said`` has it.
    """
    return f"sha256:v2:{_sha256(said)}"


def earlier_digests(said: Mapping[str, Any]) -> tuple[str, ...]:
    """What earlier versions of ours called the same manifest, the newest first."""
    full = _filled(said, _V1_DEFAULTS)
    if "evaluation" in full:
        full["evaluation"] = _filled(full["evaluation"], _V1_EVALUATION)
    full["parameters"] = {
        name: _filled(one, _V1_PARAMETER) for name, one in full["parameters"].items()
    }
    return (_sha256(full),)


def _filled(said: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    full = {**defaults, **said}
    for name, default in defaults.items():
        if isinstance(default, dict) and name in said:
            full[name] = _filled(full[name], default)
    return full


def _sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(content).encode()).hexdigest()


_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
