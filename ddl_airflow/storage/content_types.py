"""What an object is stored as, so that browsers show it."""

from __future__ import annotations

from pathlib import PurePosixPath

from ddl_airflow.storage.store import RETIRED, SUCCESS

_ANY_TYPE = "application/octet-stream"
_TEXT = "text/plain; charset=utf-8"
# What browsers show of a bucket as what it is.
_TYPES = {
    SUCCESS: "application/json",
    RETIRED: "application/json",
    ".csv": "text/csv; charset=utf-8",
    ".gz": "application/gzip",
    ".html": "text/html; charset=utf-8",
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".log": _TEXT,
    ".md": "text/markdown; charset=utf-8",
    ".pbtxt": _TEXT,
    ".png": "image/png",
    ".py": "text/x-python; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": _TEXT,
    ".xml": "application/xml",
    ".yaml": "application/yaml",
    ".yml": "application/yaml",
    ".zip": "application/zip",
}


def content_type(key: str) -> str:
    """Of an object: by the end of its name, the same on every host."""
    name = key.rpartition("/")[2]
    return _TYPES.get(name) or _TYPES.get(PurePosixPath(name).suffix.lower(), _ANY_TYPE)
