"""Training data in, results out: stores, the staging cache, checked parallel transfer.

Imports neither Airflow nor, before a store is used, boto3: DAG parsing imports this package.
"""

from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.fingerprint import fingerprint
from ddl_airflow.storage.s3 import S3Store, s3_client, s3_config
from ddl_airflow.storage.store import ObjectStore, StoredObject, open_store
from ddl_airflow.storage.transfer import (
    PublishedFile,
    PublishedResult,
    StagedDataset,
    StagedFile,
    publish,
    stage,
)

__all__ = [
    "Cache",
    "FolderStore",
    "ObjectStore",
    "PublishedFile",
    "PublishedResult",
    "S3Store",
    "StagedDataset",
    "StagedFile",
    "StoredObject",
    "fingerprint",
    "open_store",
    "publish",
    "s3_client",
    "s3_config",
    "stage",
]
