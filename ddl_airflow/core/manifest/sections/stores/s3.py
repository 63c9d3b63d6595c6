"""type: s3: a bucket, or a part of one, of any S3-compatible service."""

from __future__ import annotations

import re

from ddl_airflow.core.manifest.rule import Finding, Findings
from ddl_airflow.core.manifest.sections.store import BucketKind


class S3(BucketKind):
    """``s3://bucket/prefix``."""

    kind_name = "s3"
    scheme = "s3"
    is_a = "an S3-compatible object store"
    form = "s3://bucket/prefix"
    implementation = "ddl_airflow.storage.s3:S3Store"
    has_keys = True
    connection_types = ("ddlstore", "aws")
    environment = "the usual AWS_* variables, AWS_ENDPOINT_URL among them"

    def bucket_findings(self, at: str, bucket: str) -> Findings:
        """Stores no longer make buckets with an underscore, but those of FfDL's days have it."""
        if (
            not re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]", bucket)
            or ".." in bucket
            or re.fullmatch(r"[0-9]+(\.[0-9]+){3}", bucket)
        ):
            fix = (
                "Use 3 to 63 of a-z, 0-9, dot, dash and _, starting and ending with a letter or "
                "digit."
            )
            yield Finding(at, f"{bucket[:70]!r} is not a bucket name", fix)


KIND = S3()
