"""The content of the marker ``_SUCCESS``, under its own digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

_DIGEST = "digest"


def sealed(marker: Mapping[str, object]) -> bytes:
    """The marker's content, with its own ``digest``. It shows a change that nobody meant to make;
    what shows others is a signature, over what the marker lists.
    """
    facts = {name: value for name, value in marker.items() if name != _DIGEST}
    digest = hashlib.sha256(json.dumps(facts, indent=1).encode()).hexdigest()
    return json.dumps({**facts, _DIGEST: f"sha256:{digest}"}, indent=1).encode()


def is_as_sealed(body: bytes) -> bool | None:
    """Whether a marker's content is what was written, to the byte; None: an earlier version of ours
    wrote it, and nobody knows.

    Raises:
        ValueError: it is no JSON object.
    """
    marker = json.loads(body)
    if not isinstance(marker, dict):
        raise ValueError("it is no JSON object")
    if _DIGEST not in marker:
        return None if body == json.dumps(marker, indent=1).encode() else False
    return body == sealed(marker)
