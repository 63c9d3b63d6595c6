"""type: gcs: a bucket, or a part of one, of Google Cloud Storage."""

from __future__ import annotations

import re

from ddl_airflow.core.manifest.rule import Finding, Findings
from ddl_airflow.core.manifest.sections.store import BucketKind


class Gcs(BucketKind):
    """``gs://bucket/prefix``."""

    kind_name = "gcs"
    scheme = "gs"
    is_a = "Google Cloud Storage"
    form = "gs://bucket/prefix"
    implementation = "ddl_airflow.storage.gcs:GcsStore"
    connection_types = ("google_cloud_platform",)
    environment = "GOOGLE_APPLICATION_CREDENTIALS, or the machine's account"

    def bucket_findings(self, at: str, bucket: str) -> Findings:
        """Source: Cloud Storage, Bucket names."""
        if not (
            re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", bucket)
            and all(0 < len(part) <= 63 for part in bucket.split("."))
            and not re.fullmatch(r"[0-9]+(\.[0-9]+){3}", bucket)
        ):
            fix = (
                "Use 3 to 63 of a-z, 0-9, dash and _, starting and ending with a letter or digit; "
                "of a domain's name that is each part."
            )
            yield Finding(at, f"{bucket[:70]!r} is not a bucket name", fix)


KIND = Gcs()
