"""Clients of S3-compatible services, and what their errors mean."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ddl_airflow.core.connections import AirflowConnection
from ddl_airflow.core.errors import (
    AccessDenied,
    ConnectionInvalid,
    NoSpace,
    ObjectArchived,
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
# With statuses of what never passes; botocore takes them for passing, too.
_PASSING = {
    "BandwidthLimitExceeded",
    "IncompleteBody",
    "PriorRequestNotComplete",
    "RequestLimitExceeded",
    "RequestThrottled",
    "RequestTimeout",
    "RequestTimeoutException",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "507"}
_CORRUPT = {"BadDigest", "InvalidDigest", "PreconditionFailed", "412"}
_CORRUPT |= {"XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"}
_OF_PARTS = {"EntityTooLarge", "EntityTooSmall", "InvalidPart", "InvalidPartOrder"}
_INVALID = {
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "InvalidBucketName",
    "PermanentRedirect",
    "301",
}

_log = logging.getLogger(__name__)
_MOST_SAID = 200  # characters of an error
_STYLES = ("path", "virtual", "auto")
# What may be asked of objects that are stored: names of boto3's parameters, which the amazon
# provider's ``extra_args`` has, too. Not keys of one's own (SSE-C): reading would need them.
PUT_ARGUMENTS = (
    "ACL",
    "BucketKeyEnabled",
    "CacheControl",
    "GrantFullControl",
    "GrantRead",
    "GrantReadACP",
    "GrantWriteACP",
    "SSEKMSEncryptionContext",
    "SSEKMSKeyId",
    "ServerSideEncryption",
    "StorageClass",
    "Tagging",
)
_PROFILE = "profile_name"
# By what the amazon provider finds keys where there is no login; and a token, that needs both.
_WHO_ASKS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token", _PROFILE)
_PUTS = ("PutObject", "CreateMultipartUpload", "CopyObject")


@dataclass(frozen=True)
class S3Settings:
    """What a connection says of its store besides where it is and who asks.

    Attributes:
        addressing_style: how buckets are named: "path", "virtual" (in the host name) or "auto";
            empty: by path for services that are not Amazon's.
        put: ``PUT_ARGUMENTS`` of each object that is stored.
        requester_pays: whether who asks pays for it. Source: Amazon S3's user guide, Requester
            Pays.
        config: ``config_kwargs``, settings of botocore's ``Config``, which go before ours.
    """

    addressing_style: str = ""
    put: Mapping[str, Any] = field(default_factory=dict)
    requester_pays: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)


# Of clients, for requests that boto3 signs and does not send.
_settings: weakref.WeakKeyDictionary[Any, S3Settings] = weakref.WeakKeyDictionary()


def s3_settings(extra: Mapping[str, Any]) -> S3Settings:
    """What the extra of a connection says: ``addressing_style``, ``extra_args``, ``config_kwargs``
    and ``requester_pays``, there or, as the amazon provider has it, in ``service_config.s3``.

    Raises:
        ConnectionInvalid: one of them is not what it may be.
    """
    said = _of_s3(extra)
    style = said.get("addressing_style") or ""
    if style and style not in _STYLES:
        raise ConnectionInvalid(
            f"the connection's extra: addressing_style is {style!r}. Write {', '.join(_STYLES)}."
        )
    put = said.get("extra_args") or {}
    if not isinstance(put, Mapping):
        raise ConnectionInvalid(
            "the connection's extra: extra_args is no object. Write for example "
            '{"ServerSideEncryption": "AES256"}.'
        )
    if other := sorted(set(put) - set(PUT_ARGUMENTS)):
        raise ConnectionInvalid(
            f"the connection's extra: extra_args has {', '.join(map(repr, other))}. It may have "
            f"{', '.join(PUT_ARGUMENTS)}."
        )
    pays = said.get("requester_pays")
    if pays not in (None, True, False, "", "true", "false"):
        raise ConnectionInvalid("the connection's extra: requester_pays is neither true nor false.")
    config = said.get("config_kwargs") or {}
    if not isinstance(config, Mapping):
        raise ConnectionInvalid(
            "the connection's extra: config_kwargs is no object. Write for example "
            '{"s3": {"addressing_style": "virtual"}}.'
        )
    return S3Settings(str(style), dict(put), pays in (True, "true"), dict(config))


def _of_s3(extra: Mapping[str, Any]) -> dict[str, Any]:
    """An extra, in which what is said of S3 alone goes before what is said of all services."""
    service = extra.get("service_config") or {}
    of_s3 = service.get("s3") if isinstance(service, Mapping) else None
    return {**extra, **(of_s3 if isinstance(of_s3, Mapping) else {})}


def with_settings(client: Any, settings: S3Settings) -> Any:
    """The client, whose requests then say what the settings ask for.

    Raises:
        ConnectionInvalid: boto3 does not take a value.
    """
    _settings[client] = settings
    events = client.meta.events

    def put(params: dict[str, Any], **_: Any) -> None:
        for name, value in settings.put.items():
            params.setdefault(name, value)

    def pay(params: dict[str, Any], model: Any, **_: Any) -> None:
        if model.input_shape is not None and "RequestPayer" in model.input_shape.members:
            params.setdefault("RequestPayer", "requester")

    if settings.put:
        for operation in _PUTS:
            events.register(
                f"provide-client-params.s3.{operation}", put, unique_id=f"ddl-{operation}"
            )
    if settings.requester_pays:
        events.register("provide-client-params.s3", pay, unique_id="ddl-requester-pays")
    return client


def settings_of(client: Any) -> S3Settings:
    """Those of a client."""
    return _settings.get(client, S3Settings())


def s3_config(endpoint_url: str | None, settings: S3Settings = S3Settings()) -> Config:
    """The botocore settings that every client of ours uses.

    Args:
        endpoint_url: None for Amazon's own.
        settings: what the connection says, which goes before ours.

    Raises:
        ConnectionInvalid: its ``config_kwargs`` are none of botocore's.
    """
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    given = dict(settings.config)
    # Bucket names in the host name need wildcard DNS, which few own services have.
    style = settings.addressing_style or ("path" if endpoint_url else "auto")
    s3 = {"addressing_style": style}
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
            f"the connection's extra: config_kwargs: {error}. Write settings of botocore's Config."
        ) from error


def s3_client(
    endpoint_url: str | None,
    access_key_id: str | None,
    secret_access_key: str | None,
    region_name: str | None = None,
    ca_bundle: str | bool | None = None,
    said: str = "",
    settings: S3Settings = S3Settings(),
    session_token: str | None = None,
) -> Any:
    """A boto3 S3 client; contacts nobody. Keys left None are searched as boto3 documents.

    Args:
        ca_bundle: file with the certificates to trust; None for the usual ones, False for any.
        said: what stands for the endpoint in messages, if it is not to be shown.
        settings: what else the connection says.
        session_token: of keys that hold for a while.

    Raises:
        ConnectionInvalid: the endpoint is no http(s) URL, or the settings are none.
    """
    import boto3

    if endpoint_url is not None:
        _check_endpoint(endpoint_url, said or repr(endpoint_url))
    config = s3_config(endpoint_url, settings)
    with s3_errors("s3", endpoint_url or "AWS", said=said):
        # A session of its own: building clients from the shared one is not safe in threads.
        session = boto3.session.Session()
        try:
            client = session.client(
                "s3",
                endpoint_url=endpoint_url,
                aws_access_key_id=access_key_id,
                aws_secret_access_key=secret_access_key,
                aws_session_token=session_token,
                region_name=region_name,
                verify=ca_bundle,
                config=config,
            )
        except ValueError as error:
            if endpoint_url is not None or "Invalid endpoint" not in str(error):
                raise
            raise ConnectionInvalid(  # without its words, which may have a password
                "the endpoint of the environment (AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or the "
                "profile) is no URL. Write https://host or https://host:port there."
            ) from None
    return with_settings(client, settings)


def client_by_connection(connection: AirflowConnection) -> Any:
    """A boto3 S3 client by a connection of type ``ddlstore`` or ``aws``.

    Contacts nobody. The extra may have region_name, ca_bundle or verify, aws_session_token, what
    ``s3_settings`` reads and, of type ``aws``, endpoint_url, and region_name and aws_session_token
    in session_kwargs. One of type ``aws`` without keys has those that every AWS tool finds, and
    one without an endpoint theirs; its host is passed over.

    Raises:
        ConnectionInvalid: a key is missing, the endpoint is none, keys are to be found in a way
            that only Airflow has, or the extra says what it may not.
    """
    name, extra = connection.conn_id, connection.extra
    _check_who_asks(connection)
    amazons = connection.conn_type == "aws"
    if (connection.login or connection.password or not amazons) and not (
        connection.login and connection.password
    ):
        missing = "secret access key" if connection.login else "access key ID"
        raise ConnectionInvalid(f"connection {name!r} has no {missing}. Enter it.")
    endpoint = _of_s3(extra).get("endpoint_url") or None
    if connection.host and amazons:  # it may hold a password: not shown
        _log.warning(
            "connection %r: its host is passed over, as by the amazon provider. Write it as "
            "endpoint_url into the extra, or take it out",
            name,
        )
    elif connection.host:
        port = f":{connection.port}" if connection.port else ""
        endpoint = f"{connection.host}{port}"
    session = _session_kwargs(extra)
    token = extra.get("aws_session_token") or session.get("aws_session_token")
    client = s3_client(
        endpoint,
        connection.login or None,
        connection.password or None,
        extra.get("region_name") or session.get("region_name") or None,
        extra.get("ca_bundle") or (None if extra.get("verify") == "" else extra.get("verify")),
        settings=s3_settings(extra),
        session_token=str(token).strip() if token else None,
    )
    if endpoint is None:  # boto3 has found one in the environment, or has Amazon's
        _check_endpoint(client.meta.endpoint_url, repr(client.meta.endpoint_url))
    return client


def _session_kwargs(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where earlier versions of the amazon provider had what it has in the extra itself."""
    given = extra.get("session_kwargs")
    return given if isinstance(given, Mapping) else {}


def _check_who_asks(connection: AirflowConnection) -> None:
    """Raises ConnectionInvalid where an extra says it in a way that is not read here."""
    name, extra = connection.conn_id, connection.extra
    if role := extra.get("role_arn"):
        raise ConnectionInvalid(
            f"connection {name!r} takes the role {role}, which only Airflow does, by its amazon "
            "provider. Give one with the role's own keys; or run it in Airflow."
        )
    if connection.conn_type != "aws" or connection.login:  # which go before all else
        return
    given = [one for one in _WHO_ASKS if extra.get(one)]
    session = _session_kwargs(extra)
    given += [f"session_kwargs.{one}" for one in _WHO_ASKS if session.get(one)]
    if keys := [one for one in given if not one.endswith(_PROFILE)]:
        raise ConnectionInvalid(
            f"connection {name!r}: keys in the extra are not read: {', '.join(keys)}. Enter keys "
            "as login and password, with aws_session_token in the extra if they have one."
        )
    if given:
        raise ConnectionInvalid(
            f"connection {name!r}: {given[0]} is not read without Airflow. Set AWS_PROFILE, and "
            "take it out of the extra; or enter the profile's keys as login and password."
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
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    known = (BotoCoreError, ClientError, ResponseParserError, HTTPError, ValueError)
    try:
        yield
    except (*known, RuntimeError) as exc:
        if isinstance(exc, RuntimeError) and not _are_expired(exc):
            raise
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


def _are_expired(exc: Exception) -> bool:
    """Whether it is botocore's word, of no class of its own, that fetched keys are old ones."""
    return type(exc) is RuntimeError and "credentials are still expired" in str(exc)


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
        text = str(exc).partition("\n")[0][:_MOST_SAID].rstrip(":.")  # the answer itself follows
        return StagingError(
            f"{where}: the answer cannot be read: {text}. See what the store, or a proxy, sends."
        )
    not_fetched = (
        aws.CredentialRetrievalError,
        aws.MetadataRetrievalError,
        aws.TokenRetrievalError,
    )
    if isinstance(exc, not_fetched) or _are_expired(exc):
        return StagingError(
            f"{where}: {str(exc).rstrip('.')}. The machine's credentials could not be "
            "fetched: see whether what gives them answers, such as its metadata service."
        )
    if isinstance(exc, (aws.NoCredentialsError, aws.PartialCredentialsError)):
        return ConnectionInvalid(
            f"{where}: {exc}. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and "
            "AWS_ENDPOINT_URL if the store is not Amazon's; or enter them in the connection, "
            "where there is one."
        )
    return ConnectionInvalid(
        f"{where}: {exc}. Correct endpoint_url, region_name, bucket or keys of the connection; or "
        "AWS_* in the environment, where there is none."
    )


def refuses(error: Any) -> bool:
    """Whether botocore's ClientError may say that the service does not know what it was asked."""
    code = error.response.get("Error", {}).get("Code")
    return _status(error) in (400, 403, 501) and code not in _PASSING


def refuses_sums(error: Any) -> bool:
    """Whether botocore's ClientError may say that the service takes no checksums."""
    code = error.response.get("Error", {}).get("Code")
    known = _PASSING | _CORRUPT | _DENIED | _OF_PARTS
    return _status(error) in (400, 501) and code not in known


def _status(error: Any) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


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
    if code == "InvalidObjectState":
        # Amazon says the class, and others do not.
        named = answer["Error"].get("StorageClass")
        within = f", in storage class {named}" if named else ""
        return ObjectArchived(
            f"{said}: it is archived{within}. Restore it there, and keep the bucket's rules from "
            "archiving what is still read."
        )
    if code in _DENIED or status in (401, 403):
        return AccessDenied(
            f"{said}. Check access_key_id and secret_access_key, the rights that they have on this "
            "bucket (list, read, and for results write and delete), and this host's clock."
        )
    passing = code in _PASSING or status >= 500 or status in (408, 409, 429)
    return StagingError(said, retryable=passing)
