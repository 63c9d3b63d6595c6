"""Makes buckets, and puts the files of a folder into the first one; what is there already stays.

``python fill_buckets.py FOLDER BUCKET ...``, with S3_ENDPOINT_URL, S3_ACCESS_KEY_ID and
S3_SECRET_ACCESS_KEY.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ddl_airflow.storage.s3_client import s3_client

folder, *buckets = sys.argv[1:]
client = s3_client(
    os.environ["S3_ENDPOINT_URL"],
    os.environ["S3_ACCESS_KEY_ID"],
    os.environ["S3_SECRET_ACCESS_KEY"],
    "us-east-1",
)
there = {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}
for bucket in buckets:
    if bucket not in there:
        client.create_bucket(Bucket=bucket)
        print(f"{bucket}: made")
for path in sorted(Path(folder).iterdir()):
    client.upload_file(str(path), buckets[0], path.name)
    print(f"{buckets[0]}/{path.name}: {path.stat().st_size} bytes")
