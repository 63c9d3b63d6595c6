"""Requests that are not boto3's: over which connections, by whose certificates, and when not.

What they do on a bad line is in tests/integration/test_staging_faults.py.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
import subprocess
import threading
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import boto3
import pytest
from botocore.credentials import Credentials

from ddl_airflow.core.errors import AccessDenied, SourceMissing, StagingError
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import s3_client, s3_config
from ddl_airflow.storage.s3_http import _split, connections_of
from ddl_airflow.storage.store import PIECE, StoredObject
from tests.integration.faulty_proxy import FaultyProxy
from tests.limits import until

ODD = "a b/ü 漢字/+&%41?#.bin"


def ignore(nbytes):
    pass


@pytest.fixture
def opened(endpoint_url):
    """opened(endpoint_url, ca_bundle) -> a store with three objects."""
    clients = []

    def make(url=endpoint_url, ca_bundle=None):
        client = s3_client(url, "key", "secret", "us-east-1", ca_bundle)
        clients.append(client)
        return S3Store(client, "bucket", "p")

    store = make()
    store._client.create_bucket(Bucket="bucket")
    for key in ("a", ODD, "empty"):
        store.put_bytes(key, key.encode() if key != "empty" else b"")
    yield make
    for client in clients:
        client.close()


def fetched(store, folder):
    """What is there, by key; boto3 must not be asked for it."""

    def refuse(**_):
        raise AssertionError("boto3 was asked for an object")

    store._client.meta.events.register_first("before-call.s3.GetObject", refuse)
    found = {}
    for number, obj in enumerate(store.list()):
        path = folder / f"{number}.part"
        store.get(obj, path, ignore)
        found[obj.key] = path.read_bytes()
        path.unlink()
    return found


EXPECTED = {"a": b"a", ODD: ODD.encode(), "empty": b""}


def test_one_connection_serves_many_objects_and_another_follows_it(endpoint_url, opened, tmp_path):
    with FaultyProxy(endpoint_url, {}) as proxy:  # moto itself keeps no connection
        store = opened(proxy.endpoint_url)
        assert fetched(store, tmp_path) == EXPECTED
        ((one,),) = store._direct._idle.values()
        one.sock.shutdown(socket.SHUT_RDWR)  # as a service does with one that was idle for long
        assert fetched(store, tmp_path) == EXPECTED
        ((other,),) = store._direct._idle.values()
        assert other is not one
    with pytest.raises(SourceMissing, match="s3://bucket/p/none at http.*NoSuchKey"):
        store.get(StoredObject("none", 1, "e"), tmp_path / "f.part", ignore)


@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="Linux has it")
def test_answers_are_acknowledged_before_the_body_has_come(endpoint_url, opened):
    """Ceph waits for that with the body of a small object, and the kernel may for 40 ms."""
    with FaultyProxy(endpoint_url, {}) as proxy:
        store, at_once = opened(proxy.endpoint_url), []
        for _ in range(10):
            with store._direct.get("bucket", "p/a", {}) as (_, body):
                sock = body._connection.sock
                at_once.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK))
                body.read()
    assert at_once == [1] * 10


@pytest.mark.parametrize("token", [None, "t/o+k=en"])
def test_urls_are_signed_as_boto3_signs_them(endpoint_url, monkeypatch, token):
    client = boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint_url,
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        aws_session_token=token,
        region_name="eu-west-3",
        config=s3_config(endpoint_url),
    )
    direct, asked = connections_of(client), []

    def by_boto3(operation, parameters):
        asked.append(parameters["Key"])
        return signed(parameters)

    def signed(name):
        return client.generate_presigned_url("get_object", Params=name, ExpiresIn=900)

    def same(key, **more):
        name = {"Bucket": "bucket", "Key": key} | more
        return direct._url("get_object", name) == _split(signed(name))

    monkeypatch.setattr(direct, "_by_boto3", by_boto3)
    for key in ("first", "p/a-b_c.d~1", ODD, "p//a", "/a", "p/../a", "other"):
        until(partial(same, key), 10)  # once both are signed within one second
        until(partial(same, key, ChecksumMode="ENABLED"), 10)
    assert {*asked} == {"first", ODD, "p//a", "/a"} and "secret" not in repr(direct._signed)
    # Other keys, as a role gets them from time to time, are taken at once.
    client._request_signer._credentials = Credentials("other", "keys", token)
    assert (
        "X-Amz-Credential=other" in direct._url("get_object", {"Bucket": "bucket", "Key": "a"})[1]
    )
    client.close()


def test_what_boto3_signs_in_another_way_is_left_to_it(endpoint_url, opened, monkeypatch):
    direct = opened()._direct
    monkeypatch.setattr(
        direct, "_by_boto3", lambda operation, parameters: "http://h/b/a?X-Amz-Signature=other"
    )
    for _ in range(2):
        url = direct._url("get_object", {"Bucket": "b", "Key": "a"})
        assert url == ("h", "/b/a?X-Amz-Signature=other")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Files: a CA's certificate, and that of 127.0.0.1, which it has signed, with its key."""
    folder = tmp_path_factory.mktemp("tls")
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    for words in (
        ["req", "-x509", *new, "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem"],
        ["req", *new, "-subj", "/CN=store", "-keyout", "key.pem", "-out", "request.pem"],
        ["x509", "-req", "-in", "request.pem", "-CA", "ca.pem", "-CAkey", "ca.key"]
        + ["-CAcreateserial", "-extfile", "names", "-out", "certificate.pem"],
    ):
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=folder)
    return folder / "ca.pem", folder / "certificate.pem", folder / "key.pem"


@pytest.fixture
def strict(monkeypatch):
    """A context is made as Python 3.13 makes it."""
    made = ssl.create_default_context

    def make(*words, **more):
        context = made(*words, **more)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", make)


def test_the_certificates_that_the_client_trusts_are_trusted(
    endpoint_url, opened, certificate, tmp_path, strict
):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca, *own = certificate
    context.load_cert_chain(*own)
    with FaultyProxy(endpoint_url, {}, tls=context) as proxy:
        store = opened(proxy.endpoint_url, str(ca))
        assert fetched(store, tmp_path) == EXPECTED
        other = opened(proxy.endpoint_url)
        other._retries._left = 0
        with pytest.raises(StagingError, match="CERTIFICATE_VERIFY_FAILED|certificate verify"):
            other.get(store.list()[0], tmp_path / "f.part", ignore)


@pytest.mark.parametrize("size", [5000, PIECE + 5000])
def test_answers_that_do_not_say_how_long_they_are_are_read(opened, tmp_path, size):
    """As of a gateway that answers in chunks, and knows no ranges."""
    content = bytes(range(250)) * (size // 250)
    etag = hashlib.md5(content).hexdigest()

    class Gateway(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self):
            self.send_response(200)
            self.send_header("ETag", f'"{etag}"')
            self.end_headers()

        def do_GET(self):
            self.send_response(200)
            self.send_header("ETag", f'"{etag}"')
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            with suppress(OSError):  # whoever asked for a range hangs up
                self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content))

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        store, path = opened(f"http://127.0.0.1:{server.server_port}"), tmp_path / "f.part"
        store.get(StoredObject("a", len(content), etag), path, ignore)
        assert path.read_bytes() == content
    finally:
        server.shutdown()
        server.server_close()


def test_boto3_follows_where_the_service_sends_it(endpoint_url, opened, tmp_path):
    with FaultyProxy(endpoint_url, {0: "301"}, lambda method, path: path.endswith("/a")) as proxy:
        store = opened(proxy.endpoint_url)
        (obj, *_) = [one for one in store.list() if one.key == "a"]
        store.get(obj, tmp_path / "f.part", ignore)
        assert (tmp_path / "f.part").read_bytes() == b"a"
        assert len(proxy.asked) == 2


@pytest.mark.parametrize("fault", ["region", "location", "403", "301"])
def test_a_bucket_whose_signed_urls_are_refused_is_left_to_boto3(
    endpoint_url, opened, tmp_path, fault
):
    """One of another region; or a policy that wants signatures in headers."""

    def of_objects(method, path):
        return path.startswith("/bucket/p/") and method in ("GET", "PUT")

    content, path = bytes(PIECE) + b"end", tmp_path / "f.part"
    with FaultyProxy(endpoint_url, {}, of_objects, signed_urls=fault) as proxy:

        def refused():
            return sum("X-Amz-Signature=" in one.query for one in proxy.asked)

        store, found = opened(proxy.endpoint_url), {}
        for obj in store.list():
            store.get(obj, path, ignore)
            found[obj.key] = path.read_bytes()
            path.unlink()
        assert found == EXPECTED and refused() == 1
        store.put_bytes("more/small", b"small")
        assert store.read_bytes("more/small") == b"small" and refused() == 1
        proxy.begin({})
        path.write_bytes(content)
        other = opened(proxy.endpoint_url)
        obj = other.put(path, "more/large", hashlib.sha256(content).hexdigest(), ignore)
        assert 1 <= refused() <= 2  # of parts that went at once
        assert other.exists("more/large") and obj.size == len(content)
        other.delete(["more/small", "more/large"])


def test_what_boto3_is_refused_as_well_is_asked_for_twice_once(endpoint_url, opened, tmp_path):
    def of_objects(method, path):
        return path.startswith("/bucket/p/")

    path = tmp_path / "f.part"
    with FaultyProxy(endpoint_url, {None: "403"}, of_objects) as proxy:
        store = opened(proxy.endpoint_url)
        for number in range(3):
            with pytest.raises(AccessDenied, match="s3://bucket/p/a at http.*AccessDenied"):
                store.get(StoredObject("a", 1, "e"), path, ignore)
            path.unlink()
            with pytest.raises(AccessDenied, match="s3://bucket/p/b at http.*AccessDenied"):
                store.put_bytes("b", b"b")
            assert len(proxy.asked) == 4 + 3 * number  # to read, once more without checksums
    for fault, said in (("expired", "ExpiredToken"), ("skewed", "RequestTimeTooSkewed")):
        with FaultyProxy(endpoint_url, {None: fault}, of_objects) as proxy:
            with pytest.raises(AccessDenied, match=f"{said}.*this host's clock"):
                opened(proxy.endpoint_url).put_bytes("b", b"b")
            assert len(proxy.asked) == 1


def test_answers_that_pass_are_no_reason_to_give_up(endpoint_url, opened, tmp_path):
    """Amazon's, with a status of what never passes, where a connection stood still."""
    content, path = bytes(PIECE), tmp_path / "f.part"
    (source := tmp_path / "source").write_bytes(content)
    with FaultyProxy(endpoint_url, {}, lambda *_: True) as proxy:
        store = opened(proxy.endpoint_url)
        (one,) = [obj for obj in store.list() if obj.key == "a"]
        store.put_bytes("more/small", b"small")
        for work in (
            lambda: store.get(one, path, ignore),
            lambda: store.read_bytes("a"),
            lambda: store.put_bytes("more/small", b"other"),
            lambda: store.put(source, "more/l", hashlib.sha256(content).hexdigest(), ignore),
        ):
            proxy.begin({0: "request timeout"})
            work()
            assert proxy.placed == 1
        assert path.read_bytes() == b"a" and store.read_bytes("more/small") == b"other"
        store.delete(["more/small", "more/l"])


def test_what_is_unusual_is_left_to_boto3(opened, monkeypatch):
    client = opened()._client
    assert connections_of(client) is not None
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    assert connections_of(client) is None
