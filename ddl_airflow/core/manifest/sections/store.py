"""What every kind of store is; each kind is in ``stores``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ddl_airflow.core.manifest.rule import Findings

if TYPE_CHECKING:
    from ddl_airflow.core.manifest.sections.places import Connection, Location


class StoreKind(ABC):
    """A kind of store: what manifests write of a place in it, and what the rest of the code asks.

    Attributes:
        kind_name: what manifests write as ``type``.
        scheme: of its URIs.
        is_a: what it is, for people.
        form: of its URIs, for people.
        implementation: ``module:class`` of its ``ddl_airflow.storage.store.ObjectStore``, whose
            ``opened`` opens a URI; imported when a store is used.
        fields: of a manifest's ``source`` and ``target`` that it has.
        required: those that it needs, each with an example.
        examples: a whole ``source`` and a whole ``target``.
        needs_connection: whether a place in it is opened by a connection.
        has_buckets: whether a URI is scheme, bucket and prefix.
        watched_at_once: datasets of it that a triggerer looks at at the same time. A look at a
            folder that hangs keeps its thread for as long as its server is away; one at a bucket is
            given up after some minutes.
    """

    kind_name: ClassVar[str]
    scheme: ClassVar[str]
    is_a: ClassVar[str]
    form: ClassVar[str]
    implementation: ClassVar[str]
    fields: ClassVar[tuple[str, ...]]
    required: ClassVar[Mapping[str, str]]
    examples: ClassVar[Mapping[str, Mapping[str, Any]]]
    needs_connection: ClassVar[bool]
    has_buckets: ClassVar[bool]
    watched_at_once: ClassVar[int]

    @abstractmethod
    def findings(self, at: str, location: Location) -> Findings:
        """Yields what is wrong with its fields, beyond their types and whether they are there."""

    @abstractmethod
    def uri(self, location: Location, beside: Path) -> str:
        """Where a place is, without a trailing slash; beside: the manifest's folder."""

    @abstractmethod
    def fixed_uri(self, location: Location) -> str | None:
        """``uri``, if that does not depend on where the manifest lies; else None."""

    def folder(self, location: Location, beside: Path) -> Path | None:
        """The folder that a place is, links followed; None if it is none of this host's."""
        return None

    @abstractmethod
    def place(self, location: Location, connection: Connection | None) -> tuple[str, ...] | None:
        """Store, bucket and folders, so that a place inside another starts with it.

        None where something is missing.
        """
