"""type: azure: a container, or a part of one, of Azure Blob Storage."""

from __future__ import annotations

import re

from ddl_airflow.core.manifest.rule import Finding, Findings
from ddl_airflow.core.manifest.sections.store import BucketKind


class Azure(BucketKind):
    """``abfs://container/prefix``; the account is the connection's."""

    kind_name = "azure"
    scheme = "abfs"
    is_a = "Azure Blob Storage"
    form = "abfs://container/prefix"
    implementation = "ddl_airflow.storage.azure:AzureStore"
    connection_types = ("wasb",)
    environment = (
        "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT with AZURE_STORAGE_KEY, "
        "AZURE_STORAGE_SAS_TOKEN or the machine's identity"
    )

    def bucket_findings(self, at: str, bucket: str) -> Findings:
        """Source: Azure, Naming and Referencing Containers, Blobs, and Metadata."""
        if not re.fullmatch(r"(?=.{3,63}$)[a-z0-9]+(-[a-z0-9]+)*", bucket):
            fix = "Use 3 to 63 of a-z, 0-9 and single dashes between them."
            yield Finding(at, f"{bucket[:70]!r} is not a container's name", fix)


KIND = Azure()
