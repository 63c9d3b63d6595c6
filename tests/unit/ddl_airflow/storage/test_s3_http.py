"""Requests that are not boto3's: over which connections, by whose certificates, and when not.

What they do on a bad line is in tests/integration/test_staging_faults.py.
"""

from __future__ import annotations

import socket
import ssl
import subprocess

import pytest
from moto.server import ThreadedMotoServer

from ddl_airflow.core.errors import SourceMissing, StagingError
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import s3_client
from ddl_airflow.storage.s3_http import connections_of
from ddl_airflow.storage.store import StoredObject
from tests.integration.faulty_proxy import FaultyProxy

ODD = "a b/ü 漢字/+&%41?#.bin"


def ignore(nbytes):
    pass


@pytest.fixture(scope="module")
def endpoint_url():
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


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


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A file with the certificate of 127.0.0.1, which nobody has signed, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-subj", "/CN=store", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "certificate.pem")]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "certificate.pem", folder / "key.pem"


def test_the_certificates_that_the_client_trusts_are_trusted(
    endpoint_url, opened, certificate, tmp_path
):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with FaultyProxy(endpoint_url, {}, tls=context) as proxy:
        store = opened(proxy.endpoint_url, str(certificate[0]))
        assert fetched(store, tmp_path) == EXPECTED
        other = opened(proxy.endpoint_url)
        other._retries._left = 0
        with pytest.raises(StagingError, match="CERTIFICATE_VERIFY_FAILED|certificate verify"):
            other.get(store.list()[0], tmp_path / "f.part", ignore)


def test_boto3_follows_where_the_service_sends_it(endpoint_url, opened, tmp_path):
    with FaultyProxy(endpoint_url, {0: "301"}, lambda method, path: path.endswith("/a")) as proxy:
        store = opened(proxy.endpoint_url)
        (obj, *_) = [one for one in store.list() if one.key == "a"]
        store.get(obj, tmp_path / "f.part", ignore)
        assert (tmp_path / "f.part").read_bytes() == b"a" and len(proxy.asked) == 2


def test_what_is_unusual_is_left_to_boto3(opened, monkeypatch):
    client = opened()._client
    assert connections_of(client) is not None
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    assert connections_of(client) is None
