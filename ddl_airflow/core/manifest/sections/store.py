"""What every kind of store is; each kind is in ``stores``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ddl_airflow.core.manifest.rule import Finding, Findings

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
        has_keys: whether a manifest may say endpoint and keys itself, instead of a ``conn_id``.
        connection_types: of Airflow's connections that open it; empty: any.
        environment: what a command finds there that opens it, for people.
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
    has_keys: ClassVar[bool] = False
    connection_types: ClassVar[tuple[str, ...]] = ()
    environment: ClassVar[str] = ""
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

        As far as the manifest says it; None where something is missing.
        """


class BucketKind(StoreKind):
    """A kind whose places are buckets, whatever it calls them, or parts of one."""

    fields = ("bucket", "prefix")
    required = {"bucket": "my-bucket"}
    examples = {
        "source": {"bucket": "mnist-training-data"},
        "target": {"bucket": "mnist-training-models"},
    }
    needs_connection = True
    has_buckets = True
    watched_at_once = 8

    @abstractmethod
    def bucket_findings(self, at: str, bucket: str) -> Findings:
        """Yields what no bucket of it can be called."""

    def findings(self, at: str, location: Location) -> Findings:
        """Yields what no bucket and no prefix can be."""
        if location.bucket is not None:
            yield from self.bucket_findings(f"{at}.bucket", location.bucket)
        if location.prefix and not {"", ".", ".."}.isdisjoint(location.prefix.split("/")):
            fix = "Write it like a/b: no leading or double slash, no dots as a folder."
            yield Finding(f"{at}.prefix", f"{location.prefix[:70]!r} is not a key prefix", fix)

    def uri(self, location: Location, beside: Path) -> str:
        """The same wherever the manifest lies."""
        return self.fixed_uri(location)

    def fixed_uri(self, location: Location) -> str:
        """``scheme://bucket`` or ``scheme://bucket/prefix``."""
        folders = filter(None, location.prefix.split("/"))
        return "/".join((f"{self.scheme}:/", str(location.bucket), *folders))

    def place(self, location: Location, connection: Connection | None) -> tuple[str, ...] | None:
        """Kind, connection or endpoint, bucket, and the parts of the prefix."""
        if location.bucket is None or connection is None:
            return None
        store = connection.conn_id or (connection.endpoint_url or "").lower().rstrip("/")
        folders = filter(None, location.prefix.split("/"))
        return (self.kind_name, store, location.bucket, *folders)
