"""Clients of S3-compatible services, and what their errors mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ddl_airflow.core.errors import (
    AccessDenied,
    ConnectionInvalid,
    NoSpace,
    SourceMissing,
    StagingError,
    TransferCorrupt,
)

if TYPE_CHECKING:
    from botocore.config import Config

_MISSING = {"NoSuchBucket", "NoSuchKey", "NoSuchUpload", "NotFound", "404"}
_DENIED = {
    "AccessDenied",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "403",
    "Forbidden",
}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "507"}
_CORRUPT = {"BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "PreconditionFailed", "412"}
_INVALID = {
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "InvalidBucketName",
    "PermanentRedirect",
    "301",
}


def s3_config(endpoint_url: str | None, more: object = None) -> Config:
    """The botocore settings that every client of ours uses.

    Args:
        endpoint_url: None for Amazon's own.
        more: ``config_kwargs`` of a connection, which go before ours.

    Raises:
        ConnectionInvalid: they are none of botocore's.
    """
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    given = dict(more) if isinstance(more, Mapping) else {}
    if more and not given:
        raise ConnectionInvalid(f"config_kwargs: {type(more).__name__} is no mapping of settings.")
    # Bucket names in the host name need wildcard DNS, which few own services have.
    s3 = {"addressing_style": "path" if endpoint_url else "auto"}
    if given.get("signature_version") == "unsigned":  # as the amazon provider has it
        given["signature_version"] = UNSIGNED
    if isinstance(given.get("s3"), Mapping):
        given["s3"] = s3 | given["s3"]
    ours = Config(
        connect_timeout=10,
        read_timeout=60,
        retries={"mode": "standard", "total_max_attempts": 4},
        max_pool_connections=64,
        tcp_keepalive=True,
        signature_version="s3v4",  # of signed URLs too, for which botocore has an older one
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3=s3,
    )
    try:
        return ours.merge(Config(**given))
    except (TypeError, ValueError, BotoCoreError) as error:
        raise ConnectionInvalid(
            f"config_kwargs: {error}. Write settings of botocore's Config in that extra."
        ) from error


def pay(client: Any) -> None:
    """Has all requests of a client say that who makes them pays: a bucket may ask for that.

    Source: Amazon S3's user guide, Requester Pays.
    """

    def add(params: dict[str, Any], model: Any, **_: Any) -> None:
        if "RequestPayer" in model.input_shape.members:
            params.setdefault("RequestPayer", "requester")

    client.meta.events.register("provide-client-params.s3", add, unique_id="ddl-pays")
    # Not by connections of our own, which sign addresses, and no headers.
    client.meta.ddl_pays = True


def pays(client: Any) -> bool:
    """Whether ``pay`` was called for it."""
    return getattr(client.meta, "ddl_pays", False) is True


def s3_client(
    endpoint_url: str | None,
    access_key_id: str | None,
    secret_access_key: str | None,
    region_name: str | None = None,
    ca_bundle: str | bool | None = None,
    said: str = "",
    config: object = None,
) -> Any:
    """A boto3 S3 client; contacts nobody. Keys left None are searched as boto3 documents.

    Args:
        ca_bundle: file with the certificates to trust; None for the usual ones, False for any.
        said: what stands for the endpoint in messages, if it is not to be shown.
        config: as ``s3_config`` has ``more``.

    Raises:
        ConnectionInvalid: the endpoint is no http(s) URL, or the settings are none.
    """
    import boto3

    if endpoint_url is not None:
        _check_endpoint(endpoint_url, said or repr(endpoint_url))
    settings = s3_config(endpoint_url, config)
    with s3_errors("s3", endpoint_url or "AWS", said=said):
        # A session of its own: building clients from the shared one is not safe in threads.
        return boto3.session.Session().client(
            "s3",
            endpoint_url=endpoint_url,
            aws_access_key_id=access_key_id,
            aws_secret_access_key=secret_access_key,
            region_name=region_name,
            verify=ca_bundle,
            config=settings,
        )


def s3_answer(client: Any, bucket: str = "") -> str:
    """What the store says when asked for a bucket, or for all; one small request.

    Raises:
        StagingError: it does not answer, refuses the keys, or has no such bucket.
    """
    with s3_errors(f"s3://{bucket}" if bucket else "list of buckets", client.meta.endpoint_url):
        if bucket:
            client.list_objects_v2(Bucket=bucket, MaxKeys=1)
            return f"s3://{bucket} is there"
        return f"{len(client.list_buckets()['Buckets'])} bucket(s) are there"


def _check_endpoint(url: str, said: str) -> None:
    fix = "Write https://host or https://host:port in endpoint_url, keys in their own fields."
    if "@" in url:  # may hold a password: not shown
        raise ConnectionInvalid(f"endpoint_url holds credentials. {fix}")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as exc:
        raise ConnectionInvalid(f"endpoint_url {said} cannot be read. {fix}") from exc
    if not usable:
        raise ConnectionInvalid(f"endpoint_url {said} is no http(s) URL. {fix}")


@contextmanager
def s3_errors(uri: str, endpoint: str, needed: int = 0, said: str = "") -> Iterator[None]:
    """Turns every error of boto3 into a StagingError that names object and endpoint.

    Args:
        uri: the object, or the bucket and prefix.
        endpoint: where it was looked for.
        needed: bytes that are about to be stored.
        said: what stands for the endpoint in messages, where it is not to be shown.
    """
    from botocore.exceptions import BotoCoreError, ClientError
    from urllib3.exceptions import HTTPError

    try:
        yield
    except (BotoCoreError, ClientError, HTTPError, ValueError) as exc:
        meant = _meaning(exc, f"{uri} at {said or endpoint}", needed)
        if not said:
            raise meant from exc
        raise type(meant)(_without(str(meant), endpoint, said), retryable=meant.retryable) from None


def _without(text: str, endpoint: str, said: str) -> str:
    """A message in which boto3 or urllib3 names the endpoint, whole or in parts."""
    parts = urlsplit(endpoint)
    for part in (endpoint.rstrip("/"), parts.netloc, parts.hostname, parts.path.strip("/")):
        if part:
            text = text.replace(part, said)
    return text


def _meaning(exc: Exception, where: str, needed: int) -> StagingError:
    import botocore.exceptions as aws
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    if isinstance(exc, aws.ClientError):
        return _meaning_of_answer(exc.response, where, needed)
    if isinstance(exc, (aws.ChecksumError, aws.FlexibleChecksumError)):
        return TransferCorrupt(f"{where}: {exc}")
    unreachable = (aws.ConnectionError, aws.HTTPClientError, aws.IncompleteReadError, HTTPError)
    if isinstance(exc, unreachable):
        return StagingError(
            f"{where}: {exc}. Check that the service runs and that this host reaches it."
        )
    if isinstance(exc, ResponseParserError):
        return StagingError(
            f"{where}: the answer cannot be read: {exc}. See what the store, or a proxy, sends."
        )
    return ConnectionInvalid(
        f"{where}: {exc}. Correct endpoint_url, region_name, bucket or keys of the connection."
    )


def code_of(error: StagingError) -> str:
    """What the service called the error; empty if it was not the service's."""
    from botocore.exceptions import ClientError

    cause = error.__context__
    return str(cause.response["Error"]["Code"]) if isinstance(cause, ClientError) else ""


def _meaning_of_answer(answer: dict[str, Any], where: str, needed: int) -> StagingError:
    code = str(answer.get("Error", {}).get("Code", ""))
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    said = f"{where}: {code} ({status})"
    if text := answer.get("Error", {}).get("Message"):
        said += f": {text.rstrip('.')}"
    if code == "NoSuchBucket":
        return SourceMissing(f"{said}: no such bucket. Create it, or correct bucket or endpoint.")
    if code in _MISSING:
        return SourceMissing(f"{said}. Upload it, or correct bucket, prefix or endpoint.")
    if code in _FULL:
        return NoSpace(f"{said}: {needed:,} bytes to store. Free space there, or raise the quota.")
    if code in _CORRUPT:
        return TransferCorrupt(f"{said}: changed since it was listed, or damaged on the way.")
    if code in _INVALID:
        return ConnectionInvalid(f"{said}. Correct endpoint_url, region_name or bucket.")
    if code in _DENIED or status in (401, 403):
        return AccessDenied(
            f"{said}. Check access_key_id and secret_access_key, the rights that they have on this "
            "bucket (list, read, and for results write and delete), and this host's clock."
        )
    return StagingError(said, retryable=status >= 500 or status in (408, 409, 429))
