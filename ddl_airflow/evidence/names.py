"""The files of evidence, by their keys in a publication; and text made fit for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EVIDENCE = "evidence/"
CURVES = f"{EVIDENCE}curves.svg"
CARD = f"{EVIDENCE}model-card.md"
DATASET = f"{EVIDENCE}dataset.croissant.json"
BOM = f"{EVIDENCE}bom.cdx.json"
PROVENANCE = f"{EVIDENCE}provenance.intoto.json"
SIGNATURE = f"{EVIDENCE}model.sig"

# Versions of a record that are of no package on the index: nobody else's is to be taken for them.
NOT_INDEXED = frozenset({"python", "ddl-airflow", "ddl-ops"})
MODEL = "model/"  # what a signature and a statement are about, among what is published
_REPLACED = "\N{REPLACEMENT CHARACTER}"


def plain(value: Any) -> str:
    """The value as text without controls, halves of characters, and what turns the direction."""
    return "".join(c if c.isprintable() else _REPLACED for c in " ".join(str(value).split()))


def writable(value: Any) -> Any:
    """The JSON value, in which each text can be written as UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {writable(str(name)): writable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [writable(one) for one in value]
    return value


def hexadecimal(digest: str) -> str:
    """The digits of a digest that names how it was made, such as ``sha256:v2:…``."""
    return digest.rpartition(":")[2]
