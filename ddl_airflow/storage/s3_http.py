"""S3 objects in and out over connections of our own, at less than half of the CPU of boto3's.

boto3 signs a URL for each bucket: it knows keys, roles, regions and how buckets are addressed. The
other plain GETs of that bucket are signed by botocore's own class, without what a client of boto3
does around it: 0.13 ms for each, and not 0.30. What is unusual (a proxy, a client's certificate, a
bucket of another region, one that refuses signed URLs) is left to boto3 altogether.
"""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs, urlsplit
from xml.etree import ElementTree

from ddl_airflow.storage.checksums import OF_S3
from ddl_airflow.storage.s3_client import settings_of

CONNECT_S = 10.0
ANSWER_S = 60.0
SEND_S = 15.0  # without that a byte of a body can be sent

_BLOCK = 1024 * 1024  # of a body, until somebody may stop it
_SIGNED_FOR_S = 900  # as long as the clocks of both may differ anyway
_MOST_OF_AN_ERROR = 64 * 1024
_SAME_SECOND = 3  # tries until both sign within one second
_USUAL = {"Bucket", "Key", "ChecksumMode"}  # what most GETs say, and are signed here for
_PLAIN = re.compile(r"[A-Za-z0-9._~-]+(/[A-Za-z0-9._~-]+)*")  # keys that nobody writes differently
_METADATA = "x-amz-meta-"
# What botocore calls those headers of an answer that are read here.
_NAMES = {
    "etag": "ETag",
    "content-range": "ContentRange",
    "x-amz-server-side-encryption": "ServerSideEncryption",
    "x-amz-server-side-encryption-customer-algorithm": "SSECustomerAlgorithm",
    "x-amz-checksum-type": "ChecksumType",
} | {f"x-amz-checksum-{name}": f"Checksum{name.upper()}" for name in OF_S3}


_OPERATIONS = {
    "get_object": "GetObject",
    "put_object": "PutObject",
    "upload_part": "UploadPart",
}
# Refusals of signed URLs that requests of boto3 may not meet. Those are signed in a header, which a
# policy may ask for (Source: Amazon S3's policy keys, s3:authType), and for the region of the
# bucket, once that is known; a URL is signed for the region of the client all the same.
_FOR_BOTO3 = {
    "AccessDenied",
    "AuthorizationHeaderMalformed",
    "AuthorizationQueryParametersError",
    "IllegalLocationConstraintException",
}


class ByBoto3(Exception):
    """Has the request made by boto3, which follows the service to where it sends us."""


class Body:
    """Of an answer. Raises errors as botocore's does."""

    def __init__(
        self,
        answer: http.client.HTTPResponse,
        connection: http.client.HTTPConnection,
        endpoint: str,
    ) -> None:
        self._answer, self._connection, self._endpoint = answer, connection, endpoint

    def set_socket_timeout(self, seconds: float) -> None:
        """How long reading may take without a byte."""
        if self._connection.sock is not None:  # else all of it is here
            self._connection.sock.settimeout(seconds)

    def read(self) -> bytes:
        """All of it."""
        with _errors(self._endpoint):
            return self._answer.read()

    def readinto(self, into: memoryview) -> int:
        """How many bytes came; 0 at the end."""
        with _errors(self._endpoint):
            return self._answer.readinto(into)


class Connections:
    """Connections to one endpoint, used again; for any number of threads.

    Args:
        client: boto3's.
        context: for https; None: plain http.
    """

    def __init__(self, client: Any, context: ssl.SSLContext | None) -> None:
        self._client, self._context = client, context
        self._endpoint: str = client.meta.endpoint_url
        self._idle: dict[str, list[http.client.HTTPConnection]] = {}
        self._signed: dict[str, _Signed | None] = {}
        self._left: set[str] = set()  # buckets, to boto3
        weakref.finalize(self, _close_all, self._idle)

    @contextmanager
    def get(
        self,
        bucket: str,
        key: str,
        headers: Mapping[str, str],
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> Iterator[tuple[dict[str, Any], Body]]:
        """Yields the answer, as far as it is read here, and its body.

        Args:
            bucket, key: of the object.
            headers: that need not be signed.
            more: parameters of boto3's method.

        Raises:
            ByBoto3: it must be asked for by that.
            ClientError: the service refuses; botocore's, like those of the network.
        """

        def ask(connection: http.client.HTTPConnection, path: str) -> http.client.HTTPResponse:
            connection.sock.settimeout(ANSWER_S)
            connection.request("GET", path, headers=dict(headers))
            return _answer(connection)

        name = self._asked_for("get_object") | {"Bucket": bucket, "Key": key} | dict(more)
        headers = {**headers, **self._headers("get_object", name)}
        with self._answered("get_object", name, ask) as (connection, answer):
            if answer.status not in (200, 206):
                raise self._refused(answer, "GetObject", bucket)
            if answer.length is None:  # in chunks: it has no length to be compared
                raise ByBoto3
            yield _read(answer), Body(answer, connection, self._endpoint)
            if not answer.length:
                answer.close()

    def put(
        self,
        operation: str,
        parameters: Mapping[str, Any],
        body: memoryview,
        proceed: Callable[[int], None],
    ) -> dict[str, Any]:
        """Sends a body, and returns the answer as far as it is read here.

        Args:
            operation: "put_object" or "upload_part".
            parameters: of boto3's method; what the client's settings ask for is added.
            body: all of it.
            proceed: called with 0 while it is sent; raises to stop it.

        Raises:
            As ``get``.
        """
        parameters = self._asked_for(operation) | dict(parameters)
        headers = {"Content-Length": str(len(body))} | self._headers(operation, parameters)

        def ask(connection: http.client.HTTPConnection, path: str) -> http.client.HTTPResponse:
            return _send(connection, path, headers, body, proceed)

        with self._answered(operation, parameters, ask) as (_, answer):
            if answer.status != 200 or "ETag" not in answer.headers:
                raise self._refused(answer, operation, str(parameters["Bucket"]))
            with _errors(self._endpoint):
                answer.read(_MOST_OF_AN_ERROR)
            return _read(answer)

    def _asked_for(self, operation: str) -> dict[str, Any]:
        """What the settings of the client ask for, which boto3 signs, and sends where it sends."""
        settings = settings_of(self._client)
        more = dict(settings.put) if operation == "put_object" else {}
        return more | ({"RequestPayer": "requester"} if settings.requester_pays else {})

    def _headers(self, operation: str, parameters: Mapping[str, Any]) -> dict[str, str]:
        """Those that say the parameters, as botocore's model of the service has them."""
        model = self._client.meta.service_model.operation_model(_OPERATIONS[operation])
        headers: dict[str, str] = {}
        for name, value in parameters.items():
            said = model.input_shape.members[name].serialization
            if said.get("location") == "headers":
                headers |= {f"{said['name']}{each}": text for each, text in value.items()}
            elif said.get("location") == "header":
                headers[said["name"]] = (
                    str(value).lower() if isinstance(value, bool) else str(value)
                )
        return headers

    def _refused(self, answer: http.client.HTTPResponse, operation: str, bucket: str) -> Exception:
        with _errors(self._endpoint):
            text = answer.read(_MOST_OF_AN_ERROR)
        meant = _meaning(answer.status, text, operation)
        if isinstance(meant, ByBoto3):
            self._left.add(bucket)  # so that nothing else of it is asked for, or sent, twice
        return meant

    @contextmanager
    def _answered(
        self,
        operation: str,
        parameters: Mapping[str, Any],
        ask: Callable[[http.client.HTTPConnection, str], http.client.HTTPResponse],
    ) -> Iterator[tuple[http.client.HTTPConnection, http.client.HTTPResponse]]:
        """Yields the connection and the answer; keeps the one if the other was read to its end."""
        if parameters["Bucket"] in self._left:
            raise ByBoto3
        place, path = self._url(operation, parameters)
        idle = self._idle.setdefault(place, [])
        connection, answer = self._asked(place, idle, path, ask)
        kept = False
        try:
            yield connection, answer
            kept = answer.isclosed() and not answer.will_close
        finally:
            if kept:
                idle.append(connection)
            else:
                answer.close()
                connection.close()

    def _url(self, operation: str, parameters: Mapping[str, Any]) -> tuple[str, str]:
        """The host and its port, and the path with its query, for a request that is signed."""
        key, bucket = str(parameters["Key"]), str(parameters["Bucket"])
        usual = operation == "get_object" and parameters.keys() <= _USUAL
        if usual and _PLAIN.fullmatch(key) and (who := self._who()):
            signed = self._signed.get(bucket)
            headers = self._headers(operation, parameters)
            if bucket not in self._signed or (signed is not None and signed.who != who):
                signed = self._signed[bucket] = self._learnt(parameters, headers, who)
            if signed is not None:
                return _split(signed.url(key, headers))
        return _split(self._by_boto3(operation, parameters))

    def _by_boto3(self, operation: str, parameters: Mapping[str, Any]) -> str:
        url: str = self._client.generate_presigned_url(
            operation, Params=dict(parameters), ExpiresIn=_SIGNED_FOR_S
        )
        return url

    def _who(self) -> Any:
        """Keys and token as they are now; None: boto3 has them where they are not found here."""
        # Not public. What is not found is left to boto3, which knows it.
        signer = getattr(self._client, "_request_signer", None)
        credentials = getattr(signer, "_credentials", None)
        return None if credentials is None else credentials.get_frozen_credentials()

    def _learnt(
        self, parameters: Mapping[str, Any], headers: Mapping[str, str], who: Any
    ) -> _Signed | None:
        """How boto3 signs for this bucket; None if it comes out otherwise here."""
        key = str(parameters["Key"])
        for _ in range(_SAME_SECOND):
            url = self._by_boto3("get_object", parameters)
            above, _, query = url.partition("?")
            try:
                region = parse_qs(query)["X-Amz-Credential"][0].split("/")[2]
            except LookupError:
                return None
            signed = _Signed(above.removesuffix(key), region, who)
            if signed.url(key, headers) == url:
                return signed
        return None

    def _asked(
        self,
        place: str,
        idle: list[http.client.HTTPConnection],
        path: str,
        ask: Callable[[http.client.HTTPConnection, str], http.client.HTTPResponse],
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        while True:
            try:
                connection, used = idle.pop(), True
            except IndexError:
                connection, used = self._new(place), False
            try:
                if not used:
                    with _errors(self._endpoint, connecting=True):
                        connection.connect()
                with _errors(self._endpoint):
                    return connection, ask(connection, path)
            except BaseException as error:
                connection.close()
                # The service may have closed what was idle: that says nothing of it.
                if not used or isinstance(error.__cause__, TimeoutError) or not error.__cause__:
                    raise

    def _new(self, place: str) -> http.client.HTTPConnection:
        if self._context is None:
            return http.client.HTTPConnection(place, timeout=CONNECT_S)
        return http.client.HTTPSConnection(place, timeout=CONNECT_S, context=self._context)


@dataclass(frozen=True)
class _Signed:
    """Signs URLs of the objects of one bucket.

    Attributes:
        above: the URL before the key.
        region: that the service says to be in.
        who: botocore's keys, and token if there is one.
    """

    above: str
    region: str
    who: Any = field(repr=False)

    def url(self, key: str, headers: Mapping[str, str]) -> str:
        """That of a GET of an object.

        Args:
            key: in characters that are written as they are.
            headers: that are signed as well.
        """
        from botocore.auth import AUTH_TYPE_MAPS
        from botocore.awsrequest import AWSRequest

        request = AWSRequest("GET", self.above + key, headers=headers)
        sign = AUTH_TYPE_MAPS["s3v4-query"]  # by awscrt, where that is: in another order
        sign(self.who, "s3", self.region, _SIGNED_FOR_S).add_auth(request)
        return str(request.url)


def _split(url: str) -> tuple[str, str]:
    """The host and its port, and the path with its query."""
    parts = urlsplit(url)
    return parts.netloc, f"{parts.path}?{parts.query}"


def connections_of(client: Any) -> Connections | None:
    """None where boto3 must make the requests itself."""
    from botocore.httpsession import get_cert_path
    from botocore.utils import get_environ_proxies

    endpoint, config = client.meta.endpoint_url, client.meta.config
    if config.signature_version != "s3v4" or config.proxies or get_environ_proxies(endpoint):
        return None
    if not endpoint.startswith("https://"):
        return Connections(client, None)
    # Not public. What is not found is left to boto3, which knows it.
    session = getattr(getattr(client, "_endpoint", None), "http_session", None)
    verify = getattr(session, "_verify", None)
    if verify is None or getattr(session, "_cert_file", None):
        return None
    if verify is False:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return Connections(client, context)
    trusted = get_cert_path(verify)
    where = "capath" if Path(trusted).is_dir() else "cafile"
    context = ssl.create_default_context(**{where: trusted})
    # boto3 trusts what lacks an extension that Python 3.13 asks for, and so do its listings here.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return Connections(client, context)


@contextmanager
def _errors(endpoint: str, *, connecting: bool = False) -> Iterator[None]:
    """Makes errors of the network botocore's, whose meaning is known."""
    import botocore.exceptions as aws

    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, ssl.SSLError):
            raise aws.SSLError(endpoint_url=endpoint, error=error) from error
        if connecting:
            raise aws.EndpointConnectionError(endpoint_url=endpoint, error=error) from error
        if isinstance(error, TimeoutError):
            raise aws.ReadTimeoutError(endpoint_url=endpoint, error=error) from error
        raise aws.ResponseStreamingError(error=error) from error


def _send(
    connection: http.client.HTTPConnection,
    path: str,
    headers: Mapping[str, str],
    body: memoryview,
    proceed: Callable[[int], None],
) -> http.client.HTTPResponse:
    connection.sock.settimeout(SEND_S)
    connection.putrequest("PUT", path, skip_accept_encoding=True)
    for name, value in headers.items():
        connection.putheader(name, value)
    try:
        connection.endheaders()
        at = 0
        while at < len(body):
            proceed(0)
            at += connection.sock.send(body[at : at + _BLOCK])
    except TimeoutError:
        raise
    except OSError as error:
        # Who refuses may say so, and close before all of it has come.
        try:
            answer = _answer(connection)
        except (OSError, http.client.HTTPException):
            raise error from None
        if answer.status < 400:
            raise
        answer.will_close = True
        return answer
    connection.sock.settimeout(ANSWER_S)
    return _answer(connection)


def _answer(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
    """The answer, without its body.

    A service without TCP_NODELAY, as Ceph's is by default, keeps the end of an answer back until
    what came before it is acknowledged. Where requests and answers take turns, the kernel does so
    40 ms later, unless it is asked to: each time anew. Source: tcp(7), TCP_QUICKACK.
    """
    if hasattr(socket, "TCP_QUICKACK"):
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
    return connection.getresponse()


def _read(answer: http.client.HTTPResponse) -> dict[str, Any]:
    found: dict[str, Any] = {"ContentLength": answer.length, "Metadata": {}}
    for name, value in answer.getheaders():
        name = name.lower()
        if name.startswith(_METADATA):
            found["Metadata"][name.removeprefix(_METADATA)] = value
        elif name in _NAMES:
            found[_NAMES[name]] = value
    return found


def _meaning(status: int, text: bytes, operation: str) -> Exception:
    """Of an answer that is not what was asked for."""
    from botocore.exceptions import ClientError

    said = {}
    with suppress(ElementTree.ParseError):
        for one in ElementTree.fromstring(text):  # noqa: S314  # of the service that has the data
            said[one.tag.rpartition("}")[2]] = one.text or ""
    if status in (301, 302, 307, 308) or said.get("Code") in _FOR_BOTO3:
        return ByBoto3()
    if status == 200:  # an error, say, that some proxy sends as success
        said.setdefault("Message", "the answer has no ETag, so nothing was stored")
        status = 500
    said.setdefault("Code", str(status))
    answer = {"Error": said, "ResponseMetadata": {"HTTPStatusCode": status}}
    error: Exception = ClientError(answer, operation)
    return error


def _close_all(idle: Mapping[str, list[http.client.HTTPConnection]]) -> None:
    for connections in idle.values():
        for connection in connections:
            connection.close()
