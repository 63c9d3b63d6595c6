"""The kinds of store, one file each, which names its declaration ``KIND``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType

from ddl_airflow.core.manifest.sections.store import StoreKind


@cache
def store_kinds() -> Mapping[str, StoreKind]:
    """The kinds by what manifests write as ``type``, in the order of these names."""
    kinds = [import_module(f"{__name__}.{one.name}").KIND for one in iter_modules(__path__)]
    return MappingProxyType({kind.kind_name: kind for kind in kinds})


def kind_of_uri(uri: str) -> StoreKind | None:
    """The kind whose scheme a URI has; None if none has it, or it is no URI."""
    scheme, separator, _ = uri.partition("://")
    return next((one for one in store_kinds().values() if separator and one.scheme == scheme), None)
