"""type: s3: a bucket, or a part of one, of any S3-compatible service."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from ddl_airflow.core.manifest.rule import Finding, Findings
from ddl_airflow.core.manifest.sections.store import StoreKind

if TYPE_CHECKING:
    from ddl_airflow.core.manifest.sections.places import Connection, Location


class S3(StoreKind):
    """``s3://bucket/prefix``."""

    kind_name = "s3"
    scheme = "s3"
    is_a = "an object store"
    form = "s3://bucket/prefix"
    implementation = "ddl_airflow.storage.s3:S3Store"
    fields = ("bucket", "prefix")
    required = {"bucket": "my-bucket"}
    examples = {
        "source": {"bucket": "mnist-training-data"},
        "target": {"bucket": "mnist-training-models"},
    }
    needs_connection = True
    has_buckets = True
    watched_at_once = 8

    def findings(self, at: str, location: Location) -> Findings:
        """Yields what no bucket and no prefix can be."""
        bucket = location.bucket
        if bucket is not None and (
            # Stores no longer make buckets with an underscore, but those of FfDL's days have it.
            not re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]", bucket)
            or ".." in bucket
            or re.fullmatch(r"[0-9]+(\.[0-9]+){3}", bucket)
        ):
            fix = (
                "Use 3 to 63 of a-z, 0-9, dot, dash and _, starting and ending with a letter or "
                "digit."
            )
            yield Finding(f"{at}.bucket", f"{bucket[:70]!r} is not a bucket name", fix)
        if location.prefix and not {"", ".", ".."}.isdisjoint(location.prefix.split("/")):
            fix = "Write it like a/b: no leading or double slash, no dots as a folder."
            yield Finding(f"{at}.prefix", f"{location.prefix[:70]!r} is not a key prefix", fix)

    def uri(self, location: Location, beside: Path) -> str:
        """The same wherever the manifest lies."""
        return self.fixed_uri(location)

    def fixed_uri(self, location: Location) -> str:
        """``s3://bucket`` or ``s3://bucket/prefix``."""
        return "/".join(("s3:/", str(location.bucket), *filter(None, location.prefix.split("/"))))

    def place(self, location: Location, connection: Connection | None) -> tuple[str, ...] | None:
        """Kind, connection or endpoint, bucket, and the parts of the prefix."""
        if location.bucket is None or connection is None:
            return None
        store = connection.conn_id or (connection.endpoint_url or "").lower().rstrip("/")
        return ("s3", store, location.bucket, *filter(None, location.prefix.split("/")))


KIND = S3()
